"""Modules around models that read images in their prompt, which give them an axis for the images of each row.

one_size     images, or tiles of them, of one size
grid         images as patches of a grid, which gives them positions
whole_batch  selections and splits of images that keep all of them in a trace
joined_rows  what stands for all rows of a tensor in a trace
"""
