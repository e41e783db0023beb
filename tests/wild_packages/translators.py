"""Models with an encoder and a decoder that is stepped over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wild_packages.entry import VOCABULARY, Entry, ids, numbers

V = VOCABULARY


def phonemes() -> nn.Module:
    from dp.model.model import AutoregressiveTransformer

    return AutoregressiveTransformer(V, V, 2, d_model=32, d_fft=48, encoder_layers=2, decoder_layers=2, heads=4)


def whole(module: nn.Module, text: torch.Tensor, phonemes: torch.Tensor) -> torch.Tensor:
    """The module drops the last token of a row."""
    return module({"text": text, "phonemes": nn.functional.pad(phonemes, (0, 1), value=5)})


def in_a_batch(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"batch": dict(rows)}


def whisper() -> nn.Module:
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(
        ModelDimensions(
            n_mels=8, n_audio_ctx=12, n_audio_state=32, n_audio_head=4, n_audio_layer=2, n_vocab=V, n_text_ctx=64,
            n_text_state=32, n_text_head=4, n_text_layer=2,
        )
    )  # fmt: skip
    nn.init.normal_(model.decoder.positional_embedding)  # the package leaves it empty, to be loaded
    return model


def speech_brain() -> nn.Module:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    return TransformerASR(
        tgt_vocab=V, input_size=16, d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, d_ffn=48,
        max_length=64, causal=False,
    )  # fmt: skip


ENTRIES = [
    Entry(
        "deep-phonemizer", "AutoregressiveTransformer", phonemes, {"text": ids(), "phonemes": ids()}, "phonemes",
        wrap=in_a_batch, reads=whole,
    ),
    Entry("openai-whisper", "Whisper", whisper, {"mel": numbers(8, 24), "tokens": ids()}, "tokens"),
    Entry(
        "speechbrain", "TransformerASR", speech_brain, {"src": numbers(24, 16), "tgt": ids()}, "tgt",
        told={"output": 1, "axes": {"src": (0,)}}, seed=1,
    ),
]  # fmt: skip
