"""Native kernels of tformer for products, attention, norms and activations.

`tformer_runtime` finds the library in this folder and loads it. Nothing has to be imported.
`TFORMER_KERNELS=0` switches the kernels off.
"""

__version__ = "0.1.0"
