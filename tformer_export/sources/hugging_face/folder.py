"""A transformers model, in memory or in a folder. Its inputs follow from its config, whatever its architecture."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import padding
from tformer_export.common.packed_weight import PackedWeight
from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK
from tformer_export.sources.base import Source, as_float32
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.call.outputs import choose_output
from tformer_export.sources.hugging_face.audio import AUDIO_INPUTS, from_audio_model, load_extractor
from tformer_export.sources.hugging_face.gptq_awq import load_packed, read_packing
from tformer_export.sources.hugging_face.hub import model_name
from tformer_export.sources.hugging_face.image_prompts import (
    from_image_prompt_model,
    load_prompt_processor,
    reads_images,
)
from tformer_export.sources.hugging_face.images import from_image_model, load_processor, with_processor
from tformer_export.sources.hugging_face.peft_adapter import (
    PeftAdapter,
    is_adapter_folder,
    label_options,
    merge_checked,
    read_adapter,
)
from tformer_export.sources.hugging_face.single_pass import from_text_model, with_tokenizer
from tformer_export.sources.hugging_face.speech_to_text import from_speech_to_text_model
from tformer_export.sources.sentence_transformers.layers import with_modules
from tformer_export.sources.sentence_transformers.saved import SavedModel, read_saved
from tformer_export.sources.sentence_transformers.scores import with_named_activation
from tformer_export.sources.sentence_transformers.static import from_static
from tformer_export.sources.task_names import (
    ANSWERS_IMAGES,
    CLASSIFIES,
    FEATURES,
    GENERATES,
    RECOGNIZES,
    TRANSLATES,
    class_for,
    task_of_class,
)
from tformer_export.sources.tokenizer import (
    has_tokenizer,
    load_tokenizer,
    read_chat_template,
    read_chat_tokens,
    read_tokenizers,
)
from tformer_export.sources.untrusted_files import refuse_outside_weights, refuse_special_files
from tformer_runtime.base.errors import MissingExtraError, SourceError
from tformer_runtime.base.extras import install_command
from tformer_runtime.decoding.options import OPTIONS
from tformer_runtime.format.manifest import SpecialTokens

logger = logging.getLogger(__name__)

PIXELS = "pixel_values"  # transformers' name, of every model and processor


_LOADED_WEIGHTS = re.compile(r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?")


def is_weights_file(path: Path) -> bool:
    """Return whether a file holds weights alone: in safetensors, or as transformers names it in a folder."""
    in_folder = _LOADED_WEIGHTS.fullmatch(path.name) is not None and (path.parent / "config.json").exists()
    return path.suffix == ".safetensors" or in_folder


def folder_of_weights(path: Path) -> Path:
    """Return the folder that a file of weights belongs to.

    Raises SourceError for a file without a config.json, or of a name that transformers does not load.
    """
    if not (path.parent / "config.json").exists():
        raise SourceError(
            f"{path} holds weights alone, without the model that computes with them: put the config.json that belongs "
            "to them, and the tokenizer's files, into the same folder; or name the function that makes the model with "
            "--factory"
        )
    if not _LOADED_WEIGHTS.fullmatch(path.name):
        raise SourceError(
            f"{path} is not the file of weights that transformers loads from a folder: name it model.safetensors, or "
            "name the function that makes the model with --factory"
        )
    return path.parent


def is_transformers_model(module: Any) -> bool:
    """Return whether a module has the attributes of transformers' models."""
    return isinstance(module, nn.Module) and hasattr(module, "config") and hasattr(module, "main_input_name")


