"""Weights and caches in fewer bits, and what that costs, measured.

apply              the whole way: calibrate → plan → rewrite → measure, or refuse
matrices           the matrices of a model that can be quantised
rounding/          a float matrix → integers and scales
input_statistics   what each product reads, on calibration data
activations_int8   what products read, as integers: by row, or with fixed scales
fixed_ranges, smoothquant   fixed scales, and channels made alike for them
bit_plan, mixed_search      bits of each matrix within a budget; frontier_plot draws what was tried
simulate           try a plan without its kernels
token_quality, output_quality, degradation   what a file computes against another, on data
weight_storage     integers in the file, each matrix once
rewrite            products and tables → integer operators; few_rows_branch: another kernel for few rows
kv_cache_int8      keys and values of earlier positions in 8 bits
"""

from tformer_export.quantize.activations_int8 import Fixed
from tformer_export.quantize.bit_plan import Mixture, Plan, Planner
from tformer_export.quantize.degradation import Degradation, measure, measure_series
from tformer_export.quantize.kv_cache_int8 import hold_in_int8
from tformer_export.quantize.output_quality import OutputDegradation, OutputYardstick, measure_outputs
from tformer_export.quantize.rewrite import Product, quantize

__all__ = [
    "Degradation",
    "Fixed",
    "Mixture",
    "OutputDegradation",
    "OutputYardstick",
    "Plan",
    "Planner",
    "Product",
    "hold_in_int8",
    "measure",
    "measure_outputs",
    "measure_series",
    "quantize",
]
