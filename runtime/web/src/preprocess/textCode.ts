/** Tokenizers and readers of texts, whose code is loaded for files that have a tokenizer. */

export { TextReader } from "./textReader.js";
export { Codec, hasExpressions } from "./tokenizer.js";
