"""What can be asked of quantisation, by the words of `export` and of the command line."""

QUANTIZATIONS = ("none", "int8", "int4", "mixed")  # of weights
ROWS, FIXED = ACTIVATIONS = ("rows", "fixed")  # what scales activations: each row's maximum, or a constant
CACHES = ("float", "int8")
THROUGHPUT, LATENCY, BALANCED = GOALS = ("throughput", "latency", "balanced")  # what kernels are chosen for
