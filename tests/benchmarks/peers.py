"""The same weights in other engines' own formats."""

from __future__ import annotations

from pathlib import Path

import ctranslate2
import torch
from ctranslate2.specs import common_spec, transformer_spec
from torch import nn

from tformer_models.seq2seq import DecoderLayer, EncoderLayer, MultiHeadAttention, Seq2SeqTransformer


def to_ctranslate2(module: Seq2SeqTransformer, folder: Path, quantize: str | None, end: int) -> Path:
    """Write a post-norm encoder-decoder as a CTranslate2 model, whose tokens are the ids in decimal."""
    heads = module.decoder[0].self_attention.heads
    spec = transformer_spec.TransformerSpec.from_config(
        (len(module.encoder), len(module.decoder)), heads, pre_norm=False, activation=common_spec.Activation.RELU
    )
    for side, embedding, layers in (
        (spec.encoder, module.source, module.encoder),
        (spec.decoder, module.target, module.decoder),
    ):
        table = side.embeddings[0] if side is spec.encoder else side.embeddings
        table.weight = embedding.tokens.weight.detach().clone()
        side.scale_embeddings = True
        side.position_encodings.encodings = embedding.positions.detach().clone()
        for theirs, layer in zip(side.layer, layers, strict=True):
            _layer(theirs, layer)
    _linear(spec.decoder.projection, module.output)
    tokens = [str(i) for i in range(module.output.out_features)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.add_source_eos = False
    spec.config.bos_token = spec.config.decoder_start_token = "1"
    spec.config.unk_token, spec.config.eos_token = "0", str(end)
    spec.validate()
    spec.optimize(quantization=quantize)
    folder.mkdir()
    spec.save(str(folder))
    return folder


def _layer(spec: object, layer: EncoderLayer | DecoderLayer) -> None:
    norms = [residual.norm for residual in layer.residuals]
    _attention(spec.self_attention, layer.self_attention, norms[0], fused=3)
    if isinstance(layer, DecoderLayer):
        _attention(spec.attention, layer.cross_attention, norms[1], fused=2)
    _norm(spec.ffn.layer_norm, norms[-1])
    _linear(spec.ffn.linear_0, layer.feedforward.expand)
    _linear(spec.ffn.linear_1, layer.feedforward.contract)


def _attention(spec: object, attention: MultiHeadAttention, norm: nn.LayerNorm, fused: int) -> None:
    _norm(spec.layer_norm, norm)
    parts = [attention.query, attention.key, attention.value]
    if fused == 2:
        _linear(spec.linear[0], parts[0])
    _linear(spec.linear[fused == 2], *parts[-fused:])
    _linear(spec.linear[-1], attention.output)


def _linear(spec: object, *linears: nn.Linear) -> None:
    spec.weight = torch.cat([linear.weight for linear in linears]).detach().clone()
    spec.bias = torch.cat([linear.bias for linear in linears]).detach().clone()


def _norm(spec: object, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = norm.weight.detach().clone(), norm.bias.detach().clone()


def ctranslate2_model(folder: Path, compute_type: str, threads: int, workers: int = 1) -> ctranslate2.Translator:
    return ctranslate2.Translator(
        str(folder), device="cpu", compute_type=compute_type, inter_threads=workers, intra_threads=threads
    )
