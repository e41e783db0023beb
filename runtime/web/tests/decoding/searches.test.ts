import { expect, test } from "vitest";
import { BeamSearch } from "../../src/decoding/beamSearch.js";
import { makeRules } from "../../src/decoding/logitRules.js";
import { settingsOf, usesBeams } from "../../src/decoding/options.js";
import { SequenceTask, type Hypothesis, type SequenceSearch } from "../../src/decoding/sequence.js";
import { TokenSearch } from "../../src/decoding/tokenSearch.js";
import { camelCase } from "../../src/format/typedJson.js";
import { Golden, type Place } from "../golden/golden.js";

interface Case {
  options: Record<string, unknown>;
  ends: number[];
  stopping: boolean;
  table: Place<"float32">;
  prompts: number[][];
  max_tokens: number[];
  results: { hypotheses?: Searched[]; error?: string }[];
}

/**
 * The difference of a log-probability to that of Python. Their normalizers differ by (40 + 9 ln n + 2 |norm|) * 2 ** -24
 * (`logNormalizer.test.ts`), and both differences to a logit are rounded. There are 1500 logits, and numbers are up to 40.
 */
const LOGPROB_ERROR = (40 + 9 * Math.log(1500) + 4 * 40) * 2 ** -24;

type Searched = Omit<Hypothesis, "history">;

/** Return the parts of a hypothesis that have no rounding. */
function exactly({ ids, finish, alternatives }: Searched) {
  return { ids, finish, alternatives: alternatives.map((position) => position.map(([id]) => id)) };
}

function numbersOf({ logprobs, alternatives }: Searched): number[] {
  return [...logprobs, ...alternatives.flat().map(([, logprob]) => logprob)];
}

/** As in `golden/searches.py`: a text has a stop string if two ids have a certain sum. */
function stops(ids: readonly number[]): boolean {
  return ids.some((id, i) => i > 0 && (id + ids[i - 1]) % 13 === 5);
}

function stopChecker() {
  const ids: number[] = [];
  return (token: number) => {
    ids.push(token);
    return stops(ids);
  };
}

/** Run a search to its end. The rows change their places after each step. */
function finish(search: SequenceSearch, count: number, table: Float32Array, [states, vocabulary]: number[]): void {
  let rows = Array.from({ length: count }, (_, i) => i);
  while (search.width) {
    const logits = new Float32Array(rows.length * vocabulary);
    rows.forEach((state, i) =>
      logits.set(table.subarray(state * vocabulary, (state + 1) * vocabulary), i * vocabulary),
    );
    const before = logits.slice();
    const { parents, tokens } = search.advance(logits, vocabulary, undefined);
    expect(logits).toEqual(before);
    rows = Array.from(parents, (parent, i) => (rows[parent] * 31 + tokens[i] * 7 + 1) % states);
    search.renumber(Int32Array.from(rows, (_, i) => rows.length - 1 - i));
    rows.reverse();
  }
}

test("Hypotheses of beam search, greedy decoding and sampling are those of the Python runtime", () => {
  const golden = new Golden<Case>("decoding/searches.py");
  const seen = { end: 0, stop: 0, length: 0 };
  for (const { options, ends, stopping, table, prompts, max_tokens: maxTokens, results } of golden.cases) {
    const camel = Object.fromEntries(Object.entries(options).map(([name, value]) => [camelCase(name), value]));
    const settings = settingsOf(camel, new Map());
    const vocabulary = table.shape[1];
    const special = { bosTokenIds: [], eosTokenIds: ends, padTokenId: undefined };
    const rules = makeRules(settings, special, vocabulary);
    const tasks = prompts.map(
      (prompt, index) =>
        new SequenceTask({
          index,
          prompt: Int32Array.from(prompt),
          maxTokens: maxTokens[index],
          settings,
          endIds: ends,
          rules,
          sources: new Map(),
          prefixTokens: 0,
          ...(stopping ? { stopChecker, truncatesText: stops } : {}),
        }),
    );
    const search = usesBeams(settings) ? new BeamSearch(tasks) : new TokenSearch(tasks);
    finish(search, tasks.length, golden.array(table), table.shape);
    tasks.forEach((task, i) => {
      const place = JSON.stringify({ options, ends, stopping, task: i });
      if (results[i].error) {
        expect(`${task.error}`, place).toBe(results[i].error);
        return;
      }
      expect(task.error, place).toBeUndefined();
      const found = task.hypotheses!;
      expect(found.map(exactly), place).toEqual(results[i].hypotheses!.map(exactly));
      results[i].hypotheses!.forEach((expected, j) => {
        const numbers = numbersOf(found[j]);
        numbersOf(expected).forEach((value, k) => expect(Math.abs(numbers[k] - value)).toBeLessThan(LOGPROB_ERROR));
        const length = expected.ids.length;
        const factor = length ** -Number(options["length_penalty"]);
        expect(Math.abs(found[j].score - expected.score)).toBeLessThan(length * factor * LOGPROB_ERROR);
        seen[expected.finish]++;
      });
    });
  }
  expect(Math.min(...Object.values(seen))).toBeGreaterThan(20);
});
