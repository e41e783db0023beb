/**
 * Σ exp of logits in float32, with the last bit that it has in the Python runtime, computed by a WebAssembly function.
 *
 * The formulas are those of numpy on processors with AVX2 or AVX-512 (loops_exponent_log.dispatch.c.src): the exponential is
 * a quotient of polynomials, computed with fused multiply-adds. numpy takes others on other processors, whose last bits
 * differ.
 *
 * A fused multiply-add rounds once. Here the product is exact in float64 and the sum is rounded twice. The second
 * rounding changes one result of about 2 ** 29.
 *
 * The function takes half the time of JavaScript, in which these steps were 12 % of a step of a model of 60 M parameters in int8.
 * It is short, so that its instructions are written here.
 */

const { fround } = Math;

const LOG2_E = fround(Math.LOG2E);
const LN_2_HIGH = fround(-6.93145752e-1); // minus ln 2 in two parts
const LN_2_LOW = fround(-1.42860677e-6);
const ROUNDS = fround(1.5 * 2 ** 23); // a float32 of this size has no fraction: adding it rounds to whole numbers
const MIN_DIFFERENCE = -120; // the exponentials of smaller numbers are 0 in float32

const E0 = fround(9.99999999998087e-1);
const E1 = fround(7.257664613233124e-1);
const E2 = fround(2.473615434895521e-1);
const E3 = fround(5.114512081637298e-2);
const E4 = fround(6.757896990527505e-3);
const E5 = fround(5.082762527590694e-4);
const D1 = fround(-2.7423353904116675e-1);
const D2 = fround(2.1595093756858299e-2);

const BLOCK = 128; // numbers that numpy adds up in eight sums
const SUMS = 8;
const ITEM_BYTES = 4;
const VECTOR_BYTES = 16;
const PAGE_BYTES = 65536;

/**
 * Return Σ exp(logits - top) of the logits begin … end - 1, added up in the order of numpy (`pairwiseSum`).
 *
 * top: their largest one. Cost: a copy of the logits, and 5 ns for each.
 */
export function exponentialSum(logits: Float32Array, begin: number, end: number, top: number): number {
  const { memory, blockSum } = (instance ??= instantiate());
  const count = end - begin;
  // The last vector may begin at the last number.
  const missing = count * ITEM_BYTES + VECTOR_BYTES - memory.buffer.byteLength;
  if (missing > 0) memory.grow(Math.ceil(missing / PAGE_BYTES));
  new Float32Array(memory.buffer, 0, count).set(logits.subarray(begin, end));
  return sum(blockSum, 0, count, top);
}

function sum(blockSum: Instance["blockSum"], begin: number, end: number, top: number): number {
  const count = end - begin;
  if (count <= BLOCK) return blockSum(begin * ITEM_BYTES, count, top);
  const half = Math.floor(count / 2);
  const middle = begin + half - (half % SUMS);
  return fround(sum(blockSum, begin, middle, top) + sum(blockSum, middle, end, top));
}

interface Instance {
  readonly memory: WebAssembly.Memory;
  /** Return Σ exp(x - top) of `count` numbers at a place of the memory. */
  blockSum(place: number, count: number, top: number): number;
}

let instance: Instance | undefined;

function instantiate(): Instance {
  return new WebAssembly.Instance(new WebAssembly.Module(moduleBytes())).exports as unknown as Instance;
}

// What follows writes the module. An expression is the bytes of the instructions that leave its value on the stack.
type Code = readonly number[];

const [I32, F32, V128] = [0x7f, 0x7d, 0x7b];
const VECTOR = 0xfd; // begins the instructions of vectors

const binary =
  (...opcode: number[]) =>
  (one: Code, other: Code): Code => [...one, ...other, ...opcode];
const unary =
  (...opcode: number[]) =>
  (value: Code): Code => [...value, ...opcode];

