/**
 * Connectionist temporal classification: from scores of tokens at each frame to a text.
 *
 * A path has a token or the blank at each frame. Its labelling merges runs of one token and drops blanks. Greedy decoding
 * takes the most probable path. Prefix beam search ranks labellings by the sum of the probabilities of their paths (Graves
 * et al. 2006; Hannun et al. 2014, "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional
 * Recurrent DNNs").
 */

/** Log-probabilities (frames, tokens), row by row. */
export interface FrameScores {
  readonly data: ArrayLike<number>;
  readonly frames: number;
  readonly tokens: number;
}

/** A labelling. score: the natural logarithm of its probability; in greedy decoding, of the probability of its path. */
export interface CtcHypothesis {
  readonly ids: readonly number[];
  readonly score: number;
}

/** A piece of text and its frames. `end` is exclusive. */
export interface CtcSpan {
  readonly text: string;
  readonly first: number;
  readonly end: number;
}

/** Return the most probable path, and its labelling. */
export function greedyPath(
  { data, frames, tokens }: FrameScores,
  blank: number,
): { path: Int32Array; best: CtcHypothesis } {
  const path = new Int32Array(frames);
  let score = 0;
  for (let frame = 0; frame < frames; frame++) {
    const begin = frame * tokens;
    let best = 0;
    for (let token = 1; token < tokens; token++) if (data[begin + token] > data[begin + best]) best = token;
    path[frame] = best;
    score += data[begin + best];
  }
  return { path, best: { ids: collapsePath(path, blank), score } };
}

/** Return the labelling of a path. */
export function collapsePath(path: ArrayLike<number>, blank: number): number[] {
  return Array.from(path).filter((token, i) => token !== blank && token !== path[i - 1]);
}

/** A prefix of labellings, as its last token after another prefix. slot: its place among the present ones, or -1. */
class Prefix {
  readonly children = new Map<number, Prefix>();
  slot = -1;

  constructor(
    readonly parent: Prefix | undefined,
    readonly token: number,
  ) {}

  child(token: number): Prefix {
    const known = this.children.get(token);
    if (known) return known;
    const child = new Prefix(this, token);
    this.children.set(token, child);
    return child;
  }

  get ids(): number[] {
    const ids: number[] = [];
    for (let prefix: Prefix = this; prefix.parent; prefix = prefix.parent) ids.push(prefix.token);
    return ids.reverse();
  }
}

/**
 * Return at most `size` labellings, the most probable first.
 *
 * A score is exact if no prefix of the labelling was dropped. Cost: frames × size × tokens.
 */
export function beamSearch({ data, frames, tokens }: FrameScores, blank: number, size: number): CtcHypothesis[] {
  let prefixes = [new Prefix(undefined, blank)];
  // The log-probability of each prefix that ends in a blank, and of each that ends in its last token.
  let [blankEnds, tokenEnds] = [Float64Array.of(0), Float64Array.of(-Infinity)];
  for (let frame = 0; frame < frames; frame++) {
    const begin = frame * tokens;
    const scoreOf = (token: number) => data[begin + token];
    const count = prefixes.length;
    const repeated = new Float64Array(count);
    const stays = new Float64Array(count);
    const extended = new Float64Array(count * tokens);
    prefixes.forEach((prefix, i) => {
      prefix.slot = i;
      const total = logAddExp(blankEnds[i], tokenEnds[i]);
      repeated[i] = prefix.parent ? tokenEnds[i] + scoreOf(prefix.token) : -Infinity;
      stays[i] = total + scoreOf(blank);
      for (let token = 0; token < tokens; token++) extended[i * tokens + token] = total + scoreOf(token);
      extended[i * tokens + prefix.token] = blankEnds[i] + scoreOf(prefix.token); // a blank separates equal tokens
      extended[i * tokens + blank] = -Infinity;
    });
    prefixes.forEach(({ parent, token }, i) => {
      if (!parent || parent.slot < 0) return; // an extended prefix may equal another prefix
      const place = parent.slot * tokens + token;
      repeated[i] = logAddExp(repeated[i], extended[place]);
      extended[place] = -Infinity;
    });
    for (const prefix of prefixes) prefix.slot = -1;
    const candidates = new Float64Array(count + extended.length);
    for (let i = 0; i < count; i++) candidates[i] = logAddExp(stays[i], repeated[i]);
    candidates.set(extended, count);
    const best = largest(candidates, size).filter((place) => candidates[place] > -Infinity);
    const previous = prefixes;
    prefixes = best.map((place) => {
      if (place < count) return previous[place];
      return previous[Math.floor((place - count) / tokens)].child((place - count) % tokens);
    });
    blankEnds = Float64Array.from(best, (place) => (place < count ? stays[place] : -Infinity));
    tokenEnds = Float64Array.from(best, (place) => (place < count ? repeated[place] : candidates[place]));
  }
  const totals = Float64Array.from(prefixes, (_, i) => logAddExp(blankEnds[i], tokenEnds[i]));
  return largest(totals, totals.length).map((i) => ({ ids: prefixes[i].ids, score: totals[i] }));
}

