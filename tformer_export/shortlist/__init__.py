"""A vocabulary shortlist: the ids that may come for a request, learned from data, and what is computed for them alone.

learn    pairs of source and target ids → which go together
make     … → the shortlist of a model, as large as the data ask for, measured
graph    the output projection apart from the decode stage, of all ids or of gathered columns
check    what the file computes with candidates against what it computes without
"""

from tformer_export.shortlist.check import check_columns
from tformer_export.shortlist.graph import choose_columns, set_apart
from tformer_export.shortlist.make import SHARE, Measured, make_shortlist

__all__ = ["SHARE", "Measured", "check_columns", "choose_columns", "make_shortlist", "set_apart"]
