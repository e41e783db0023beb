"""Models whose forward takes a batch in one argument, one row, channels first or one size, or has no projection."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.handwritten_case import BLOCK, END, SPECIAL, START
from tiny import HEADS, WIDTH, Attention, TinyDecoder

from tformer_export import export, lengths, padding
from tformer_runtime import Model, TformerError, UnsupportedModelError
from tformer_runtime.engine.engine import Engine

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
NUM_TOKENS = 8
# float32 rounds sums of at most 80 products of values below 10, in the order of the kernel.
TOLERANCE = 1e-4


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """Return the module with random weights, whose greedy tokens vary."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4 if parameter.dim() > 1 else 1.0)
    return module.eval()


@torch.no_grad()
def greedy(logits, start: list[int]) -> list[int]:
    """Return the greedy ids after `start`. logits: ids → (time, vocabulary)."""
    ids = list(start)
    while len(ids) < len(start) + NUM_TOKENS and END not in ids[len(start) :]:
        ids.append(int(logits(ids)[-1].argmax()))
    return ids[len(start) :]


class Translator(TinyDecoder):
    """A step of training takes a batch of a data loader: a dict with labels, which only the loss reads."""

    def __init__(self):
        super().__init__()
        self.encoder, self.cross = Attention(), Attention()

    def forward(self, batch):
        hidden = ~batch["src_mask"].bool()[:, None, None]
        memory = self.tokens(batch["src"])
        memory = self.norm(memory + self.encoder(memory, hidden))
        x = self.tokens(batch["tgt"]) + self.positions(torch.arange(batch["tgt"].shape[1]))
        x = x + self.mix(self.norm(x), batch["tgt"])
        q, _, _ = self.cross.heads(self.norm(x))
        _, k, v = self.cross.heads(memory)
        return {"logits": self.head(self.final_norm(x + self.cross.attend(q, k, v, hidden)))}


