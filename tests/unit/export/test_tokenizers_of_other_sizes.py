"""Tokenizers with fewer or more ids than the model: the report has a line, and texts are as transformers has them."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tformer_export import export
from tformer_runtime import InputError, Model

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places, self.out = nn.Embedding(12, 8), nn.Embedding(20, 8), nn.Linear(8, 12)

    def forward(self, tgt):
        return self.out(self.embed(tgt) + self.places(torch.arange(tgt.shape[1])))


class Encoder(Generator):
    def forward(self, tgt):
        return super().forward(tgt).mean(1)


def letters(count):
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(count)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def exported(module, count, path):
    step = "tgt" if type(module) is Generator else None
    return export(module, path, {"tgt": IDS}, step, tokenizer=letters(count).to_str())


def lines(report):
    return [text for label, text in report.rows() if label == "tokenizer"]


def test_ids_without_a_token_have_no_text_and_stay_in_the_result(tmp_path):
    path, count = tmp_path / "model.onnx", 7
    (line,) = lines(exported(Generator(), count, path))
    assert line.startswith("5 of the 12 ids that the model generates have no token")
    model = Model.load(path, threads=1)
    results = [model.generate([start], temperature=1.0, seed=start, max_new_tokens=8) for start in range(7)]
    assert any(i >= count for result in results for i in result.token_ids)
    reference = PreTrainedTokenizerFast(tokenizer_object=letters(count))
    for start, result in enumerate(results):
        assert len(result.token_ids) == 8
        assert result.text == reference.decode(result.token_ids)
        streamed = model.stream([start], temperature=1.0, seed=start, max_new_tokens=8)
        assert "".join(streamed) == result.text


@pytest.mark.parametrize("module", [Generator, Encoder])
def test_tokens_beyond_the_ids_of_the_model_are_reported_and_refused(module, tmp_path):
    path = tmp_path / "model.onnx"
    (line,) = lines(exported(module(), 15, path))
    assert line == "3 tokens are beyond the 12 ids that tgt takes: a text that needs one is refused"
    model = Model.load(path, threads=1)
    run = model.generate if module is Generator else lambda text: list(model.predict([text]))
    with pytest.raises(InputError, match=r"14|'o' .character 3"):
        run("bco")


@pytest.mark.parametrize("module", [Generator, Encoder])
def test_tokenizer_of_the_model_is_no_line_of_the_report(module, tmp_path):
    assert lines(exported(module(), 12, tmp_path / "model.onnx")) == []