def from_folder(
    path: str | os.PathLike[str],
    step_input: str | None = None,
    tokenizer: bool = True,
    task: str | None = None,
    image_size: tuple[int, int] | None = None,
) -> Source:
    """Load a folder with config.json and weights, and optionally a tokenizer, a chat template and modules.json.

    A folder of a PEFT adapter stands for its base model with the adapter merged into its weights. Its own tokenizer,
    chat template and modules.json go before those of the base model.

    step_input: the caller's name of the step input, which has to be that of the model.
    tokenizer: whether to read the tokenizer of the folder.
    task: the task to load the folder for; by default that of the saved class.
    image_size: height and width of the images of a prompt, for a model that reads images at their own size.

    Raises SourceError for missing files, and for weights that are missing, unexpected or misshapen, which are all
    listed.
    """
    folder = Path(path)
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"reading a Hugging Face folder needs transformers: {install_command('hf')}")
    name, adapter, texts = model_name(folder), read_adapter(folder) if is_adapter_folder(folder) else None, folder
    if adapter is not None:
        folder, task = adapter.find_base(), task or adapter.task
        texts = texts if has_tokenizer(texts) else folder
    saved = read_saved(Path(path), task) or read_saved(folder, task)
    if saved is not None and saved.is_static:
        return with_modules(from_static(saved, name), saved)
    if saved is not None:
        task = saved.task
        if adapter is None:
            folder = texts = saved.transformer_folder
    with _quiet_transformers():
        module, loaded_task, packed = _load(folder, task, adapter)
        peft_model = adapter.apply(module) if adapter is not None else None
        reads_audio = module.main_input_name in AUDIO_INPUTS and loaded_task not in (GENERATES, TRANSLATES)
        processors = (load_extractor(folder), _tokenizer(texts) if tokenizer else None) if reads_audio else (None, None)
        if loaded_task == ANSWERS_IMAGES:
            processors = (None, load_prompt_processor(folder) if tokenizer else None)
        source = from_transformers(module, name, loaded_task, *processors, image_size=image_size)
        if adapter is not None:
            merge_checked(peft_model, source, adapter)
        source = replace(source, packed_weights=packed)
        if step_input not in (None, source.step_input):
            stepped = (
                f"stepped over {source.step_input!r}, not"
                if source.step_input
                else f"a single-pass model ({source.task}), not stepped over"
            )
            raise SourceError(f"{folder} is {stepped} {step_input!r}: leave --step-input (step_input=) out")
        if reads_audio or loaded_task == ANSWERS_IMAGES:
            return source
        if source.step_input is None:
            return _complete_single_pass(folder, texts, source, tokenizer, saved, module.config)
        return _complete_generative(texts, source, source.step_input, tokenizer)


def _tokenizer(folder: Path) -> Any | None:
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def _complete_generative(folder: Path, source: Source, step_input: str, tokenizer: bool) -> Source:
    """Complete a generative model with the tokenizer and chat template of its folder."""
    if tokenizer and has_tokenizer(folder):
        request = next((n for n in source.caller_inputs if n != step_input), None)
        source = replace(source, tokenizers=read_tokenizers(folder, request, step_input))
    source = replace(source, chat_template=read_chat_template(folder))
    if source.tokenizers or (source.chat_template is not None and has_tokenizer(folder)):
        source = replace(source, chat_tokens=read_chat_tokens(folder))
    return source


def _complete_single_pass(
    folder: Path, texts: Path, source: Source, tokenizer: bool, saved: SavedModel | None, config: Any
) -> Source:
    """Complete a single-pass model with the image processor of its folder, and the tokenizer of `texts`.

    saved: modules of sentence-transformers, and their settings. config: the model's own.
    """
    if PIXELS in source.example:
        processor = load_processor(folder)
        return source if processor is None else with_processor(source, processor)
    limits = [source.max_length, saved.max_length if saved is not None else None]
    source = replace(source, max_length=min((n for n in limits if n is not None), default=None))
    if tokenizer and has_tokenizer(texts):
        source = with_tokenizer(source, load_tokenizer(texts))
    if source.task == CLASSIFIES:
        return with_named_activation(source, saved, config)
    return with_modules(source, saved) if saved is not None else source


def _load(
    folder: Path, task: str | None, adapter: PeftAdapter | None = None
) -> tuple[Any, str, Mapping[str, PackedWeight]]:
    """Load a model with its weights, and return it with its task, and the weights that are packed in 4 bits.

    adapter: will be put on the model, and may supply weights that the folder lacks, such as a classifier.

    Raises SourceError for weights that do not fit. transformers would warn of a missing weight and draw it at random.
    """
    import transformers

    if not (folder / "config.json").exists():
        raise SourceError(f"{folder} is not a Hugging Face folder: it holds no config.json")
    refuse_special_files(folder)
    refuse_outside_weights(folder)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    loading = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    packed: Mapping[str, PackedWeight] = {}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        kind, task = class_for(config, task)
        if adapter is not None and task not in (GENERATES, TRANSLATES):
            options |= label_options(adapter, kind, config)
        if (packing := read_packing(config)) is not None and adapter is not None:
            raise SourceError(
                f"its weights are 4-bit integers, into which the adapter {adapter.folder} cannot be merged: name the "
                "unquantised base model, or keep the adapter apart with --adapters"
            )
        if packing is not None:
            module, info, packed = load_packed(folder, kind, config, packing, loading)
        else:
            module, info = kind.from_pretrained(folder, **options, **loading)
    except SourceError as error:
        raise SourceError(f"{folder}: {error}") from error
    except Exception as error:  # transformers, safetensors and torch raise many types
        if "trust_remote_code" in str(error):
            raise SourceError(
                f"{folder} needs Python code that it brings along, which is not run: load the model in Python, with "
                "trust_remote_code=True if you trust it, and pass it to export()"
            ) from error
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{folder} is not a Hugging Face folder that transformers can load: {reason}") from error
    misshapen = [f"{n} is {tuple(shape)}, not {tuple(expected)}" for n, shape, expected in info["mismatched_keys"]]
    parts = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "misshapen": misshapen}
    if type(module).__name__ not in (config.architectures or ()) and task not in (GENERATES, TRANSLATES):
        parts["unexpected"] = ()  # the weights of the head of the saved class
    if adapter is not None:
        parts["missing"] = [name for name in parts["missing"] if not adapter.supplies(name)]
    if parts["missing"] and task == FEATURES:
        parts["missing"] = [name for name in parts["missing"] if _matters(module, name)]
    listed = [f"{label}: {', '.join(sorted(names))}" for label, names in parts.items() if names]
    if listed or info.get("error_msgs"):
        listed += [" ".join(text.split()) for text in info.get("error_msgs", ())]
        raise SourceError(
            f"{folder}'s weights do not fit the {type(module).__name__} that its config describes: {'; '.join(listed)}"
        )
    return module, task, packed


