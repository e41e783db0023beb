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


@functools.cache
def t5(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2,
        pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=START, initializer_factor=2.5,
    )  # fmt: skip
    return _plain(transformers.T5ForConditionalGeneration(config))


@functools.cache
def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=START, eos_token_id=END, pad_token_id=PAD,
        initializer_range=0.5,
    )  # fmt: skip
    return _plain(transformers.LlamaForCausalLM(config))


def _plain(model: Any) -> Any:
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, eos_token_id=END, bos_token_id=START, decoder_start_token_id=START
    )
    return model.eval()


class HfRows:
    """Rows of a transformers model, which recomputes every row from its beginning: a simple `RunningBatch`."""

    def __init__(self, model: Any, sources: list[np.ndarray | None], ids: list[list[int]]) -> None:
        self.model, self.sources, self.ids = model, sources, ids
        self.calls: list[int] = []

    @torch.no_grad()
    def logits(self) -> np.ndarray:
        rows = []
        for source, own in zip(self.sources, self.ids, strict=True):
            ids = torch.tensor([own])
            if source is None:
                out = self.model(input_ids=ids)
            else:
                out = self.model(input_ids=torch.tensor(source)[None], decoder_input_ids=ids)
            rows.append(out.logits[0, -1].float().numpy())
        return np.stack(rows)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        self.calls.append(len(tokens))
        for own, new in zip(self.ids, tokens, strict=True):
            own += new.tolist()
        return self.logits()

    def greedy_steps(self, tokens: np.ndarray, make_plan: Any) -> None:
        return None

    def requests(self) -> None:
        return None

    def reorder(self, rows: np.ndarray) -> None:
        self.ids = [list(self.ids[r]) for r in rows]
        self.sources = [self.sources[r] for r in rows]

    def join(self, other: HfRows) -> None:
        self.ids += other.ids
        self.sources += other.sources

    def fit(self) -> bool:
        return False

    def histories(self) -> None:
        return None

    def guesses(self) -> None:
        return None

    def release(self) -> None:
        pass


class HfStarter:
    """Starts rows. begun: the number of tasks of each start. batches: the started rows."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.begun: list[int] = []
        self.batches: list[HfRows] = []

    def begin(self, tasks: list[Any]) -> tuple[HfRows, np.ndarray]:
        self.begun.append(len(tasks))
        rows = HfRows(self.model, [t.sources.get("src") for t in tasks], [t.prompt.tolist() for t in tasks])
        self.batches.append(rows)
        return rows, rows.logits()

    def begin_unread(self, task: Any) -> None:
        return None

    def bytes_needed(self, running: list[Any], coming: list[Any], rows: HfRows | None = None) -> int:
        return sum(task.width for task in (*running, *coming))


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
