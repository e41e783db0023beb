"""Custom single-pass encoders, against PyTorch: pooling, heads, masks and refused options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional as F

from tformer_export import Task, export, padding
from tformer_export.common.checkpoint import save_checkpoint
from tformer_export.sources import load_source
from tformer_export.sources.pooled_module import POOLS
from tformer_export.sources.pooling import with_pooling
from tformer_export.sources.torch_module import from_module
from tformer_runtime import Model, OptionError, ParityError, SourceError

ANIMALS = "the quick brown fox jumps over lazy dog a e o"
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *ANIMALS.split()]
WIDTH, HEADS, MAX_LENGTH = 16, 2, 48
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
TEXTS = ["the quick brown fox", "a", "over the lazy dog the fox jumps over the lazy dog", "dog dog"]


class Packed(nn.Module):
    """A pre-norm encoder with packed projections and learned positions; padding by an additive mask."""

    def __init__(self, labels=0):
        super().__init__()
        self.embed, self.places = nn.Embedding(len(WORDS), WIDTH), nn.Embedding(MAX_LENGTH, WIDTH)
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, labels) if labels else None

    def forward(self, ids, mask):
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.packed(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        x = x + self.contract(F.gelu(self.expand(self.norms[1](x))))
        return x if self.head is None else self.head(x[:, 0])


MASKS = {"mask": padding("ids", keep="additive", shape=("batch", 1, 1, "time"))}


class Checked(Packed):
    """The same encoder for ids alone, with its own padding mask, as a checkpoint needs it."""

    def forward(self, ids):
        mask = torch.where(ids == 0, -1e9, 0.0)[:, None, None]
        return super().forward(ids, mask)


class Leaks(nn.Module):
    """An encoder that masks its embeddings but includes padding in the mean."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(len(WORDS), WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return self.out(self.embed(ids) * (ids != 0)[:, :, None]).mean(1)


def tokenizer():
    word_tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    word_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    word_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return word_tokenizer


def encode_text(text):
    return torch.tensor([tokenizer().encode(*((text,) if isinstance(text, str) else text)).ids])


def seeded(kind, *arguments):
    torch.manual_seed(5)
    module = kind(*arguments).eval()
    nn.init.normal_(module.embed.weight)
    return module


def test_pooled_vectors_match_pytorch(tmp_path):
    module = seeded(Packed)
    report = export(
        module, tmp_path / "x.onnx", {"ids": IDS}, masks=MASKS, tokenizer=tokenizer().to_str(),
        task=Task(pooling="max", normalize=True), quantization="int8",
    )  # fmt: skip
    model = Model.load(tmp_path / "x.onnx", "cpu")
    assert report.parity.raw.relative < 1e-5
    assert "from raw inputs" in dict(report.rows())
    assert "cosine" in dict(report.rows())
    with torch.no_grad():
        states = [module(encode_text(text), torch.zeros(1, 1, 1, 1))[0].max(0).values for text in TEXTS]
    expected = F.normalize(torch.stack(states), dim=1).numpy()
    actual = model.embed(TEXTS)
    assert (actual * expected).sum(1).min() > 0.999
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), 1, atol=1e-5)


def test_classifier_checkpoint_matches_pytorch(tmp_path):
    module = seeded(Checked, 3)
    save_checkpoint(
        module, tmp_path / "model.pt", factory=f"{__name__}:Checked", arguments={"labels": 3}, step_input=None,
        tokenizer=tokenizer().to_str(), special_tokens={"pad_token_id": 0},
    )  # fmt: skip
    labels = ["no", "perhaps", "yes"]
    report = export(
        load_source(tmp_path / "model.pt", trust=[__name__]), tmp_path / "x.onnx",
        task=Task("text-classification", labels=labels, problem_type="multi_label_classification"),
    )  # fmt: skip
    model = Model.load(tmp_path / "x.onnx", "cpu")
    pairs = [("the fox", "a dog"), ("a", "the lazy dog")]
    for text, result in zip([*TEXTS, *pairs], model.classify([*TEXTS, *pairs]), strict=True):
        with torch.no_grad():
            expected = module(encode_text(text))[0].sigmoid().tolist()
        assert list(result.scores) == labels
        assert list(result.scores.values()) == pytest.approx(expected, abs=1e-5)
        assert result.score == max(result.scores.values())
    assert report.parity.ragged
    assert report.parity.raw.pairs == 4


