"""Checks that refuse a model, each with the user's line and a reason.

determinism         results that depend on chance or on earlier calls, and tensors that no file has
size_branches       code that depends on a size
row_independence    operations through which a row of a batch can change another
step_checks         models that cannot be decoded step by step
"""
