"""What a file must not get wrong without a word: ids that only seem to be padding, values that only seem to be fixed,
outputs that only seem to be logits; and what a model keeps for itself."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from support.small_models import EXAMPLE, VOCABULARY, Mixer, Small, causal, refusal

from tformer_export import export
from tformer_runtime import Model, OptionError, SourceError

IDS = torch.tensor([[3, 0, 5, VOCABULARY - 3, 0, 4, 7]])


def scored(model, path):
    """The largest difference between the file's log-probabilities of IDS and the model's."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(IDS)[0], -1)
    expected = logprobs[:-1].gather(1, IDS[0, 1:, None])[:, 0]
    return float((torch.from_numpy(Model.load(path, "cpu").score(IDS[0].tolist())) - expected).abs().max())


class Documents(Mixer):
    """Packed documents: a position sees its own, and the id 0 ends one."""

    def forward(self, x, tgt):
        document = (tgt == 0).cumsum(1)
        same = document[:, :, None] == document[:, None, :]
        scores = (x @ x.transpose(1, 2)).masked_fill(~(same & causal(x)), -1e9)
        return torch.softmax(scores, -1) @ x


@pytest.mark.parametrize("special", [None, {"eos_token_id": [0]}, {"eos_token_id": [0], "pad_token_id": 0}])
def test_an_id_that_was_not_declared_to_be_padding_is_data(special, tmp_path):
    assert "`aten.cumsum.default`" in refusal(Small(Documents), tmp_path, special_tokens=special)


class ZeroIsNothing(Small):
    def forward(self, tgt):
        return self.out(self.embed(tgt) * (tgt != 0)[..., None] + self.position[: tgt.shape[1]])


class Factored(Small):
    """Embeddings of an id's two digits, so that no table shows the vocabulary; one id, not in the example, has more."""

    def forward(self, tgt):
        marked = (tgt == VOCABULARY - 3)[..., None] * self.position[0]
        return self.out(self.embed(tgt // 5) + self.embed(tgt % 5) + marked + self.position[: tgt.shape[1]])


@pytest.mark.parametrize("model", [ZeroIsNothing, Factored])
def test_what_a_model_asks_of_single_ids_is_computed(model, tmp_path):
    model = model(Identity).eval()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert scored(model, tmp_path / "model.onnx") < 1e-5


class ByLength(Mixer):
    def __init__(self, trained):
        super().__init__()
        self.trained = trained

    def forward(self, x, tgt):
        length = torch.arange(1, x.shape[1] + 1).max().float()
        return x * (length.log() / math.log(self.trained)).clamp(min=1)


class Identity(Mixer):
    def forward(self, x, tgt):
        return x


@pytest.mark.parametrize("trained", [2, 20])
def test_a_number_that_changes_with_the_length(trained, tmp_path):
    """From the first lengths on, or only beyond those that are looked at first."""
    message = refusal(Small(lambda: ByLength(trained)), tmp_path, max_length=30)
    assert "makes a number that changes with the length of the sequence" in message
    assert "`aten.clamp.default` at " in message


def test_a_number_that_changes_late_limits_the_length(tmp_path):
    report = export(Small(lambda: ByLength(20)), tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert report.max_length == 20


class Probabilities(Small):
    def forward(self, tgt):
        return torch.softmax(super().forward(tgt), -1)


class Hidden(Small):
    def forward(self, tgt):
        x = self.embed(tgt) + self.position[: tgt.shape[1]]
        return {"hidden": x, "scores": self.out(x)}


def test_outputs_that_are_no_logits(tmp_path):
    assert "forward returns probabilities, at " in refusal(Probabilities(Identity), tmp_path)
    message = refusal(Hidden(Identity), tmp_path)
    assert f"is not as wide as the vocabulary of 'tgt', {VOCABULARY}" in message
    assert message.endswith("its output 'scores' is: name the logits, output='scores'")
    export(Hidden(Identity), tmp_path / "model.onnx", EXAMPLE, "tgt", output="scores")


def test_special_ids_that_the_model_does_not_have(tmp_path):
    with pytest.raises(
        OptionError, match=f"eos_token_id=99 is not in the model's vocabulary, which has {VOCABULARY} ids"
    ):
        export(Small(Identity), tmp_path / "model.onnx", EXAMPLE, "tgt", special_tokens={"eos_token_id": [99]})


@functools.lru_cache
def remembered(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


class Caches(Small):
    """Masks made once, in a dictionary and by functools; every output kept in a list."""

    def __init__(self):
        super().__init__(Identity)
        self.masks, self.seen = {}, []

    def forward(self, tgt):
        x, length = self.embed(tgt), tgt.shape[1]
        mask = self.masks.setdefault(30, torch.ones(30, 30, dtype=torch.bool).tril()) & remembered(30)
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:length, :length], -1e9)
        self.seen.append(scores)
        return self.out(torch.softmax(scores, -1) @ x)


def test_what_a_model_keeps_for_itself_stays_its_own(tmp_path):
    remembered.cache_clear()
    model = Caches()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert not model.masks
    assert not model.seen
    assert type(remembered(30)) is torch.Tensor
    assert scored(model, tmp_path / "model.onnx") < 1e-5


class Counting(Small):
    def __init__(self):
        super().__init__(Identity)
        self.register_buffer("calls", torch.zeros(()))
        self.asked = 0

    def forward(self, tgt):
        self.calls += 1
        self.asked += 1
        return super().forward(tgt)


def test_the_whole_export_leaves_a_model_as_it_was(tmp_path):
    model = Counting()
    export(model, tmp_path / "model.onnx", EXAMPLE, "tgt")
    assert (model.calls.item(), model.asked) == (0, 0)


def test_compiled_modules_are_taken_for_what_they_compile(tmp_path):
    model = Small(Identity)
    assert export(torch.compile(model), tmp_path / "model.onnx", EXAMPLE, "tgt").tokens_equal
    with torch.no_grad():
        traced = torch.jit.trace(model, EXAMPLE["tgt"])  # noqa: TID251 (users have them)
    (tmp_path / "model.onnx").unlink()
    message = refusal(traced, tmp_path, SourceError)
    assert (
        message == "the model is TorchScript, which torch.export cannot trace: give the nn.Module that it was made of"
    )
