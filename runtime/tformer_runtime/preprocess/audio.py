"""From an audio file or samples to the features of a model, as transformers' feature extractors compute them.

read (soundfile) → mean of the channels → resample (soxr) to the rate of the model → features:

waveform   the samples x, or (x - mean) / √(variance + 1e-7) of each recording
log-mel    log10 of the power in bands of the mel scale, in frames `hop_length` samples apart, limited to 8 below the
           maximum: (max(log10 S, max log10 S - 8) + 4) / 4, S = M · |FFT(hann · x)|²

The mel scale and its triangles of equal area are those of Slaney's Auditory Toolbox (1998), as in librosa.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import asdict

from tformer_runtime.base.arrays import F32
from tformer_runtime.base.errors import InputError, ModelFileError, OutOfMemoryError
from tformer_runtime.base.extras import import_optional
from tformer_runtime.format.manifest import AUDIO, Manifest, Preprocessing
from tformer_runtime.format.typed_json import Count, read_typed

TASK = "automatic-speech-recognition"
WAVEFORM, LOG_MEL = "waveform", "log-mel"
VARIANCE_EPSILON = 1e-7
MIN_POWER, LOG10_POWER_RANGE = 1e-10, 8.0
FFT_CHUNK_FRAMES = 4096  # 13 MB for frames of 400 samples
MAX_SAMPLES = 2**30  # of all channels, 4 GiB: 18 hours at 16 kHz
# A small compressed file could fill the memory: silence takes next to no bytes in FLAC. The least that speech takes is
# 64 samples a byte (6 kbit/s at 48 kHz).
MAX_SAMPLES_PER_BYTE = 128
FREE_SAMPLES = 2**24  # samples of any file
READ_SAMPLES = 2**22  # samples that are decoded at one time
MAX_SPECTRUM = 1 << 16  # bands, and samples of a frame
MIN_RATE, MAX_RATE = 1_000, 1_000_000  # samples per second
MP3_MISSING_SAMPLES = 2304  # two frames of MP3, which a complete file may lack
HEADER_SLACK_BYTES = 8  # writers differ in whether the size in a header includes the header
MIN_PIPE_BYTES = 2**31 - 2**16  # a header with at least this size was written to a pipe, before the size was known
UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's value for a file without a length, such as FLAC from a pipe


class AudioPreprocessor(Struct, frozen=True):
    """How a model reads a recording. The fields are those of the manifest.

    sampling_rate: samples per second.
    features: WAVEFORM or LOG_MEL.
    normalize: whether each waveform is normalized to mean 0 and variance 1.
    min_samples: the minimum number of samples.
    num_mel_bins: bands of the spectrogram.
    n_fft, hop_length: samples of a Fourier transform, and from one transform to the next.
    max_frequency: the upper end of the bands, in Hz.
    n_samples: the length of a spectrogram's input; shorter recordings are padded with silence.
    """

    sampling_rate: Annotated[int, Meta(ge=1, le=MAX_RATE)] = 16000
    features: str = WAVEFORM
    normalize: bool = False
    min_samples: Count = 1
    num_mel_bins: Annotated[int, Meta(ge=0, le=MAX_SPECTRUM)] = 0
    n_fft: Annotated[int, Meta(ge=0, le=MAX_SPECTRUM)] = 0
    hop_length: Annotated[int, Meta(ge=0, le=MAX_SPECTRUM)] = 0
    max_frequency: Annotated[float, Meta(ge=0, le=MAX_RATE)] = 0.0
    n_samples: Annotated[int, Meta(ge=0, le=MAX_SAMPLES)] = 0

    @property
    def frames(self) -> int:
        """The number of frames of a padded spectrogram."""
        return self.n_samples // self.hop_length

    def from_samples(self, audio: Any) -> F32:
        """Return the features of a recording without a batch axis: (samples,), or (num_mel_bins, frames).

        audio: see `read`; an array with the shape of a spectrogram is one.
        Raise InputError for a recording that cannot be read or is longer than a spectrogram, MissingExtraError for a
        file without soundfile.
        """
        if self.features != LOG_MEL:
            return self.waveform(self.read(audio))
        if isinstance(audio, np.ndarray) and audio.shape == (self.num_mel_bins, self.frames):
            spectrogram: F32 = np.asarray(audio, np.float32)
            return spectrogram
        samples = self.read(audio)
        if len(samples) > self.n_samples:
            seconds, max_seconds = len(samples) / self.sampling_rate, self.n_samples / self.sampling_rate
            raise InputError(
                f"the recording is {seconds:.2f} s long and {max_seconds:g} s are read at once: transcribe() reads "
                "longer ones piece by piece"
            )
        return self.spectrogram(samples)

    def waveform(self, samples: F32) -> F32:
        """Return the samples of `read`, (samples,), normalized if the model requires that."""
        if not self.normalize:
            return samples
        with _memory_errors("the recording"):
            values = samples.astype(np.float64)
            normalized = (values - values.mean()) / np.sqrt(values.var() + VARIANCE_EPSILON)
            waveform: F32 = normalized.astype(np.float32)
        return waveform

    def spectrogram(self, samples: F32) -> F32:
        """Return the log-mel spectrogram (num_mel_bins, frames) of a recording of any length.

        Frames begin half a window before the recording, which is reflected at its ends. Cost: linear in the length.
        Memory: the recording and the result.
        """
        with _memory_errors("the recording"):
            return self._spectrogram(samples)

    def _spectrogram(self, samples: F32) -> F32:
        values = np.pad(samples, (0, max(0, self.n_samples - len(samples))))
        count = len(values) // self.hop_length
        values = np.pad(values, self.n_fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(values, self.n_fft)[:: self.hop_length][:count]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        filters = _mel_filters(self.sampling_rate, self.n_fft, self.num_mel_bins, self.max_frequency)
        spectrogram: F32 = np.empty((self.num_mel_bins, count), np.float32)
        for begin in range(0, count, FFT_CHUNK_FRAMES):
            chunk = slice(begin, begin + FFT_CHUNK_FRAMES)
            power = np.abs(np.fft.rfft(frames[chunk] * hann)) ** 2
            spectrogram[:, chunk] = np.log10(np.maximum(filters @ power.T, MIN_POWER))
        np.maximum(spectrogram, spectrogram.max() - np.float32(LOG10_POWER_RANGE), out=spectrogram)
        spectrogram += np.float32(4.0)
        spectrogram /= np.float32(4.0)
        return spectrogram

    def read(self, audio: Any, max_samples: int | None = None) -> F32:
        """Return the samples of a recording, (samples,), with one channel at the rate of the model.

        audio: the name or the bytes of a file in a format of soundfile (WAV, FLAC, OGG, MP3); samples at the rate of
            the model, (samples,) or (samples, channels), as floats from -1 to 1 or integers of 16 or 32 bits; or a pair
            of samples and their rate. Channels are averaged.
        max_samples: before and after resampling; MAX_SAMPLES by default.
        Raise InputError for a recording that cannot be read, and for one with more samples. Cost and memory: linear in
        both numbers.
        """
        name = os.fspath(audio) if isinstance(audio, (str, os.PathLike)) else "the recording"
        with _memory_errors(str(name)):
            return self._read(audio, str(name), MAX_SAMPLES if max_samples is None else max_samples)

    def _read(self, audio: Any, name: str, max_samples: int) -> F32:
        rate: Any = self.sampling_rate
        if isinstance(audio, (str, os.PathLike, bytes)):
            samples, rate = _read_file(audio, name, max_samples)  # one channel
        elif isinstance(audio, tuple) and len(audio) == 2 and np.isscalar(audio[1]) and not np.isscalar(audio[0]):
            rate = _check_rate(audio[1], name)
            samples = _as_samples(audio[0])
        else:
            samples = _as_samples(audio)
        if not samples.size:
            raise InputError(f"{name} is empty")
        _check_numbers(samples, 0, rate, name)
        mono = _resample(_mono(samples), rate, self.sampling_rate, name, max_samples)
        if len(mono) < self.min_samples:
            seconds = len(mono) / self.sampling_rate
            raise InputError(
                f"{name} is {len(mono)} samples long at {self.sampling_rate} Hz ({seconds:.4f} s) and the model reads "
                f"{self.min_samples} at least"
            )
        return mono

    @property
    def manifest_entry(self) -> Preprocessing:
        """The entry of the manifest."""
        return Preprocessing(AUDIO, asdict(self))

    @classmethod
    def of(cls, entry: Preprocessing) -> AudioPreprocessor:
        """Return the preprocessor of an entry of the manifest. Raise ModelFileError for a damaged entry."""
        damaged = "the audio settings of the file are damaged"
        audio = read_typed(cls, entry.numbers, damaged)
        try:
            audio.check()
        except ValueError as error:
            raise ModelFileError(f"{damaged} ({error}): export the model again") from error
        return audio

    def check(self) -> None:
        """Raise ValueError for impossible values. Its text is for the author of the values."""
        if self.features not in (WAVEFORM, LOG_MEL):
            raise ValueError(f"features {self.features!r}")
        if self.features != LOG_MEL:
            return
        if min(self.num_mel_bins, self.n_fft - 1, self.hop_length, self.max_frequency) <= 0 or not self.frames:
            raise ValueError("a spectrogram without size")
        if self.num_mel_bins * max(self.n_fft, self.frames) > MAX_SAMPLES // 4:
            raise ValueError("a spectrogram of an impossible size")


def audio_of(manifest: Manifest) -> tuple[str, AudioPreprocessor] | None:
    """Return the name of the input that reads a recording, and its preprocessor; None without one."""
    for name, entry in manifest.preprocessing.items():
        if entry.kind == AUDIO:
            audio = AudioPreprocessor.of(entry)
            shapes = [spec.shape for spec in manifest.encode.inputs if spec.name == name] if manifest.encode else []
            fixed = [size for shape in shapes for size in shape[1:] if isinstance(size, int)]
            if audio.features == LOG_MEL and not {*fixed} <= {audio.num_mel_bins, audio.frames}:
                sizes, expected = f"{audio.num_mel_bins} × {audio.frames}", " × ".join(map(str, fixed))
                raise ModelFileError(
                    f"the audio settings of the file are damaged (a spectrogram of {sizes}, an input of {expected}): "
                    "export the model again"
                )
            return name, audio
    return None


@contextmanager
def _memory_errors(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(f"{name} is too long for the memory there is: cut it into parts") from error


def _mono(samples: F32) -> F32:
    """Return the mean of the channels of (samples, channels)."""
    if samples.shape[1] == 1:
        return samples[:, 0]
    mono: F32 = np.empty(len(samples), np.float32)
    for begin in range(0, len(samples), READ_SAMPLES):
        mono[begin : begin + READ_SAMPLES] = samples[begin : begin + READ_SAMPLES].mean(1, dtype=np.float64)
    return mono


def _read_file(source: Any, name: str, max_samples: int) -> tuple[F32, int]:
    """Return the mean of the channels of a file, (samples, 1), and their rate. source: its name or its bytes."""
    soundfile = import_optional("soundfile", "reading audio needs soundfile", "audio")
    if not isinstance(source, bytes):
        if not os.fspath(source):
            raise InputError("the name of an audio file is empty")
        if Path(source).is_dir():
            raise InputError(f"{name} is a directory: give the name of a file in it")
        if not Path(source).is_file():
            raise InputError(f"{name} cannot be read: there is no such file")
    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)) as file:
            rate = _check_rate(file.samplerate, name)
            if file.frames == UNKNOWN_FRAMES:
                raise InputError(
                    f"{name} does not state its length, which is usual for output of a pipe: convert it to a file"
                )
            if file.frames * file.channels > max_samples:
                raise _too_long(name, file.frames * file.channels, max_samples)
            size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
            samples = _read_blocks(file, size, name)
            _check_complete(file, len(samples), name)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise InputError(
            f"{name} is not an audio file of a supported format (WAV, FLAC, OGG, MP3), or is damaged: {reason}"
        ) from error
    return samples, rate


def _read_blocks(file: Any, size: int, name: str) -> F32:
    """Return the mean of the channels, (samples, 1). Memory follows the samples, and not what the header says.

    size: bytes of the file. Raise InputError for more samples than a file of this size can hold.
    """
    max_samples = max(FREE_SAMPLES, size * MAX_SAMPLES_PER_BYTE)
    mono: F32 = np.empty(
        min(file.frames, max_samples // file.channels), np.float32
    )  # memory is taken when it is written
    step, count = max(1, READ_SAMPLES // file.channels), 0
    while len(block := file.read(step, dtype="float32", always_2d=True)):
        if (count + len(block)) * file.channels > max_samples:
            raise InputError(
                f"{name} holds more than {max_samples:,} samples, too many for a file of {size:,} bytes: it unpacks to "
                "silence that could fill the memory"
            )
        _check_numbers(block, count, file.samplerate, name)
        if count + len(block) > len(mono):  # the header states too few
            mono = np.concatenate([mono[:count], np.empty(max(count, len(block)), np.float32)])
        mono[count : count + len(block)] = _mono(block)
        count += len(block)
    return mono[:count, None]


def _check_complete(file: Any, read_frames: int, name: str) -> None:
    """Raise InputError for a file that is shorter than its header says.

    libsndfile reads compressed files to their end. For uncompressed files it corrects the sizes of the header by the
    size of the file, and reports that in its log.
    """
    expected_frames = file.frames if file.frames - read_frames > MP3_MISSING_SAMPLES else 0
    for header_bytes, actual_bytes in _CORRECTED_SIZE.findall(file.extra_info):
        missing_bytes = int(header_bytes) - int(actual_bytes)
        if missing_bytes > HEADER_SLACK_BYTES and int(header_bytes) < MIN_PIPE_BYTES:
            expected_frames = max(expected_frames, read_frames * int(header_bytes) // max(1, int(actual_bytes)))
    if expected_frames:
        raise InputError(
            f"{name} is cut off: it holds {read_frames / file.samplerate:.2f} s of "
            f"{expected_frames / file.samplerate:.2f} s that its header states; copy it again"
        )


def _check_numbers(samples: F32, begin: int, rate: int, name: str) -> None:
    """Raise InputError for samples (samples, channels) that are not numbers. begin: the index of the first."""
    if not np.isfinite(samples).all():
        index = int(np.flatnonzero(~np.isfinite(samples).all(1))[0])
        raise InputError(
            f"{name} holds a sample that is not a number, {samples[index].tolist()} at {(begin + index) / rate:.3f} s"
        )


def _too_long(name: str, samples: int, max_samples: int) -> InputError:
    return InputError(f"{name} has {samples:,} samples, and at most {max_samples:,} are read: cut it into parts")


def _check_rate(rate: Any, name: str) -> int:
    """Return a rate in samples per second. Raise InputError for other values than whole numbers in the valid range."""
    is_number = isinstance(rate, (int, float, np.integer, np.floating)) and not isinstance(rate, bool)
    if not is_number or not MIN_RATE <= rate <= MAX_RATE or rate != int(rate):
        raise InputError(
            f"the sampling rate of {name} must be a whole number of samples per second from {MIN_RATE:,} to "
            f"{MAX_RATE:,}, not {rate!r}"
        )
    return int(rate)


def _as_samples(array: Any) -> F32:
    """Return an array as samples (samples, channels). Raise InputError for other values than samples."""
    try:
        values = np.asarray(array)
    except ValueError as error:
        raise InputError(f"a recording is an array of numbers, (samples,): {error}") from error
    if values.dtype in (np.int16, np.int32):
        values = values / np.float32(-np.iinfo(values.dtype).min)
    if values.dtype.kind in "iu" and values.size:
        raise InputError(
            f"samples are floats from -1 to 1, or integers of 16 or 32 bits (np.int16, np.int32), and these are "
            f"{values.dtype}: make them what they were sampled in, such as np.array(samples, np.int16)"
        )
    if values.dtype.kind != "f" or values.ndim not in (1, 2):
        raise InputError(
            "a recording is the name of a file, its bytes, or samples, (samples,) floats from -1 to 1 or integers of "
            f"16 or 32 bits, not {type(array).__name__} of {values.dtype} {values.shape}"
        )
    values = values[:, None] if values.ndim == 1 else values
    if 0 < len(values) < values.shape[1]:
        raise InputError(f"samples must have the shape (samples, channels), not {values.shape}: transpose the array")
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _resample(samples: F32, rate: int, target_rate: int, name: str, max_samples: int) -> F32:
    """Resample with soxr's high quality, the default of librosa."""
    if rate == target_rate:
        return samples
    if len(samples) * target_rate > max_samples * rate:
        raise _too_long(f"{name}, resampled to {target_rate} Hz,", len(samples) * target_rate // rate, max_samples)
    needs = f"{name} has {rate} samples a second and the model reads {target_rate}: to have it resampled it needs soxr"
    soxr = import_optional("soxr", needs, "audio")
    resampled: F32 = soxr.resample(samples, rate, target_rate).astype(np.float32)
    if not np.isfinite(resampled).all():
        raise InputError(f"{name} holds samples that are too large to be resampled: samples are from -1 to 1")
    return resampled


@functools.lru_cache(maxsize=8)
def _mel_filters(sampling_rate: int, n_fft: int, num_mel_bins: int, max_frequency: float) -> npt.NDArray[np.float64]:
    """Return the weight of each frequency in each band, (num_mel_bins, n_fft // 2 + 1): triangles of area 1."""
    frequencies = np.linspace(0, sampling_rate // 2, n_fft // 2 + 1)
    corners = _to_hertz(np.linspace(0.0, _to_mel(max_frequency), num_mel_bins + 2))
    widths = np.diff(corners)
    slopes = corners[:, None] - frequencies[None]
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    areas: npt.NDArray[np.float64] = 2.0 / (corners[2:] - corners[:-2])
    return triangles * areas[:, None]


_CORRECTED_SIZE = re.compile(r"(\d+) \(should be (\d+)\)")  # bytes, in libsndfile's log

_LINEAR_MAX_HERTZ = 1000.0  # the mel scale is linear up to here, and logarithmic above
_LINEAR_MAX_MELS = 15.0
_MELS_PER_E = 27.0 / np.log(6.4)  # for each factor of e above


def _to_mel(hertz: float) -> float:
    if hertz < _LINEAR_MAX_HERTZ:
        return 3.0 * hertz / 200.0
    return float(_LINEAR_MAX_MELS + np.log(hertz / _LINEAR_MAX_HERTZ) * _MELS_PER_E)


def _to_hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    logarithmic = _LINEAR_MAX_HERTZ * np.exp((mels - _LINEAR_MAX_MELS) / _MELS_PER_E)
    return np.where(mels < _LINEAR_MAX_MELS, 200.0 * mels / 3.0, logarithmic)
