"""Weights in fewer bits, with activations quantised row by row, and what that costs, measured.

weights      a float matrix → integers and scales
store        where integers are held, each matrix once, and how kernels' forms of it are made of that
few          a branch of the decode stage for few rows
rewrite      matrix products and tables → integer operators, row by row
measure      what the quantised file does differently
"""

from tformer_export.quantize.measure import Degradation, measure
from tformer_export.quantize.rewrite import GOALS, THROUGHPUT, Bits, Product, quantize

__all__ = ["GOALS", "THROUGHPUT", "Bits", "Degradation", "Product", "measure", "quantize"]
