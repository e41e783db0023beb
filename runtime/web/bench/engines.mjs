// The two engines, behind the same calls: they run in Node and in pages.
//
// generate({ prompt, newTokens }): greedily generate tokens. logits(ids): what a decoder gives after each of its ids, as
// one array; in Node only.

/** A model of tformer. model: loaded by `Model.load`. */
export function tformerRunner(model) {
  const { encode, decode } = model.manifest;
  const name = encode ? encode.inputs.find(({ role }) => role === "ids").name : decode.step.name;
  const generate = async ({ prompt, newTokens }) => {
    const options = { maxNewTokens: newTokens, minNewTokens: newTokens };
    const begin = performance.now();
    const { tokenIds } = await model.generate({ [name]: prompt }, options);
    return { ms: performance.now() - begin, tokens: [...tokenIds].slice(-newTokens) };
  };
  const logits = async (ids) => {
    const state = await model.engine.start(new Map(), { rows: 1 });
    try {
      return (await model.engine.step(state, ids, undefined, "all")).slice();
    } finally {
      state.release();
    }
  };
  return { generate, logits };
}

const QUANTIZATION = { fp32: "fp32", int8: "q8", int4: "q4" };

/** A model of transformers.js in a folder. session: options of onnxruntime's sessions. */
export async function peerRunner(library, folder, precision, device, session = {}) {
  const { AutoModelForCausalLM, AutoModelForSeq2SeqLM, Tensor, env } = library;
  env.allowRemoteModels = false;
  env.allowLocalModels = true;
  env.localModelPath = folder.replace(/[^/]+\/?$/, "");
  const isDecoder = folder.includes("134m");
  const options = { dtype: QUANTIZATION[precision], device, local_files_only: true, session_options: session };
  const loader = isDecoder ? AutoModelForCausalLM : AutoModelForSeq2SeqLM;
  const model = await loader.from_pretrained(folder.match(/([^/]+)\/?$/)[1], options);
  const inputs = (ids) => ({
    ids: new Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]),
    mask: new Tensor("int64", new BigInt64Array(ids.length).fill(1n), [1, ids.length]),
  });
  const generate = async ({ prompt, newTokens }) => {
    const begin = performance.now();
    const { ids, mask } = inputs(prompt);
    const settings = { max_new_tokens: newTokens, min_new_tokens: newTokens, do_sample: false };
    const output = await model.generate({ inputs: ids, attention_mask: mask, ...settings });
    const tokens = [...output.data].map(Number).slice(-newTokens);
    return { ms: performance.now() - begin, tokens };
  };
  const logits = async (given) => {
    const { ids, mask } = inputs(given);
    return (await model({ input_ids: ids, attention_mask: mask })).logits.data.slice();
  };
  return { generate, logits };
}
