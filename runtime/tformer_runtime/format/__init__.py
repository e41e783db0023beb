"""The model file: its manifest, and how ONNX is read without the onnx package.

manifest     everything that the runtime must know of a file, as JSON in the file's metadata
model_file   read the metadata; map the weights into memory
stage_split  cut one stage out of a file that holds two
sizes        lengths of one row along the free axes of its inputs and outputs
dtypes       types that numpy does not have
onnx_wire    protobuf's wire format
info         facts about a file, for people
"""
