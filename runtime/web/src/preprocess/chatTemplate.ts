/** Chat templates: from a conversation to the text of a prompt, as transformers' apply_chat_template does. */

import { Environment, Interpreter, parse, tokenize } from "@huggingface/jinja";
import { errorSummary, InputError } from "../base/errors.js";
import type { Manifest } from "../format/manifest.js";
import type { PromptTemplate } from "./conversation.js";

/** Return the chat template of a file that has one. */
export function templateOf(manifest: Manifest): PromptTemplate {
  return compileTemplate(manifest.chatTemplate!, manifest.chatTokens);
}

/**
 * Return a function from messages to the text of the prompt. The template has the variables of apply_chat_template.
 *
 * A template is a program of a stranger, so that its steps and its ranges have limits.
 *
 * tokens: the texts of special tokens, by names such as bos_token.
 * Throw InputError for an invalid template. The function throws InputError if the template refuses the messages, fails or
 * takes too long, or if there are tools and the template does not read them.
 */
export function compileTemplate(text: string, tokens: ReadonlyMap<string, string>): PromptTemplate {
  let program: Program;
  try {
    program = parse(tokenize(text, { lstrip_blocks: true, trim_blocks: true }));
  } catch (error) {
    throw new InputError(`the chat template cannot be read: ${errorSummary(error)}`, undefined, error);
  }
  const variables = { ...Object.fromEntries(tokens), documents: null, add_generation_prompt: true };
  return (messages, tools) => {
    if (tools?.length && !/\btools\b/.test(text)) {
      throw new InputError("the chat template has no place for tools: leave them out, or describe them in a message");
    }
    let refused: string | undefined;
    const refuse = (reason: unknown) => {
      refused = String(reason);
      throw new Error(refused);
    };
    try {
      const environment = new Environment();
      const all = { ...GLOBALS, raise_exception: refuse, ...variables, messages, tools: tools?.length ? tools : null };
      for (const [name, value] of Object.entries(all)) environment.set(name, value);
      return String(new LimitedInterpreter(environment).run(program).value);
    } catch (error) {
      if (refused !== undefined) throw new InputError(`the chat template refuses: ${refused}`, undefined, error);
      throw new InputError(`the chat template cannot be filled in: ${errorSummary(error)}`, undefined, error);
    }
  };
}

type Program = ReturnType<typeof parse>;

const MAX_STEPS = 500_000; // of evaluating a template; those of published models take some thousands
const MAX_RANGE = 100_000;

class LimitedInterpreter extends Interpreter {
  private steps = 0;

  override evaluate(...given: Parameters<Interpreter["evaluate"]>): ReturnType<Interpreter["evaluate"]> {
    if (++this.steps > MAX_STEPS) throw new Error(`it takes more than ${MAX_STEPS.toLocaleString("en-US")} steps`);
    return super.evaluate(...given);
  }
}

const GLOBALS = {
  false: false,
  False: false,
  true: true,
  True: true,
  none: null,
  None: null,
  range: (first: number, second?: number, step = 1) => {
    const [start, stop] = second === undefined ? [0, first] : [first, second];
    const length = Math.max(0, Math.ceil((stop - start) / step));
    if (!(length <= MAX_RANGE))
      throw new Error(`it has a range of more than ${MAX_RANGE.toLocaleString("en-US")} numbers`);
    return Array.from({ length }, (_, i) => start + i * step);
  },
  strftime_now: (form: string) => {
    const now = new Date();
    const part = (options: Intl.DateTimeFormatOptions) => now.toLocaleString("en-US", options);
    const two = (number: number) => String(number).padStart(2, "0");
    const parts: Readonly<Record<string, string>> = {
      Y: String(now.getFullYear()),
      m: two(now.getMonth() + 1),
      d: two(now.getDate()),
      H: two(now.getHours()),
      M: two(now.getMinutes()),
      S: two(now.getSeconds()),
      B: part({ month: "long" }),
      b: part({ month: "short" }),
      A: part({ weekday: "long" }),
      a: part({ weekday: "short" }),
      y: two(now.getFullYear() % 100),
      "%": "%",
    };
    return form.replace(/%(.)/g, (whole, letter: string) => parts[letter] ?? whole);
  },
};
