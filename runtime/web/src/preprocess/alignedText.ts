/**
 * A text that steps change. Each character keeps its place in the original.
 *
 * The rules of the places are those of `NormalizedString` of the tokenizers library: a changed character has the place of
 * the character that it replaces, and an inserted one the place of the character before it. Places are counted in characters
 * (code points), as there.
 */

/** A character of a changed text. inserted > 0: it replaces none; inserted < 0: it replaces 1 − inserted characters. */
export type Change = readonly [character: string, inserted: number];

export class AlignedText {
  private constructor(
    readonly characters: readonly string[],
    /** The places of each character: first and last + 1. */
    private readonly starts: readonly number[],
    private readonly ends: readonly number[],
    /** The place of the text itself in the original. */
    readonly start: number,
  ) {}

  static of(text: string): AlignedText {
    const characters = [...text];
    return new AlignedText(
      characters,
      characters.map((_, place) => place),
      characters.map((_, place) => place + 1),
      0,
    );
  }

  get length(): number {
    return this.characters.length;
  }

  get text(): string {
    return this.characters.join("");
  }

  /** Return the place in the original of the characters from `first` to `end`, which is exclusive. */
  place(first: number, end: number): [number, number] {
    return first < end ? [this.starts[first], this.ends[end - 1]] : [this.start, this.start];
  }

  slice(first: number, end: number): AlignedText {
    const start = first < this.length ? this.starts[first] : this.start;
    return new AlignedText(
      this.characters.slice(first, end),
      this.starts.slice(first, end),
      this.ends.slice(first, end),
      start,
    );
  }

  /** Return the text with other characters. skipped: characters at the beginning that none replaces. */
  changed(changes: Iterable<Change>, skipped = 0): AlignedText {
    const characters: string[] = [];
    const starts: number[] = [];
    const ends: number[] = [];
    let next = skipped;
    for (const [character, inserted] of changes) {
      const from = inserted > 0 ? next - 1 : next;
      characters.push(character);
      starts.push(from < 0 ? this.start : this.starts[from]);
      ends.push(from < 0 ? this.start : this.ends[from]);
      if (inserted <= 0) next += 1 - inserted;
    }
    return new AlignedText(characters, starts, ends, this.start);
  }

  /** Return the text with each character replaced by others. */
  mapped(replacement: (character: string) => Iterable<string>): AlignedText {
    return this.changed(
      this.characters.flatMap((character) => Array.from(replacement(character), (one, i): Change => [one, i])),
    );
  }

  filtered(keep: (character: string) => boolean): AlignedText {
    const kept = [...this.characters.keys()].filter((i) => keep(this.characters[i]));
    const pick = <T>(values: readonly T[]) => kept.map((i) => values[i]);
    return new AlignedText(pick(this.characters), pick(this.starts), pick(this.ends), this.start);
  }

  /** Return the text behind another one, whose characters have the place of the first character. */
  prepended(prefix: string): AlignedText {
    if (!this.length) return this;
    const before = [...prefix, this.characters[0]].map((character, i): Change => [character, i]);
    return this.changed([...before, ...this.characters.slice(1).map((character): Change => [character, 0])]);
  }

  /** Return the text with each match replaced by `content`, whose characters have the place of the match's end. */
  replaced(pattern: RegExp, content: string): AlignedText {
    const characters: string[] = [];
    const starts: number[] = [];
    const ends: number[] = [];
    let done = 0;
    const copy = (end: number) => {
      for (; done < end; done++) {
        characters.push(this.characters[done]);
        starts.push(this.starts[done]);
        ends.push(this.ends[done]);
      }
    };
    for (const [first, end] of this.matches(pattern)) {
      copy(first);
      for (const character of content) {
        characters.push(character);
        starts.push(end ? this.starts[end - 1] : this.start);
        ends.push(end ? this.ends[end - 1] : this.start);
      }
      done = end;
    }
    copy(this.length);
    return new AlignedText(characters, starts, ends, this.start);
  }

  /** Return the matches of a pattern with the flags g and u: first and last + 1, in characters of this text. */
  matches(pattern: RegExp): [number, number][] {
    const found: [number, number][] = [];
    let unit = 0; // of UTF-16
    let place = 0;
    const placeOf = (target: number) => {
      while (unit < target) unit += this.characters[place++].length;
      return place;
    };
    for (const match of this.text.matchAll(pattern)) {
      found.push([placeOf(match.index), placeOf(match.index + match[0].length)]);
    }
    return found;
  }

  /** Return the parts between matches, and the matches themselves if `keepMatches`. Empty parts are left out. */
  split(matches: readonly (readonly [number, number])[], keepRest: boolean, keepMatches: boolean): AlignedText[] {
    const parts: AlignedText[] = [];
    let done = 0;
    for (const [first, end] of [...matches, [this.length, this.length] as const]) {
      if (keepRest && first > done) parts.push(this.slice(done, first));
      if (keepMatches && end > first) parts.push(this.slice(first, end));
      done = end;
    }
    return parts;
  }
}
