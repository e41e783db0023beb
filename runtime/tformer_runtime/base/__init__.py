"""Errors, checks of arguments and of files, and names of array types. Every other layer imports this one."""
