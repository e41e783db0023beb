"""Measure on this machine which of several correct forms of a file is the fastest."""
