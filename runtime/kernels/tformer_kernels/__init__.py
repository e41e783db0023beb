"""Native kernels for products of tformer: a library that tformer_runtime finds in this folder and loads.

Nothing has to be imported. `TFORMER_KERNELS=0` switches the kernels off.
"""

__version__ = "0.1.0"
