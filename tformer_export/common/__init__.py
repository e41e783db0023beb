"""Used by every stage of the compiler.

fx_nodes, source_lines     what a node of a traced graph does, and which line of the user's code made it
onnx_operators, names      operators that a graph is lowered to, and names of values
ir_edit, onnx_writer       change and write ONNX
kernel_choices, quantization, degradation_budget   options that several stages read
derived_inputs             masks and positions that follow from other inputs
checkpoint                 `model.pt`: weights with the code that builds the model
atomic_output, clock, paired_timing, log_silence
"""
