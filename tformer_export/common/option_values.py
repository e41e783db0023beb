"""The allowed values of options of `export` and of the command line. It imports nothing, so that --help is fast."""

DEFAULT_MAX_LENGTH = 512  # positions of a sequence, for a model that states no limit
QUANTIZATIONS = ("none", "int8", "int4", "mixed")  # of weights
PER_ROW, STATIC = ACTIVATION_SCALES = ("per-row", "static")  # each row's own maximum, or a calibrated constant
KV_CACHES = ("float", "int8")
THROUGHPUT, LATENCY = OPTIMIZATION_GOALS = ("throughput", "latency")  # of the kernels of quantised products
TARGET_NAMES = ("cpu", "cuda", "web", "portable")
HALF_PRECISIONS = ("fp16", "bf16")
POOLINGS = ("mean", "first", "max", "last")
