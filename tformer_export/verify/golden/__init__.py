"""Golden files: requests and their results, by which a runtime in another language proves that it reads a file right.

values     arrays as JSON, and the part of a large array that a golden file holds
manifest_draws  seeded requests of every shape, from the manifest alone
raw        texts, images, recordings and series, as JSON and for a call
run        run one request
decided    tokens that a small change of the logits does not change
record     make a golden file
replay     compare the results of a file with a golden file

It imports no torch: the runtime makes a golden file from a finished file. docs/golden.md describes the format.
"""
