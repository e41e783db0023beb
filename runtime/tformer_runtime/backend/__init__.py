"""onnxruntime: the only layer that calls it.

session         an opened file; errors of onnxruntime become ours
sampling_graph  nodes that choose the next token on a GPU
cuda_graphs     decode steps that are captured as CUDA graphs, and their buffers
resident_pages  give memory back to the operating system
"""
