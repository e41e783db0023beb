"""From staged programs to one ONNX file.

to_onnx             a program → an ONNX model
torch_onnx_patches  torch.onnx does once what it does again for each program or operation
target              operators of cpu, cuda, web and portable
webgpu_operators    operators that have WebGPU kernels
join_stages         two models → one with both stages
model_manifest      the description for the runtime
"""
