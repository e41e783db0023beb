"""What can be exported, brought into one form: a `Source`.

source.module        any nn.Module with an example of its inputs
source.checkpoint    a `model.pt` of save_checkpoint
source.hugging_face  a transformers model, in memory or in a folder
"""

from tformer_export.source.base import Mask, Source, causal, padding
from tformer_export.source.load import load_source

__all__ = ["Mask", "Source", "causal", "load_source", "padding"]
