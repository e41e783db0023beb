"""A transformers model that reads sound: its inputs, what its feature extractor does, and how its vocabulary is spelt.

What an extractor does is read from its settings and compared with what it gives for sounds of several kinds; so is what
a tokenizer writes for ids. What no form here does as they do is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tformer_export.common.derived_inputs import padding
from tformer_export.sources.adapter import Adapter, chosen_output
from tformer_export.sources.base import Source, as_float32, evaluating
from tformer_export.sources.hf_single_pass import MASK
from tformer_export.sources.pooled_module import Answer
from tformer_export.sources.task_names import RECOGNIZES
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import Outcome
from tformer_runtime.preprocess.audio import LOG_MEL, WAVEFORM, Audio
from tformer_runtime.preprocess.ctc import Spelling, Stretch

SAMPLES = "input_values"  # transformers' name of a waveform, of every model and extractor
SOUND = (SAMPLES, "input_features")  # and of a spectrogram
LONGEST = 1 << 16  # samples that a model is tried with, to know how many it needs
PADDED = 3  # times what a model needs: an example
SECONDS = (0.31, 1.0, 0.725)  # of sounds that are drawn
APART = {WAVEFORM: 1e-5, LOG_MEL: 1e-4}  # of features, whose range is some 2 to 8: the others are made in float32
SEQUENCES, LENGTH = 24, 40  # of ids that are drawn


def on_sound(module: Any, task: str, name: str | None = None, extractor: Any = None, tokenizer: Any = None) -> Source:
    """A transformers model that is run once on a sound, with its feature extractor, which says whether it is told of
    padding, and its tokenizer, if there are."""
    if module.main_input_name != SAMPLES:
        raise SourceError(
            f"{type(module).__name__} is run once on {module.main_input_name}: spectrograms are made for models alone "
            "that write what they hear; load it in Python and give an example of its inputs"
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
    least = _least(Adapter(single, names, constants=constants))
    sound = torch.randn((2, PADDED * least), generator=torch.Generator().manual_seed(0))
    example, masks = {SAMPLES: sound}, {}
    if masked:
        masks[MASK] = padding(SAMPLES, dtype=torch.int64)
        example[MASK] = torch.ones(sound.shape, dtype=torch.int64)
    return Source(
        module=Adapter(single, list(example), constants=constants),
        example=example,
        step=None,
        name=name or type(module).__name__,
        task=task,
        masks=masks,
        shortest={SAMPLES: least} if least > 1 else {},
        outcome=Outcome(settings={"blank": _blank(module)}) if task == RECOGNIZES else Outcome(),
    )


def _with_extractor(source: Source, module: Any, extractor: Any) -> Source:
    """The source whose sounds are made as a transformers feature extractor makes them. SourceError for one that does
    something else than is done here."""
    made = replace(read_extractor(extractor), shortest=source.shortest.get(SAMPLES, 1))
    return replace(
        source, preparation={SAMPLES: made.preparation}, answer=_own_answer(module, extractor, list(source.example))
    )


def read_extractor(extractor: Any) -> Audio:
    """What a feature extractor does to a sound. SourceError for what is not done here, whatever its class is called."""
    made = _settings(extractor)
    apart = float("inf")
    if made is not None:
        for sound in draw_sounds(made.rate):
            own, theirs = made.made(sound), features_of(extractor, sound)
            apart = float(np.abs(own - theirs).max()) if own.shape == theirs.shape else float("inf")
            if not apart <= APART[made.features]:
                break
        else:
            return made
    raise SourceError(
        f"the feature extractor {type(extractor).__name__} does something else than normalise samples, or make "
        f"spectrograms of log mel as this runtime does (max |Δ| {apart:.3g}): load the model in Python and give an "
        "example of its inputs, which are then made by whoever runs the file"
    )


def _settings(extractor: Any) -> Audio | None:
    """What its attributes say, in transformers' names; None for what they do not."""
    rate = int(extractor.sampling_rate)
    filters = getattr(extractor, "mel_filters", None)
    if filters is None:
        if getattr(extractor, "feature_size", 1) != 1:
            return None
        return Audio(rate, WAVEFORM, bool(getattr(extractor, "do_normalize", False)))
    sizes = [getattr(extractor, name, None) for name in ("n_fft", "hop_length", "n_samples")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    window, hop, samples = map(int, sizes)  # type: ignore[arg-type]
    mels = np.asarray(filters).shape[1]
    return Audio(rate, LOG_MEL, mels=mels, window=window, hop=hop, highest=_highest(filters, rate), samples=samples)


def _highest(filters: Any, rate: int) -> float:
    """Where the last band of (frequencies, mels) ends, in Hz, to the next hundred."""
    last = np.flatnonzero(np.asarray(filters)[:, -1])
    step = rate / 2 / (len(filters) - 1)
    return float(min(rate / 2, round((last[-1] + 1) * step / 100) * 100)) if len(last) else rate / 2


def features_of(extractor: Any, sound: np.ndarray) -> np.ndarray:
    """What the extractor gives for one sound, without a batch axis."""
    given = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="np")
    features: np.ndarray = np.asarray(given[extractor.model_input_names[0]])[0]
    return features


