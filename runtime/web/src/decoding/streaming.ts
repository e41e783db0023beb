/** Text in pieces, as soon as each is final. Beam search has its text in one piece at the end. */

import { Detokenizer } from "../preprocess/detokenizer.js";
import type { Generator } from "./generator.js";
import { usesBeams, type Settings } from "./options.js";
import type { Request, Result } from "./request.js";
import type { Token } from "./sequence.js";

/**
 * Yield pieces of the text of one request as soon as they are final. Return the whole result.
 *
 * The computation ends with the iteration: a caller that leaves its loop frees the memory.
 */
export async function* generateStream(
  generator: Generator,
  request: Request,
  settings: Settings,
  signal?: AbortSignal,
): AsyncGenerator<string, Result> {
  const text = new Detokenizer(generator.codec!, settings.stopStrings);
  const beams = usesBeams(settings);
  let fresh = "";
  if (!beams) {
    for (const token of request.prompt.subarray(request.prompt.length - request.prefixTokens))
      fresh += text.push(token);
  }
  const onToken = (token: Token) => {
    if (token.finish !== "end") fresh += text.push(token.id);
    if (token.finish !== undefined) fresh += text.finish();
  };
  const task = generator.makeTask(request, settings, beams ? undefined : onToken);
  const scheduler = generator.scheduler([task], settings, signal);
  try {
    while (!task.finished) {
      await scheduler.step();
      if (task.error !== undefined) throw task.error;
      if (task.finished && beams) fresh = generator.makeResult(task).text;
      const piece = fresh;
      fresh = "";
      if (piece) yield piece;
    }
    return generator.makeResult(task);
  } finally {
    scheduler.release();
  }
}
