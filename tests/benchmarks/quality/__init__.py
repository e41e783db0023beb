"""Parts of tests/benchmarks/quality.py. See there."""
