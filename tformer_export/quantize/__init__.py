"""Quantize weights, activations and caches, and measure the loss.

apply             the whole way: calibrate → plan → rewrite → measure, or refuse
matrices          the matrices of a model that can be quantised
rounding/         a float matrix → integers and scales
input_statistics  the inputs of products on calibration data
activations_int8  inputs of products as integers, with a scale for each row or a static scale
fixed_ranges      static scales; smoothquant: outlier channels smoothed for them
bit_plan          bits of each matrix; mixed_search: within a budget
simulate          try a plan without its kernels
degradation       one file's results compared with another's, on data; token_quality, output_quality, speed: measures
weight_storage    integers in the file, each matrix once
form_writer       operators of stored forms, inserted into a graph
rewrite           products and tables → integer operators; few_rows_branch: other kernels for few rows
kv_cache_int8     keys and values of earlier positions in 8 bits
"""

from tformer_export.quantize.activations_int8 import StaticScale
from tformer_export.quantize.bit_plan import BitPlan, BitPlanner, Mixture
from tformer_export.quantize.degradation import Degradation, measure, measure_series
from tformer_export.quantize.kv_cache_int8 import quantize_caches
from tformer_export.quantize.output_quality import OutputDegradation, ReferenceOutputs, measure_outputs
from tformer_export.quantize.rewrite import Product, quantize_weights

__all__ = [
    "BitPlan",
    "BitPlanner",
    "Degradation",
    "Mixture",
    "OutputDegradation",
    "Product",
    "ReferenceOutputs",
    "StaticScale",
    "measure",
    "measure_outputs",
    "measure_series",
    "quantize_caches",
    "quantize_weights",
]
