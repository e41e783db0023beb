"""The parts of `versus.py`: one model in several engines, measured in one run.

shapes      what is measured: models, precisions, cases
sources     the models' weights, and what they compute in fp32
worker      an engine in a process of its own, which answers lines of JSON; `client` is the other end
engines/    one engine a file
floor       what a step must read and multiply, and how fast the machine does that
measure     turns, medians, ratios
table       the results as a table, `chart` as a picture
"""
