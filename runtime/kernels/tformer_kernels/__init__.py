"""Native kernels of tformer for products, attention, norms and activations: a library that tformer_runtime finds in this folder and loads.

Nothing has to be imported. `TFORMER_KERNELS=0` switches the kernels off.
"""

__version__ = "0.1.0"
