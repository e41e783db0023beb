"""What the traced graph does: by its operations and by running them, never by the name of a model.

binding_time       when each value is known: constant, by the request, or by each step
attention          softmax(scale · QKᵀ + bias) · V, in whatever operations it is written
batch_axes         which axis holds the rows
input_facts        vocabulary, padding and maximum length of each input
size_branches      code that depends on a size
determinism        results that do not depend on chance or on earlier calls
last_position      models that give logits for the last position only
attention_weights  attention that a file gives besides its logits
series             what was said of a forecaster's series, checked against the graph
interpreter        run parts of a graph
"""
