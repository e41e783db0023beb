"""The trained model: a Llama of 7 million weights, which learns the text of `corpus` in half an hour on one core.

`prepare` leaves it in `source/hf` of a folder, where the engines of `versus` look for it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from versus.engines import HUGGING_FACE, SOURCE, build_once
from versus.shapes import END, PAD, START

from quality import corpus
from quality.forms import SHAPE, TEXT

STEPS, ROWS = 4000, 8  # optimizer steps, and windows in each
VALIDATED = 64  # windows


class Llama(nn.Module):
    """transformers' Llama as a recipe's model: ids to logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=SHAPE.width, intermediate_size=SHAPE.feedforward,
            num_hidden_layers=SHAPE.layers, num_attention_heads=SHAPE.heads, num_key_value_heads=SHAPE.heads,
            max_position_embeddings=SHAPE.max_length, tie_word_embeddings=False,
            pad_token_id=PAD, bos_token_id=START, eos_token_id=END,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) for ids (B, T)."""
        return self.llama(ids, use_cache=False).logits


def dataset(folder: str) -> Any:
    """Return the data of the recipe. folder: of the text."""
    from tformer_models.data import Dataset

    train, length = corpus.part(Path(folder), "train"), SHAPE.max_length
    rows = np.lib.stride_tricks.sliding_window_view(train, length + 1)[::length]
    held_out = corpus.windows(corpus.part(Path(folder), "validation"), VALIDATED, length + 1)
    return Dataset(
        train=[(row[:-1], row[1:]) for row in rows],
        validation=[(row[:-1], row[1:]) for row in held_out],
        model_arguments={"vocabulary": SHAPE.vocabulary},
        tokenizers={"ids": (Path(folder) / corpus.TOKENIZER).read_text(encoding="utf-8")},
        special_tokens={"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": PAD},
        step_input="ids",
    )


def prepare(folder: Path) -> Path:
    """Train the model, unless it is there, and return its transformers folder. An interrupted training continues."""
    corpus.prepare(folder / TEXT, SHAPE.vocabulary)
    build_once(folder / SOURCE, lambda part: _train(folder, part / HUGGING_FACE))
    return folder / SOURCE / HUGGING_FACE


def _train(folder: Path, path: Path) -> None:
    from tformer_export.common.checkpoint import load_checkpoint
    from tformer_models.recipe import CheckpointOptions, FactoryCall, Recipe, TrainingOptions
    from tformer_models.training import train

    options = TrainingOptions(
        STEPS, batch_tokens=ROWS * SHAPE.max_length, validate_every=250, learning_rate=2e-3, betas=(0.9, 0.95),
        weight_decay=0.1, schedule="cosine", warmup=200, label_smoothing=0.0, average=0.0, precision="bf16",
    )  # fmt: skip
    recipe = Recipe(
        FactoryCall(f"{__name__}:dataset", {"folder": str(folder / TEXT)}),
        FactoryCall(f"{__name__}:{Llama.__name__}"),
        options,
        CheckpointOptions("text-generation", max_length=SHAPE.max_length),
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    module = load_checkpoint(train(recipe, folder / "training", resume=True)).build(trust=[__name__])
    module.llama.save_pretrained(path)
