"""One step of decoding: encode requests, feed tokens, get logits.

engine           the functions: encode, start, step, reorder, join, copy
state            what decoding has so far, row by row
decode_call      one run of the decode stage on any device; cuda_call: as a CUDA graph
kv_cache         keys and values of earlier positions
encoder_context  outputs of the encoder that every step reads
shortlist        the ids that may come for a request, and their columns of the output projection
static_inputs    inputs of the file that are the same at every step
padding          rows of different lengths → padded arrays and masks
memory_estimate  bytes that a request will take; memory_budget: bytes that all may take
step_outputs     attention and hidden states of each step
"""
