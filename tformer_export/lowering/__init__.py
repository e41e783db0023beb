"""From staged programs to one ONNX file.

to_onnx         a program → an ONNX model
operator_table  torch.onnx's table of operators, read once
target          operators of cpu, cuda and portable
join_stages     two models → one with both stages
manifest        the description for the runtime
"""
