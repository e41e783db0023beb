"""A transformers model that reads audio: its inputs, its feature extractor and the spelling of its vocabulary.

The steps of an extractor are read from its settings, and the results are compared for recordings of several kinds. The
texts that a tokenizer writes for ids are compared as well. Extractors and tokenizers with other results are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from tformer_export.common.derived_inputs import padding
from tformer_export.sources.base import Source, as_float32, eval_mode
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.call.outputs import choose_output
from tformer_export.sources.forward_errors import run_example
from tformer_export.sources.hugging_face.single_pass import MASK
from tformer_export.sources.pooled_module import Pipeline
from tformer_export.sources.task_names import RECOGNIZES
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import OutputMeaning
from tformer_runtime.preprocess.audio import LOG_MEL, WAVEFORM, AudioPreprocessor
from tformer_runtime.preprocess.ctc import CtcSpan, CtcSpelling

SAMPLES = "input_values"  # transformers' name of a waveform, of every model and extractor
AUDIO_INPUTS = (SAMPLES, "input_features")  # and of a spectrogram
MAX_TRIED_SAMPLES = 1 << 16  # the longest recording with which a model is tried
EXAMPLE_LENGTH_FACTOR = 3  # length of the example over the length that a model needs
AUDIO_SECONDS = (0.31, 1.0, 0.725)  # lengths of the recordings that are drawn
MAX_FEATURE_ERRORS = {
    WAVEFORM: 1e-5,
    LOG_MEL: 1e-4,
}  # of features, whose range is 2 to 8; extractors compute in float32
DRAWN_SEQUENCES, DRAWN_IDS = 24, 40  # that are compared with the tokenizer's texts


def from_audio_model(
    module: Any, task: str, name: str | None = None, extractor: Any = None, tokenizer: Any = None
) -> Source:
    """Read a single-pass transformers model on a recording.

    extractor: its feature extractor, which decides whether the model gets a padding mask; optional.
    tokenizer: its tokenizer, for a model that recognises speech; optional.

    Raises SourceError for a model that reads spectrograms.
    """
    if module.main_input_name != SAMPLES:
        raise SourceError(
            f"{type(module).__name__} is a single-pass model of {module.main_input_name}: the runtime computes "
            "spectrograms for speech-to-text models only; load the model in Python and give an example of its inputs"
        )
    taken = inspect.signature(module.forward).parameters
    source = _on_samples(module, task, name, bool(getattr(extractor, "return_attention_mask", False)) and MASK in taken)
    if extractor is not None:
        source = _with_extractor(source, source.module.module, extractor)
    return source if tokenizer is None or task != RECOGNIZES else _with_vocabulary(source, tokenizer)


def _on_samples(module: Any, task: str, name: str | None, masked: bool) -> Source:
    names = [SAMPLES]
    single = as_float32(module)
    constants = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
    min_samples = _min_samples(Adapter(single, names, fixed_arguments=constants))
    samples = torch.randn((2, EXAMPLE_LENGTH_FACTOR * min_samples), generator=torch.Generator().manual_seed(0))
    example, masks = {SAMPLES: samples}, {}
    if masked:
        masks[MASK] = padding(SAMPLES, dtype=torch.int64)
        example[MASK] = torch.ones(samples.shape, dtype=torch.int64)
    return Source(
        made_example=True,
        module=Adapter(single, list(example), fixed_arguments=constants),
        example=example,
        step_input=None,
        name=name or type(module).__name__,
        task=task,
        masks=masks,
        min_lengths={SAMPLES: min_samples} if min_samples > 1 else {},
        output_meaning=OutputMeaning(settings={"blank": _blank(module)}) if task == RECOGNIZES else OutputMeaning(),
    )


def _with_extractor(source: Source, module: Any, extractor: Any) -> Source:
    """Add the preprocessing of a transformers feature extractor. Raises SourceError for one that is not supported."""
    preprocessor = structs.replace(read_extractor(extractor), min_samples=source.min_lengths.get(SAMPLES, 1))
    return replace(
        source,
        preprocessing={SAMPLES: preprocessor.manifest_entry},
        own_pipeline=_make_own_pipeline(module, extractor, list(source.example)),
    )


def read_extractor(extractor: Any) -> AudioPreprocessor:
    """Read the steps of a feature extractor, and compare their results with its own.

    Raises SourceError for an extractor that is not supported. Its class does not count.
    """
    preprocessor = _settings(extractor)
    difference = "its settings are of other steps"
    if preprocessor is not None:
        for recording in draw_audio(preprocessor.sampling_rate):
            ours, expected = preprocessor.from_samples(recording), extract_features(extractor, recording)
            if ours.shape != expected.shape:
                difference = f"the shape is {ours.shape}, not {expected.shape}"
                break
            error = float(np.abs(ours - expected).max())
            if not error <= MAX_FEATURE_ERRORS[preprocessor.features]:
                difference = f"max |Δ| {error:.3g}"
                break
        else:
            return preprocessor
    raise SourceError(
        f"the runtime cannot compute the features of {type(extractor).__name__}: it normalises samples and makes log "
        f"mel spectrograms ({difference}). Load the model in Python and give an example of its inputs; the file "
        "then reads features instead of recordings"
    )


def _settings(extractor: Any) -> AudioPreprocessor | None:
    """Read the attributes of an extractor, by transformers' names; None if they describe no supported steps."""
    rate = int(extractor.sampling_rate)
    filters = getattr(extractor, "mel_filters", None)
    if filters is None:
        if getattr(extractor, "feature_size", 1) != 1:
            return None
        return AudioPreprocessor(rate, WAVEFORM, bool(getattr(extractor, "do_normalize", False)))
    sizes = [getattr(extractor, name, None) for name in ("n_fft", "hop_length", "n_samples")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    n_fft, hop_length, n_samples = map(int, sizes)  # type: ignore[arg-type]
    return AudioPreprocessor(
        rate,
        LOG_MEL,
        num_mel_bins=np.asarray(filters).shape[1],
        n_fft=n_fft,
        hop_length=hop_length,
        max_frequency=_max_frequency(filters, rate),
        n_samples=n_samples,
    )


def _max_frequency(filters: Any, rate: int) -> float:
    """Return the upper end of the last band of filters (frequencies, mels) in Hz, rounded to hundreds."""
    last = np.flatnonzero(np.asarray(filters)[:, -1])
    step = rate / 2 / (len(filters) - 1)
    return float(min(rate / 2, round((last[-1] + 1) * step / 100) * 100)) if len(last) else rate / 2


def extract_features(extractor: Any, recording: np.ndarray) -> np.ndarray:
    """Return the features of one recording, without a batch axis."""
    batch = extractor(recording, sampling_rate=extractor.sampling_rate, return_tensors="np")
    features: np.ndarray = np.asarray(batch[extractor.model_input_names[0]])[0]
    return features


def draw_audio(rate: int, seed: int = 0, min_samples: int = 1) -> list[np.ndarray]:
    """Draw recordings of several lengths: gliding tones that start and stop, and noise; float32 from -1 to 1."""
    random = np.random.default_rng(seed)
    recordings = []
    for seconds in AUDIO_SECONDS:
        size = max(2 * min_samples, int(seconds * rate))
        time = np.arange(size) / rate
        recording = 0.02 * random.standard_normal(size)
        for _ in range(4):
            low, glide, begin = random.uniform(90, 3000), random.uniform(-400, 400), random.uniform(0, 7)
            recording += 0.2 * np.sin(2 * np.pi * (low + glide * time) * time) * np.maximum(0, np.sin(9 * time + begin))
        recordings.append(recording.astype(np.float32))
    return recordings


def load_extractor(folder: Path) -> Any | None:
    """Load a folder's feature extractor; None if it has none. Raises SourceError if it cannot be loaded."""
    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{folder}'s feature extractor cannot be loaded: {reason}") from error


def _with_vocabulary(source: Source, tokenizer: Any) -> Source:
    """Add the spelling of ids of a transformers tokenizer.

    Raises SourceError for a tokenizer that writes random ids in another way than `CtcSpelling`.
    """
    width = int(run_example(source)[0].shape[-1])
    blank = tokenizer.pad_token_id
    if blank is None or not 0 <= blank < width:
        raise SourceError("the tokenizer names no padding token, which is the blank of its model: set pad_token")
    delimiter, space = (
        getattr(tokenizer, name, None) for name in ("word_delimiter_token", "replace_word_delimiter_char")
    )
    spelling = CtcSpelling(
        tuple(str(token) for token in tokenizer.convert_ids_to_tokens(list(range(width)))),
        int(blank),
        None if delimiter is None else str(delimiter),
        " " if space is None else str(space),
        bool(getattr(tokenizer, "do_lower_case", False)),
        bool(tokenizer.clean_up_tokenization_spaces),
    )
    _check_spelling(spelling, tokenizer, width)
    settings = {
        "blank": spelling.blank, "delimiter": spelling.delimiter, "space": spelling.space,
        "lower": spelling.lower, "tidy": spelling.tidy,
    }  # fmt: skip

    def decode(logits: torch.Tensor) -> str:
        return str(tokenizer.batch_decode(logits.argmax(-1)[None])[0])

    return replace(
        source, output_meaning=OutputMeaning(labels=spelling.tokens, settings=settings), decode_output=decode
    )


def _check_spelling(spelling: CtcSpelling, tokenizer: Any, width: int) -> None:
    random = np.random.default_rng(0)
    timed = "output_word_offsets" in inspect.signature(tokenizer.decode).parameters
    for _ in range(DRAWN_SEQUENCES):
        some = random.integers(width, size=6)
        path = random.choice([*some, spelling.blank], size=DRAWN_IDS).repeat(random.integers(1, 4, DRAWN_IDS))
        text = spelling.text(path)
        expected = str(tokenizer.decode(path.tolist()))
        if text != expected:
            raise SourceError(
                f"{type(tokenizer).__name__} decodes ids to {expected!r}, but merging equal neighbours and removing "
                f"{spelling.tokens[spelling.blank]!r} gives {text!r}: export without the tokenizer, and the file "
                "returns ids"
            )
        if timed:
            decoded = tokenizer.decode(path.tolist(), output_word_offsets=True, output_char_offsets=True)
            for stretches, offsets, name in (
                (spelling.words(path), decoded.word_offsets, "word"),
                (spelling.characters(path), decoded.char_offsets, "char"),
            ):
                if stretches != [CtcSpan(o[name], o["start_offset"], o["end_offset"]) for o in offsets]:
                    raise SourceError(
                        f"{type(tokenizer).__name__} gives other times than CTC for each {name} of {path.tolist()}"
                    )


def _make_own_pipeline(module: Any, extractor: Any, names: Sequence[str]) -> Pipeline:
    """Make the model's own pipeline from samples to its output, for one recording: feature extractor and forward."""

    def answer(sample: Any, max_tokens: int | None) -> torch.Tensor:
        read = extractor(sample, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        with torch.no_grad():
            return choose_output(module(**{name: read[name] for name in names}))[0].float()

    return answer


def _min_samples(module: Adapter) -> int:
    """Return the least number of samples for which the model gives an output. Cost: about 16 runs.

    Raises SourceError if it fails for all lengths.
    """

    def works(length: int) -> bool:
        try:
            recording = torch.randn((1, length), generator=torch.Generator().manual_seed(0))
            with eval_mode(module), torch.no_grad():
                return bool(module(recording).numel() > 0)
        except (RuntimeError, ValueError, IndexError):
            return False

    high = 1
    while not works(high):
        high *= 2
        if high > MAX_TRIED_SAMPLES:
            raise SourceError(
                f"forward fails for {SAMPLES} of up to {MAX_TRIED_SAMPLES} samples: load it in Python and see why"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _blank(module: Any) -> int:
    """Return the id of the blank of a model without a tokenizer."""
    pad = getattr(module.config, "pad_token_id", None)
    return pad if isinstance(pad, int) else 0
