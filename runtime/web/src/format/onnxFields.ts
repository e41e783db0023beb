/**
 * Field numbers and enum values of onnx.proto: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
 *
 * MESSAGE_FIELD is the number of that field of that message: MODEL_GRAPH is ModelProto.graph.
 */

import type { Dtype } from "../base/arrays.js";

export const MODEL_IR_VERSION = 1;
export const MODEL_GRAPH = 7;
export const MODEL_METADATA_PROPS = 14;
export const MODEL_FUNCTIONS = 25;

export const ENTRY_KEY = 1; // of a StringStringEntryProto
export const ENTRY_VALUE = 2;

export const GRAPH_NODE = 1;
export const GRAPH_NAME = 2;
export const GRAPH_INITIALIZER = 5;
export const GRAPH_INPUT = 11;
export const GRAPH_OUTPUT = 12;

export const NODE_INPUT = 1;
export const NODE_OUTPUT = 2;
export const NODE_OP_TYPE = 4;
export const NODE_ATTRIBUTE = 5;
export const NODE_DOMAIN = 7;

export const ATTRIBUTE_NAME = 1;
export const ATTRIBUTE_I = 3;
export const ATTRIBUTE_S = 4;
export const ATTRIBUTE_G = 6;
export const ATTRIBUTE_INTS = 8;
export const ATTRIBUTE_TYPE = 20;
export const ATTRIBUTE_TYPE_INT = 2;
export const ATTRIBUTE_TYPE_STRING = 3;
export const ATTRIBUTE_TYPE_GRAPH = 5;
export const ATTRIBUTE_TYPE_INTS = 7;

export const VALUE_INFO_NAME = 1;
export const VALUE_INFO_TYPE = 2;
export const TYPE_TENSOR_TYPE = 1;
export const TYPE_TENSOR_ELEM_TYPE = 1;
export const TYPE_TENSOR_SHAPE = 2;
export const SHAPE_DIM = 1;
export const DIM_VALUE = 1;

export const TENSOR_DIMS = 1;
export const TENSOR_DATA_TYPE = 2;
export const TENSOR_NAME = 8;
export const TENSOR_RAW_DATA = 9;
export const TENSOR_EXTERNAL_DATA = 13;
export const TENSOR_DATA_LOCATION = 14;
export const TENSOR_DATA_LOCATION_EXTERNAL = 1;

/** Numbers of TensorProto.DataType. */
export const DATA_TYPES: Record<Dtype, number> = {
  float32: 1,
  uint8: 2,
  int8: 3,
  int16: 5,
  int32: 6,
  int64: 7,
  bool: 9,
  float16: 10,
  float64: 11,
  bfloat16: 16,
};