/** Return log(eᵃ + eᵇ). */
function logAddExp(a: number, b: number): number {
  if (a === b) return a + Math.LN2; // -Infinity, too
  return a > b ? a + Math.log1p(Math.exp(b - a)) : b + Math.log1p(Math.exp(a - b));
}

/** Return the places of the largest values, largest first. Of equal values the first comes first. */
function largest(values: Float64Array, count: number): number[] {
  let places = Array.from(values.keys());
  if (count < values.length) {
    const threshold = values.slice().sort()[values.length - count];
    places = places.filter((place) => values[place] >= threshold);
  }
  return places.sort((one, other) => values[other] - values[one] || one - other).slice(0, count);
}

/**
 * Return the most probable path with the labelling `ids`, by the Viterbi algorithm. One must exist.
 *
 * Cost: frames × ids.
 */
export function alignPath({ data, frames, tokens }: FrameScores, ids: readonly number[], blank: number): Int32Array {
  const states = Int32Array.from({ length: 2 * ids.length + 1 }, (_, i) => (i % 2 ? ids[(i - 1) / 2] : blank));
  const count = states.length;
  let score = Float64Array.from(states, (token, i) => (i < 2 ? data[token] : -Infinity));
  const moves = new Uint8Array(frames * count); // states from the previous frame's to this one
  for (let frame = 1; frame < frames; frame++) {
    const next = new Float64Array(count);
    for (let state = 0; state < count; state++) {
      let [best, move] = [score[state], 0];
      if (state >= 1 && score[state - 1] > best) [best, move] = [score[state - 1], 1];
      // Between two different tokens the blank is optional.
      const skips = state >= 3 && state % 2 === 1 && states[state] !== states[state - 2];
      if (skips && score[state - 2] > best) [best, move] = [score[state - 2], 2];
      moves[frame * count + state] = move;
      next[state] = best + data[frame * tokens + states[state]];
    }
    score = next;
  }
  let state = count === 1 || score[count - 1] > score[count - 2] ? count - 1 : count - 2;
  const path = new Int32Array(frames);
  for (let frame = frames - 1; frame >= 0; frame--) {
    path[frame] = states[state];
    state -= moves[frame * count + state];
  }
  return path;
}

/**
 * How tokens become text.
 *
 * tokens: the text of each id.
 * blank: the id of the blank.
 * delimiter: the token between words; undefined without one.
 * space: the text of the delimiter.
 * lower: whether the text becomes lower case.
 * tidy: whether spaces before punctuation are removed.
 */
export interface CtcSpellingSettings {
  readonly tokens: readonly string[];
  readonly blank: number;
  readonly delimiter?: string | undefined;
  readonly space?: string;
  readonly lower?: boolean;
  readonly tidy?: boolean;
}

export class CtcSpelling {
  private readonly space: string;

  constructor(readonly settings: CtcSpellingSettings) {
    this.space = settings.space ?? " ";
  }

  /** Return the text of a path. */
  text(path: ArrayLike<number>): string {
    const { lower, tidy } = this.settings;
    const characters = this.characters(path).map((span) => span.text);
    let text = stripped(characters.join(""));
    if (lower) text = text.toLowerCase();
    return tidy ? cleanedUp(text) : text;
  }

  /** Return the span of each token of a path, spaces included. A run of ids with one text is one token. */
  characters(path: ArrayLike<number>): CtcSpan[] {
    const { tokens, blank, delimiter } = this.settings;
    const spans: CtcSpan[] = [];
    for (const { first, end } of runs(path.length, (i) => tokens[path[i]])) {
      const token = tokens[path[first]];
      if (token !== tokens[blank]) spans.push({ text: token === delimiter ? this.space : token, first, end });
    }
    return spans;
  }

  /** Return the span of each word of a path. Spaces separate words. */
  words(path: ArrayLike<number>): CtcSpan[] {
    const characters = this.characters(path);
    const words: CtcSpan[] = [];
    for (const { first, end } of runs(characters.length, (i) => characters[i].text === this.space)) {
      if (characters[first].text === this.space) continue;
      const word = characters.slice(first, end);
      words.push({
        text: word.map((span) => span.text).join(""),
        first: word[0].first,
        end: word[word.length - 1].end,
      });
    }
    return words;
  }
}

/** Yield the runs of equal keys of the numbers 0 … count - 1. */
function* runs(count: number, key: (i: number) => unknown): Generator<{ first: number; end: number }> {
  for (let first = 0, end = 0; first < count; first = end) {
    while (end < count && key(end) === key(first)) end++;
    yield { first, end };
  }
}

/** The characters that Python's strip() removes, which are not quite those of trim(). */
const SPACES = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+";
const OUTER_SPACES = new RegExp(`^${SPACES}|${SPACES}$`, "g");

function stripped(text: string): string {
  return text.replace(OUTER_SPACES, "");
}

/** Remove spaces before punctuation, as transformers' clean_up_tokenization does. */
function cleanedUp(text: string): string {
  let tidy = text;
  for (const mark of [".", "?", "!", ","]) tidy = tidy.replaceAll(` ${mark}`, mark);
  tidy = tidy.replaceAll(" ' ", "'");
  for (const ending of ["n't", "'m", "'s", "'ve", "'re"]) tidy = tidy.replaceAll(` ${ending}`, ending);
  return tidy;
}
