"""A vocabulary shortlist: the ids that may follow for a request, learned from data, so that logits are of these only.

learn    pairs of source and target ids → associations between them
make     associations → the shortlist of a model, as large as the data require, and its measurement
columns  the output projection outside of the decode stage, for all ids or for gathered columns
check    comparison of logits with candidates and without
add      all of these, for a file
"""

from tformer_export.shortlist.add import add_shortlist, with_columns
from tformer_export.shortlist.columns import separate_projection
from tformer_export.shortlist.make import MIN_EQUAL_SHARE, ShortlistMeasurement

__all__ = ["MIN_EQUAL_SHARE", "ShortlistMeasurement", "add_shortlist", "separate_projection", "with_columns"]
