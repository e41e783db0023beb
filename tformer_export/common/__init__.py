"""Modules that several folders of the compiler use.

fx_nodes, source_lines     the operation of a node of a traced graph, and the line of the user's code that made it
onnx_operators             operators that a graph is lowered to
ir_edit, onnx_writer       edit and write ONNX models, with the records of quantised products
packed_weight              matrices that a source stores in 4-bit integers
example_sizes, module_state   inputs of other sizes, and a module as it was before a run
option_table, option_values, task, kernel_choices, degradation_budget   options that several folders read
derived_inputs             masks and positions that follow from other inputs
checkpoint                 `model.pt`: weights with the code that builds the model
torch_patch_lock, log_silence   regions that change something for the whole process
atomic_output, clock, paired_timing
"""
