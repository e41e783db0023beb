"""Rewriting of a model while it is loaded. onnxruntime gets other operators than the file has, which compute the same.

`backend.session.Session` opens a file. It calls `product_rewrite` first, if there are native kernels, and then
`derived_weights`. The file itself does not change.

stored_weights       find integer weights by their record, and compare the graph with it
derived_weights      compute the weights that a file derives from stored ones
quantized_product    find quantised products by their record, and compare the graph with it
float_product        recognise a float32 product
attention_rewrite    recognise attention that native kernels compute
elementwise_rewrite  recognise norms, activations and gates that native kernels compute
product_rewrite      replace all of these by operators of native kernels, whose weights are packed meanwhile
operator_chain       join operators of native kernels that follow each other
greedy_loop          make a decode stage one chain, which runs several greedy steps at once
"""
