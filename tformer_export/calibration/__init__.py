"""Data that quantisation is fitted to and measured on: lines of a file, windows of a series, or random ids."""
