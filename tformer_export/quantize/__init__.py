"""Weights in fewer bits, with activations quantised row by row, and what that costs, measured.

weights      a float matrix → integers and scales
rewrite      matrix products and tables → integer operators, row by row
measure      what the quantised file does differently
"""

from tformer_export.quantize.measure import Degradation, measure
from tformer_export.quantize.rewrite import quantize

__all__ = ["Degradation", "measure", "quantize"]
