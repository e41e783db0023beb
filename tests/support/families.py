"""Tiny, seeded source models of many families, with their reference logits and greedy tokens.

Every release must export all of them. Each has two decoder layers, so that a test fails if caches of layers are
swapped. The references come from PyTorch's forward over the whole sequence and from transformers' generate().
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from tformer_models.seq2seq import Seq2SeqTransformer

PAD, START, END = 0, 1, 2
VOCABULARY = 97
MAX_LENGTH = 64

transformers.logging.set_verbosity_error()


@dataclass(frozen=True)
class Family:
    """A source model with its reference logits and greedy tokens.

    decoder_only: whether the step input is the prompt itself.
    hf: whether it is a transformers model, which exports without an example.
    """

    name: str
    build: Callable[[], nn.Module]
    decoder_only: bool = False
    hf: bool = False

    @functools.cached_property
    def module(self) -> nn.Module:
        return self.build().eval()

    @property
    def request(self) -> str | None:
        """Return the name of the request input."""
        return None if self.decoder_only else "input_ids" if self.hf else "src"

    @torch.no_grad()
    def logits(self, source: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (time, vocabulary) of a single row, from one forward pass over the whole row."""
        module, ids = self.module, torch.from_numpy(tokens)[None]
        if not self.hf:
            return module(torch.from_numpy(source)[None], ids)[0].numpy()
        if self.decoder_only:
            return module(input_ids=ids, use_cache=False).logits[0].numpy()
        sources = torch.from_numpy(source)[None]
        return module(input_ids=sources, decoder_input_ids=ids, use_cache=False).logits[0].numpy()

    @torch.no_grad()
    def greedy(self, row: np.ndarray, max_new_tokens: int) -> list[int]:
        """Return the greedy ids for a single row, with the end token.

        A transformers model uses generate(). For others, each token is the best of
        the whole sequence's logits.
        """
        if self.hf:
            ids = torch.from_numpy(row)[None]
            ids_of_generate = self.module.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
            )[0].tolist()
            return ids_of_generate[len(row) :] if self.decoder_only else ids_of_generate[1:]
        tokens = [START]
        while len(tokens) <= max_new_tokens and tokens[-1] != END:
            tokens.append(int(self.logits(row, np.array(tokens))[-1].argmax()))
        return tokens[1:]


def _seeded(build: Callable[[], nn.Module], seed: int, gain: float = 1.0) -> nn.Module:
    """Build a model from a seed and change its weights so that its tokens vary.

    Most untrained models repeat one token for every input. Random signs of the norms keep a tied output projection from
    choosing its own input again. Biases and norms move away from values that would hide a mistake.
    gain: the factor for the matrices between embedding and output.
    """
    torch.manual_seed(seed)
    module = build()
    with torch.no_grad():
        for owner in module.modules():
            for parameter in owner.parameters(recurse=False):
                if parameter.dim() < 2:
                    parameter *= torch.randint_like(parameter, 2) * 2 - 1
                    parameter += 0.05 * torch.randn_like(parameter)
                elif not isinstance(owner, nn.Embedding):
                    parameter *= gain
    return module


# -- Seq2SeqTransformer, over its options ---------------------------------------------------------------------------


def seq2seq(seed: int, gain: float = 1.0, **options: Any) -> nn.Module:
    sizes = dict(width=48, heads=3, encoder_layers=1, decoder_layers=2, feedforward=80, max_length=MAX_LENGTH)
    return _seeded(lambda: Seq2SeqTransformer(VOCABULARY - 6, VOCABULARY, **{**sizes, **options}), seed, gain)


# -- hand-written models --------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """x + PE, Vaswani et al. 2017, §3.5."""

    table: torch.Tensor

    def __init__(self, d: int) -> None:
        super().__init__()
        angle = torch.arange(MAX_LENGTH)[:, None] * torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        table = torch.zeros(1, MAX_LENGTH, d)
        table[0, :, 0::2], table[0, :, 1::2] = angle.sin(), angle.cos()
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[:, : x.size(1)]


class Attention(nn.Module):
    """Multi-head attention as tutorials write it, with scores of -1e9 where mask == 0."""

    def __init__(self, heads: int, d: int) -> None:
        super().__init__()
        self.heads, self.d_k = heads, d // heads
        self.linears = nn.ModuleList(nn.Linear(d, d) for _ in range(4))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch = q.size(0)
        q, k, v = [
            f(x).view(batch, -1, self.heads, self.d_k).transpose(1, 2)
            for f, x in zip(self.linears, (q, k, v), strict=False)
        ]
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        self.weights = torch.softmax(
            scores.masked_fill(mask.unsqueeze(1) == 0, -1e9), -1
        )  # read by test_extra_outputs.py
        joined = torch.matmul(self.weights, v).transpose(1, 2).contiguous()
        return self.linears[3](joined.view(batch, -1, self.heads * self.d_k))


class HandWritten(nn.Module):
    """An encoder-decoder written by hand, with a padding mask for the target too."""

    def __init__(self, vocabulary: int = VOCABULARY, d: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocabulary, d), nn.Embedding(vocabulary, d)
        self.positions, self.out = Positions(d), nn.Linear(d, vocabulary)

        def layer(attentions: int) -> nn.ModuleList:
            return nn.ModuleList(
                [
                    *(Attention(4, d) for _ in range(attentions)),
                    nn.Linear(d, 2 * d),
                    nn.Linear(2 * d, d),
                    *(nn.LayerNorm(d) for _ in range(attentions + 1)),
                ]
            )

        self.encoder = nn.ModuleList([layer(1)])
        self.decoder = nn.ModuleList(layer(2) for _ in range(layers))

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        source_mask = (src != PAD).unsqueeze(-2)
        x = self.positions(self.src(src) * 6)
        for a, w1, w2, n1, n2 in self.encoder:
            x = n1(x + a(x, x, x, source_mask))
            x = n2(x + w2(torch.relu(w1(x))))
        size = tgt.size(-1)
        target_mask = (tgt != PAD).unsqueeze(-2) & (torch.triu(torch.ones(1, size, size), diagonal=1) == 0)
        y = self.positions(self.tgt(tgt) * 6)
        for a, c, w1, w2, n1, n2, n3 in self.decoder:
            y = n1(y + a(y, y, y, target_mask))
            y = n2(y + c(y, x, x, source_mask))
            y = n3(y + w2(torch.relu(w1(y))))
        return torch.log_softmax(self.out(y), -1)


class AroundTorchTransformer(nn.Module):
    """torch.nn.Transformer between embeddings and a projection."""

    def __init__(self, vocabulary: int = VOCABULARY, d: int = 32) -> None:
        super().__init__()
        self.embed, self.positions, self.out = nn.Embedding(vocabulary, d), Positions(d), nn.Linear(d, vocabulary)
        self.transformer = nn.Transformer(d, 4, 1, 2, 64, batch_first=True)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        padding, causal = src == PAD, nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        out = self.transformer(
            self.positions(self.embed(src)),
            self.positions(self.embed(tgt)),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.out(out)


# -- transformers ---------------------------------------------------------------------------------------------------

_IDS = dict(vocab_size=VOCABULARY, pad_token_id=PAD, eos_token_id=END, bos_token_id=START)
_ENCODER_DECODER_IDS = dict(decoder_start_token_id=START, forced_eos_token_id=None)


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        **_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LENGTH, initializer_range=0.3
    )
    return _hugging_face(transformers.GPT2LMHeadModel, config, attention, 10, 0.5)


def llama(attention: str, width: int = 32) -> nn.Module:
    config = transformers.LlamaConfig(
        **_IDS, hidden_size=width, intermediate_size=width + 16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_LENGTH, initializer_range=1.7 / math.sqrt(width),
    )  # fmt: skip
    return _hugging_face(transformers.LlamaForCausalLM, config, attention, 11)


def mixtral(attention: str) -> nn.Module:
    config = transformers.MixtralConfig(
        **_IDS, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=MAX_LENGTH,
        initializer_range=0.3,
    )  # fmt: skip
    return _hugging_face(transformers.MixtralForCausalLM, config, attention, 11)


def marian(attention: str) -> nn.Module:
    config = transformers.MarianConfig(
        **_IDS, **_ENCODER_DECODER_IDS, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=MAX_LENGTH,
        init_std=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    return _hugging_face(transformers.MarianMTModel, config, attention, 4)


def t5(attention: str) -> nn.Module:
    config = transformers.T5Config(
        **_IDS, **_ENCODER_DECODER_IDS, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=48,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, initializer_factor=1.0,
    )  # fmt: skip
    return _hugging_face(transformers.T5ForConditionalGeneration, config, attention, 9)


def _hugging_face(kind: Any, config: Any, attention: str, seed: int, gain: float = 1.0) -> nn.Module:
    config._attn_implementation = attention
    module = _seeded(lambda: kind(config), seed, gain)
    module.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, eos_token_id=END, bos_token_id=START, decoder_start_token_id=START
    )
    return module


FAMILIES = [
    Family("seq2seq", lambda: seq2seq(14, 0.5)),  # the defaults: sinusoidal, post-norm, relu, tied
    Family("seq2seq-learned-pre-gelu", lambda: seq2seq(0, positions="learned", norm="pre", activation="gelu")),
    Family("seq2seq-pre-untied", lambda: seq2seq(5, norm="pre", tie_output=False)),
    Family(
        "seq2seq-learned-gelu-untied",
        lambda: seq2seq(12, 0.5, positions="learned", activation="gelu", tie_output=False),
    ),
    Family("hand-written", lambda: _seeded(HandWritten, 0)),
    Family("torch-transformer", lambda: _seeded(AroundTorchTransformer, 11, 0.5)),
    Family("gpt2-sdpa", functools.partial(gpt2, "sdpa"), decoder_only=True, hf=True),
    Family("llama-sdpa", functools.partial(llama, "sdpa"), decoder_only=True, hf=True),
    Family("llama-eager", functools.partial(llama, "eager"), decoder_only=True, hf=True),
    Family("marian-eager", functools.partial(marian, "eager"), hf=True),
    Family("t5-eager", functools.partial(t5, "eager"), hf=True),
    Family("mixtral", functools.partial(mixtral, "sdpa"), decoder_only=True, hf=True),
]  # fmt: skip


# -- models for quantisation: weights are most of the file, and the embeddings of one token are 50 times larger ------

LOUD_ID = END + 1


def _with_loud_token(module: nn.Module) -> nn.Module:
    for owner in module.modules():
        if isinstance(owner, nn.Embedding):
            owner.weight.data[LOUD_ID] *= 50
    return module


QUANTIZED_FAMILIES = [
    Family("wide-seq2seq", lambda: _with_loud_token(seq2seq(3, width=192, feedforward=256))),
    Family("wide-llama", lambda: _with_loud_token(llama("sdpa", width=160)), decoder_only=True, hf=True),
]
BY_NAME = {family.name: family for family in (*FAMILIES, *QUANTIZED_FAMILIES)}
