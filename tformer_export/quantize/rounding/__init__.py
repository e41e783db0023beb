"""Rounding of a float matrix to integers and scales.

pair_sums          integers that saturate on no processor
round_nearest      to nearest
round_least_error  with the scales of least error
round_gptq         with error feedback, by calibration data
choose_rounding    the best of these for the available data
"""