def test_batch_in_a_dict_decodes_as_its_module(tmp_path: Path) -> None:
    model = seeded(Translator())
    batch = {"src": IDS, "src_mask": torch.ones_like(IDS), "tgt": IDS, "name": "a batch"}
    masks = {"src_mask": padding("src", dtype=torch.int64)}
    path = tmp_path / "model.onnx"
    export(model, path, {"batch": batch}, "tgt", masks=masks, special_tokens=SPECIAL, max_length=BLOCK)

    def logits(source: list[int], ids: list[int]) -> torch.Tensor:
        src = torch.tensor([source])
        return model({"src": src, "src_mask": torch.ones_like(src), "tgt": torch.tensor([ids])})["logits"][0]

    sources = [[3, 4, 5, 9, 11], [44], [7, 30, 12]]
    expected = [greedy(lambda ids, s=source: logits(s, ids), [START]) for source in sources]
    results = Model.load(path, "cpu", threads=1).generate_batch(sources, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class OneRow(TinyDecoder):
    """ids (time,) → logits (time, vocabulary), as in code for learning."""

    def forward(self, ids):
        T = len(ids)
        x = self.tokens(ids) + self.positions(torch.arange(T))
        q, k, v = (p.view(T, HEADS, -1).transpose(0, 1) for p in self.attention.qkv(self.norm(x)).split(WIDTH, -1))
        scores = (q @ k.transpose(1, 2) / math.sqrt(WIDTH // HEADS)).masked_fill(self.mask(ids[None]), float("-inf"))
        x = x + self.attention.out((scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1))
        return self.head(self.final_norm(x))


def test_model_of_one_row_decodes_batches_as_it_decodes_each_row(tmp_path: Path) -> None:
    model, path = seeded(OneRow()), tmp_path / "model.onnx"
    export(model, path, {"ids": IDS[0]}, "ids", special_tokens=SPECIAL, max_length=BLOCK)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    expected = [greedy(lambda ids: model(torch.tensor(ids)), prompt) for prompt in prompts]
    results = Model.load(path, "cpu", threads=1).generate_batch([*map(np.array, prompts)], max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class Hidden(TinyDecoder):
    """forward gives the decoder's states, and the caller applies the generator."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(self.head, nn.LogSoftmax(-1))
        del self.head

    def forward(self, idx):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        return self.final_norm(x + self.mix(self.norm(x), idx))


def test_projection_outside_forward_is_in_the_file(tmp_path: Path) -> None:
    model, path = seeded(Hidden()), tmp_path / "model.onnx"
    export(model, path, {"idx": IDS}, "idx", head="generator", special_tokens=SPECIAL, max_length=BLOCK)
    expected = greedy(lambda ids: model.generator(model(torch.tensor([ids])))[0], [5, 6, 7])
    assert list(Model.load(path, "cpu").generate([5, 6, 7], max_new_tokens=NUM_TOKENS).token_ids) == expected


class OfTraining(Translator):
    """forward takes the whole target and drops its last token, so that the rest predicts the rows that follow."""

    def forward(self, src, src_mask, tgt):
        return super().forward({"src": src, "src_mask": src_mask, "tgt": tgt[:, :-1]})["logits"]


class OfTrainingAndShift(OfTraining):
    """The rows stand for the tokens themselves, as the token before each predicts it."""

    def forward(self, src, src_mask, tgt):
        return super().forward(src, src_mask, F.pad(tgt[:, :-1], (1, 0), value=START))


def test_forward_that_drops_the_last_token_gives_logits_after_each(tmp_path: Path) -> None:
    model, path = seeded(OfTraining()), tmp_path / "model.onnx"
    example, masks = {"src": IDS, "tgt": IDS}, {"src_mask": padding("src", dtype=torch.int64)}
    export(model, path, example, "tgt", masks=masks, special_tokens=SPECIAL, max_length=BLOCK)

    def logits(source: list[int], ids: list[int]) -> torch.Tensor:
        src = torch.tensor([source])
        return model(src, torch.ones_like(src), torch.tensor([[*ids, 5]]))[0]

    sources = [[3, 4, 5, 9, 11], [44], [7, 30, 12]]
    expected = [greedy(lambda ids, s=source: logits(s, ids), [START]) for source in sources]
    results = Model.load(path, "cpu", threads=1).generate_batch(sources, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


def test_rows_that_do_not_stand_for_the_tokens_before_them_are_refused(tmp_path: Path) -> None:
    model, masks = seeded(OfTrainingAndShift()), {"src_mask": padding("src", dtype=torch.int64)}
    with pytest.raises(UnsupportedModelError, match=r"returns \(batch, time - 1, 53\) first"):
        export(model, tmp_path / "model.onnx", {"src": IDS, "tgt": IDS}, "tgt", masks=masks, special_tokens=SPECIAL)


class ReshapedByOtherRows(TinyDecoder):
    """The heads of keys are merged with the rows of the queries' batch, as torch does. Padded frames are zeros."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, WIDTH, bias=False)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, frames, mask, ids):
        batch, time = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(time))
        x = x + self.mix(self.norm(x), ids)
        memory = self.enter(frames * mask[..., None]).transpose(0, 1).contiguous()
        q, k, v = self.query(x.transpose(0, 1).contiguous()), self.key(memory), self.value(memory)
        q = q.view(time, batch * HEADS, -1).transpose(0, 1)
        k, v = (p.view(p.shape[0], batch * HEADS, WIDTH // HEADS).transpose(0, 1) for p in (k, v))
        attended = (torch.bmm(torch.bmm(q, k.transpose(1, 2)) / WIDTH, v)).transpose(0, 1).reshape(time, batch, WIDTH)
        return self.head(self.final_norm(x + attended.transpose(0, 1)))


def test_keys_that_are_reshaped_by_the_rows_of_another_input_export(tmp_path: Path) -> None:
    model, path = seeded(ReshapedByOtherRows()), tmp_path / "model.onnx"
    example, masks = {"frames": torch.randn(2, 7, 4), "ids": IDS}, {"mask": padding("frames", dtype=torch.float32)}
    export(model, path, example, "ids", masks=masks, special_tokens=SPECIAL, max_length=BLOCK)
    generator = np.random.default_rng(1)
    sources = [generator.standard_normal((length, 4)).astype("float32") for length in (6, 9, 3)]

    def logits(source: np.ndarray, ids: list[int]) -> torch.Tensor:
        frames = torch.from_numpy(source)[None]
        return model(frames, torch.ones(frames.shape[:2]), torch.tensor([ids]))[0]

    expected = [greedy(lambda ids, s=source: logits(s, ids), [START]) for source in sources]
    results = Model.load(path, "cpu", threads=1).generate_batch(sources, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class Captioner(TinyDecoder):
    """A decoder that reads patches of an image (batch, 3, 32, 32) by cross-attention."""

    def __init__(self):
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, WIDTH, 8, 8), nn.Parameter(torch.zeros(1, 16, WIDTH))

    def memory(self, image):
        return self.patches(image).flatten(2).transpose(1, 2) + self.places

    def forward(self, image, ids):
        memory = self.memory(image)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x + self.mix(self.norm(x), ids)
        return self.head(self.final_norm(x + F.scaled_dot_product_attention(self.norm(x), memory, memory)))


def test_image_of_one_size_needs_no_axes(tmp_path: Path) -> None:
    model, path = seeded(Captioner()), tmp_path / "model.onnx"
    example = {"image": torch.randn(1, 3, 32, 32), "ids": IDS[:1]}
    export(model, path, example, "ids", special_tokens=SPECIAL, max_length=BLOCK)
    images = torch.randn(3, 3, 32, 32)
    expected = [greedy(lambda ids, i=i: model(images[i : i + 1], torch.tensor([ids]))[0], [START]) for i in range(3)]
    results = Model.load(path, "cpu", threads=1).generate_batch([*images.numpy()], max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class Spectrogram(nn.Module):
    """(batch, 80, frames), in which padding is hidden by lengths."""

    def __init__(self):
        super().__init__()
        self.conv, self.attention, self.head = nn.Conv1d(80, WIDTH, 1), Attention(), nn.Linear(WIDTH, 5)

    def forward(self, mel, num_frames):
        x = self.conv(mel).transpose(1, 2)
        hidden = torch.arange(x.shape[1]) >= num_frames[:, None]
        x = x + self.attention(x, hidden[:, None, None])
        return self.head(x.masked_fill(hidden[:, :, None], 0).sum(1) / num_frames[:, None])


def test_channels_first_need_no_axes(tmp_path: Path) -> None:
    model, path = seeded(Spectrogram()), tmp_path / "model.onnx"
    export(model, path, {"mel": torch.randn(2, 80, 20)}, masks={"num_frames": lengths("mel")})
    mels = [torch.randn(80, frames) for frames in (20, 7, 33)]
    actual = Model.load(path, "cpu", threads=1).embed([mel.T.numpy() for mel in mels], batch_size=3)
    with torch.no_grad():
        expected = torch.cat([model(mel[None], torch.tensor([mel.shape[1]])) for mel in mels]).numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


class OneImage(nn.Module):
    """(3, 32, 32) → scores (5,)."""

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(16 * WIDTH, 5)

    def forward(self, image):
        return self.head(self.patches(image).relu().flatten())


def test_single_pass_model_of_one_row_runs_batches(tmp_path: Path) -> None:
    model, path = seeded(OneImage()), tmp_path / "model.onnx"
    export(model, path, {"image": torch.randn(3, 32, 32)}, axes={"image": (None,)})
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        expected = torch.stack([*map(model, images)]).numpy()
    actual = Model.load(path, "cpu", threads=1).embed([*images.numpy()], batch_size=4)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=10 * TOLERANCE)  # of sums of 384 products


class OneRowWithSink(TinyDecoder):
    """ids (time,), casts to float32, and a learned score of nothing beside those of the keys."""

    def __init__(self):
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def forward(self, ids):
        x = self.tokens(ids).float()
        n = x.shape[0]
        q, k, v = (part.contiguous().view(-1, HEADS, WIDTH // HEADS) for part in self.attention.qkv(x).chunk(3, -1))
        mask = torch.triu(q.new_full((n, n), -float("inf")), diagonal=1)
        mask += torch.tril(mask.new_full((n, n), -float("inf")), diagonal=-6)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(WIDTH // HEADS) + mask[None]
        scores = torch.cat([scores, self.sink.reshape(HEADS, 1, 1).expand(-1, n, -1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :-1]
        x = x + self.attention.out(torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1))
        return self.head(self.final_norm(x))


def test_one_row_with_a_sink_decodes_as_its_module(tmp_path: Path) -> None:
    model = seeded(OneRowWithSink())
    path = tmp_path / "model.onnx"
    export(model, path, {"ids": IDS[0]}, "ids", special_tokens=SPECIAL, max_length=BLOCK)
    prompts = [[3, 4, 5, 9, 11, 8, 7], [44], [7, 30, 12]]
    expected = [greedy(lambda ids: model(torch.tensor(ids)), prompt) for prompt in prompts]
    results = Model.load(path, "cpu", threads=1).generate_batch(prompts, max_new_tokens=NUM_TOKENS)
    assert [list(result.token_ids) for result in results] == expected


class FailsInOneRow(TinyDecoder):
    def forward(self, ids):
        return self.head(self.tokens(ids)[: int(ids.sum()) % 3 + 1])


def test_refusal_of_one_row_leaves_torch_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(TformerError):
        export(FailsInOneRow().eval(), tmp_path / "model.onnx", {"ids": IDS[0]}, "ids")
    assert not torch._C._functorch.maybe_current_level()
    nn.Embedding(3, 4)  # it draws numbers, which torch.vmap refuses


class TimeFirstEncoder(nn.Module):
    """Inputs and states (time, batch, …), the lengths of the rows, and states of all layers in a list."""

    def __init__(self):
        super().__init__()
        self.tokens, self.attention = nn.Embedding(50, WIDTH), Attention()

    def forward(self, x, lengths):
        hidden = torch.arange(int(lengths.max())) >= lengths[:, None]
        states = [self.tokens(x).transpose(0, 1)]
        for _ in range(2):
            states.append(states[-1] + self.attention(states[-1], hidden[:, None, None]))
        return [state.transpose(0, 1) for state in states], states[-1][
            torch.arange(x.shape[1]), (lengths - 1).squeeze()
        ]


@pytest.mark.parametrize("output", ["0.2", 1])
def test_states_with_time_in_front_are_those_of_the_module(tmp_path: Path, output: str | int) -> None:
    model = seeded(TimeFirstEncoder())
    path = tmp_path / "model.onnx"
    masks = {"lengths": lengths("x")}
    export(model, path, {"x": IDS.T}, masks=masks, output=output, axes={"x": (1, 0)}, special_tokens=SPECIAL)
    rows = [np.array([3, 4, 5, 9]), np.array([12]), np.array([7, 8])]
    (actual,) = Engine(path, "cpu", threads=1).encode({"x": rows}, len(rows)).values()
    for row, states in zip(rows, actual.numpy(), strict=True):
        with torch.no_grad():
            all_states, last = model(torch.from_numpy(row)[:, None], torch.tensor([len(row)]))
        expected = last[0] if output == 1 else all_states[2][:, 0]
        found = states if output == 1 else states[: len(row)]
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=TOLERANCE)


def test_results_in_containers_are_named_in_the_refusal(tmp_path: Path) -> None:
    with pytest.raises(TformerError, match=r"among its outputs, which are '0\.0', '0\.1', '0\.2', '1'$"):
        export(
            TimeFirstEncoder().eval(),
            tmp_path / "model.onnx",
            {"x": IDS.T},
            masks={"lengths": lengths("x")},
            output=0,
            axes={"x": (1, 0)},
        )


class TwoIds(TinyDecoder):
    """The first GPT's input: (batch, time, 2), ids of tokens and of positions in one table."""

    def forward(self, x):
        return self.head(self.tokens(x).sum(2))


def test_several_ids_for_a_position_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="holds 2 ids for each position, and decoding appends one"):
        export(TwoIds().eval(), tmp_path / "model.onnx", {"x": torch.stack([IDS, IDS], -1)}, "x")


class Pairs(TinyDecoder):
    """Results for pairs of positions, without the first and the last position."""

    def forward(self, idx, keep):
        x = self.tokens(idx) * keep[..., None]
        return (x[:, :, None] * x[:, None])[:, 1:-1, 1:-1]


def test_empty_results_are_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"forward returns no numbers for inputs of these sizes: idx \(1, "):
        export(Pairs().eval(), tmp_path / "model.onnx", {"idx": IDS}, masks={"keep": padding("idx")})