def draw_sounds(rate: int, seed: int = 0, least: int = 1) -> list[np.ndarray]:
    """Sounds of several lengths: tones that glide, come and go, and noise; float32 from -1 to 1."""
    random = np.random.default_rng(seed)
    made = []
    for seconds in SECONDS:
        size = max(2 * least, int(seconds * rate))
        time = np.arange(size) / rate
        sound = 0.02 * random.standard_normal(size)
        for _ in range(4):
            low, glide, begin = random.uniform(90, 3000), random.uniform(-400, 400), random.uniform(0, 7)
            sound += 0.2 * np.sin(2 * np.pi * (low + glide * time) * time) * np.maximum(0, np.sin(9 * time + begin))
        made.append(sound.astype(np.float32))
    return made


def load_extractor(folder: Path) -> Any | None:
    """A folder's feature extractor; None if it has none. SourceError if it cannot be loaded."""
    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{folder}'s feature extractor cannot be loaded: {reason}") from error


def _with_vocabulary(source: Source, tokenizer: Any) -> Source:
    """The source whose ids are spelt as a transformers tokenizer spells them.

    SourceError for one that writes random ids otherwise than `Spelling` does.
    """
    with source.ready(), torch.no_grad():
        width = int(source.module(*source.example.values()).shape[-1])
    blank = tokenizer.pad_token_id
    if blank is None or not 0 <= blank < width:
        raise SourceError("the tokenizer names no padding token, which is the blank of its model: set pad_token")
    delimiter, space = (
        getattr(tokenizer, name, None) for name in ("word_delimiter_token", "replace_word_delimiter_char")
    )
    spelling = Spelling(
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

    def written(logits: torch.Tensor) -> str:
        return str(tokenizer.batch_decode(logits.argmax(-1)[None])[0])

    return replace(source, outcome=Outcome(labels=spelling.tokens, settings=settings), written=written)


def _check_spelling(spelling: Spelling, tokenizer: Any, width: int) -> None:
    random = np.random.default_rng(0)
    timed = "output_word_offsets" in inspect.signature(tokenizer.decode).parameters
    for _ in range(SEQUENCES):
        some = random.integers(width, size=6)
        path = random.choice([*some, spelling.blank], size=LENGTH).repeat(random.integers(1, 4, LENGTH))
        own = spelling.text(path)
        theirs = str(tokenizer.decode(path.tolist()))
        if own != theirs:
            raise SourceError(
                f"{type(tokenizer).__name__} writes {theirs!r} for ids that say {own!r} where runs of one are one and "
                f"{spelling.tokens[spelling.blank]!r} is left out: export without it, and the file gives ids"
            )
        if timed:
            found = tokenizer.decode(path.tolist(), output_word_offsets=True, output_char_offsets=True)
            for stretches, offsets, name in (
                (spelling.words(path), found.word_offsets, "word"),
                (spelling.characters(path), found.char_offsets, "char"),
            ):
                if stretches != [Stretch(o[name], o["start_offset"], o["end_offset"]) for o in offsets]:
                    raise SourceError(f"{type(tokenizer).__name__} has other times of each {name} for {path.tolist()}")


def _own_answer(module: Any, extractor: Any, names: Sequence[str]) -> Answer:
    """The model's own way from samples to its output: its feature extractor, and forward, of one sound."""

    def answer(sample: Any, most: int | None) -> torch.Tensor:
        read = extractor(sample, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        with torch.no_grad():
            return chosen_output(module(**{name: read[name] for name in names}))[0].float()

    return answer


def _least(module: Adapter) -> int:
    """How many samples the model needs to give anything. SourceError if it fails for any number. Cost: some 16 runs."""

    def works(length: int) -> bool:
        try:
            sound = torch.randn((1, length), generator=torch.Generator().manual_seed(0))
            with evaluating(module), torch.no_grad():
                return bool(module(sound).numel() > 0)
        except (RuntimeError, ValueError, IndexError):
            return False

    high = 1
    while not works(high):
        high *= 2
        if high > LONGEST:
            raise SourceError(f"forward fails for {SAMPLES} of up to {LONGEST} samples: load it in Python and see why")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _blank(module: Any) -> int:
    """The id of the blank, where no tokenizer says which."""
    pad = getattr(module.config, "pad_token_id", None)
    return pad if isinstance(pad, int) else 0
