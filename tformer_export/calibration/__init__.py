"""Calibration data of quantisation, to fit and to measure: lines of a file, windows of a series, or random ids."""
