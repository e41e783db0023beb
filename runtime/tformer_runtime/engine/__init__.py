"""One step of decoding: encode requests, feed tokens, return logits.

engine           the functions: encode, start, step, reorder, join, copy
state            the rows of a batch: their lengths, context and caches
decode_call      one run of the decode stage on any device; cuda_call: as a CUDA graph
kv_cache         keys and values of earlier positions
encoder_context  outputs of the encoder that every step reads
shortlist        the candidate ids of a request, and their columns of the output projection
static_inputs    inputs of the file that are the same at every step
padding          rows of different lengths → padded arrays and masks
memory_estimate  bytes that a request may need; memory_budget: upper limit for all requests
step_outputs     attention weights and hidden states of each step
"""
