"""Weights in fewer bits, with activations quantised row by row or in fixed steps, and what that costs, measured.

How many bits, and which integers:

products     the matrices of a model that can be quantised
operands     what they are multiplied with, as integers
weights      a float matrix → integers and scales, rounded to nearest
scales       … with the scales of least error
gptq         … with error feedback, by what a product reads
samples      data: lines of a file, or what the model makes of random ids
activations  data → what each product reads
ranges       … and the fixed scales that are good enough for it
smooth       channels made alike, so that one scale does for all
rounding     the integers of every matrix, by the best of these that there is data for
simulate     quantisation without its kernels, to try a plan in no time
quality      what a file computes against another, on data
outputs      the same of a model that is run once
search       the sensitivity of each matrix, and the mixture of bits that fits a budget
plan         what `--quantize` comes to for one model
frontier     the mixtures that were measured, as a picture

caches       keys and values of earlier positions in 8 bits

And the file:

store        where integers are held, each matrix once, and how kernels' forms of it are made of that
few          a branch of the decode stage for few rows
rewrite      matrix products and tables → integer operators
measure      what the quantised file does differently
"""

from tformer_export.quantize.activations_int8 import Fixed
from tformer_export.quantize.bit_plan import QUANTIZATIONS, Mixture, Plan, Planner
from tformer_export.quantize.degradation import Degradation, measure, measure_series
from tformer_export.quantize.fixed_ranges import ACTIVATIONS, FIXED, ROWS
from tformer_export.quantize.kv_cache_int8 import CACHES, hold_in_int8
from tformer_export.quantize.output_quality import OutputDegradation, OutputYardstick, measure_outputs
from tformer_export.quantize.rewrite import GOALS, THROUGHPUT, Product, quantize

__all__ = [
    "ACTIVATIONS",
    "CACHES",
    "FIXED",
    "GOALS",
    "QUANTIZATIONS",
    "ROWS",
    "THROUGHPUT",
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
