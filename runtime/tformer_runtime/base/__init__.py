"""Errors, checks of arguments and of files, files that appear whole or for a while, and names of array types.

Every other layer imports this one.
"""
