"""Models whose forward counts the positions of its step input as training does: with a token of its own in front."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from support.handwritten_case import BLOCK, SPECIAL, START
from test_signatures import IDS, NUM_TOKENS, Translator, greedy, seeded
from tiny import TinyDecoder

from tformer_export import export, padding
from tformer_runtime import Model, UnsupportedModelError

OWN = 7  # the token that forward puts in front; decoding starts with another
ANY = 5  # stands at a position that has no influence
SOURCES = PROMPTS = [[3, 4, 5, 9, 11], [44], [7, 30, 12]]


def assert_translates(path: Path, logits: Callable[[list[int], list[int]], torch.Tensor]) -> None:
    """Check the file's tokens against the greedy ones. logits: a source and the ids so far → (time, vocabulary)."""
    expected = [greedy(lambda ids, s=source: logits(s, ids), [START]) for source in SOURCES]
    assert len({token for row in expected for token in row}) > 3
    results = Model.load(path, "cpu", threads=1).generate_batch(SOURCES, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class WithLabels(Translator):
    """The labels are shifted by one position, and the last one is not read."""

    def forward(self, src, src_mask, labels):
        return super().forward({"src": src, "src_mask": src_mask, "tgt": self.shifted(labels)})["logits"]

    def shifted(self, labels):
        return torch.cat([labels.new_full((len(labels), 1), OWN), labels[:, :-1]], 1)


class ByWriting(WithLabels):
    def shifted(self, labels):
        ids = labels.new_zeros(labels.shape)
        ids[:, 1:] = labels[:, :-1].clone()
        ids[:, 0] = OWN
        return ids


class ByPadding(WithLabels):
    def shifted(self, labels):
        return nn.functional.pad(labels[:, :-1], (1, 0), value=OWN)


class RowByRow(WithLabels):
    """Labels that a batch is filled up with, which are -1, are dropped from each row."""

    def forward(self, src, src_mask, labels):
        rows = [row[row != -1] for row in labels]
        own = rows[0].new([OWN])
        rows = [torch.cat([own, row]) for row in rows]
        ids = rows[0].new(len(rows), max(len(row) for row in rows)).fill_(3)
        for i in range(len(rows)):
            ids[i, : len(rows[i])] = rows[i]
        return Translator.forward(self, {"src": src, "src_mask": src_mask, "tgt": ids})["logits"]


class AndTheEnd(WithLabels):
    """The logits have a row more than the labels: it predicts the end."""

    def shifted(self, labels):
        return torch.cat([labels.new_full((len(labels), 1), OWN), labels], 1)


@pytest.mark.parametrize(
    "kind",
    [
        WithLabels,
        ByPadding,
        AndTheEnd,
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in (ByWriting, RowByRow)),
    ],
)
def test_labels_are_shifted_by_forward(kind, tmp_path: Path) -> None:
    model, path = seeded(kind(), 10), tmp_path / "model.onnx"
    example, masks = {"src": IDS, "labels": IDS}, {"src_mask": padding("src", dtype=torch.int64)}
    export(model, path, example, "labels", masks=masks, special_tokens=SPECIAL, max_length=BLOCK - 1)

    def logits(source: list[int], ids: list[int]) -> torch.Tensor:
        src = torch.tensor([source])
        behind = [] if kind in (RowByRow, AndTheEnd) else [ANY]
        return model(src, torch.ones_like(src), torch.tensor([[*ids[1:], *behind]], dtype=torch.long))[0]

    assert_translates(path, logits)


class Prompted(TinyDecoder):
    """A language model whose forward has a token of its own in front, and logits that predict the ids themselves."""

    def forward(self, idx):
        return super().forward(torch.cat([torch.full_like(idx[:, :1], OWN), idx[:, :-1]], 1))


class PromptedWithEnd(TinyDecoder):
    def forward(self, idx):
        return super().forward(torch.cat([torch.full_like(idx[:, :1], OWN), idx], 1))


