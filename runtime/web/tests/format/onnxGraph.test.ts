/** Attributes of nodes, as protobuf and onnxruntime read them. */

import { expect, test } from "vitest";
import {
  ATTRIBUTE_I,
  ATTRIBUTE_INTS,
  ATTRIBUTE_NAME,
  ATTRIBUTE_S,
  ATTRIBUTE_TYPE,
  ATTRIBUTE_TYPE_INT,
  ATTRIBUTE_TYPE_INTS,
  ATTRIBUTE_TYPE_STRING,
  NODE_ATTRIBUTE,
} from "../../src/format/onnxFields.js";
import { attributesOf, newNode } from "../../src/format/onnxGraphEdit.js";
import { bytesField, concatBytes, integerField, varint, varintField } from "../../src/format/onnxWire.js";

const FLOAT = 1; // another type of attributes

function valueOf(type: number, ...parts: Uint8Array[][]): unknown {
  const attribute = [...bytesField(ATTRIBUTE_NAME, "a"), ...parts.flat(), ...varintField(ATTRIBUTE_TYPE, type)];
  const node = newNode("Any", [], []);
  node.encoded = [...node.encoded, ...bytesField(NODE_ATTRIBUTE, attribute)];
  const attributes = attributesOf(node);
  expect([...attributes.keys()]).toEqual(["a"]);
  return attributes.get("a");
}

test("a number that is left out is 0, as a list is empty and a text is", () => {
  expect(valueOf(ATTRIBUTE_TYPE_INT)).toBe(0);
  expect(valueOf(ATTRIBUTE_TYPE_INTS)).toEqual([]);
  expect(valueOf(ATTRIBUTE_TYPE_STRING)).toBe("");
});

test.each([0, 1, 127, 128, 2 ** 31, 2 ** 52, -1, -2, -(2 ** 31)])(
  "the number %s is read as it was written",
  (number) => {
    expect(valueOf(ATTRIBUTE_TYPE_INT, integerField(ATTRIBUTE_I, number))).toBe(number);
    expect(valueOf(ATTRIBUTE_TYPE_INTS, integerField(ATTRIBUTE_INTS, number), integerField(ATTRIBUTE_INTS, 7))).toEqual(
      [number, 7],
    );
  },
);

test("packed numbers, the last of several numbers, and texts are read", () => {
  const packed = bytesField(ATTRIBUTE_INTS, concatBytes([varint(300), varint(0), varint(5)]));
  expect(valueOf(ATTRIBUTE_TYPE_INTS, packed)).toEqual([300, 0, 5]);
  expect(valueOf(ATTRIBUTE_TYPE_INT, varintField(ATTRIBUTE_I, 3), varintField(ATTRIBUTE_I, 4))).toBe(4);
  expect(valueOf(ATTRIBUTE_TYPE_STRING, bytesField(ATTRIBUTE_S, "RIGHT"))).toBe("RIGHT");
});

test("the type says what is meant", () => {
  expect(valueOf(FLOAT, varintField(ATTRIBUTE_I, 3))).toBeUndefined();
});
