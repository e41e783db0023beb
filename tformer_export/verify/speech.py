"""The gate from a recording to its text, against the source's own way.

For a model that scores tokens at each frame, the scores are compared with the scores by the source's feature extractor.
The text is compared where its two best tokens differ by more than the error at every frame. For a model that writes,
the tokens are compared with the source's generate(), up to a step at which the source's own logits of two tokens are
nearer to each other than the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from tformer_export.sources import Source
from tformer_export.sources.hugging_face.audio import draw_audio
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.step_outputs import crop
from tformer_runtime.format.sizes import input_and_output_sizes
from tformer_runtime.model import Model
from tformer_runtime.preprocess.audio import AudioPreprocessor, audio_of
from tformer_runtime.tasks.ctc_recognition import CtcRecognition
from tformer_runtime.tasks.speech_to_text import Transcriber

MAX_COMPARED_TOKENS = 24  # of a window; each costs a run of the module
PROMPT_TOKENS = 8  # reserved for the tokens before them


@dataclass(frozen=True)
class AudioParity:
    """The result of the comparison.

    error: max |Δ| of the scores.
    relative: the error over their range.
    count: the number of compared recordings.
    tokens: for a model that writes, the number of compared tokens. They are equal, except where two are equally likely.
    """

    error: float
    relative: float
    count: int
    tokens: int = 0


def check_audio(source: Source, engine: Engine, tolerance: float) -> AudioParity | None:
    """Compare the results for recordings; return None for a source that has no pipeline of its own for them.

    Raises ParityError where a result differs.
    """
    named = audio_of(engine.manifest)
    if named is None or (source.own_pipeline is None and source.transcribe is None):
        return None
    if source.transcribe is not None:
        return _check_transcripts(source, engine, named[1], tolerance)
    return _check_scores(source, engine, named[1], tolerance)


def _check_scores(source: Source, engine: Engine, audio: AudioPreprocessor, tolerance: float) -> AudioParity:
    """Compare the scores and the texts of a model that scores tokens at each frame."""
    assert source.own_pipeline is not None
    model = Model(engine)
    recordings = draw_audio(audio.sampling_rate, seed=1, min_samples=audio.min_samples)
    expected = [source.own_pipeline(recording, None) for recording in recordings]
    span = max(float(np.ptp(np.concatenate([value.numpy().ravel() for value in expected]))), 1e-6)
    worst = 0.0
    for together in (True, False):
        outputs = _outputs(engine, [model.inputs.single_pass_arrays(recording) for recording in recordings], together)
        results = list(model.predict(recordings, len(recordings) if together else 1))
        for recording, output, result, expected_scores in zip(recordings, outputs, results, expected, strict=True):
            subject = f"for a recording of {len(recording)} samples, {'in a batch' if together else 'alone'}"
            if output.shape != tuple(expected_scores.shape):
                raise ParityError(
                    f"the file's result {subject}, has the shape {output.shape}, and its source's own "
                    f"{tuple(expected_scores.shape)}; no file was written"
                )
            error = float(np.abs(output - expected_scores.numpy()).max())
            worst = max(worst, error)
            if not error <= tolerance * span:
                raise ParityError(
                    f"the file's result {subject}, differs from its source's own by {error:.3g} where the results span "
                    f"{span:.3g} ({tolerance:g} of that is allowed); no file was written"
                )
            if source.decode_output is None:
                continue
            best = expected_scores.topk(2).values
            if bool((best[:, 0] - best[:, 1] > 2 * error).all()) and result.text != (
                text := source.decode_output(expected_scores)
            ):
                raise ParityError(
                    f"the file's text {subject}, is {result.text!r}, and its source's {text!r}; no file was written"
                )
    _check_windows(source, model, audio, worst)
    return AudioParity(worst, worst / span, len(recordings))


def _check_windows(source: Source, model: Model, audio: AudioPreprocessor, error: float) -> None:
    """Check that a recording which is read in several windows is covered once.

    The expected scores of each window are the source's own scores for it, without the frames that neighbours have. They
    must have as many frames as the source makes of the whole recording.
    """
    assert source.own_pipeline is not None
    task = model.calls.only_task
    if not isinstance(task, CtcRecognition) or not task.in_windows:
        return
    recording = np.concatenate(draw_audio(audio.sampling_rate, seed=2, min_samples=audio.min_samples))
    settings = task.settings(
        {
            "chunk_length_s": len(recording) / audio.sampling_rate / 2,
            "stride_length_s": len(recording) / audio.sampling_rate / 12,
        }
    )
    pieces = task.pieces(len(recording), settings["chunk_length_s"], settings["stride_length_s"])
    scores = [source.own_pipeline(recording[samples], None)[piece_frames].numpy() for samples, piece_frames in pieces]
    frame_count, frames = sum(map(len, scores)), len(source.own_pipeline(recording, None))
    if len(pieces) < 2 or frame_count != frames:
        raise ParityError(
            f"a recording that is read in {len(pieces)} windows gives {frame_count} frames, but {frames} when it is "
            "read as a whole; no file was written"
        )
    expected = np.concatenate(scores)
    best = np.sort(expected, 1)
    (result,) = model.predict(
        [recording],
        chunk_length_s=settings["chunk_length_s"] / audio.sampling_rate,
        stride_length_s=settings["stride_length_s"] / audio.sampling_rate,
    )
    if (
        bool((best[:, -1] - best[:, -2] > 2 * error).all())
        and result.token_ids != task.result([expected], settings).token_ids
    ):
        raise ParityError(
            "the file transcribes a recording in windows differently from its source: the token ids differ; no file "
            "was written"
        )


def _outputs(engine: Engine, rows: Sequence[Mapping[str, np.ndarray]], together: bool) -> list[np.ndarray]:
    """Return the first output of each row, without padding. Rows run together if the file allows padding."""
    encode = engine.manifest.encode
    assert encode is not None
    spec, outputs = encode.outputs[0], []
    for batch in [rows] if together and encode.ragged else [[row] for row in rows]:
        named = {name: [row[name] for row in batch] for name in batch[0]}
        values = engine.encode(named, len(batch))[spec.name].numpy()
        outputs += [
            crop(input_and_output_sizes(encode, row), spec.shape[1:], values[at]) for at, row in enumerate(batch)
        ]
    return outputs


def _check_transcripts(source: Source, engine: Engine, audio: AudioPreprocessor, tolerance: float) -> AudioParity:
    """Compare the tokens of recordings of one window, with timestamps and without.

    Cost: a run of generate() for each recording with timestamps, and one without.
    """
    assert source.transcribe is not None
    manifest = engine.manifest
    max_tokens = min(MAX_COMPARED_TOKENS, manifest.max_length - PROMPT_TOKENS)
    settings = {**manifest.output_meaning.settings, "max_new_tokens": max_tokens}
    file = Transcriber(
        Model(engine).generator, replace(manifest, output_meaning=replace(manifest.output_meaning, settings=settings))
    )
    recordings = [recording[: audio.n_samples] for recording in draw_audio(audio.sampling_rate, seed=1)[:2]]
    timestamp_options = [False] if file.task.prompt.no_timestamps is None else [False, True]
    worst, span, tokens = 0.0, 1.0, 0
    for recording in recordings:
        for timestamps in timestamp_options:
            expected = source.transcribe(recording, timestamps, max_tokens)
            (result,) = file.transcribe_all([recording], 1, 1, 0, {"timestamps": timestamps})
            tokens_of_file = list(result.token_ids)
            tokens += len(expected)
            place = _first_difference(expected, tokens_of_file)
            if place is None:
                continue
            opening = file.task.prompt.ids(manifest.special_tokens.bos_token_ids[0], None, None, timestamps)
            prompt = [file.task.prompt.language_id(result.language or "") if i is None else i for i in opening]
            gap, range_of = _logit_gap(
                source,
                audio,
                recording,
                prompt,
                expected,
                tokens_of_file,
                place,
                manifest.special_tokens.eos_token_ids[0],
            )
            worst, span = max(worst, gap), range_of
            if not gap <= tolerance * range_of:
                raise ParityError(
                    f"the file writes other tokens than its source for a recording of {len(recording)} samples"
                    f"{', with times' * timestamps}: {tokens_of_file[place : place + 1]} as number {place + 1}, where "
                    f"that writes {expected[place : place + 1]}; no file was written"
                )
    return AudioParity(worst, worst / span, len(recordings), tokens)


def _first_difference(expected: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Return the first index at which two token sequences differ; None if they are equal."""
    if list(expected) == list(tokens):
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b), min(len(expected), len(tokens))
    )


def _logit_gap(
    source: Source,
    audio: AudioPreprocessor,
    recording: np.ndarray,
    prompt: Sequence[int],
    expected: Sequence[int],
    tokens_of_file: Sequence[int],
    place: int,
    end: int,
) -> tuple[float, float]:
    """Return the difference of the source's logits of both tokens, and the range of all logits.

    They are the logits after the tokens before them, in the first window. Later windows belong to other recordings.
    """
    features = torch.from_numpy(audio.spectrogram(recording))[None]
    with torch.no_grad():
        logits = source.module(features, torch.tensor([[*prompt, *expected[:place]]]))[0, -1].float()
    one, other = (logits[ids[place] if place < len(ids) else end] for ids in (expected, tokens_of_file))
    return float((one - other).abs()), float(logits.max() - logits.min())
