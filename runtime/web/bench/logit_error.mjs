// How far the logits of a quantised decoder are from those in fp32, with tformer and with transformers.js.
//
//   node bench/logit_error.mjs [PRECISION]      # int8 or int4
//
// Both read the token rows of the golden file of 134m, and both are compared with tformer in fp32. Logits have a free
// constant, so a row's mean is subtracted. The error of a position is |logits - logits in fp32| / |logits in fp32|, which
// does not depend on how close two tokens are. The agreement of the best token does, so the distance between the best two
// tokens is printed too.
import { existsSync, readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { median } from "./median.mjs";
import { startProcess } from "./node_process.mjs";

const FOLDER = resolve(import.meta.dirname, "../../../build/web-large");
const VOCABULARY = 32000;
const [precision = "int8"] = process.argv.slice(2);
if (!["int8", "int4"].includes(precision)) {
  console.error("usage: node bench/logit_error.mjs [int8|int4]");
  process.exit(2);
}
const golden = JSON.parse(readFileSync(join(FOLDER, "134m.golden.json"), "utf8"));
const rows = golden.decode.flatMap((example) => example.rows.map(({ tokens }) => tokens.values));
const suffix = { int8: { node: "-int8", wasm: "-int8" }, int4: { node: "-int4", wasm: "-web-int4" } }[precision];

async function logitsOf(engine, path, form, device) {
  const { run, end } = await startProcess(engine, path, form, device, 1);
  try {
    return (await run({ logitsOf: rows })).flatMap((all) =>
      Array.from({ length: all.length / VOCABULARY }, (_, i) =>
        centred(all.subarray(i * VOCABULARY, (i + 1) * VOCABULARY)),
      ),
    );
  } finally {
    await end();
  }
}

function centred(logits) {
  const mean = logits.reduce((sum, one) => sum + one, 0) / logits.length;
  return logits.map((one) => one - mean);
}

const norm = (values) => Math.sqrt(values.reduce((sum, one) => sum + one * one, 0));
const best = (values) => values.indexOf(values.reduce((most, one) => Math.max(most, one), -Infinity));
const percent = (share) => `${(100 * share).toFixed(2)} %`;

const reference = await logitsOf("tformer", join(FOLDER, "134m.onnx"), "fp32", "node");
const gaps = reference.map((logits) => {
  const [most, next] = Float32Array.from(logits).sort().slice(-2).reverse();
  return (most - next) / (norm(logits) / Math.sqrt(VOCABULARY));
});
console.log(`${reference.length} positions of ${rows.length} rows`);
console.log(`the best token is ${median(gaps).toFixed(3)} standard deviations of the logits above the next (median)`);
const peer = join(FOLDER, "134m/transformers.js");
for (const device of ["node", "wasm"]) {
  const engines = { tformer: join(FOLDER, `134m${suffix[device]}.onnx`), "transformers.js": peer };
  for (const [engine, path] of Object.entries(engines).filter(([, path]) => existsSync(path))) {
    const found = await logitsOf(engine, path, precision, device);
    const errors = found.map((logits, i) => norm(logits.map((one, k) => one - reference[i][k])) / norm(reference[i]));
    const same = found.filter((logits, i) => best(logits) === best(reference[i])).length;
    const sorted = errors.toSorted((one, other) => one - other);
    const range = [sorted[0], sorted.at(-1)].map(percent).join(" to ");
    console.log(
      `${engine} ${precision} on ${device}: error ${percent(median(errors))} (${range}), best token equal at ${same}`,
    );
  }
}
