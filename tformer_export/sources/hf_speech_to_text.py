"""A transformers model that writes what it hears: an encoder of spectrograms, and a decoder whose first tokens say what
is to be done. What these are is read from its generation config, and how its sounds are made from its feature
extractor."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from tformer_export.common.log_silence import quiet
from tformer_export.sources.adapter import Adapter
from tformer_export.sources.base import Source, as_float32
from tformer_export.sources.hf_audio import read_extractor
from tformer_export.sources.task_names import RECOGNIZES
from tformer_export.sources.tokenizer import read_writing_tokenizer
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import Outcome, SpecialTokens
from tformer_runtime.preprocess.audio import LOG_MEL
from tformer_runtime.tasks.speech_to_text import Opening

STEP = "decoder_input_ids"  # transformers' name, of every decoder beside an encoder
KEPT = (  # of a file's defaults; max_new_tokens is of its opening
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "logit_bias", "repetition_penalty",
    "no_repeat_ngram_size", "min_new_tokens", "num_beams", "length_penalty", "early_stopping",
)  # fmt: skip
_NOT_CARRIED = (  # of generation configs; what else changes what generate() writes
    "condition_on_prev_tokens", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold", "prompt_ids",
    "do_sample", "num_return_sequences", "num_beam_groups", "diversity_penalty", "forced_bos_token_id", "min_length",
)  # fmt: skip
logger = logging.getLogger(__name__)


def from_transformers_that_writes(
    module: Any, name: str, extractor: Any, tokenizer: Any, special: SpecialTokens, defaults: Mapping[str, Any]
) -> Source:
    """extractor, tokenizer: transformers' own; without a tokenizer the file gives ids. special, defaults: of its
    generation config. SourceError for an extractor that does something else than is done
    here, and for a model that is not made for windows of one size."""
    if extractor is None:
        raise SourceError(
            f"{name} has no feature extractor, which says how its sounds are made: put its preprocessor_config.json "
            "into the folder, or give its processor (tokenizer=)"
        )
    audio = read_extractor(extractor)
    if audio.features != LOG_MEL:
        raise SourceError(
            f"{name} writes what it hears in samples, which is done here of windows of log mel alone: load it in "
            "Python and give an example of its inputs"
        )
    single: Any = as_float32(module)
    generation = module.generation_config
    features = torch.randn((2, audio.mels, audio.frames), generator=torch.Generator().manual_seed(0))
    example = {module.main_input_name: features, STEP: torch.arange(1, 7).reshape(2, 3) % 3}
    given = generation.to_diff_dict()
    lost = [option for option in _NOT_CARRIED if given.get(option)]
    if "min_length" in lost and "min_new_tokens" not in given:  # it counts the first tokens, which are many or few
        defaults = {option: value for option, value in defaults.items() if option != "min_new_tokens"}
    if lost:
        logger.warning("the generation config sets %s, which the file does not carry over", ", ".join(lost))

    def dictated(sample: Any, times: bool, most: int) -> list[int]:
        read = extractor(sample, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        with torch.no_grad(), quiet("transformers"):
            found = single.generate(read[module.main_input_name], return_timestamps=times, max_new_tokens=most)
        ids: list[int] = found[0].tolist()
        return ids

    opening = opening_of(module)
    below = None if opening.no_timestamps is None else opening.no_timestamps + 1
    return Source(
        module=Adapter(single, list(example), constants={"use_cache": False}),
        example=example,
        step=STEP,
        name=name,
        task=RECOGNIZES,
        dynamic={module.main_input_name: (0,)},
        special=special,
        defaults={option: value for option, value in defaults.items() if option in KEPT},
        tokenizers={} if tokenizer is None else {STEP: read_writing_tokenizer(tokenizer, below)},
        outcome=Outcome(settings=asdict(opening)),
        preparation={module.main_input_name: audio.preparation},
        dictated=dictated,
    )


def opening_of(module: Any) -> Opening:
    """What the generation config says of the first tokens and of times."""
    generation = module.generation_config

    def said(name: str, default: Any = None) -> Any:
        value = getattr(generation, name, None)
        return default if value is None else value

    forced = said("forced_decoder_ids") or getattr(module.config, "forced_decoder_ids", None) or ()
    if [place for place, _ in forced] != list(range(1, len(forced) + 1)):
        forced = ()
    precision = inspect.signature(module.generate).parameters
    step, frame = (precision[name].default for name in ("time_precision", "time_precision_features"))
    return Opening(
        languages=dict(said("lang_to_id", {})),
        tasks=dict(said("task_to_id", {})),
        language=said("language"),
        task=said("task"),
        forced=tuple(token for _, token in forced),
        multilingual=bool(said("is_multilingual", True)),
        no_timestamps=said("no_timestamps_token_id"),
        timestamps=bool(said("return_timestamps", False)),
        latest=said("max_initial_timestamp_index"),
        step=float(step),
        stride=round(step / frame),
        most=said("max_new_tokens") or said("max_length"),
    )
