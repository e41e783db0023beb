"""Field numbers and enum values of onnx.proto: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto

MESSAGE_FIELD is the number of that field of that message: MODEL_GRAPH is ModelProto.graph. Only the fields that this
project reads or writes without the onnx package are listed.
"""

from __future__ import annotations

# ModelProto
MODEL_IR_VERSION = 1
MODEL_DOC_STRING = 6
MODEL_GRAPH = 7
MODEL_OPSET_IMPORT = 8
MODEL_METADATA_PROPS = 14
MODEL_FUNCTIONS = 25

# OperatorSetIdProto
OPERATOR_SET_ID_DOMAIN = 1
OPERATOR_SET_ID_VERSION = 2

# StringStringEntryProto
STRING_STRING_ENTRY_KEY = 1
STRING_STRING_ENTRY_VALUE = 2

# GraphProto
GRAPH_NODE = 1
GRAPH_NAME = 2
GRAPH_INITIALIZER = 5
GRAPH_INPUT = 11
GRAPH_OUTPUT = 12

# NodeProto
NODE_INPUT = 1
NODE_OUTPUT = 2
NODE_OP_TYPE = 4
NODE_ATTRIBUTE = 5
NODE_DOMAIN = 7

# AttributeProto
ATTRIBUTE_NAME = 1
ATTRIBUTE_F = 2
ATTRIBUTE_I = 3
ATTRIBUTE_S = 4
ATTRIBUTE_G = 6
ATTRIBUTE_INTS = 8
ATTRIBUTE_TYPE = 20

# AttributeProto.AttributeType
ATTRIBUTE_TYPE_FLOAT = 1
ATTRIBUTE_TYPE_INT = 2
ATTRIBUTE_TYPE_GRAPH = 5

# ValueInfoProto
VALUE_INFO_NAME = 1
VALUE_INFO_TYPE = 2

# TypeProto and TypeProto.Tensor
TYPE_TENSOR_TYPE = 1
TYPE_TENSOR_ELEM_TYPE = 1

# TensorProto
TENSOR_DIMS = 1
TENSOR_DATA_TYPE = 2
TENSOR_NAME = 8
TENSOR_RAW_DATA = 9
TENSOR_EXTERNAL_DATA = 13
TENSOR_DATA_LOCATION = 14
TENSOR_DATA_LOCATION_EXTERNAL = 1  # TensorProto.DataLocation.EXTERNAL

# TensorProto.DataType
DATA_TYPE_FLOAT = 1
DATA_TYPE_UINT8 = 2
DATA_TYPE_INT8 = 3
DATA_TYPE_INT32 = 6
DATA_TYPE_INT64 = 7
DATA_TYPE_BFLOAT16 = 16
