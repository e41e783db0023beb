"""A transformers model, in memory or in a folder. Its inputs follow from its config, whatever its architecture."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tformer_export.source.adapter import Adapter
from tformer_export.source.base import Source, as_float32
from tformer_export.source.derived import padding
from tformer_runtime.errors import MissingExtraError, SourceError
from tformer_runtime.manifest import SpecialTokens

logger = logging.getLogger(__name__)


def is_transformers_model(module: Any) -> bool:
    """Whether the module describes itself the way transformers' models do."""
    return isinstance(module, nn.Module) and hasattr(module, "config") and hasattr(module, "main_input_name")


def from_folder(path: str | os.PathLike[str], step: str | None = None, tokenizer: bool = True) -> Source:
    """A folder with config.json, weights and, if there is one, tokenizer.json."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "reading a Hugging Face folder needs transformers: pip install 'tformer[hf]'"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        module = kind.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SourceError(
            f"{os.fspath(path)} is not a Hugging Face folder that transformers can load: {reason}"
        ) from error
    tokenizers: dict[str, str] = {}
    file = os.path.join(path, "tokenizer.json")
    if os.path.exists(file):
        with open(file, encoding="utf-8") as text:
            tokenizers = dict.fromkeys(("input_ids", "decoder_input_ids"), text.read())
    return from_transformers(module, tokenizers, name=os.path.basename(os.path.abspath(path)))


def from_transformers(module: Any, tokenizers: Mapping[str, str] | None = None, name: str | None = None) -> Source:
    """Inputs: `input_ids`, and for an encoder-decoder its padding mask and `decoder_input_ids`, which is stepped over.

    A decoder-only model gets no mask: rows are right-padded, so causal attention never reads padding.
    """
    config, generation = module.config, getattr(module, "generation_config", None)
    ids = torch.arange(1, 7).reshape(2, 3) % 3
    example, masks = {"input_ids": ids}, {}
    step = "input_ids"
    if config.is_encoder_decoder:
        masks["attention_mask"] = padding("input_ids", dtype=torch.int64)
        example["attention_mask"] = torch.ones_like(ids)
        step = "decoder_input_ids"
        example[step] = ids
    special = _special(config, generation)
    limits = [getattr(config, n, None) for n in ("max_position_embeddings", "n_positions")]
    limit = min((n for n in limits if isinstance(n, int) and n > 0), default=None)
    return Source(
        module=Adapter(as_float32(module), list(example), constants={"use_cache": False}),
        example=example,
        step=step,
        name=name or type(module).__name__,
        task="text2text-generation" if config.is_encoder_decoder else "text-generation",
        masks=masks,
        special=special,
        tokenizers={k: v for k, v in (tokenizers or {}).items() if k in example},
        defaults=_defaults(generation),
        max_length=min(limit, 512) if limit else None,
    )


def _special(config: Any, generation: Any) -> SpecialTokens:
    def of(name: str) -> Any:
        value = getattr(generation, name, None)
        return getattr(config, name, None) if value is None else value

    end = of("eos_token_id")
    ends = tuple(end) if isinstance(end, (list, tuple)) else () if end is None else (end,)
    pad = of("pad_token_id")
    pad = pad if isinstance(pad, int) else (ends or (0,))[0]
    start: tuple[int, ...] = ()
    if config.is_encoder_decoder:
        first = of("decoder_start_token_id")
        first = of("bos_token_id") if first is None else first
        if first is None:
            raise SourceError("the model's config names no decoder_start_token_id: set it before exporting")
        start = (int(first),)
    return SpecialTokens(start, ends, pad)


_OPTIONS = {  # transformers' name → ours, of the options that mean the same
    "num_beams": "beam_size",
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "num_return_sequences": "num_return",
}
_NOT_CARRIED = (  # options that change what generate() gives and that the runtime does not have
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "num_beam_groups",
    "min_p",
    "typical_p",
)
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}


def _defaults(generation: Any) -> dict[str, Any]:
    """The generation options that the model's own generation config sets."""
    if generation is None:
        return {}
    names = _OPTIONS | (_SAMPLING if getattr(generation, "do_sample", False) else {})
    set_by_config = generation.to_diff_dict()
    lost = [name for name in _NOT_CARRIED if set_by_config.get(name) is not None]
    if lost:
        logger.warning("the model's generation config sets %s, which the file does not carry over", ", ".join(lost))
    return {ours: set_by_config[theirs] for theirs, ours in names.items() if set_by_config.get(theirs) is not None}