const i32Const = (value: number): Code => [0x41, ...signed(value)];
const i32Less = binary(0x49);
const i32Add = binary(0x6a);
const i32And = binary(0x71);
const i32ShiftLeft = binary(0x74);
const f32Add = binary(0x92);
const f32x4Splat = unary(VECTOR, 0x13);
const f32x4Add = binary(VECTOR, 0xe4, 0x01);
const f32x4Sub = binary(VECTOR, 0xe5, 0x01);
const f32x4Mul = binary(VECTOR, 0xe6, 0x01);
const f32x4Max = binary(VECTOR, 0xe9, 0x01); // NaN if one is
const f64x2Add = binary(VECTOR, 0xf0, 0x01);
const f64x2Mul = binary(VECTOR, 0xf2, 0x01);
const f64x2Div = binary(VECTOR, 0xf3, 0x01);
const demote = unary(VECTOR, 0x5e); // f64x2 to the first two lanes of f32x4
const promote = unary(VECTOR, 0x5f); // and back
const i32x4Truncate = unary(VECTOR, 0xf8, 0x01);
const i64x2Splat = (value: number): Code => [0x42, ...signed(value), VECTOR, 0x12];
const i64x2Extend = unary(VECTOR, 0xc7, 0x01); // the first two lanes of i32x4
const i64x2ShiftLeft = binary(VECTOR, 0xcb, 0x01);
const i64x2Add = binary(VECTOR, 0xce, 0x01);
const lane = (vector: Code, i: number): Code => [...vector, VECTOR, 0x1f, i];
const load = (place: Code, offset: number): Code => [...place, VECTOR, 0x00, 2, offset];
const get = (local: number): Code => [0x20, local];
const set = (local: number, value: Code): Code => [...value, 0x21, local];
/** Repeat a body while a condition holds. */
const loop = (condition: Code, body: Code): Code => [
  ...[0x02, 0x40, 0x03, 0x40], // a block, and a loop in it
  ...[...condition, 0x45, 0x0d, 1], // leave the block if it does not hold
  ...[...body, 0x0c, 0, 0x0b, 0x0b],
];
/** Choose lanes of 8 bytes: 0 and 1 are those of the first vector, 2 and 3 those of the second. */
const shuffle = (one: Code, other: Code, ...lanes: number[]): Code => [
  ...[...one, ...other, VECTOR, 0x0d],
  ...lanes.flatMap((from) => Array.from({ length: 8 }, (_, i) => 8 * from + i)),
];
const high = (vector: Code): Code => shuffle(vector, vector, 1, 0);

const constants = (values: Float32Array | Float64Array): Code => [
  ...[VECTOR, 0x0c],
  ...new Uint8Array(values.buffer as ArrayBuffer),
];
const f32x4 = (value: number) => constants(new Float32Array(4).fill(value));
const f64x2 = (value: number) => constants(new Float64Array(2).fill(value));

/** a · b + c of two numbers, rounded to float32. */
const fused = (a: Code, b: Code, c: Code) => promote(demote(f64x2Add(f64x2Mul(a, b), c)));

// Locals of the function: its parameters first.
const [PLACE, COUNT, TOP, END, TOTAL, TOPS, FIRST, SECOND, DIFFERENCE, POWER, REST, HALF, FIRST_SUMS, SECOND_SUMS] = [
  ...Array(14).keys(),
];

/** Write the exponentials of two numbers to the first lanes of HALF. part: `high` for the last two lanes of vectors. */
function twoExponentials(part: (vector: Code) => Code): Code {
  const power = promote(part(get(POWER)));
  const rest = fused(power, f64x2(LN_2_HIGH), promote(part(get(DIFFERENCE))));
  const y = get(REST);
  const numerator = [E4, E3, E2, E1, E0].reduce<Code>((sum, factor) => fused(sum, y, f64x2(factor)), f64x2(E5));
  const denominator = [D1, 1].reduce<Code>((sum, factor) => fused(sum, y, f64x2(factor)), f64x2(D2));
  const quotient = promote(demote(f64x2Div(numerator, denominator)));
  const exponent = i64x2Extend(part(i32x4Truncate(get(POWER))));
  const twoToThePower = i64x2ShiftLeft(i64x2Add(exponent, i64x2Splat(1023)), i32Const(52));
  return [
    ...set(REST, fused(power, f64x2(LN_2_LOW), rest)),
    ...set(HALF, demote(f64x2Mul(quotient, twoToThePower))), // rounds once, also if the result is denormal
  ];
}

