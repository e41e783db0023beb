"""Encoder-decoders of public repositories."""

from __future__ import annotations

import torch
from torch import nn

from tformer_export import causal, padding
from wild_packages.entry import PAD, START, VOCABULARY, Entry, ids

V = VOCABULARY


def all_you_need() -> nn.Module:
    from transformer.Models import Transformer

    return Transformer(
        V, V, src_pad_idx=PAD, trg_pad_idx=PAD, d_word_vec=32, d_model=32, d_inner=48, n_layers=2, n_head=4, d_k=8,
        d_v=8, n_position=64,
    )  # fmt: skip


def in_rows(module: nn.Module, src_seq: torch.Tensor, trg_seq: torch.Tensor) -> torch.Tensor:
    """The module puts the positions of all rows into one axis."""
    return module(src_seq, trg_seq)[None]


def annotated() -> nn.Module:
    from the_annotated_transformer import make_model

    torch.manual_seed(0)  # the import draws numbers, the first time
    return make_model(V, V, N=2, d_model=32, d_ff=48, h=4)


def generated(module: nn.Module, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
    """The caller applies the generator and makes the masks, as `greedy_decode` of the repository."""
    from the_annotated_transformer import subsequent_mask

    return module.generator(module(src, tgt, (src != PAD).unsqueeze(-2), subsequent_mask(tgt.shape[1])))


def hyunwoong() -> nn.Module:
    from models.model.transformer import Transformer

    return Transformer(
        PAD, PAD, START, V, V, d_model=32, n_head=4, max_len=64, ffn_hidden=48, n_layers=2, drop_prob=0.0, device="cpu"
    )


ENTRIES = [
    Entry(
        "jadore801120/attention-is-all-you-need-pytorch", "Transformer", all_you_need,
        {"src_seq": ids(), "trg_seq": ids()}, "trg_seq", reads=in_rows,
        commit="132907dd272e2cc92e3c10e6c4e783a87ff8893d",
    ),
    Entry(
        "harvardnlp/annotated-transformer", "EncoderDecoder", annotated, {"src": ids(), "tgt": ids()}, "tgt",
        told={"head": "generator"},
        masks={
            "src_mask": (padding("src", shape=("batch", 1, "time")), generated),
            "tgt_mask": (causal("tgt", shape=("batch", "time", "time")), generated),
        },
        reads=generated, commit="debc9fd747bb2123160a98046ad1c2d4da44a567",
        unused=(
            "altair", "torchtext", "torchtext.data", "torchtext.data.functional", "torchtext.vocab",
            "torchtext.datasets", "spacy", "GPUtil",
        ),
    ),
    Entry(
        "hyunwoongko/transformer", "Transformer", hyunwoong, {"src": ids(), "trg": ids()}, "trg",
        commit="63286547b9cd174a6cfc204832271814d685181f",
    ),
]  # fmt: skip
