"""Tiny seeded transformers models and a stepper over them that recomputes the whole sequence: slow, and simple."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)  # tiny products: threads would only wait for each other
PAD, START, END, OTHER_END = 0, 1, 2, 3
VOCABULARY = 24


@functools.cache
def marian(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=PAD, eos_token_id=END,
        decoder_start_token_id=START, forced_eos_token_id=None, init_std=0.6, max_position_embeddings=64,
    )  # fmt: skip
    return _plain(transformers.MarianMTModel(config))


@functools.cache
def gpt2(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=START, eos_token_id=END,
        pad_token_id=PAD, initializer_range=0.4,
    )  # fmt: skip
    return _plain(transformers.GPT2LMHeadModel(config))


def _plain(model: Any) -> Any:
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, eos_token_id=END, bos_token_id=START, decoder_start_token_id=START
    )
    return model.eval()


class HfStepper:
    """The stepper that the runtime's search asks for, over a transformers model. sources: one a row, or None."""

    def __init__(self, model: Any, sources: list[np.ndarray] | None, rows: int) -> None:
        self.model, self.sources = model, sources
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.calls: list[int] = []

    @torch.no_grad()
    def step(self, tokens: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        assert len(tokens) == len(self.ids)
        self.calls.append(len(tokens))
        logits = []
        for row, new in enumerate(tokens):
            self.ids[row] += new[: counts[row] if counts is not None else len(new)].tolist()
            ids = torch.tensor([self.ids[row]])
            if self.sources is None:
                out = self.model(input_ids=ids)
            else:
                out = self.model(input_ids=torch.tensor(self.sources[row])[None], decoder_input_ids=ids)
            logits.append(out.logits[0, -1].float().numpy())
        return np.stack(logits)

    def reorder(self, rows: np.ndarray) -> None:
        self.ids = [list(self.ids[r]) for r in rows]
        if self.sources is not None:
            self.sources = [self.sources[r] for r in rows]


@torch.no_grad()
def generate(model: Any, ids: np.ndarray, **options: Any) -> tuple[list[list[int]], list[float] | None]:
    """transformers' own generation for one row: generated ids without the prompt and padding, and their scores."""
    out = model.generate(
        input_ids=torch.tensor(ids)[None], attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    prompt = 1 if model.config.is_encoder_decoder else len(ids)
    rows = [_cut(row[prompt:].tolist(), options) for row in out.sequences]
    scores = getattr(out, "sequences_scores", None)
    return rows, None if scores is None else scores.tolist()


def _cut(ids: list[int], options: dict[str, Any]) -> list[int]:
    ends = options.get("eos_token_id", END)
    ends = ends if isinstance(ends, list) else [ends]
    at = next((i for i, t in enumerate(ids) if t in ends), None)
    return ids if at is None else ids[: at + 1]