/** Write the exponentials of the four numbers at PLACE + offset to a local. */
function fourExponentials(offset: number, target: number): Code {
  const power = f32x4Mul(get(DIFFERENCE), f32x4(LOG2_E));
  return [
    ...set(DIFFERENCE, f32x4Max(f32x4Sub(load(get(PLACE), offset), get(TOPS)), f32x4(MIN_DIFFERENCE))),
    ...set(POWER, f32x4Sub(f32x4Add(power, f32x4(ROUNDS)), f32x4(ROUNDS))),
    ...twoExponentials((vector) => vector),
    ...set(target, get(HALF)),
    ...twoExponentials(high),
    ...set(target, shuffle(get(target), get(HALF), 0, 2)),
  ];
}

function functionBody(): Code {
  const four = (vector: number) =>
    f32Add(f32Add(lane(get(vector), 0), lane(get(vector), 1)), f32Add(lane(get(vector), 2), lane(get(vector), 3)));
  const endOf = (count: Code) => set(END, i32Add(get(PLACE), i32ShiftLeft(count, i32Const(2))));
  const advance = (bytes: number) => set(PLACE, i32Add(get(PLACE), i32Const(bytes)));
  return [
    ...[3, 1, I32, 1, F32, 9, V128], // the numbers of locals of each type: END; TOTAL; the vectors
    ...set(TOPS, f32x4Splat(get(TOP))),
    ...endOf(i32And(get(COUNT), i32Const(-SUMS))),
    ...loop(i32Less(get(PLACE), get(END)), [
      ...fourExponentials(0, FIRST),
      ...fourExponentials(VECTOR_BYTES, SECOND),
      ...set(FIRST_SUMS, f32x4Add(get(FIRST_SUMS), get(FIRST))),
      ...set(SECOND_SUMS, f32x4Add(get(SECOND_SUMS), get(SECOND))),
      ...advance(2 * VECTOR_BYTES),
    ]),
    ...set(TOTAL, f32Add(four(FIRST_SUMS), four(SECOND_SUMS))),
    ...endOf(i32And(get(COUNT), i32Const(SUMS - 1))), // the numbers that the eight sums leave
    ...loop(i32Less(get(PLACE), get(END)), [
      ...fourExponentials(0, FIRST),
      ...set(TOTAL, f32Add(get(TOTAL), lane(get(FIRST), 0))),
      ...advance(ITEM_BYTES),
    ]),
    ...get(TOTAL),
    0x0b,
  ];
}

/** Return the module: a memory, and a function of (i32, i32, f32) that returns a f32. */
function moduleBytes(): Uint8Array<ArrayBuffer> {
  const code = functionBody();
  const name = (text: string) => [text.length, ...new TextEncoder().encode(text)];
  const section = (id: number, content: Code) => [id, ...unsigned(content.length), ...content];
  return Uint8Array.from([
    ...[0x00, 0x61, 0x73, 0x6d, 1, 0, 0, 0], // "\0asm", version 1
    ...section(1, [1, 0x60, 3, I32, I32, F32, 1, F32]), // the type of the function
    ...section(3, [1, 0]),
    ...section(5, [1, 0, 1]), // a memory of one page at first
    ...section(7, [2, ...name("memory"), 2, 0, ...name("blockSum"), 0, 0]),
    ...section(10, [1, ...unsigned(code.length), ...code]),
  ]);
}

/** Return a number in LEB128. */
function unsigned(value: number): number[] {
  return value < 0x80 ? [value] : [(value & 0x7f) | 0x80, ...unsigned(value >>> 7)];
}

function signed(value: number): number[] {
  return value >= -64 && value < 64 ? [value & 0x7f] : [(value & 0x7f) | 0x80, ...signed(value >> 7)];
}
