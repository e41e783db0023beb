/**
 * Protobuf's wire format, read and written by hand: https://protobuf.dev/programming-guides/encoding
 *
 * A message is a sequence of fields. Each field is a tag, which holds the field's number and wire type, followed by its
 * content. A reader goes from field to field and skips large ones. `onnxFields` has the field numbers.
 */

export const VARINT = 0; // wire types: a number;
export const BYTES = 2; // content with a length, such as a text, a message or packed numbers
const MAX_VARINT_BYTES = 10;
const MAX_NUMBER = 2 ** 29 - 1; // of a field

/** The bytes are not a message, or end too early. */
export class WireError extends Error {}

/**
 * One field of a message in `data`.
 *
 * number: the field number.
 * varint: the unsigned number of a varint, exact up to 53 bits; 0 for other fields.
 * start, end: of its content, which is empty for a varint.
 * begin: where its tag begins.
 */
export interface Field {
  readonly number: number;
  readonly varint: number;
  readonly begin: number;
  readonly start: number;
  readonly end: number;
}

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Yield the fields of a message, in their order. Throw WireError if the bytes are not a message. */
export function* iterFields(data: Uint8Array, begin = 0, end = data.length): Generator<Field> {
  let position = begin;
  while (position < end) {
    const field = readField(data, position, end);
    yield field;
    position = field.end;
  }
}

/** Read the field that begins at a position. Throw WireError if there is none, or if it extends beyond `end`. */
export function readField(data: Uint8Array, begin: number, end: number): Field {
  let [header, position] = readVarint(data, begin, end);
  const number = Math.floor(header / 8);
  const wireType = header % 8;
  let varint = 0;
  let length = 0;
  if (wireType === VARINT) [varint, position] = readVarint(data, position, end);
  else if (wireType === BYTES) [length, position] = readVarint(data, position, end);
  else if (wireType === 1) length = 8;
  else if (wireType === 5) length = 4;
  else throw new WireError();
  if (number < 1 || number > MAX_NUMBER || position + length > end) throw new WireError();
  return { number, varint, begin, start: position, end: position + length };
}

/** Return the number that is encoded at a position, and the position after it. Throw WireError if there is none. */
function readVarint(data: Uint8Array, position: number, end: number): [number, number] {
  let value = 0;
  let factor = 1;
  for (let i = 0; i < MAX_VARINT_BYTES && position < end; i++) {
    const byte = data[position++];
    value += (byte & 0x7f) * factor;
    if (byte < 0x80) return [value, position];
    factor *= 128;
  }
  throw new WireError();
}

/** Return the numbers of a repeated field: one, or several that are packed. */
export function varintsOf(data: Uint8Array, field: Field): number[] {
  if (field.start === field.end) return [field.varint];
  const numbers: number[] = [];
  let position = field.start;
  while (position < field.end) {
    const [number, next] = readVarint(data, position, field.end);
    numbers.push(number);
    position = next;
  }
  return numbers;
}

/** Return the signed numbers of a repeated field of 64 bits, exact up to 53 bits; none for a field of another kind. */
export function signedVarintsOf(data: Uint8Array, field: Field): number[] {
  const [header, afterTag] = readVarint(data, field.begin, field.end);
  const isPacked = header % 8 === BYTES;
  if (!isPacked && header % 8 !== VARINT) return [];
  const numbers: number[] = [];
  let number = 0n;
  let shift = 0n;
  for (const byte of data.subarray(isPacked ? field.start : afterTag, field.end)) {
    number |= BigInt(byte & 0x7f) << shift;
    shift += 7n;
    if (byte >= 0x80 && shift < 7n * BigInt(MAX_VARINT_BYTES)) continue;
    if (byte >= 0x80) throw new WireError();
    numbers.push(Number(BigInt.asIntN(64, number)));
    number = shift = 0n;
  }
  if (shift) throw new WireError();
  return numbers;
}

/** Return a text of a message. Throw WireError unless the bytes are UTF-8. */
export function textOf(data: Uint8Array, field: Field): string {
  try {
    return decoder.decode(data.subarray(field.start, field.end));
  } catch {
    throw new WireError();
  }
}

/** Return the bytes of a field with its tag. */
export function encodedOf(data: Uint8Array, field: Field): Uint8Array {
  return data.subarray(field.begin, field.end);
}

/** Return the bytes of the content of a field. */
export function contentOf(data: Uint8Array, field: Field): Uint8Array {
  return data.subarray(field.start, field.end);
}

/** Encode a non-negative number in groups of 7 bits, the lowest group first. */
export function varint(number: number): Uint8Array {
  const out: number[] = [];
  while (number > 0x7f) {
    out.push((number % 128) | 0x80);
    number = Math.floor(number / 128);
  }
  out.push(number);
  return Uint8Array.from(out);
}

/** Encode the tag of a field. */
export function tag(number: number, wireType: number): Uint8Array {
  return varint(number * 8 + wireType);
}

/** Encode a field that holds bytes, as parts: a text or another message. */
export function bytesField(number: number, content: string | Uint8Array | readonly Uint8Array[]): Uint8Array[] {
  const parts = typeof content === "string" ? [encoder.encode(content)] : isBytes(content) ? [content] : content;
  return [tag(number, BYTES), varint(totalBytes(parts)), ...parts];
}

/** Encode a field that holds a non-negative number, as parts. */
export function varintField(number: number, value: number): Uint8Array[] {
  return [tag(number, VARINT), varint(value)];
}

/** Encode a field that holds a whole number of 64 bits, which may be negative, as parts. */
export function integerField(number: number, value: number): Uint8Array[] {
  if (value >= 0) return varintField(number, value);
  const groups = Array.from({ length: MAX_VARINT_BYTES }, (_, i) =>
    Number((BigInt.asUintN(64, BigInt(value)) >> BigInt(7 * i)) & 0x7fn),
  );
  return [
    tag(number, VARINT),
    Uint8Array.from(groups, (group, i) => (i < MAX_VARINT_BYTES - 1 ? group | 0x80 : group)),
  ];
}

/** Return the number of bytes of some parts. */
export function totalBytes(parts: readonly Uint8Array[]): number {
  let bytes = 0;
  for (const part of parts) bytes += part.length;
  return bytes;
}

/** Return parts as one array. */
export function concatBytes(parts: readonly Uint8Array[]): Uint8Array<ArrayBuffer> {
  const whole = new Uint8Array(totalBytes(parts));
  let position = 0;
  for (const part of parts) {
    whole.set(part, position);
    position += part.length;
  }
  return whole;
}

function isBytes(content: Uint8Array | readonly Uint8Array[]): content is Uint8Array {
  return content instanceof Uint8Array;
}
