"""Facts about the traced graph, found from its operations and by running them, never from the name of a model.

binding_time        when each value is known: constant, by the request, or by each step
attention           the operation that each attention becomes
attention_patterns  softmax(scale · QKᵀ + bias) · V, in any operations
own_caches          caches of the user's own, of which attention reads the room that is not written too
own_first_token     a forward that replaces the first token of the step input by its own
hidden_wraps        rotations along the positions whose first rows are overwritten
selected_rows       rows that a mask selects and that are put back, as one expression of all rows
einsum              Einstein sums as matrix products
attention_weights   weights of attention as extra outputs
batch_axes          the axis of the rows
input_facts         vocabulary, padding and maximum length of each input
size_branches       code that depends on a size
determinism         refusal of results that depend on chance or on earlier calls, and of tensors that no file has
row_independence    refusal of operations through which a row of a batch can change another
step_checks         refusal of models that cannot be decoded step by step
placeholders        tokens in the places of which the rows of pictures are put
last_position       models that return logits for the last position only
relative_shift      products with a table of distances, shifted row by row
series              the options of a forecaster's series, checked against the graph
interpreter         evaluation of the graph
"""
