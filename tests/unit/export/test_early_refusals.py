"""Options that a model cannot have are refused as soon as their facts are known, before the trace if possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tformer_export import ExtraOutputs, Quantization, export
from tformer_runtime import InputError, OptionError, UnsupportedModelError

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TRACE, LOWERING, VERIFICATION = "capture", "lowering", "verify"  # phases


def letters():
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("-<>abcdefghi")}, unk_token="-"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer.to_str()


class Small(nn.Module):
    """`traced`: whether forward was run on anything but a tensor of numbers."""

    def __init__(self, outputs=12):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places, self.out = nn.Embedding(12, 8), nn.Embedding(20, 8), nn.Linear(8, outputs)
        self.traced = False

    def embedded(self, ids):
        self.traced |= type(ids) is not torch.Tensor
        return self.embed(ids) + self.places(torch.arange(ids.shape[1]))


class Generator(Small):
    def forward(self, tgt):
        return self.out(self.embedded(tgt))


class Translator(Small):
    def forward(self, src, tgt):
        return self.out(self.embedded(tgt) + self.embed(src[:, :1]))


class Encoder(Small):
    def forward(self, ids):
        return self.out(self.embedded(ids))[:, 0]


def refusal(tmp_path, module, stage, error, **options):
    """Export, and return the message of the refusal, which has to come before a phase: before tracing for TRACE."""
    inputs = {Generator: ["tgt"], Translator: ["src", "tgt"], Encoder: ["ids"]}[type(module)]
    phases = []
    with pytest.raises(error) as caught:
        export(
            module, tmp_path / "out.onnx", dict.fromkeys(inputs, IDS), "tgt" if "tgt" in inputs else None,
            progress=phases.append, **options,
        )  # fmt: skip
    if stage == TRACE:
        assert not module.traced
        assert not {"analysis", LOWERING} & set(phases)
    else:
        assert stage not in phases
    assert not (tmp_path / "out.onnx").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
def test_special_id_beyond_the_vocabulary_is_refused_before_the_trace(name, tmp_path):
    message = refusal(tmp_path, Generator(), TRACE, OptionError, special_tokens={**SPECIAL, name: 99999})
    assert message == f"the special id {name}=99999 is not in the model's vocabulary, which has 12 ids"


def test_id_that_is_read_and_never_written_is_accepted(tmp_path):
    """The logits have fewer ids than the table: decoding may begin with any id of the table."""
    export(
        Generator(outputs=10),
        tmp_path / "out.onnx",
        {"tgt": IDS},
        "tgt",
        special_tokens={**SPECIAL, "bos_token_id": 11},
    )


def test_forced_first_id_beyond_the_logits_is_refused_before_the_trace(tmp_path):
    message = refusal(
        tmp_path, Generator(), TRACE, OptionError, special_tokens=SPECIAL,
        generation_defaults={"forced_bos_token_id": 999},
    )  # fmt: skip
    assert "forced_bos_token_id=999 is not in the model's vocabulary" in message


@pytest.mark.parametrize(("module", "name"), [(Translator, "src"), (Encoder, "ids")])
def test_padding_that_an_input_cannot_look_up_is_refused_before_lowering(module, name, tmp_path):
    message = refusal(tmp_path, module(), LOWERING, OptionError, special_tokens={**SPECIAL, "pad_token_id": 999})
    assert f"pad_token_id=999 is not in the vocabulary of {name}, which has 12 ids" in message


def test_length_beyond_the_positions_of_an_encoder_is_refused_before_lowering(tmp_path):
    message = refusal(tmp_path, Encoder(), LOWERING, OptionError, max_length=100)
    assert "cannot run at a length of 100: its input ids has at most 20 positions" in message


def test_length_beyond_the_positions_of_a_generator_is_refused_before_lowering(tmp_path):
    message = refusal(tmp_path, Generator(), LOWERING, UnsupportedModelError, max_length=100)
    assert "cannot run at a length of 100" in message


@pytest.mark.parametrize(
    ("module", "extra", "part"),
    [
        (Generator, ExtraOutputs(attentions=True), "attentions are outputs of a single-pass model"),
        (Generator, ExtraOutputs(cross_attentions=True), "the model reads nothing but tgt: it has no cross-attention"),
        (Encoder, ExtraOutputs(cross_attentions="last"), "is a single-pass model: it has no cross-attention"),
    ],
)
def test_attentions_that_no_model_of_the_kind_has_are_refused_before_the_trace(module, extra, part, tmp_path):
    assert part in refusal(tmp_path, module(), TRACE, OptionError, extra_outputs=extra)


@pytest.mark.parametrize(
    ("content", "part"), [(b"", "holds 0 lines"), (b"abc\n" * 7, "holds 7 lines"), (b"\xff\n" * 9, "is not UTF-8 text")]
)
@pytest.mark.parametrize("option", ["--calibration", "--shortlist"])
def test_file_with_too_little_text_is_refused_before_the_trace(option, content, part, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    options = (
        {"shortlist": path} if option == "--shortlist" else {"quantization": Quantization("int8", calibration=path)}
    )
    message = refusal(tmp_path, Translator(), TRACE, OptionError, special_tokens=SPECIAL, **options)
    assert message.startswith(f"{option} {path} {part}")


@pytest.mark.parametrize("option", ["--calibration", "--shortlist"])
def test_line_that_the_model_cannot_read_is_refused_before_verification(option, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("abc\tcd\n" * 8 + "a\tb\tc\n")
    options = (
        {"shortlist": path} if option == "--shortlist" else {"quantization": Quantization("int8", calibration=path)}
    )
    message = refusal(
        tmp_path, Translator(), VERIFICATION, InputError, special_tokens=SPECIAL, tokenizer=letters(),
        **options,
    )  # fmt: skip
    assert message.startswith(f"line 9 of {path}: it holds more than one tab")


@pytest.mark.parametrize(("content", "part"), [("", "is empty"), ("v\n1\nx\n", "line 3")])
def test_series_that_cannot_be_read_is_refused_before_lowering(content, part, tmp_path):
    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.Linear(1, 1)

        def forward(self, series):
            return self.out(series)

    path, phases = tmp_path / "series.csv", []
    path.write_text(content)
    example = {"series": torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5, 1)).astype(np.float32))}
    with pytest.raises(OptionError, match=part):
        export(
            Forecaster(), tmp_path / "out.onnx", example, "series", series={"columns": ["v"]},
            quantization=Quantization("int8", calibration=path), progress=phases.append,
        )  # fmt: skip
    assert LOWERING not in phases


def test_cache_that_cannot_be_int8_is_refused_before_verification(tmp_path):
    message = refusal(
        tmp_path, Generator(), VERIFICATION, UnsupportedModelError, special_tokens=SPECIAL,
        quantization=Quantization(kv_cache="int8"),
    )  # fmt: skip
    assert "no cache of this model can be int8" in message


def test_model_without_matrices_has_no_mixture_and_is_refused_before_verification(tmp_path):
    message = refusal(
        tmp_path, Generator(), VERIFICATION, OptionError, special_tokens=SPECIAL, quantization=Quantization("mixed")
    )
    assert "no bits to mix" in message


@pytest.mark.parametrize(
    ("weights", "bits"), [("int4", 4.8), ("none", 4.8), ("mixed", 0), ("mixed", float("inf")), ("mixed", float("nan"))]
)
def test_bits_that_limit_no_mixture_are_refused(weights, bits):
    with pytest.raises(OptionError, match=r"max_bits is a number of bits, such as 4\.8, for quantization 'mixed'"):
        Quantization(weights, max_bits=bits)


def test_budget_without_quantisation_is_refused():
    with pytest.raises(OptionError, match="max_degradation is for a quantised file"):
        Quantization(max_degradation="1%")
