/** Speech recognition: the results that models of all kinds share. */

/** A piece of a transcription: a word, a character or a phrase. start, end: seconds from the start of the recording. */
export interface Segment {
  readonly text: string;
  readonly start: number;
  readonly end: number;
}

/** The text of a recording. */
export interface Transcription {
  /** Empty if the file has no vocabulary. */
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** The natural logarithm of its probability. */
  readonly score: number;
  /** Pieces of the text with their times, if timestamps are on. */
  readonly segments: readonly Segment[];
  /** The code of the spoken language; undefined for a model that does not detect languages. */
  readonly language: string | undefined;
}
