"""Facts about inputs and outputs: padding ids, numbers that vary with the length, logits and state of the module."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from support.small_models import EXAMPLE, VOCABULARY, Mixer, Small, causal, refusal

from tformer_export import export
from tformer_runtime import Model, OptionError, SourceError

IDS = torch.tensor([[3, 0, 5, VOCABULARY - 3, 0, 4, 7]])


def max_score_difference(model, path):
    """Return the largest difference between the log-probabilities of IDS in the file and in the model."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(IDS)[0], -1)
    expected = logprobs[:-1].gather(1, IDS[0, 1:, None])[:, 0]
    return float((torch.from_numpy(Model.load(path, "cpu").score(IDS[0].tolist())) - expected).abs().max())


class Documents(Mixer):
    """Packed documents: a position sees its own document only, and the id 0 ends a document."""

    def forward(self, x, tgt):
        document = (tgt == 0).cumsum(1)
        same = document[:, :, None] == document[:, None, :]
        scores = (x @ x.transpose(1, 2)).masked_fill(~(same & causal(x)), -1e9)
        return torch.softmax(scores, -1) @ x


@pytest.mark.parametrize("special", [None, {"eos_token_id": [0]}, {"eos_token_id": [0], "pad_token_id": 0}])
def test_undeclared_padding_id_is_data(special, tmp_path):
    model = Small(Documents).eval()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt", special_tokens=special)
    assert max_score_difference(model, tmp_path / "model.onnx") < 1e-5


class ZeroIsNothing(Small):
    def forward(self, tgt):
        return self.out(self.embed(tgt) * (tgt != 0)[..., None] + self.position[: tgt.shape[1]])


class Factored(Small):
    """Embeddings of the two digits of an id, so that no table shows the vocabulary.

    One id, which is not in the example, has an additional vector.
    """

    def forward(self, tgt):
        extra_vector = (tgt == VOCABULARY - 3)[..., None] * self.position[0]
        return self.out(self.embed(tgt // 5) + self.embed(tgt % 5) + extra_vector + self.position[: tgt.shape[1]])


@pytest.mark.parametrize("model", [ZeroIsNothing, Factored])
def test_conditions_on_single_ids_are_exported(model, tmp_path):
    model = model(Identity).eval()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert max_score_difference(model, tmp_path / "model.onnx") < 1e-5


class ByLength(Mixer):
    def __init__(self, trained_length):
        super().__init__()
        self.trained_length = trained_length

    def forward(self, x, tgt):
        length = torch.arange(1, x.shape[1] + 1).max().float()
        return x * (length.log() / math.log(self.trained_length)).clamp(min=1)


class Identity(Mixer):
    def forward(self, x, tgt):
        return x


@pytest.mark.parametrize("trained_length", [2, 20])
def test_number_that_varies_with_length_is_refused(trained_length, tmp_path):
    """The number varies from the first lengths on, or only beyond the lengths that the compiler tries first."""
    message = refusal(Small(lambda: ByLength(trained_length)), tmp_path, max_length=30)
    assert "makes a number that changes with the length of the sequence" in message
    assert "`clamp` at " in message


def test_number_that_varies_beyond_a_length_limits_the_length(tmp_path):
    report = export(Small(lambda: ByLength(20)), tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert report.max_length == 20


class Probabilities(Small):
    def forward(self, tgt):
        return torch.softmax(super().forward(tgt), -1)


class Hidden(Small):
    def forward(self, tgt):
        x = self.embed(tgt) + self.position[: tgt.shape[1]]
        return {"hidden": x, "scores": self.out(x)}


def test_outputs_other_than_logits_are_refused(tmp_path):
    assert "forward returns probabilities, at " in refusal(Probabilities(Identity), tmp_path)
    message = refusal(Hidden(Identity), tmp_path)
    assert f"is not as wide as the vocabulary of 'tgt', {VOCABULARY}" in message
    assert message.endswith("its output 'scores' is: name the logits, output='scores'")
    export(Hidden(Identity), tmp_path / "model.onnx", EXAMPLE, "tgt", output="scores")


def test_special_id_beyond_vocabulary_is_refused(tmp_path):
    with pytest.raises(
        OptionError, match=f"eos_token_id=99 is not in the model's vocabulary, which has {VOCABULARY} ids"
    ):
        export(Small(Identity), tmp_path / "model.onnx", EXAMPLE, "tgt", special_tokens={"eos_token_id": [99]})


@functools.lru_cache
def cached_mask(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


class Caches(Small):
    """Masks that are cached in a dictionary and by functools, and a list of all outputs."""

    def __init__(self):
        super().__init__(Identity)
        self.masks, self.outputs = {}, []

    def forward(self, tgt):
        x, length = self.embed(tgt), tgt.shape[1]
        mask = self.masks.setdefault(30, torch.ones(30, 30, dtype=torch.bool).tril()) & cached_mask(30)
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:length, :length], -1e9)
        self.outputs.append(scores)
        return self.out(torch.softmax(scores, -1) @ x)


def test_export_leaves_no_traced_tensors_in_caches(tmp_path):
    cached_mask.cache_clear()
    model = Caches()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert not model.masks
    assert not model.outputs
    assert type(cached_mask(30)) is torch.Tensor
    assert max_score_difference(model, tmp_path / "model.onnx") < 1e-5


class Counting(Small):
    def __init__(self):
        super().__init__(Identity)
        self.register_buffer("calls", torch.zeros(()))
        self.num_calls = 0

    def forward(self, tgt):
        self.calls += 1
        self.num_calls += 1
        return super().forward(tgt)


def test_export_restores_buffers_and_attributes(tmp_path):
    model = Counting()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert (model.calls.item(), model.num_calls) == (0, 0)


def test_compiled_module_is_exported_and_torchscript_is_refused(tmp_path):
    model = Small(Identity)
    assert export(torch.compile(model), tmp_path / "model.onnx", EXAMPLE, "tgt").tokens_equal
    with torch.no_grad():
        traced = torch.jit.trace(model, EXAMPLE["tgt"])  # noqa: TID251 (users have them)
    (tmp_path / "model.onnx").unlink()
    message = refusal(traced, tmp_path, SourceError)
    assert (
        message == "the model is TorchScript, which torch.export cannot trace: give the nn.Module that it was made of"
    )
