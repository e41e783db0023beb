/**
 * The random numbers of numpy's `default_rng([…])`, bit for bit: a PCG64 generator, seeded by a SeedSequence.
 *
 * The Python runtime draws with them, so that a seed gives the same tokens in both runtimes.
 *
 * SeedSequence: https://numpy.org/doc/stable/reference/random/bit_generators/generated/numpy.random.SeedSequence.html
 * PCG64 (the permutation XSL-RR of 128 bits): https://www.pcg-random.org
 */

const POOL_WORDS = 4;
const INIT_A = 0x43b0d7e5;
const MULT_A = 0x931e8875;
const INIT_B = 0x8b51f9dd;
const MULT_B = 0x58f38ded;
const MIX_MULT_L = 0xca01f9dd;
const MIX_MULT_R = 0x4973f715;

const LIMBS = 8; // a number of 128 bits is 8 limbs of 16 bits, the lowest first: sums of their products are exact
const MULTIPLIER = limbsOf([0x9fccf645, 0x4385df64, 0x1fc65da4, 0x2360ed05]);

/** Draws numbers from 0 to 1. */
export class RandomGenerator {
  private readonly state = new Uint16Array(LIMBS);
  private readonly increment: Uint16Array;

  /** seed: whole numbers of at least 0, of any size. */
  constructor(seed: readonly (number | bigint)[]) {
    const words = generateState(mixEntropy(seed.flatMap(wordsOf)), 8);
    // Words of 64 bits follow each other with the higher one first; each is two of these words, the lower one first.
    const [a, b, c, d, e, f, g, h] = words;
    this.increment = limbsOf([(g << 1) | 1, (h << 1) | (g >>> 31), (e << 1) | (h >>> 31), (f << 1) | (e >>> 31)]);
    this.step();
    add(this.state, limbsOf([c, d, a, b]));
    this.step();
  }

  /** Return a number from 0 to 1, 1 excluded: the higher 53 of 64 random bits. */
  random(): number {
    this.step();
    const s = this.state;
    // The halves of the state are combined by xor, and rotated to the right by the state's highest 6 bits.
    const low = ((s[0] | (s[1] << 16)) ^ (s[4] | (s[5] << 16))) >>> 0;
    const high = ((s[2] | (s[3] << 16)) ^ (s[6] | (s[7] << 16))) >>> 0;
    const rotation = s[7] >>> 10;
    const [first, second] = rotation < 32 ? [low, high] : [high, low];
    const shift = rotation & 31;
    const rotatedLow = shift ? ((first >>> shift) | (second << (32 - shift))) >>> 0 : first;
    const rotatedHigh = shift ? ((second >>> shift) | (first << (32 - shift))) >>> 0 : second;
    return (rotatedHigh * 2 ** 21 + (rotatedLow >>> 11)) * 2 ** -53;
  }

  /** state = state · MULTIPLIER + increment, modulo 2 ** 128. */
  private step(): void {
    const { state } = this;
    const product = new Uint16Array(LIMBS);
    let carry = 0; // below 2 ** 36, so that no sum is rounded
    for (let i = 0; i < LIMBS; i++) {
      let sum = carry;
      for (let j = 0; j <= i; j++) sum += state[j] * MULTIPLIER[i - j];
      product[i] = sum % 0x10000;
      carry = Math.floor(sum / 0x10000);
    }
    state.set(product);
    add(state, this.increment);
  }
}

/** Add a number to another in place, modulo 2 ** 128. */
function add(target: Uint16Array, other: Uint16Array): void {
  let carry = 0;
  for (let i = 0; i < LIMBS; i++) {
    carry += target[i] + other[i];
    target[i] = carry;
    carry >>>= 16;
  }
}

/** Return the limbs of four words of 32 bits, the lowest word first. */
function limbsOf(words: readonly number[]): Uint16Array {
  return Uint16Array.from(words.flatMap((word) => [word & 0xffff, word >>> 16]));
}

/** Return the words of 32 bits of a whole number, the lowest first; one word for 0. */
function wordsOf(value: number | bigint): number[] {
  const words: number[] = [];
  let rest = BigInt(value);
  do {
    words.push(Number(rest & 0xffffffffn));
    rest >>= 32n;
  } while (rest > 0n);
  return words;
}

/** Return the pool of a SeedSequence. */
function mixEntropy(entropy: readonly number[]): Uint32Array {
  const pool = new Uint32Array(POOL_WORDS);
  let constant = INIT_A;
  const hash = (word: number) => {
    const before = word ^ constant;
    constant = Math.imul(constant, MULT_A);
    const value = Math.imul(before, constant);
    return value ^ (value >>> 16);
  };
  const mix = (one: number, other: number) => {
    const value = Math.imul(MIX_MULT_L, one) - Math.imul(MIX_MULT_R, other);
    return value ^ ((value >>> 0) >>> 16);
  };
  for (let i = 0; i < POOL_WORDS; i++) pool[i] = hash(entropy[i] ?? 0);
  for (let source = 0; source < POOL_WORDS; source++) {
    for (let target = 0; target < POOL_WORDS; target++) {
      if (source !== target) pool[target] = mix(pool[target], hash(pool[source]));
    }
  }
  for (const word of entropy.slice(POOL_WORDS)) {
    for (let target = 0; target < POOL_WORDS; target++) pool[target] = mix(pool[target], hash(word));
  }
  return pool;
}

/** Return words of 32 bits that a pool determines. */
function generateState(pool: Uint32Array, count: number): Uint32Array {
  const words = new Uint32Array(count);
  let constant = INIT_B;
  for (let i = 0; i < count; i++) {
    const before = pool[i % POOL_WORDS] ^ constant;
    constant = Math.imul(constant, MULT_B);
    const value = Math.imul(before, constant);
    words[i] = value ^ (value >>> 16);
  }
  return words;
}
