"""Half precision, after the other passes.

half_precision       products and caches in half
emulate_half_on_cpu  the same results on a CPU, for the parity gate
"""
