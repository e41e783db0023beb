"""Models that run once for each input: texts, proteins, audio, tables, series."""

from __future__ import annotations

import torch
from torch import nn

from tformer_export import lengths
from wild_packages.entry import PAD, VOCABULARY, Entry, Input, ids, numbers

V = VOCABULARY
PADDED = {"special_tokens": {"pad_token_id": PAD}}


def x_encoder() -> nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=16, rel_pos_bias=True)
    return TransformerWrapper(num_tokens=V, max_seq_len=64, attn_layers=layers)


def phonemes() -> nn.Module:
    from dp.model.model import ForwardTransformer

    return ForwardTransformer(V, V, d_model=32, d_fft=48, layers=2, heads=4)


def bert() -> nn.Module:
    from bert_pytorch import BERT

    return BERT(V, hidden=32, n_layers=2, attn_heads=4)


def clip_text() -> nn.Module:
    from open_clip.transformer import TextTransformer

    return TextTransformer(context_length=64, vocab_size=V, width=32, heads=4, layers=2, output_dim=16)


def conformer() -> nn.Module:
    from conformer import Conformer

    return Conformer(dim=32, depth=2, dim_head=16, heads=4, conv_kernel_size=7)


def audio_conformer() -> nn.Module:
    from torchaudio.models import Conformer

    return Conformer(32, num_heads=4, ffn_dim=48, num_layers=2, depthwise_conv_kernel_size=7)


def emformer() -> nn.Module:
    from torchaudio.models import Emformer

    return Emformer(
        32, num_heads=4, ffn_dim=48, num_layers=2, segment_length=4, left_context_length=8, right_context_length=0
    )


def wav2vec() -> nn.Module:
    from torchaudio.models import wav2vec2_model

    return wav2vec2_model(
        extractor_mode="layer_norm", extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)], extractor_conv_bias=False,
        encoder_embed_dim=32, encoder_projection_dropout=0.0, encoder_pos_conv_kernel=9, encoder_pos_conv_groups=4,
        encoder_num_layers=2, encoder_num_heads=4, encoder_attention_dropout=0.0, encoder_ff_interm_features=48,
        encoder_ff_interm_dropout=0.0, encoder_dropout=0.0, encoder_layer_norm_first=True, encoder_layer_drop=0.0,
        aux_num_out=12,
    )  # fmt: skip


def nystrom() -> nn.Module:
    from nystrom_attention.nystrom_attention import Nystromformer

    return Nystromformer(dim=32, dim_head=16, heads=4, depth=2, num_landmarks=4)


def streaming() -> nn.Module:
    from encodec.modules.transformer import StreamingTransformerEncoder

    return StreamingTransformerEncoder(32, num_heads=4, num_layers=2, past_context=6)


def table() -> nn.Module:
    from tab_transformer_pytorch import FTTransformer

    return FTTransformer(categories=(5, 7, 4), num_continuous=3, dim=32, depth=2, heads=4, dim_head=16, dim_out=2)


def inverted() -> nn.Module:
    from iTransformer import iTransformer

    return iTransformer(num_variates=5, lookback_len=24, dim=32, depth=2, heads=4, dim_head=16, pred_length=6)


def chronos() -> nn.Module:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    config = T5Config(
        vocab_size=2,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        is_encoder_decoder=True,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    config.chronos_config = {
        "context_length": 32, "prediction_length": 8, "input_patch_size": 4, "input_patch_stride": 4,
        "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True,
    }  # fmt: skip
    return ChronosBoltModelForForecasting(config)


FRAMES = {"x": numbers(None, 32)}
WITH_LENGTHS = {"lengths": (lengths("input"), lambda input: torch.tensor([input.shape[1]]))}

ENTRIES = [
    Entry("x-transformers", "TransformerWrapper(Encoder)", x_encoder, told=PADDED),
    Entry(
        "deep-phonemizer",
        "ForwardTransformer",
        phonemes,
        {"text": ids()},
        told=PADDED,
        wrap=lambda rows: {"batch": dict(rows)},
    ),
    Entry("bert-pytorch", "BERT", bert, {"x": ids(), "segment_info": Input((None,), 3, 0)}, told=PADDED),
    Entry("open-clip-torch", "TextTransformer", clip_text, {"text": Input((64,), V)}, told={"axes": {"text": (0,)}}),
    Entry("conformer", "Conformer", conformer, FRAMES),
    Entry(
        "torchaudio",
        "Conformer",
        audio_conformer,
        {"input": numbers(None, 32)},
        masks=WITH_LENGTHS,
    ),
    Entry("torchaudio", "Emformer", emformer, {"input": numbers(None, 32)}, masks=WITH_LENGTHS),
    Entry("torchaudio", "Wav2Vec2Model", wav2vec, {"waveforms": numbers(None)}, length=7, unit=40),
    Entry(
        "nystrom-attention",
        "Nystromformer",
        nystrom,
        FRAMES,
        refusal="takes another execution path if 'x' has 4 positions",
        why="a length is filled up to a multiple",
    ),
    Entry("encodec", "StreamingTransformerEncoder", streaming, FRAMES),
    Entry(
        "tab-transformer-pytorch",
        "FTTransformer",
        table,
        {"x_categ": Input((3,), 4, 0), "x_numer": numbers(3)},
        told={"axes": {"x_categ": (0,), "x_numer": (0,)}},
    ),
    Entry("iTransformer", "iTransformer", inverted, {"x": numbers(24, 5)}),
    Entry(
        "chronos-forecasting",
        "ChronosBoltModelForForecasting",
        chronos,
        {"context": numbers(32)},
        told={"output": "quantile_preds"},
    ),
]
