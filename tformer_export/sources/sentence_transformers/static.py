"""A sentence encoder without a transformer: a vector is the mean of the rows of a table, one for each token."""

from __future__ import annotations

import json
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from tformer_export.sources.base import Source
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.pooled_module import Pipeline
from tformer_export.sources.sentence_transformers.layers import read_weights
from tformer_export.sources.sentence_transformers.saved import SavedModel
from tformer_export.sources.task_names import FEATURES
from tformer_export.sources.untrusted_files import read_json
from tformer_runtime.base.errors import SourceError

IDS = "input_ids"


class _Rows(nn.Module):
    """Returns the row of each token."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(len(table), table.shape[1], _weight=table)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(input_ids)
        return rows


def from_static(saved: SavedModel, name: str) -> Source:
    """Read a StaticEmbedding, of which `with_modules` makes vectors. Raises SourceError for a damaged folder."""
    path = saved.modules[0].path
    rows = _Rows(_table(saved))
    data = read_json(path / "tokenizer.json")
    try:
        truncation = data.get("truncation")
        text = json.dumps({**data, "post_processor": None, "padding": None, "truncation": None})
        tokenizer = Tokenizer.from_str(text)
        max_length = None if truncation is None else int(truncation["max_length"])
    except Exception as error:  # tokenizers raises plain Exception
        raise SourceError(f"{path / 'tokenizer.json'} holds no tokenizer: {error}") from error
    ids = torch.arange(6).reshape(2, 3) % len(rows.table.weight)
    return Source(
        module=Adapter(rows, [IDS]),
        example={IDS: ids},
        step_input=None,
        name=name,
        task=FEATURES,
        tokenizers={IDS: text},
        max_length=max_length,
        own_pipeline=_pipeline(rows, tokenizer),
        reads_pairs=False,
    )


def _pipeline(rows: _Rows, tokenizer: Tokenizer) -> Pipeline:
    def answer(sample: Any, max_tokens: int | None) -> torch.Tensor:
        ids = tokenizer.encode(sample, add_special_tokens=False).ids
        result: torch.Tensor = rows(torch.tensor(ids[:max_tokens], dtype=torch.int64))
        return result

    return answer


def _table(saved: SavedModel) -> torch.Tensor:
    """Return the rows, (ids, width), in float32. model2vec may store the number of a row, and a weight, for each id."""
    path = saved.modules[0].path
    weights = read_weights(path)
    rows = weights.get("embedding.weight", weights.get("embeddings"))
    if rows is None or rows.dim() != 2:
        raise SourceError(f"{path} holds no table embedding.weight of vectors")
    rows, mapping, scales = rows.float(), weights.get("mapping"), weights.get("weights")
    rows = rows if mapping is None else rows[mapping.long()]
    return rows if scales is None else rows * scales.float()[:, None]
