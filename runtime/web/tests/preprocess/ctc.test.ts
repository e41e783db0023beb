import { describe, expect, test } from "vitest";
import {
  alignPath,
  beamSearch,
  collapsePath,
  CtcSpelling,
  greedyPath,
  type CtcHypothesis,
  type CtcSpan,
  type CtcSpellingSettings,
} from "../../src/preprocess/ctc.js";
import { Golden, type Place } from "../golden/golden.js";

describe("For random scores of frames", () => {
  interface Case {
    scores: Place<"float64">;
    blank: number;
    size: number;
    path: Place<"int32">;
    greedy: CtcHypothesis;
    hypotheses: CtcHypothesis[];
    ids: number[];
    aligned: Place<"int32"> | null;
    spelling: CtcSpellingSettings & { delimiter: string | null };
    loose: number[];
    text: string;
    characters: CtcSpan[];
    words: CtcSpan[];
  }
  const golden = new Golden<Case>("preprocess/labellings.py");
  const scoresOf = ({ scores }: Case) => ({
    data: golden.array(scores),
    frames: scores.shape[0],
    tokens: scores.shape[1],
  });

  test("the most probable path and its score are those of the Python runtime", () => {
    for (const one of golden.cases) {
      const { path, best } = greedyPath(scoresOf(one), one.blank);
      expect(path).toEqual(golden.array(one.path));
      expect(best.ids).toEqual(one.greedy.ids);
      // Two sums of numbers of one sign, each rounded at every number.
      const error = 2 * path.length * 2 ** -53 * Math.abs(one.greedy.score);
      expect(Math.abs(best.score - one.greedy.score)).toBeLessThanOrEqual(error);
    }
  });

  test("labellings of beam search and their order are those of the Python runtime, and scores to the rounding of float64", () => {
    const searched = golden.cases.filter(({ hypotheses }) => hypotheses.length);
    expect(searched.length).toBeGreaterThan(80);
    for (const one of searched) {
      const found = beamSearch(scoresOf(one), one.blank, one.size);
      expect(found.map(({ ids }) => ids)).toEqual(one.hypotheses.map(({ ids }) => ids));
      found.forEach(({ score }, i) => {
        // Some 120 sums and logarithms of sums, each rounded by 2 ** -53 of up to 200.
        expect(Math.abs(score - one.hypotheses[i].score)).toBeLessThan(120 * 200 * 2 ** -53);
      });
    }
  });

  test("the most probable path with a labelling is that of the Python runtime", () => {
    for (const one of golden.cases.filter(({ aligned }) => aligned)) {
      const path = alignPath(scoresOf(one), one.ids, one.blank);
      expect(path).toEqual(golden.array(one.aligned!));
      expect(collapsePath(path, one.blank)).toEqual(one.ids);
    }
  });

  test("texts, characters and words of a path are those of the Python runtime", () => {
    for (const { spelling, loose, text, characters, words } of golden.cases) {
      const found = new CtcSpelling({ ...spelling, delimiter: spelling.delimiter ?? undefined });
      expect(found.text(loose), JSON.stringify(spelling)).toBe(text);
      expect(found.characters(loose)).toEqual(characters);
      expect(found.words(loose)).toEqual(words);
    }
  });
});

test("The probabilities of all labellings add up to 1", () => {
  const data = [0.6, 0.3, 0.1, 0.2, 0.5, 0.3, 0.1, 0.1, 0.8].map(Math.log);
  const all = beamSearch({ data, frames: 3, tokens: 3 }, 0, 1000);
  expect(all.reduce((sum, { score }) => sum + Math.exp(score), 0)).toBeCloseTo(1, 12);
  expect(all.map(({ ids }) => ids)).toContainEqual([]);
});

test("Of equally probable labellings, that of the shorter prefix and of the smaller token comes first", () => {
  const found = beamSearch({ data: new Array<number>(4).fill(Math.log(0.25)), frames: 1, tokens: 4 }, 2, 3);
  expect(found.map(({ ids }) => ids)).toEqual([[], [0], [1]]); // as numpy's stable argsort
});

test("Runs of a token are merged, unless a blank is between them", () => {
  expect(collapsePath([0, 3, 3, 0, 3, 4, 4, 0], 0)).toEqual([3, 3, 4]);
  expect(collapsePath([], 0)).toEqual([]);
});
