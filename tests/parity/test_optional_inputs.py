"""Inputs that forward may lack: a request that leaves them out gets what the source computes without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from support.text_models import SHAPE, byte_pairs, wordpiece_vocabulary
from torch import nn
from transformers import BertTokenizer, RobertaTokenizer

from tformer_export import export
from tformer_export.common.derived_inputs import padding
from tformer_export.sources import load_source
from tformer_export.sources.base import Source
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.hugging_face.single_pass import TYPES, from_text_model
from tformer_runtime import InputError, Model, ParityError

IDS = [7, 8, 9, 5]
WORDS = len(wordpiece_vocabulary())
SMALL = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "pad_token_id": 0}


def gpt2(kind=transformers.GPT2Model, **options):
    torch.manual_seed(0)
    return kind(transformers.GPT2Config(vocab_size=WORDS, **SMALL, **options)).eval()


def bert(**options):
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**{**SHAPE, **options}, vocab_size=WORDS)).eval()


ABSENT = {  # models that add nothing for token types that are left out, and something for zeros
    "states": gpt2,
    "classes": lambda: gpt2(transformers.GPT2ForSequenceClassification, num_labels=3),
    "gpt": lambda: transformers.OpenAIGPTModel(transformers.OpenAIGPTConfig(vocab_size=WORDS, **SMALL)).eval(),
    "ctrl": lambda: transformers.CTRLModel(transformers.CTRLConfig(vocab_size=WORDS, dff=48, **SMALL)).eval(),
}


def without_types(module, ids=IDS):
    with torch.no_grad():
        return module(torch.tensor([ids]))[0][0].numpy()


@pytest.mark.parametrize("kind", ABSENT)
def test_types_that_are_left_out_are_absent_without_a_tokenizer(kind, tmp_path):
    """A folder is read as the model in memory is."""
    torch.manual_seed(0)
    module = ABSENT[kind]()
    with torch.no_grad():
        zeros = module(torch.tensor([IDS]), token_type_ids=torch.zeros(1, len(IDS), dtype=torch.long))[0][0].numpy()
    module.save_pretrained(tmp_path / "folder")
    source = load_source(tmp_path / "folder")
    assert TYPES not in source.example
    report = export(module, tmp_path / "x.onnx")
    assert "without attention_mask" in report.parity.errors
    (output,) = Model.load(tmp_path / "x.onnx", "cpu").engine.encode({"input_ids": [np.array(IDS)]}, 1).values()
    expected = without_types(module)
    np.testing.assert_allclose(output.numpy()[0], expected, atol=1e-5)
    assert np.abs(zeros - expected).max() > 0.01


def test_types_of_a_tokenizer_are_required_next_to_ids_if_zeros_are_not_the_default(tmp_path):
    module = gpt2()
    report = export(module, tmp_path / "x.onnx", tokenizer=BertTokenizer(vocab=wordpiece_vocabulary()))
    model = Model.load(tmp_path / "x.onnx", "cpu")
    (types,) = (spec for spec in model.manifest.encode.inputs if spec.role == "types")
    assert types.required
    assert report.parity.raw.pairs == 4
    with torch.no_grad():
        expected = module(torch.tensor([IDS]), token_type_ids=torch.tensor([[0, 1, 1, 0]]))[0][0].numpy()
    (given,) = model.predict([{"input_ids": IDS, TYPES: [0, 1, 1, 0]}])
    np.testing.assert_allclose(given, expected, atol=1e-5)
    with pytest.raises(InputError, match="input 1: the model reads token_type_ids next to the ids of input_ids"):
        list(model.predict([IDS]))


def test_types_that_are_left_out_are_zeros_if_they_are_the_default(tmp_path):
    module = bert()
    report = export(module, tmp_path / "x.onnx", tokenizer=BertTokenizer(vocab=wordpiece_vocabulary()))
    model = Model.load(tmp_path / "x.onnx", "cpu")
    np.testing.assert_allclose(next(iter(model.predict([IDS]))), without_types(module), atol=1e-5)
    assert report.parity.errors["without attention_mask and token_type_ids"] < 1e-5


def test_tokenizer_without_types_leaves_them_out(tmp_path):
    module = bert()
    module.resize_token_embeddings(270)
    tokenizer = RobertaTokenizer(**byte_pairs("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    export(module, tmp_path / "x.onnx", tokenizer=tokenizer)
    model = Model.load(tmp_path / "x.onnx", "cpu")
    assert [spec.name for spec in model.manifest.encode.inputs] == ["input_ids", "attention_mask"]
    np.testing.assert_allclose(next(iter(model.predict([IDS]))), without_types(module), atol=1e-5)


def test_gate_refuses_zeros_that_are_not_the_default(tmp_path):
    """The source is made as if zeros were the default: the comparison itself sees the difference."""
    source = from_text_model(gpt2(), "feature-extraction")
    example = {**source.example, TYPES: torch.arange(6).reshape(2, 3) % 2}
    module = Adapter(source.module.module, list(example), source.module.fixed_arguments)
    wrong = replace(source, module=module, example=example, token_types={TYPES: "input_ids"})
    with pytest.raises(ParityError, match="in the case 'without attention_mask and token_type_ids'"):
        export(wrong, tmp_path / "x.onnx")
    assert not (tmp_path / "x.onnx").exists()


class MarksTheMask(nn.Module):
    """A step model whose results change where the mask of its encoder is left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, src, tgt, mask=None):
        shift = 1.0 if mask is None else 0.0
        keep = torch.ones_like(src) if mask is None else mask
        states = self.embedding(src) * keep[:, :, None]
        scores = self.embedding(tgt) @ states.transpose(1, 2)
        scores = scores.masked_fill(keep[:, None] == 0, -1e9)
        return self.output(self.embedding(tgt) + scores.softmax(-1) @ states + shift)


def test_gate_refuses_a_mask_of_ones_that_is_not_the_default(tmp_path):
    ids = torch.arange(6).reshape(2, 3)
    example = {"src": ids, "tgt": ids, "mask": torch.ones_like(ids)}
    masks = {"mask": padding("src", dtype=torch.int64)}
    source = Source(
        Adapter(MarksTheMask().eval(), list(example), step="tgt"), example, "tgt", "marks", "text2text", masks
    )
    with pytest.raises(ParityError, match=r"'without mask': .*forward computes something else without mask than with"):
        export(source, tmp_path / "x.onnx")


def test_mask_that_the_caller_describes_may_have_another_default(tmp_path):
    ids = torch.arange(6).reshape(2, 3)
    masks = {"mask": padding("src", dtype=torch.int64)}
    report = export(MarksTheMask().eval(), tmp_path / "x.onnx", {"src": ids, "tgt": ids}, "tgt", masks=masks)
    assert not any(case.startswith("without") for case in report.parity.errors)
