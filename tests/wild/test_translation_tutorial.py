"""PyTorch's translation tutorial, with its own forward and its own masks, exports unchanged.

The code is that of the documentation's first page.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tformer_export import causal, export, padding
from tformer_runtime import Model

PAGE = Path(__file__).parents[2] / "docs" / "first-model.md"
VOCABULARY, MAX_NEW_TOKENS = 40, 9
SEEDS = {False: 5, True: 10}  # by batch_first; for which the greedy tokens vary
SOURCES = [[7, 21, 5], [30, 8, 12, 9, 33, 17, 6], [11]]


@pytest.fixture(scope="module")
def tutorial():
    """Return the names of the tutorial's module."""
    code = re.search(r'```python title="translation.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(compile(code[1], "translation.py", "exec"), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")})


class BatchFirst(nn.Module):
    """The same model with the batch first, as users change it."""

    def __init__(self, tutorial, model):
        super().__init__()
        self.model = model
        self.model.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

    def forward(self, src, trg, tgt_mask, src_padding_mask, tgt_padding_mask):
        embed = self.model.positional_encoding
        source = embed(self.model.src_tok_emb(src).transpose(0, 1)).transpose(0, 1)
        target = embed(self.model.tgt_tok_emb(trg).transpose(0, 1)).transpose(0, 1)
        masks = None, tgt_mask, None, src_padding_mask, tgt_padding_mask, src_padding_mask
        return self.model.generator(self.model.transformer(source, target, *masks))


def build(tutorial, batch_first):
    torch.manual_seed(SEEDS[batch_first])
    model = tutorial.Seq2SeqTransformer(2, 2, 32, 4, VOCABULARY, VOCABULARY, 64)
    model = (BatchFirst(tutorial, model) if batch_first else model).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # without training, all positions would get one token
            if parameter.dim() < 2:
                parameter.add_(0.3 * torch.randn_like(parameter)).mul_(torch.randint_like(parameter, 2) * 2 - 1)
            elif "tok_emb" in name:
                parameter.mul_(2.0)
    return model


def greedy(tutorial, model, source, batch_first):
    """Decode as the tutorial does, with the whole sequence in each step."""
    src = torch.tensor([[tutorial.BOS_IDX, *source, tutorial.EOS_IDX]]).T
    tokens = [tutorial.BOS_IDX]
    while len(tokens) <= MAX_NEW_TOKENS and tutorial.EOS_IDX not in tokens:
        trg = torch.tensor([tokens]).T
        src_mask, tgt_mask, src_padding, tgt_padding = tutorial.create_mask(src, trg)
        with torch.no_grad():
            if batch_first:
                logits = model(src.T, trg.T, tgt_mask, src_padding, tgt_padding)[0, -1]
            else:
                logits = model(src, trg, src_mask, tgt_mask, src_padding, tgt_padding, src_padding)[-1, 0]
        tokens.append(int(logits.argmax()))
    return tokens[1:]


FLOAT, BOOL = causal("trg", keep="additive"), causal("trg", keep=False)


@pytest.mark.parametrize(
    ("batch_first", "tgt_mask"),
    [
        pytest.param(False, FLOAT, id="time first-float"),
        pytest.param(True, BOOL, id="batch first-bool"),
        # The order of the axes and the kind of the mask do not meet anywhere: the suite has each of them once.
        pytest.param(False, BOOL, id="time first-bool", marks=pytest.mark.thorough),
        pytest.param(True, FLOAT, id="batch first-float", marks=pytest.mark.thorough),
    ],
)
def test_tutorial_exports_unchanged_and_decodes_as_pytorch(tutorial, batch_first, tgt_mask, tmp_path):
    model, ids = build(tutorial, batch_first), torch.randint(4, VOCABULARY, (2, 5))
    ids = ids if batch_first else ids.T
    masks = {
        "tgt_mask": tgt_mask,
        "src_padding_mask": padding("src", keep=False),
        "tgt_padding_mask": padding("trg", keep=False),
    }
    if not batch_first:
        masks["memory_key_padding_mask"] = padding("src", keep=False)
    special = {"bos_token_id": tutorial.BOS_IDX, "eos_token_id": tutorial.EOS_IDX, "pad_token_id": tutorial.PAD_IDX}
    report = export(
        model,
        tmp_path / "model.onnx",
        {"src": ids, "trg": ids},
        "trg",
        axes=None if batch_first else {"src": (1, 0), "trg": (1, 0)},
        masks=masks,
        fixed_arguments=None if batch_first else {"src_mask": None},
        special_tokens=special,
        max_length=32,
    )
    assert report.counts["caches"] == 4  # keys and values of two layers
    sources = [np.array([tutorial.BOS_IDX, *source, tutorial.EOS_IDX]) for source in SOURCES]
    loaded = Model.load(tmp_path / "model.onnx", "cpu", threads=1)
    results = loaded.generate_batch(sources, max_new_tokens=MAX_NEW_TOKENS, batch_size=3)
    expected = [greedy(tutorial, model, source, batch_first) for source in SOURCES]
    assert [list(result.token_ids) for result in results] == expected
    assert len({token for row in expected for token in row}) >= 6
