"""Modules around models that read pictures in their prompt, which give them an axis for the pictures of each row.

one_size     pictures, or tiles of them, of one size
grid         pictures as patches of a grid, which gives them positions
whole_batch  selections and splits of pictures that keep all of them in a trace
joined_rows  what stands for all rows of a tensor in a trace
"""
