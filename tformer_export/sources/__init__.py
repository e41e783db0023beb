"""Everything that can be exported, in one form: a `Source`.

base                 `Source` itself; adapter: inputs that forward() takes in another way
load                 SOURCE of the command line → one of these
torch_module         any nn.Module with an example of its inputs
checkpoint_source    a `model.pt` of save_checkpoint
factory              a function that makes a module, alone or with a state dict; a pickled module
exported_program     a `.pt2` of torch.export
hugging_face         a transformers model, in memory or in a folder
  task_names         the task of its class
  hf_single_pass     its inputs, labels and reference answers, if it is run once
  hf_images, hf_audio, hf_speech_to_text   its processors
sentence_encoder     a folder of sentence-transformers
tokenizer            tokenizers of any of these, as tokenizers' JSON
pooling              a vector for each row of an encoder; pooled_module: the module that computes it
chat_template        a conversation's template beside a model
reference_pipelines  the source's own results, to be compared with
outcome              what outputs mean, as the user says
"""

from tformer_export.common.derived_inputs import Mask, causal, lengths, padding, positions
from tformer_export.sources.base import Source
from tformer_export.sources.load import load_source

__all__ = ["Mask", "Source", "causal", "lengths", "load_source", "padding", "positions"]
