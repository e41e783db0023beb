"""The parts of `versus.py`: one model in several engines, measured in one run.

shapes      the measured models, precisions and cases
worker      an engine in a process of its own, which answers lines of JSON; `client` is the other end
engines/    one module per engine; `source` makes the weights of the models and their results in fp32
floor       bytes and multiply-adds that a step needs, at the rates of the machine
measure     rounds, medians, ratios
processes   whole processes: to the first result, and to the results of a file of texts (`file_job`)
table       the results as a table; `chart`: as an image
"""
