"""Models of series and tables of public repositories."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from wild_packages.entry import Entry, Input, numbers


def table() -> nn.Module:
    from rtdl import FTTransformer

    return FTTransformer.make_baseline(
        n_num_features=3, cat_cardinalities=[4, 5], d_token=32, n_blocks=2, attention_dropout=0.0, ffn_d_hidden=48,
        ffn_dropout=0.0, residual_dropout=0.0, d_out=2,
    )  # fmt: skip


SIZES = {
    "task_name": "long_term_forecast", "seq_len": 24, "label_len": 12, "pred_len": 12, "enc_in": 5, "dec_in": 5,
    "c_out": 5, "d_model": 32, "n_heads": 4, "d_ff": 48, "e_layers": 2, "d_layers": 1, "embed": "timeF", "freq": "h",
    "dropout": 0.0, "factor": 1, "activation": "gelu",
}  # fmt: skip


def inverted() -> nn.Module:
    from models.iTransformer import Model

    return Model(SimpleNamespace(**SIZES))


def patches() -> nn.Module:
    from models.PatchTST import Model

    return Model(SimpleNamespace(**SIZES), patch_len=8, stride=4)


def frequencies() -> nn.Module:
    from models.FEDformer import Model

    fields = {
        "version": "Fourier", "mode_select": "lowest", "modes": 8, "moving_avg": [4, 6], "output_attention": False,
        "n_heads": 8,
    }  # fmt: skip
    model = Model(SimpleNamespace(**SIZES | fields))
    for weight in model.parameters():
        if weight.is_complex():  # the repository makes them so small that they change nothing
            weight.data *= 1e5
    return model


def informer() -> nn.Module:
    from models.model import Informer

    return Informer(
        5, 5, 5, 24, 12, 12, d_model=32, n_heads=4, e_layers=2, d_layers=1, d_ff=48, attn="full", embed="timeF"
    )


LIBRARY = {"commit": "4e938a1767106324dd753b2a44832bf870a0252e", "unused": ("reformer_pytorch",)}

ENTRIES = [
    Entry(
        "yandex-research/rtdl", "FTTransformer", table, {"x_num": numbers(3), "x_cat": Input((2,), 4, 0)},
        told={"axes": {"x_num": (0,), "x_cat": (0,)}}, commit="4ca77be57aae445648df63e9ef3a5566b1f0a835",
    ),
    Entry(
        "thuml/Time-Series-Library", "iTransformer", inverted, {"x_enc": numbers(24, 5), "x_mark_enc": numbers(24, 4)},
        told={
            "axes": {"x_enc": (0,), "x_mark_enc": (0,)},
            "fixed_arguments": {"x_dec": None, "x_mark_dec": None},
        },
        **LIBRARY,
    ),
    Entry(
        "thuml/Time-Series-Library", "PatchTST", patches, {"x_enc": numbers(24, 5)},
        told={
            "axes": {"x_enc": (0,)},
            "fixed_arguments": {"x_mark_enc": None, "x_dec": None, "x_mark_dec": None},
        },
        **LIBRARY,
    ),
    Entry(
        "MAZiqing/FEDformer", "FEDformer, Fourier", frequencies,
        {"x_enc": numbers(24, 5), "x_mark_enc": numbers(24, 4), "x_dec": numbers(24, 5), "x_mark_dec": numbers(24, 4)},
        told={"axes": {"x_enc": (0,), "x_mark_enc": (0,), "x_dec": (0,), "x_mark_dec": (0,)}},
        unused=("matplotlib", "matplotlib.pyplot", "utils.masking"), commit="c0f6b972def125691434d62be1ecadf710ae921a",
    ),
    Entry(
        "zhouhaoyi/Informer2020", "Informer, full attention", informer,
        {"x_enc": numbers(24, 5), "x_mark_enc": numbers(24, 4), "x_dec": numbers(24, 5), "x_mark_dec": numbers(24, 4)},
        told={"axes": {"x_enc": (0,), "x_mark_enc": (0,), "x_dec": (0,), "x_mark_dec": (0,)}},
        commit="29f2a739226a509202a092b464163da81fa74960",
    ),
]  # fmt: skip
