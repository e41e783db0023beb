"""The gate from samples of a sound to what is said, against the source's own way there.

Of a model that scores tokens at each frame: its scores, by its own feature extractor, and the text, where its two best
tokens are further apart than the error at every frame. Of one that writes: its own generate()'s tokens, up to where its
own logits are as near to each other as the error allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tformer_export.sources import Source
from tformer_export.sources.hf_audio import draw_sounds
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.step_outputs import cut_to
from tformer_runtime.format.sizes import every_size
from tformer_runtime.model import Model
from tformer_runtime.preprocess.audio import Audio, audio_of
from tformer_runtime.tasks.ctc_recognition import Recognition
from tformer_runtime.tasks.speech_to_text import Dictator

TOKENS = 24  # of a window that are compared, each of which is a run of the module
AROUND = 8  # that stand before them


@dataclass(frozen=True)
class SoundParity:
    """error, relative: of scores, max |Δ| and over their range. count: sounds that were compared. tokens: those that
    were written, of a model that writes, of which all are equal but where the source has two that are as likely."""

    error: float
    relative: float
    count: int
    tokens: int = 0


def check_sounds(source: Source, engine: Engine, tolerance: float) -> SoundParity | None:
    """None for a source that reads no sound by a way of its own. ParityError where a result differs."""
    sound = audio_of(engine.manifest)
    if sound is None or (source.answer is None and source.dictated is None):
        return None
    if source.dictated is not None:
        return _check_dictated(source, engine, sound[1], tolerance)
    return _check_scores(source, engine, sound[1], tolerance)


def _check_scores(source: Source, engine: Engine, audio: Audio, tolerance: float) -> SoundParity:
    assert source.answer is not None
    model = Model(engine)
    sounds = draw_sounds(audio.rate, seed=1, least=audio.shortest)
    expected = [source.answer(sound, None) for sound in sounds]
    span = max(float(np.ptp(np.concatenate([value.numpy().ravel() for value in expected]))), 1e-6)
    worst = 0.0
    for together in (True, False):
        found = _outputs(engine, [model.inputs.once(sound) for sound in sounds], together)
        results = list(model.predict(sounds, len(sounds) if together else 1))
        for sound, output, result, own in zip(sounds, found, results, expected, strict=True):
            where = f"for a sound of {len(sound)} samples, {'beside others' if together else 'alone'}"
            error = float(np.abs(output - own.numpy()).max()) if output.shape == tuple(own.shape) else np.inf
            worst = max(worst, error)
            if not error <= tolerance * span:
                raise ParityError(
                    f"the file's result {where}, differs from its source's own by {error:.3g} where the results span "
                    f"{span:.3g} ({tolerance:g} of that is allowed); no file was written"
                )
            if source.written is None:
                continue
            best = own.topk(2).values
            if bool((best[:, 0] - best[:, 1] > 2 * error).all()) and result.text != (text := source.written(own)):
                raise ParityError(
                    f"the file's text {where}, is {result.text!r}, and its source's {text!r}; no file was written"
                )
    _check_windows(source, model, audio, worst)
    return SoundParity(worst, worst / span, len(sounds))


def _check_windows(source: Source, model: Model, audio: Audio, error: float) -> None:
    """That a sound which is read in several windows is all heard, and once: what is said by the source's own scores of
    each window, without what others have of it, as many frames as it makes of the whole."""
    assert source.answer is not None
    task = model._only_task
    if not isinstance(task, Recognition) or not task.in_windows:
        return
    sound = np.concatenate(draw_sounds(audio.rate, seed=2, least=audio.shortest))
    asked = task.settings({"window": len(sound) / audio.rate / 2, "stride": len(sound) / audio.rate / 12})
    pieces = task.pieces(len(sound), asked["window"], asked["stride"])
    scores = [source.answer(sound[samples], None)[own].numpy() for samples, own in pieces]
    heard, frames = sum(map(len, scores)), len(source.answer(sound, None))
    if len(pieces) < 2 or heard != frames:
        raise ParityError(
            f"a sound that is read in {len(pieces)} windows gives {heard} frames, and as a whole {frames}; no file was "
            "written"
        )
    own = np.concatenate(scores)
    best = np.sort(own, 1)
    (result,) = model.predict([sound], window=asked["window"] / audio.rate, stride=asked["stride"] / audio.rate)
    if bool((best[:, -1] - best[:, -2] > 2 * error).all()) and result.token_ids != task.result([own], asked).token_ids:
        raise ParityError("the file hears something else than its source in windows of a sound; no file was written")


def _outputs(engine: Engine, rows: Sequence[Mapping[str, np.ndarray]], together: bool) -> list[np.ndarray]:
    """The first output of each row, without padding; together where the file says that rows may be padded."""
    encode = engine.manifest.encode
    assert encode is not None
    spec, found = encode.outputs[0], []
    for batch in [rows] if together and encode.ragged else [[row] for row in rows]:
        named = {name: [row[name] for row in batch] for name in batch[0]}
        values = engine.encode(named, len(batch))[spec.name].numpy()
        found += [cut_to(every_size(encode, row), spec.shape[1:], values[at]) for at, row in enumerate(batch)]
    return found


def _check_dictated(source: Source, engine: Engine, audio: Audio, tolerance: float) -> SoundParity:
    """Of a window's sounds, with times and without. Cost: as many runs of generate() as there are sounds and ways."""
    assert source.dictated is not None
    manifest = engine.manifest
    most = min(TOKENS, manifest.max_length - AROUND)
    settings = {**manifest.outcome.settings, "most": most}
    file = Dictator(Model(engine).generator, replace(manifest, outcome=replace(manifest.outcome, settings=settings)))
    sounds = [sound[: audio.samples] for sound in draw_sounds(audio.rate, seed=1)[:2]]
    ways = [False] if file.task.opening.no_timestamps is None else [False, True]
    worst, span, tokens = 0.0, 1.0, 0
    for sound in sounds:
        for times in ways:
            own = source.dictated(sound, times, most)
            (result,) = file.every([sound], 1, 1, 0, {"timestamps": times})
            found = list(result.token_ids)
            tokens += len(own)
            place = _difference(own, found)
            if place is None:
                continue
            opening = file.task.opening.ids(manifest.special.start[0], None, None, times)
            begun = [file.task.opening.language_id(result.language or "") if i is None else i for i in opening]
            gap, range_of = _gap(source, audio, sound, begun, own, found, place, manifest.special.end[0])
            worst, span = max(worst, gap), range_of
            if not gap <= tolerance * range_of:
                raise ParityError(
                    f"the file writes other tokens than its source for a sound of {len(sound)} samples"
                    f"{', with times' * times}: {found[place : place + 1]} as number {place + 1}, where that writes "
                    f"{own[place : place + 1]}; no file was written"
                )
    return SoundParity(worst, worst / span, len(sounds), tokens)


def _difference(own: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place at which they are not the same."""
    if list(own) == list(found):
        return None
    return next((i for i, (a, b) in enumerate(zip(own, found, strict=False)) if a != b), min(len(own), len(found)))


def _gap(
    source: Source,
    audio: Audio,
    sound: np.ndarray,
    begun: Sequence[int],
    own: Sequence[int],
    found: Sequence[int],
    place: int,
    end: int,
) -> tuple[float, float]:
    """How far apart the source's logits of both tokens are, after those before them, and the range of all. (Of a window
    that is not the first they are those of other sounds, and far apart.)"""
    features = torch.from_numpy(audio.spectrogram(sound))[None]
    with torch.no_grad():
        logits = source.module(features, torch.tensor([[*begun, *own[:place]]]))[0, -1].float()
    one, other = (logits[ids[place] if place < len(ids) else end] for ids in (own, found))
    return float((one - other).abs()), float(logits.max() - logits.min())
