// The two engines, behind one call each: they run in Node and in pages. A run greedily generates a given number of tokens.

/** A model of tformer. model: loaded by `Model.load`. */
export function tformerRunner(model) {
  const { encode, decode } = model.manifest;
  const name = encode ? encode.inputs.find(({ role }) => role === "ids").name : decode.step.name;
  return async ({ prompt, newTokens }) => {
    const options = { maxNewTokens: newTokens, minNewTokens: newTokens };
    const begin = performance.now();
    const { tokenIds } = await model.generate({ [name]: prompt }, options);
    return { ms: performance.now() - begin, tokens: [...tokenIds].slice(-newTokens) };
  };
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
  return async ({ prompt, newTokens }) => {
    const begin = performance.now();
    const shape = [1, prompt.length];
    const ids = new Tensor("int64", BigInt64Array.from(prompt, BigInt), shape);
    const mask = new Tensor("int64", new BigInt64Array(prompt.length).fill(1n), shape);
    const settings = { max_new_tokens: newTokens, min_new_tokens: newTokens, do_sample: false };
    const output = await model.generate({ inputs: ids, attention_mask: mask, ...settings });
    const tokens = [...output.data].map(Number).slice(-newTokens);
    return { ms: performance.now() - begin, tokens };
  };
}
