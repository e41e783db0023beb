"""Features of the Python runtime for random recordings and settings of files."""

from __future__ import annotations

from typing import Any

import numpy as np
from golden_file import GoldenFile
from msgspec.structs import asdict

from tformer_runtime.preprocess.audio import LOG_MEL, AudioPreprocessor

golden = GoldenFile()
rng = np.random.default_rng(51)
SPECTROGRAMS = [
    AudioPreprocessor(
        rate, LOG_MEL, num_mel_bins=mels, n_fft=n_fft, hop_length=hop, max_frequency=maximum, n_samples=samples
    )
    for rate, mels, n_fft, hop, maximum, samples in [
        (16000, 80, 400, 160, 8000.0, 16000),  # the settings of Whisper
        (16000, 128, 400, 160, 8000.0, 8000),
        (8000, 12, 256, 100, 3000.0, 4000),
        (22050, 40, 511, 77, 900.0, 5000),  # an odd window of 7 · 73 samples, and bands in the linear part of the scale
        (16000, 4, 2, 1, 8000.0, 50),
        (16000, 6, 64, 16, 7600.0, 20),  # reflected more than once
    ]
]
WAVEFORMS = [AudioPreprocessor(normalize=normalize, min_samples=5) for normalize in (False, True)]


def random_audio(size: int) -> np.ndarray:
    """Return noise and tones, partly silent, with a range of 100 dB."""
    time = np.arange(size) / 16000
    tones = sum(np.sin(2 * np.pi * hertz * time) for hertz in rng.uniform(50, 7000, 3)) / 6
    loudness = 10.0 ** rng.uniform(-5, 0, size // 700 + 1).repeat(700)[:size]
    return (
        loudness * (tones + rng.normal(0, 0.1, size)) * (rng.random(size // 900 + 1) < 0.8).repeat(900)[:size]
    ).astype(np.float32)


def as_given(samples: np.ndarray, kind: int) -> np.ndarray:
    """Return samples in one of the types of samples, with one or several channels."""
    if kind == 0:
        return samples
    if kind in (1, 2):
        dtype = (np.int16, np.int32)[kind - 1]
        return np.clip(samples.astype(np.float64) * -float(np.iinfo(dtype).min), -30000, 30000).astype(dtype)
    if kind == 3:
        return samples.astype(np.float64)
    return np.stack([samples * rng.normal() for _ in range((2, 3, 9)[kind - 4])], 1).astype(np.float32)


cases: list[dict[str, Any]] = []
for number in range(60):
    audio = [*SPECTROGRAMS, *WAVEFORMS][number % 8]
    size = int(rng.integers(30, audio.n_samples + 1)) if audio.n_samples > 30 else 20
    samples = as_given(random_audio(size if audio.features == LOG_MEL else 4000 + number), number // 8 % 7)
    features = audio.from_samples(samples)
    channels = [samples] if samples.ndim == 1 else list(samples.T)
    cases.append(
        {
            "settings": asdict(audio),
            "channels": [golden.array(channel) for channel in channels],
            "features": golden.array(features),
        }
    )
for audio in SPECTROGRAMS[:3]:
    longer = random_audio(audio.n_samples * 2 + 123)
    for samples in (longer, np.zeros(500, np.float32)):
        spectrogram = audio.spectrogram(samples)
        cases.append(
            {
                "settings": asdict(audio),
                "channels": [golden.array(samples)],
                "features": golden.array(spectrogram),
                "direct": True,
            }
        )
golden.write(cases)
