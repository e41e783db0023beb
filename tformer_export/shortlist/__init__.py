"""A vocabulary shortlist: the ids that may come for a request, learned from data, and what is computed for them alone.

learn    pairs of source and target ids → which go together
make     … → the shortlist of a model, as large as the data ask for, measured
columns  the output projection apart from the decode stage, of all ids or of gathered columns
check    what the file computes with candidates against what it computes without
add      all of it, for a file
"""

from tformer_export.shortlist.add import add_shortlist, with_columns
from tformer_export.shortlist.columns import set_apart
from tformer_export.shortlist.make import SHARE, Measured

__all__ = ["SHARE", "Measured", "add_shortlist", "set_apart", "with_columns"]
