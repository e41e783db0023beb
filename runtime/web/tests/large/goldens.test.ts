/** Golden files of an encoder-decoder of 60 M parameters and a decoder of 134 M (`npm run test:large`). */

import { describe, expect, test } from "vitest";
import { Model } from "../../src/index.js";
import { differences } from "../support/goldenReplay.js";
import { largeGolden, largeModelPath } from "../support/largeModels.js";

const FORMS = ["", "-int8", "-int4", "-int4-latency", "-web-int8", "-web-int4"];

describe.each(["node", "wasm"])("on %s", (device) => {
  test.each(["60m", "134m"].flatMap((name) => FORMS.map((form) => name + form)))(
    "%s gives the results of its golden file",
    async (name) => {
      const model = await Model.load(largeModelPath(name), { device, threads: 1 });
      try {
        expect(await differences(model, largeGolden(name))).toEqual([]);
        expect(model.memory().usedBytes).toBe(0);
      } finally {
        await model.dispose();
      }
    },
  );
});