@pytest.mark.parametrize("kind", [Prompted, PromptedWithEnd])
def test_prompts_are_shifted_by_forward(kind, tmp_path: Path) -> None:
    model, path = seeded(kind()), tmp_path / "model.onnx"
    export(model, path, {"idx": IDS}, "idx", special_tokens=SPECIAL, max_length=BLOCK - 1)
    behind = [] if kind is PromptedWithEnd else [ANY]
    expected = [greedy(lambda ids: model(torch.tensor([[*ids, *behind]]))[0], prompt) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 3
    results = Model.load(path, "cpu", threads=1).generate_batch(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class WholeTable(TinyDecoder):
    """The table of positions is added as a whole."""

    def forward(self, idx):
        x = self.tokens(idx) + self.positions.weight
        x = x + self.mix(self.norm(x), idx)
        return self.head(self.final_norm(x + self.feed_forward(self.norm(x))))


class WholeTableTranslator(Translator):
    def forward(self, src, src_mask, tgt):
        x = self.tokens(tgt) + self.positions.weight
        hidden = ~src_mask.bool()[:, None, None]
        memory = self.tokens(src)
        memory = self.norm(memory + self.encoder(memory, hidden))
        x = x + self.mix(self.norm(x), tgt)
        q, _, _ = self.cross.heads(self.norm(x))
        _, k, v = self.cross.heads(memory)
        return self.head(self.final_norm(x + self.cross.attend(q, k, v, hidden)))


def test_forward_with_one_number_of_positions_is_filled_up(tmp_path: Path) -> None:
    model, path = seeded(WholeTable()), tmp_path / "model.onnx"
    example = torch.randint(3, 50, (2, BLOCK))
    report = export(model, path, {"idx": example}, "idx", special_tokens=SPECIAL)

    def logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids + [ANY] * (BLOCK - len(ids))]))[0, : len(ids)]

    expected = [greedy(logits, prompt) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 3
    loaded = Model.load(path, "cpu", threads=1)
    results = loaded.generate_batch(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected
    assert loaded.manifest.max_length == BLOCK
    assert report is not None


def test_decoder_with_one_number_of_positions_reads_its_encoder(tmp_path: Path) -> None:
    model, path = seeded(WholeTableTranslator(), 10), tmp_path / "model.onnx"
    example = {"src": IDS, "tgt": torch.randint(3, 50, (2, BLOCK))}
    masks = {"src_mask": padding("src", dtype=torch.int64)}
    export(model, path, example, "tgt", masks=masks, special_tokens=SPECIAL)

    def logits(source: list[int], ids: list[int]) -> torch.Tensor:
        src, filled = torch.tensor([source]), torch.tensor([ids + [ANY] * (BLOCK - len(ids))])
        return model(src, torch.ones_like(src), filled)[0, : len(ids)]

    assert_translates(path, logits)


class Loss(TinyDecoder):
    """forward is a step of training: it returns the loss alone."""

    def forward(self, idx):
        logits = super().forward(idx[:, :-1])
        return nn.functional.cross_entropy(logits.transpose(1, 2), idx[:, 1:])


class LossOfRows(TinyDecoder):
    """The loss is a module's, of logits (batch · time, vocabulary), and comes with a count."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, idx):
        logits = super().forward(idx)
        loss = self.loss(logits.reshape(-1, logits.shape[-1]), idx.reshape(-1))
        return {"loss": loss, "accuracy": (logits.argmax(-1) == idx).float().mean()}


@pytest.mark.parametrize("kind", [Loss, LossOfRows])
def test_logits_are_those_of_the_loss(kind, tmp_path: Path) -> None:
    model, path = seeded(kind()), tmp_path / "model.onnx"
    export(model, path, {"idx": IDS}, "idx", special_tokens=SPECIAL, max_length=BLOCK)
    expected = [greedy(lambda ids: TinyDecoder.forward(model, torch.tensor([ids]))[0], prompt) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 3
    results = Model.load(path, "cpu", threads=1).generate_batch(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class TwoLosses(TinyDecoder):
    def forward(self, idx):
        logits = super().forward(idx).transpose(1, 2)
        return nn.functional.cross_entropy(logits, idx) + nn.functional.cross_entropy(-logits, idx)


def test_logits_of_one_of_two_losses_are_not_chosen(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"forward returns \(\) first"):
        export(seeded(TwoLosses()), tmp_path / "model.onnx", {"idx": IDS}, "idx", special_tokens=SPECIAL)


class OneStream(TinyDecoder):
    """The ids are (batch, streams, time), and so are the logits."""

    def forward(self, codes):
        return torch.stack([super(OneStream, self).forward(codes[:, k]) for k in range(codes.shape[1])], 1)


def test_ids_with_an_axis_of_one_decode_as_their_module(tmp_path: Path) -> None:
    model, path = seeded(OneStream()), tmp_path / "model.onnx"
    export(model, path, {"codes": IDS[:, None]}, "codes", special_tokens=SPECIAL, max_length=BLOCK)
    expected = [greedy(lambda ids: model(torch.tensor([[ids]]))[0, 0], prompt) for prompt in PROMPTS]
    results = Model.load(path, "cpu", threads=1).generate_batch(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected
