"""CTranslate2: the weights of an encoder-decoder in its model specification; its own converter for other models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from versus.engines import SOURCE, build_once, hugging_face, only
from versus.engines.batched import ROWS
from versus.shapes import END, Case, Shape

if TYPE_CHECKING:
    import ctranslate2
    from torch import nn

    from tformer_models.seq2seq import DecoderLayer, EncoderLayer, MultiHeadAttention, Seq2SeqTransformer

PRECISIONS = {"fp32": "float32", "int8": "int8"}


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    only(precision, *PRECISIONS)

    def make(path: Path) -> None:
        quantize = None if precision == "fp32" else PRECISIONS[precision]
        if shape.kind == "translate":
            from versus.engines.source import encoder_decoder

            to_ctranslate2(encoder_decoder(folder / SOURCE, shape), path / "model", quantize, END)
        else:
            from ctranslate2.converters import TransformersConverter

            source = str(hugging_face(folder, shape))
            TransformersConverter(source).convert(str(path / "model"), quantization=quantize)

    return build_once(_path(folder, precision), make)


def _path(folder: Path, precision: str) -> Path:
    return folder / f"ctranslate2-{precision}"


class Engine:
    workers = False  # threads are workers of one thread, instead of sharing each product

    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import ctranslate2

        classes = {"translate": ctranslate2.Translator, "continue": ctranslate2.Generator, "embed": ctranslate2.Encoder}
        self.model = classes[shape.kind](
            str(_path(folder, precision) / "model"), device="cpu", compute_type=PRECISIONS[precision],
            inter_threads=threads if self.workers else 1, intra_threads=1 if self.workers else threads,
        )  # fmt: skip
        self.call = {"translate": self._translate, "continue": self._continue, "embed": self._embed}[shape.kind]
        self.kind = shape.kind
        self.tokens = _names(shape.vocabulary, shape.kind == "translate")

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        return self.call(case, inputs)

    def _translate(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        results = self.model.translate_batch(
            self._named(inputs), beam_size=case.beams, max_decoding_length=case.new, min_decoding_length=case.new
        )
        return None, [[int(token) for token in result.hypotheses[0]] for result in results]

    def _continue(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        first: list[float] = []

        def note_first_token(step: Any) -> bool:
            if not first:
                first.append(time.perf_counter())
            return False

        results = self.model.generate_batch(
            self._named(inputs), beam_size=case.beams, max_length=case.new, min_length=case.new,
            include_prompt_in_result=False, callback=note_first_token if case.beams == 1 else None,
        )  # fmt: skip
        return first[0] if first else None, [result.sequences_ids[0] for result in results]

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        """Run batches of its own: it sorts texts by their length."""
        sizes = {"max_batch_size": ROWS, "batch_type": "examples"}
        if self.kind == "translate":
            results = self.model.translate_batch(
                self._named(inputs), beam_size=1, max_decoding_length=new, min_decoding_length=new, **sizes
            )
            return [[int(token) for token in result.hypotheses[0]] for result in results]
        results = self.model.generate_batch(
            self._named(inputs), beam_size=1, max_length=new, min_length=new, include_prompt_in_result=False, **sizes
        )
        return [result.sequences_ids[0] for result in results]

    def _embed(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        import numpy as np

        hidden = self.model.forward_batch(inputs).last_hidden_state
        return None, np.array(hidden).mean(1).tolist()

    def score(self, inputs: list[list[int]], last: int) -> list[float]:
        results = self.model.score_batch(self._named(inputs))
        return [value for result in results for value in result.log_probs[-last:]]

    def _named(self, inputs: list[list[int]]) -> list[list[str]]:
        return [[self.tokens[i] for i in ids] for ids in inputs]


class FileEngine(Engine):
    workers = True


def _names(vocabulary: int, decimal: bool) -> list[str]:
    first = ["0", "1", "2"] if decimal else ["<pad>", "<s>", "</s>"]
    return [*first, *map(str, range(3, vocabulary))]


def to_ctranslate2(module: Seq2SeqTransformer, folder: Path, quantize: str | None, end: int) -> Path:
    """Write an encoder-decoder as a CTranslate2 model, whose tokens are the ids in decimal."""
    from ctranslate2.specs import common_spec, transformer_spec

    heads, pre = module.decoder[0].self_attention.heads, module.decoder[0].residuals[0].pre
    spec = transformer_spec.TransformerSpec.from_config(
        (len(module.encoder), len(module.decoder)), heads, pre_norm=pre, activation=common_spec.Activation.RELU
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
    if pre:
        _norm(spec.encoder.layer_norm, module.encoder_norm)
        _norm(spec.decoder.layer_norm, module.decoder_norm)
    _linear(spec.decoder.projection, module.output)
    spec.register_source_vocabulary([str(i) for i in range(module.source.tokens.num_embeddings)])
    spec.register_target_vocabulary([str(i) for i in range(module.output.out_features)])
    spec.config.add_source_eos = False
    spec.config.bos_token = spec.config.decoder_start_token = "1"
    spec.config.unk_token, spec.config.eos_token = "0", str(end)
    spec.validate()
    spec.optimize(quantization=quantize)
    folder.mkdir()
    spec.save(str(folder))
    return folder


def _layer(spec: Any, layer: EncoderLayer | DecoderLayer) -> None:
    norms = [residual.norm for residual in layer.residuals]
    _attention(spec.self_attention, layer.self_attention, norms[0], fused=3)
    if hasattr(layer, "cross_attention"):
        _attention(spec.attention, layer.cross_attention, norms[1], fused=2)
    _norm(spec.ffn.layer_norm, norms[-1])
    _linear(spec.ffn.linear_0, layer.feedforward.expand)
    _linear(spec.ffn.linear_1, layer.feedforward.contract)


def _attention(spec: Any, attention: MultiHeadAttention, norm: nn.LayerNorm, fused: int) -> None:
    _norm(spec.layer_norm, norm)
    parts = [attention.query, attention.key, attention.value]
    if fused == 2:
        _linear(spec.linear[0], parts[0])
    _linear(spec.linear[fused == 2], *parts[-fused:])
    _linear(spec.linear[-1], attention.output)


def _linear(spec: Any, *linears: nn.Linear) -> None:
    import torch

    spec.weight = torch.cat([linear.weight for linear in linears]).detach().clone()
    spec.bias = torch.cat([linear.bias for linear in linears]).detach().clone()


def _norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = norm.weight.detach().clone(), norm.bias.detach().clone()


def ctranslate2_model(folder: Path, compute_type: str, threads: int, workers: int = 1) -> ctranslate2.Translator:
    import ctranslate2

    return ctranslate2.Translator(
        str(folder), device="cpu", compute_type=compute_type, inter_threads=workers, intra_threads=threads
    )
