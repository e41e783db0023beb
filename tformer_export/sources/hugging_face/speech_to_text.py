"""A transformers model that transcribes speech: an encoder of spectrograms and a decoder with a prompt.

The prompt, the first tokens of the decoder, states the task. It is read from the generation config, and the
preprocessing of recordings from the feature extractor.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import asdict

from tformer_export.common.log_silence import quiet
from tformer_export.sources.base import Source, as_float32
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.hugging_face.audio import read_extractor
from tformer_export.sources.task_names import RECOGNIZES
from tformer_export.sources.tokenizer import read_writing_tokenizer
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import OutputMeaning, SpecialTokens
from tformer_runtime.preprocess.audio import LOG_MEL
from tformer_runtime.tasks.speech_to_text import DecoderPrompt

STEP_INPUT = "decoder_input_ids"  # transformers' name, in every encoder-decoder
CARRIED_DEFAULTS = (  # generation options that become the file's; max_new_tokens belongs to the prompt
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "logit_bias", "repetition_penalty",
    "no_repeat_ngram_size", "min_new_tokens", "num_beams", "length_penalty", "early_stopping",
)  # fmt: skip
_NOT_CARRIED = (  # other options of generation configs that change the result of generate()
    "condition_on_prev_tokens", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold", "prompt_ids",
    "do_sample", "num_return_sequences", "num_beam_groups", "diversity_penalty", "forced_bos_token_id", "min_length",
    "stop_strings",
)  # fmt: skip
logger = logging.getLogger(__name__)


def from_speech_to_text_model(
    module: Any, name: str, extractor: Any, tokenizer: Any, special: SpecialTokens, defaults: Mapping[str, Any]
) -> Source:
    """Read a model that transcribes speech.

    name: the name of the model in reports.
    extractor, tokenizer: transformers' own. Without a tokenizer the file gives ids.
    special, defaults: special tokens and generation options of its generation config.

    Raises SourceError for an extractor that is not supported, and for a model without windows of one size.
    """
    if extractor is None:
        raise SourceError(
            f"{name} has no feature extractor, which describes how recordings become inputs: put its "
            "preprocessor_config.json into the folder, or give its processor (tokenizer=)"
        )
    audio = read_extractor(extractor)
    if audio.features != LOG_MEL:
        raise SourceError(
            f"{name} transcribes samples, but only models that read log mel spectrograms are supported: load it in "
            "Python and give an example of its inputs"
        )
    single: Any = as_float32(module)
    generation = module.generation_config
    features = torch.randn((2, audio.num_mel_bins, audio.frames), generator=torch.Generator().manual_seed(0))
    example = {module.main_input_name: features, STEP_INPUT: torch.arange(1, 7).reshape(2, 3) % 3}
    settings = generation.to_diff_dict()
    lost = [option for option in _NOT_CARRIED if settings.get(option)]
    if "min_length" in lost and "min_new_tokens" not in settings:  # it counts the prompt, whose length varies
        defaults = {option: value for option, value in defaults.items() if option != "min_new_tokens"}
    if lost:
        logger.warning("the generation config sets %s, which the file does not carry over", ", ".join(lost))

    def transcribe(sample: Any, times: bool, max_tokens: int) -> list[int]:
        read = extractor(sample, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        with torch.no_grad(), quiet("transformers"):
            generated = single.generate(
                read[module.main_input_name], return_timestamps=times, max_new_tokens=max_tokens
            )
        ids: list[int] = generated[0].tolist()
        return ids

    opening = read_decoder_prompt(module)
    below = None if opening.no_timestamps is None else opening.no_timestamps + 1
    return Source(
        made_example=True,
        module=Adapter(single, list(example), fixed_arguments={"use_cache": False}),
        example=example,
        step_input=STEP_INPUT,
        name=name,
        task=RECOGNIZES,
        axes={module.main_input_name: (0,)},
        special_tokens=special,
        generation_defaults={option: value for option, value in defaults.items() if option in CARRIED_DEFAULTS},
        tokenizers={} if tokenizer is None else {STEP_INPUT: read_writing_tokenizer(tokenizer, below)},
        output_meaning=OutputMeaning(settings=asdict(opening)),
        preprocessing={module.main_input_name: audio.manifest_entry},
        transcribe=transcribe,
    )


def read_decoder_prompt(module: Any) -> DecoderPrompt:
    """Read the decoder prompt and the settings of time tokens from the generation config."""
    generation = module.generation_config

    def setting(name: str, default: Any = None) -> Any:
        value = getattr(generation, name, None)
        return default if value is None else value

    forced = setting("forced_decoder_ids") or getattr(module.config, "forced_decoder_ids", None) or ()
    if [place for place, _ in forced] != list(range(1, len(forced) + 1)):
        forced = ()
    precision = inspect.signature(module.generate).parameters
    step, frame = (precision[name].default for name in ("time_precision", "time_precision_features"))
    return DecoderPrompt(
        languages=dict(setting("lang_to_id", {})),
        tasks=dict(setting("task_to_id", {})),
        language=setting("language"),
        task=setting("task"),
        forced=tuple(token for _, token in forced),
        multilingual=bool(setting("is_multilingual", True)),
        no_timestamps=setting("no_timestamps_token_id"),
        timestamps=bool(setting("return_timestamps", False)),
        latest=setting("max_initial_timestamp_index"),
        step=float(step),
        stride=round(step / frame),
        max_new_tokens=setting("max_new_tokens") or setting("max_length"),
    )