def test_model_that_is_changed_by_padding_runs_rows_by_length(tmp_path):
    module = seeded(Leaks)
    report = export(
        module, tmp_path / "x.onnx", {"ids": IDS}, tokenizer=tokenizer().to_str(), special_tokens={"pad_token_id": 0}
    )
    model = Model.load(tmp_path / "x.onnx", "cpu")
    assert not report.parity.ragged
    assert not model.manifest.encode.ragged
    assert report.parity.raw.relative < 1e-5
    with torch.no_grad():
        expected = [module(encode_text(text))[0].numpy() for text in TEXTS]
    np.testing.assert_allclose(model.embed(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("name", POOLS)
def test_pooling_reads_valid_positions_only(name):
    torch.manual_seed(0)
    source = with_pooling(from_module(seeded(Packed), {"ids": IDS}, None, masks=MASKS), [name])
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    with torch.no_grad():
        batch = source.module(ids, keep)
        single_rows = torch.cat([source.module(ids[:1], keep[:1]), source.module(ids[1:, :2], keep[1:, :2])])
        states = seeded(Packed)(ids[1:, :2], torch.zeros(1, 1, 1, 1))[0]
    torch.testing.assert_close(batch, single_rows)
    expected = {
        "mean": states.mean(0), "first": states[0], "last": states[1], "max": states.amax(0),
        "mean_sqrt_len_tokens": states.sum(0) / 2**0.5, "weightedmean": (states[0] + 2 * states[1]) / 3,
    }  # fmt: skip
    torch.testing.assert_close(batch[1], expected[name])


@pytest.mark.parametrize(
    ("labels", "options", "error", "message"),
    [
        (
            3,
            {"pooling": "mean"},
            SourceError,
            r"pooling needs a vector for each position, .* the model returns \(2, 3\)",
        ),
        (0, {"pooling": "median"}, OptionError, "pooling must be one of mean, first, max, last, not 'median'"),
        (0, {"normalize": True}, OptionError, "normalize is for pooled vectors: choose a pooling too"),
        (3, {"labels": ["a"]}, OptionError, "labels and problem_type are for the tasks text-classification"),
        (3, {"labels": ["a"], "name": "text-classification"}, OptionError, "1 labels are given for 3 scores"),
        (0, {"name": "text-classification"}, SourceError, r"a classifier must return scores .* returns \(2, 3, 16\)"),
        (
            3,
            {"problem_type": "ordinal", "name": "text-classification"},
            OptionError,
            "problem_type must be one of single_label_classification, multi",
        ),
        (0, {"tokenizer": len}, OptionError, "a tokenizer is text in tokenizers' JSON format"),
    ],
)
def test_invalid_tasks_are_refused(tmp_path, labels, options, error, message):
    options = dict(options)
    tokenizer = options.pop("tokenizer", None)

    def run():
        task = Task(**options)
        export(seeded(Packed, labels), tmp_path / "x.onnx", {"ids": IDS}, masks=MASKS, task=task, tokenizer=tokenizer)

    with pytest.raises(error, match=message):
        run()
    assert list(tmp_path.iterdir()) == []


def test_inverted_mask_raises_parity_error(tmp_path):
    class InvertedMask(Packed):
        def forward(self, ids, hidden):
            return super().forward(ids, torch.where(hidden, 0.0, -1e9)[:, None, None])

    with pytest.raises(ParityError, match=r"differs from its source|the wrong way round|not finite"):
        export(seeded(InvertedMask), tmp_path / "x.onnx", {"ids": IDS}, masks={"hidden": padding("ids", keep=False)})
