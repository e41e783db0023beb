"""Models of sentence-transformers, read without that package: a transformers model and the modules around it.

saved     the files of a folder: modules, their order, and settings, of which each is read, named or refused
layers    pooling and the layers after it
scores    the activation that a CrossEncoder applies to its scores
static    the mean of rows of a table, which is a sentence encoder without a transformer
objects   a model in memory, which is saved into a folder for a while

https://sbert.net/docs/package_reference/sentence_transformer/models.html
"""
