"""From a source to its traced graph, which holds for all lengths.

captured_model  `capture_model`, the whole of it
lengths         the ways to a graph that holds for as many lengths as forward takes, in their order
ways            the ways to trace forward, in their order, and the loop that tries ways
hidden_reads    data that Python reads while a trace does not
"""
