"""Facts about the traced graph, found from its operations and by running them, never from the name of a model.

binding_time   when each value is known: constant, by the request, or by each step
attention      the operation that each attention becomes
batch_axes     the axis of the rows
input_facts    vocabulary, padding and maximum length of each input
series_options  the options of a forecaster's series, checked against the graph
interpreter    evaluation of the graph
"""