def _matters(module: Any, name: str) -> bool:
    """Return whether a weight changes the exported output. A pooler next to the states does not. Cost: two runs."""
    weight = module.state_dict()[name]
    ids = {module.main_input_name: torch.arange(6).reshape(1, 6) % 3}
    if module.main_input_name == PIXELS:
        ids = from_image_model(module, FEATURES).example
    original = weight.clone()
    try:
        with torch.no_grad():
            before = choose_output(module(**ids))
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
            return not torch.equal(before, choose_output(module(**ids)))
    except Exception:  # the module may raise anything for such ids
        return True
    finally:
        weight.copy_(original)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and hints for a while. Problems are raised as errors.

    These settings are process-wide: exports of other threads wait.
    """
    from transformers.utils import logging as hf_logging

    with TORCH_PATCH_LOCK:
        level, has_bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        hf_logging.set_verbosity(logging.CRITICAL)
        hf_logging.disable_progress_bar()
        try:
            yield
        finally:
            hf_logging.set_verbosity(level)
            if has_bars:
                hf_logging.enable_progress_bar()


def from_transformers(
    module: Any,
    name: str | None = None,
    task: str | None = None,
    extractor: Any = None,
    tokenizer: Any = None,
    image_size: tuple[int, int] | None = None,
) -> Source:
    """Read a transformers model in memory.

    task: by default the task of its class, or generation for a class that transformers does not list.
    extractor, tokenizer: transformers' own, for a model that reads audio.

    A generative model has the input `input_ids`; an encoder-decoder also has its padding mask and the step input
    `decoder_input_ids`. A decoder-only model has no mask: rows are right-padded, so causal attention never reads
    padding. For single-pass models see `single_pass`, `images` and `audio`.
    """
    task = task or task_of_class(type(module)) or GENERATES
    if image_size is not None and task != ANSWERS_IMAGES:
        raise SourceError(f"{type(module).__name__} reads no images in its prompt: leave --image-size out")
    config, generation = module.config, getattr(module, "generation_config", None)
    if task == RECOGNIZES and config.is_encoder_decoder:
        special = _special(config, generation)
        defaults = read_generation_defaults(generation, 1, None, _vocabulary(module))
        name = name or type(module).__name__
        return from_speech_to_text_model(module, name, extractor, tokenizer, special, defaults)
    if task == ANSWERS_IMAGES:
        return _from_image_prompt_model(module, name or type(module).__name__, tokenizer, image_size)
    if task not in (GENERATES, TRANSLATES) and module.main_input_name == PIXELS:
        return from_image_model(module, task, name)
    if task not in (GENERATES, TRANSLATES) and module.main_input_name in AUDIO_INPUTS:
        return from_audio_model(module, task, name, extractor, tokenizer)
    if task not in (GENERATES, TRANSLATES):
        return from_text_model(module, task, name)
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
        module=Adapter(as_float32(module), list(example), fixed_arguments={"use_cache": False}),
        example=example,
        step_input=step,
        made_example=True,
        name=name or type(module).__name__,
        task=TRANSLATES if config.is_encoder_decoder else GENERATES,
        masks=masks,
        special_tokens=special,
        generation_defaults=read_generation_defaults(
            generation, len(special.bos_token_ids), limit, _vocabulary(module)
        ),
        max_length=min(limit, 512) if limit else None,
    )


def _from_image_prompt_model(module: Any, name: str, processor: Any, image_size: tuple[int, int] | None) -> Source:
    config, generation = module.config, getattr(module, "generation_config", None)
    if config.is_encoder_decoder or not reads_images(module):
        raise SourceError(
            f"{type(module).__name__} does not put images in the place of ids of its prompt (its config names no "
            "image_token_id), which is the only way of reading images that is supported: load it in Python and give "
            "an example of its inputs"
        )
    special = _special(config, generation, config.get_text_config())

    def defaults(limit: int | None) -> dict[str, Any]:
        return read_generation_defaults(generation, 0, limit, _vocabulary(module))

    return from_image_prompt_model(module, name, processor, special, defaults, image_size)


def _vocabulary(module: Any) -> int | None:
    """Return the number of logits of a position; None if the module does not tell."""
    weight = getattr(module.get_output_embeddings(), "weight", None)
    return None if weight is None else int(weight.shape[0])


def _special(config: Any, generation: Any, inner: Any = None) -> SpecialTokens:
    def of(name: str) -> Any:
        values = (getattr(owner, name, None) for owner in (generation, config, inner))
        return next((value for value in values if value is not None), None)

    end = of("eos_token_id")
    ends = tuple(end) if isinstance(end, (list, tuple)) else () if end is None else (end,)
    pad = of("pad_token_id")
    start: tuple[int, ...] = ()
    if config.is_encoder_decoder:
        first = of("decoder_start_token_id")
        first = of("bos_token_id") if first is None else first
        if first is None:
            raise SourceError("the model's config names no decoder_start_token_id: set it before exporting")
        start = (int(first),)
    return SpecialTokens(start, ends, pad if isinstance(pad, int) else None)


_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": None}  # option → default of generate()
_NOT_CARRIED = {  # options of generate() that the runtime lacks → the value that has no effect
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "renormalize_logits": False,
    "guidance_scale": 1,
    "max_time": None,
    "token_healing": False,
    "watermarking_config": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
}
_NOT_CARRIED_SAMPLING = {"typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


def read_generation_defaults(
    generation: Any, starts: int, limit: int | None, vocabulary: int | None = None
) -> dict[str, Any]:
    """Return the generation options that the model's generation config sets, and warn of lost options.

    starts: the number of tokens that an encoder-decoder starts from, which transformers counts in lengths; 0 for a
        decoder-only model, where transformers counts the prompt.
    limit: the greatest number of tokens that the model takes.
    vocabulary: the number of logits. Suppressed ids beyond it have no logit; `generate()` passes over them.
    """
    if generation is None:
        return {}
    settings = {name: value for name, value in generation.to_diff_dict().items() if value is not None}
    defaults = {name: settings[name] for name, spec in OPTIONS.items() if spec.in_transformers and name in settings}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if vocabulary is not None and name in defaults:
            defaults[name] = [token for token in defaults[name] if token < vocabulary]
    lost = {name for name, none in _NOT_CARRIED.items() if settings.get(name, none) != none}
    if settings.get("do_sample") and defaults.get("num_beams", 1) == 1:
        sampling = {name: settings.get(name, default) for name, default in _SAMPLING.items()}
        defaults |= {name: value for name, value in sampling.items() if value is not None}
        lost |= {name for name, none in _NOT_CARRIED_SAMPLING.items() if settings.get(name, none) != none}
    elif settings.get("do_sample"):
        lost.add("do_sample (with num_beams)")
    for name, ours, min_tokens in (("max_length", "max_new_tokens", 1), ("min_length", "min_new_tokens", 0)):
        if not settings.get(name) or ours in defaults:
            continue
        if starts:
            defaults[ours] = max(min_tokens, settings[name] - starts)
        elif name == "min_length" or limit is None or settings[name] < limit:
            lost.add(name)
    if (first := settings.get("forced_bos_token_id")) is not None:
        defaults |= {"forced_bos_token_id": first} if starts == 1 else {}
        lost |= {"forced_bos_token_id"} if starts != 1 else set()
    if bias := settings.get("sequence_bias"):
        pairs = [(list(ids), value) for ids, value in (bias.items() if isinstance(bias, dict) else bias)]
        if all(len(ids) == 1 for ids, _ in pairs):
            defaults["logit_bias"] = [[ids[0], value] for ids, value in pairs]
        else:
            lost.add("sequence_bias (of several tokens)")
    if lost:
        logger.warning(
            "the model's generation config sets %s, which the file does not carry over", ", ".join(sorted(lost))
        )
    return defaults
