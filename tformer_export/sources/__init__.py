"""What can be exported, brought into one form: a `Source`.

source.load          SOURCE of the command line → one of these:
source.checkpoint    a `model.pt` of save_checkpoint
source.factory       a function that makes a module, alone or with a state dict; a pickled module
source.program       a `.pt2` of torch.export
source.hugging_face  a transformers model, in memory or in a folder, with its tokenizers
  purpose            which task its class is for
  once               its inputs, labels and own answers, if it is run once
  images             one that reads images: its image processor, or what is said of them
  sounds             one that reads sound: its feature extractor and its vocabulary
  dictation          one that reads sound and writes what it hears
  sentence_encoder   a folder of sentence-transformers: what follows the transformer
source.module        any nn.Module with an example of its inputs

source.pooled        a vector for each row of an encoder
source.results       what results stand for, as whoever exports says
"""

from tformer_export.common.derived_inputs import Mask, causal, lengths, padding, positions
from tformer_export.sources.base import Source
from tformer_export.sources.load import load_source

__all__ = ["Mask", "Source", "causal", "lengths", "load_source", "padding", "positions"]
