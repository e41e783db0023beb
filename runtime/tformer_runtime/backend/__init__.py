"""The only layer that calls onnxruntime.

session         an opened model file; translates errors of onnxruntime
binding         the buffers of a call, which a closed session takes away
native_kernels  optional kernels for products, and loading a model with them
run_deadline    end a run after some seconds
run_slots       limit the runs at the same time
sampling_graph  nodes that choose the next token on a GPU
cuda_graphs     decode steps as CUDA graphs, and their buffers
resident_pages  return unneeded memory to the operating system
"""
