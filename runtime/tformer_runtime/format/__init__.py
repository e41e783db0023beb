"""The model file: its manifest, and reading and writing of ONNX without the onnx package.

manifest         everything that the runtime must know about a file, as JSON in the file's metadata
manifest_checks  rules between fields of a manifest, and its graph
typed_json       JSON as structs of msgspec, by their type hints
digest           whether a file is as the exporter wrote it
open_files       the files of a loaded model, held open: whether their bytes have changed
model_file       read the metadata; map the weights into memory
stage_split      extract one stage of a file with two
stored_forms     records of quantised products, and the operators that a graph has for them
weight_forms     the forms of weights, made by numpy
sizes            lengths of one row along the free axes of its inputs and outputs
dtypes           types that numpy does not have
onnx_fields      field numbers of onnx.proto
onnx_wire        protobuf's wire format
onnx_graph       a model as nodes that can be replaced
weight_files     the bytes of weights, mapped into memory
info             facts about a file, for people
"""
