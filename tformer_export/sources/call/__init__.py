"""How forward is called: from any signature to tensors (batch, time, …), one by one, and from any results to logits.

signature      the parameters of forward, and calls by their names
encode_decode  a module with encode and decode and without forward
containers     arguments that hold several tensors
one_row        a forward without a batch axis
loss           the logits of a forward that returns the loss of training
selected_ids   selections of all ids of a row
outputs        the logits among the results of forward
own_caches     new caches for each call of a forward that writes into its own
adapter        the wrapper of all of them
step_positions how forward counts the positions of its step input
adapter_switch low-rank adapters that are switched by row
free_axes      which axes of an input may vary
"""
