/** The code of tokenizers, which is loaded for files that have one. */

import { TextReader } from "./textReader.js";
import { Codec, TokenizerParts } from "./tokenizer.js";

/** A tokenizer of a file: as generation uses it, and as single-pass models do. Both share its vocabulary. */
export class TextCode {
  readonly codec: Codec;
  readonly reader: TextReader;

  /** definition: see `TokenizerParts`. Throw ModelFileError if it cannot be read. */
  constructor(definition: string) {
    const parts = new TokenizerParts(definition);
    this.codec = new Codec(parts);
    this.reader = new TextReader(parts);
  }
}
