"""Errors, checks of arguments, and names of array types. Every other layer imports this one."""
