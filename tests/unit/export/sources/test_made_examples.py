"""Examples that are made for a model: forward takes them, or one sentence says that none was given."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    CanineConfig,
    CanineForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    NystromformerConfig,
    NystromformerForSequenceClassification,
)

from tformer_export import export
from tformer_export.common.task import Task
from tformer_export.sources import load_source
from tformer_export.sources.forward_errors import run_example
from tformer_export.sources.hugging_face.folder import from_transformers
from tformer_runtime import SourceError, UnsupportedModelError

SMALL = {"vocab_size": 60, "num_labels": 3}
LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}


def bart():
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    config = BartConfig(**SMALL, d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=64, **heads)
    return BartForSequenceClassification(config).eval()


def nystromformer():
    torch.manual_seed(0)  # whether one row is seen to change another depends on the weights
    config = NystromformerConfig(**SMALL, **LAYER, segment_means_seq_len=16, num_landmarks=4)
    return NystromformerForSequenceClassification(config).eval()


def canine():
    config = CanineConfig(**LAYER, num_labels=3, num_hash_buckets=64, num_hash_functions=2, max_position_embeddings=64)
    return CanineForSequenceClassification(config).eval()


def test_model_of_one_length_gets_an_example_of_that_length_and_is_refused_for_its_rows(tmp_path):
    model = nystromformer()
    source = from_transformers(model)
    assert source.example["input_ids"].shape == (2, 16)
    assert source.max_length == 16
    assert run_example(source)[0].shape == (2, 3)
    with pytest.raises(UnsupportedModelError, match=r"`max` at .* lets the rows of a batch change each other"):
        export(model, tmp_path / "model.onnx")


def test_model_that_needs_some_positions_gets_an_example_of_as_many():
    source = from_transformers(canine())
    assert source.example["input_ids"].shape[1] >= 4
    assert source.min_lengths["input_ids"] > 1
    assert run_example(source)[0].shape == (2, 3)


def test_head_that_reads_the_end_token_is_refused_by_name(tmp_path):
    with pytest.raises(SourceError, match="BartForSequenceClassification takes only rows that hold its end token"):
        export(bart(), tmp_path / "model.onnx")


def test_head_that_takes_one_row_alone_is_refused_with_the_setting_that_it_names(tmp_path):
    model = LlamaForSequenceClassification(LlamaConfig(**SMALL, **LAYER)).eval()
    with pytest.raises(SourceError, match=r"takes one row and no batch of rows, .* if no padding token is defined\."):
        export(model, tmp_path / "model.onnx")


class Picky(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.embed, self.out, self.error = nn.Embedding(9, 8), nn.Linear(8, 3), error

    def forward(self, ids):
        if len(ids) != 7:
            raise self.error
        return self.out(self.embed(ids).mean(1))


@pytest.mark.parametrize("task", [Task("text-classification", labels=["a", "b", "c"]), Task(pooling="mean"), None])
@pytest.mark.parametrize("error", [ValueError("seven"), KeyError("seven")])
def test_error_of_an_example_is_a_sentence_for_each_task(error, task, tmp_path):
    with pytest.raises(SourceError, match=r"^forward fails by itself on the example, at .*: \w+Error: '?seven'?$"):
        export(Picky(error).eval(), tmp_path / "model.onnx", {"ids": torch.ones(2, 3, dtype=torch.int64)}, task=task)


def test_error_of_a_factory_without_an_example_says_that_none_was_given(tmp_path, monkeypatch):
    module = ModuleType("picky_factories")
    module.without = lambda: Picky(ValueError("seven")).eval()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = load_source("picky_factories:without")
    with pytest.raises(SourceError, match="forward fails on the example that was made for it, as none was given") as e:
        export(source, tmp_path / "model.onnx")
    assert "(module, example) from a factory" in str(e.value)
