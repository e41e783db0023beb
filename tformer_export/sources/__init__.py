"""All forms of models that can be exported, read into one form: a `Source`.

base                 `Source` itself; call/: how forward is called
load                 SOURCE of the command line → one of these
torch_module         any nn.Module with an example of its inputs
checkpoint_source    a `model.pt` of save_checkpoint
factory              a function that makes a module, alone or with weights; a pickled module
state_dict           the weights of a module in the file of a training loop
exported_program     a program of torch.export, in memory or in a `.pt2`
hugging_face/        a transformers model, in memory or in a folder; task_names: the task of its class
sentence_transformers/  a model of sentence-transformers, in memory or in a folder
tokenizer/           tokenizers of any of these, as tokenizers' JSON
pooling              one vector for each row of an encoder; pooled_module: the module that computes it
chat_template        the chat template of a model
reference_pipelines  the source's own results for tasks of single tokens, for verification
switched_adapters    several PEFT adapters in one model, switched by row
untrusted_files      files of a source: regular, bounded, inside their folder
forward_errors       runs of forward, and its errors as sentences
outcome              the meaning of outputs, by the caller's task
finish               the caller's overrides of a source
image_axes/          modules around models that read images in their prompt
"""

from tformer_export.common.derived_inputs import Mask, causal, lengths, padding, positions
from tformer_export.sources.base import Source
from tformer_export.sources.load import load_source

__all__ = ["Mask", "Source", "causal", "lengths", "load_source", "padding", "positions"]
