"""Rewriting of a model while it is loaded. onnxruntime gets other operators than the file has, which compute the same.

stored_weights       recognise the stored form of integer weights
derived_weights      compute the weights that a file derives from stored ones
quantized_product    recognise the operators of a quantised product
float_product        recognise a float32 product
attention_rewrite    recognise attention that native kernels compute
elementwise_rewrite  recognise norms, activations and gates that native kernels compute
product_rewrite      replace all of these by operators of native kernels
"""
