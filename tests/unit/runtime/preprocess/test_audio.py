"""AudioPreprocessor: spectrograms and waveforms equal the output of transformers' feature extractors, and files are
read as they were written.
"""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import soundfile
from msgspec.structs import replace
from transformers import Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from tformer_runtime.base.errors import InputError, MissingExtraError, ModelFileError, OutOfMemoryError
from tformer_runtime.format.manifest import Preprocessing
from tformer_runtime.preprocess.audio import LOG_MEL, AudioPreprocessor

WAVE = AudioPreprocessor(sampling_rate=16000, min_samples=50)
MEL = AudioPreprocessor(
    sampling_rate=16000,
    features=LOG_MEL,
    num_mel_bins=80,
    n_fft=400,
    hop_length=160,
    max_frequency=8000.0,
    n_samples=480000,
)


def speech(seconds, rate=16000, seed=0):
    """Return a sum of tones of varying pitch and loudness, and noise."""
    random, time = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    samples = 0.01 * random.standard_normal(len(time))
    for pitch in (110, 330, 1300, 2900):
        samples += (
            0.2 * np.sin(2 * np.pi * (pitch + 40 * np.sin(3 * time)) * time) * np.maximum(0, np.sin(5 * time + pitch))
        )
    return samples.astype(np.float32)


RECORDINGS = {
    "speech": speech(3.7),
    "silence": np.zeros(8000, np.float32),
    "noise": np.random.default_rng(1).uniform(-1, 1, 20011).astype(np.float32),
    "one sample": np.ones(1, np.float32),
}


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("mels", [80, 128])
def test_spectrograms_match_whisper_feature_extractor(name, mels):
    expected = WhisperFeatureExtractor(feature_size=mels)(RECORDINGS[name], sampling_rate=16000, return_tensors="np")
    actual = replace(MEL, num_mel_bins=mels).from_samples(RECORDINGS[name])
    assert actual.shape == (mels, 3000)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected.input_features[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [400, 256])
def test_spectrograms_of_other_sizes_and_long_recordings_match_feature_extractor(window):
    extractor = WhisperFeatureExtractor(feature_size=12, chunk_length=1, hop_length=100, n_fft=window)
    audio = replace(MEL, num_mel_bins=12, n_fft=window, hop_length=100, n_samples=16000)
    for recording in (speech(0.4), speech(1.0), speech(2.7137)):
        padding = "longest" if len(recording) > 16000 else "max_length"
        expected = extractor(recording, sampling_rate=16000, return_tensors="np", truncation=False, padding=padding)
        np.testing.assert_allclose(audio.spectrogram(recording), expected.input_features[0], atol=1e-4, rtol=0)


def test_waveforms_match_wav2vec2_feature_extractor():
    for normalize in (True, False):
        extractor = Wav2Vec2FeatureExtractor(do_normalize=normalize)
        for recording in RECORDINGS.values():
            expected = extractor(recording + 0.3, sampling_rate=16000, return_tensors="np").input_values[0]
            actual = AudioPreprocessor(normalize=normalize).from_samples(recording + np.float32(0.3))
            np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "subtype", "tolerance"),
    [("a.wav", "PCM_16", 4e-5), ("a.wav", "PCM_24", 2e-7), ("a.wav", "FLOAT", 0), ("a.flac", "PCM_16", 4e-5)],
)
def test_files_are_read_as_written(tmp_path, name, subtype, tolerance):
    samples = speech(0.5)
    soundfile.write(tmp_path / name, samples, 16000, subtype=subtype)
    for source in (tmp_path / name, str(tmp_path / name), (tmp_path / name).read_bytes()):
        np.testing.assert_allclose(WAVE.read(source), samples, atol=tolerance, rtol=0)


def test_channels_are_averaged_and_integers_are_scaled(tmp_path):
    left, right = speech(0.5, seed=1), speech(0.5, seed=2)
    both = np.stack([left, right], 1)
    soundfile.write(tmp_path / "both.wav", both, 16000, subtype="FLOAT")
    for source in (tmp_path / "both.wav", both, (both, 16000)):
        np.testing.assert_allclose(WAVE.read(source), (left + right) / 2, atol=1e-7)
    integers = np.round(left * 32767).astype(np.int16)
    np.testing.assert_allclose(WAVE.read(integers), integers / 32768, atol=1e-7)
    np.testing.assert_allclose(WAVE.read(list(map(float, left))), left, atol=1e-7)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_other_rates_are_resampled(tmp_path, rate):
    def tone(rate):
        return (0.5 * np.sin(2 * np.pi * 1000 * np.arange(rate) / rate)).astype(np.float32)

    soundfile.write(tmp_path / "tone.wav", tone(rate), rate, subtype="FLOAT")
    for source in (tmp_path / "tone.wav", (tone(rate), rate)):
        actual = WAVE.read(source)
        assert len(actual) == 16000
        np.testing.assert_allclose(actual[500:-500], tone(16000)[500:-500], atol=1e-3)


def test_missing_resampler_error_names_both_rates(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingExtraError, match=r"44100 samples a second and the model reads 16000.*tformer\[audio\]"):
        WAVE.read((speech(0.5), 44100))


def test_missing_soundfile_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"needs soundfile: pip install 'tformer\[audio\]'"):
        WAVE.read(tmp_path / "a.wav")


def test_soundfile_without_libsndfile_raises_missing_extra_error(monkeypatch, tmp_path):
    """The module soundfile raises OSError on import if libsndfile is not found."""
    (tmp_path / "soundfile.py").write_text("raise OSError('sndfile library not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "soundfile")
    with pytest.raises(MissingExtraError, match=r"cannot be loaded \(sndfile library not found\).*tformer\[audio\]"):
        WAVE.read(tmp_path / "a.wav")


def test_invalid_recordings_raise_input_error(tmp_path):
    (tmp_path / "text.wav").write_text("no audio at all")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), 16000)
    whole_file = tmp_path / "whole.flac"
    soundfile.write(whole_file, speech(1.0), 16000)
    (tmp_path / "cut.flac").write_bytes(whole_file.read_bytes()[:30])
    with_nan = speech(0.5)
    with_nan[800] = np.nan
    invalid_recordings = {
        "there is no such file": tmp_path / "none.wav",
        "text.wav is not an audio file": tmp_path / "text.wav",
        "cut.flac is not an audio file": tmp_path / "cut.flac",
        "empty.wav is empty": tmp_path / "empty.wav",
        "the recording is empty": [],
        r"not a number, \[nan\] at 0.050 s": with_nan,
        "20 samples long at 16000 Hz .* the model reads 50 at least": speech(0.5)[:20],
        r"\(samples, channels\), not \(2, 800\): transpose": np.zeros((2, 800), np.float32),
        r"samples, .* not ndarray of <U4": np.array("text"),
        "these are int64: make them what they were sampled in": [0, 300, -300] * 100,
        "must be a whole number of samples per second from 1,000 to 1,000,000, not 0": (speech(0.5), 0),
        "to 1,000,000, not True": (speech(0.5), True),
        "to 1,000,000, not 1180591620717411303424": (speech(0.5), 2**70),
        "to 1,000,000, not 16000.5": (speech(0.5), 16000.5),
        "to 1,000,000, not nan": (speech(0.5), float("nan")),
        "to 1,000,000, not '16 kHz'": (speech(0.5), "16 kHz"),
        "name of an audio file is empty": "",
        "is a directory": tmp_path,
    }
    for message, recording in invalid_recordings.items():
        with pytest.raises(InputError, match=message):
            WAVE.read(recording)
    with pytest.raises(InputError, match=r"31.00 s long and 30 s are read at once"):
        MEL.from_samples(speech(31.0))


def with_frame_count(flac, frames):
    """Return the bytes of a FLAC file with a changed number of frames in its header: 36 bits from byte 21."""
    return (
        flac[:21]
        + (flac[21] & 0xF0 | frames >> 32).to_bytes(1, "big")
        + (frames % 2**32).to_bytes(4, "big")
        + flac[26:]
    )


def test_recordings_too_large_for_memory_are_refused(tmp_path, monkeypatch):
    """The header is checked before samples are read."""
    soundfile.write(tmp_path / "a.flac", speech(0.5), 16000)
    with pytest.raises(
        InputError, match="the recording has 68,719,476,735 samples, and at most 1,073,741,824 are read"
    ):
        WAVE.read(with_frame_count((tmp_path / "a.flac").read_bytes(), 2**36 - 1))
    soundfile.write(tmp_path / "slow.wav", speech(0.5), 1)
    with pytest.raises(InputError, match=r"sampling rate of .*slow\.wav must be .*, not 1$"):
        WAVE.read(tmp_path / "slow.wav")
    monkeypatch.setattr("tformer_runtime.preprocess.audio.MAX_SAMPLES", 10000)
    with pytest.raises(InputError, match="resampled to 16000 Hz, has 16,000 samples, and at most 10,000"):
        WAVE.read((speech(1.0, 8000), 8000))
    with pytest.raises(InputError, match="does not state its length"):
        WAVE.read(with_frame_count((tmp_path / "a.flac").read_bytes(), 0))

    def raise_memory_error(*_, **__):
        raise MemoryError

    monkeypatch.setattr(soundfile.SoundFile, "read", raise_memory_error)
    with pytest.raises(OutOfMemoryError, match=r"a\.flac is too long for the memory there is"):
        WAVE.read(tmp_path / "a.flac")
    monkeypatch.setattr("tformer_runtime.preprocess.audio.np.fft.rfft", raise_memory_error)
    with pytest.raises(OutOfMemoryError, match="the recording is too long for the memory there is"):
        MEL.from_samples(speech(0.5))


@pytest.mark.parametrize(
    ("file_format", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("RF64", "PCM_16"),
        ("AIFF", "PCM_24"),
        ("AU", "FLOAT"),
        ("W64", "PCM_16"),
        ("MP3", "MPEG_LAYER_III"),
        ("FLAC", "PCM_16"),
    ],
)
def test_truncated_file_is_refused(file_format, subtype):
    file = io.BytesIO()
    soundfile.write(file, speech(2.0), 16000, format=file_format, subtype=subtype)
    content = file.getvalue()
    assert len(WAVE.read(content)) == 32000
    with pytest.raises(InputError, match=r"the recording is cut off: it holds 1\.\d\d s of 2\.\d\d s|or is damaged"):
        WAVE.read(content[: len(content) * 2 // 3])


@pytest.mark.parametrize("declared_size", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000])
def test_wave_file_written_to_a_pipe_is_read_whole(declared_size):
    """The writer of a pipe does not know the number of samples, and writes the largest size into the header."""
    file = io.BytesIO()
    soundfile.write(file, speech(0.5), 16000, format="WAV", subtype="PCM_16")
    wave = bytearray(file.getvalue())
    size_offset = wave.index(b"data") + 4
    wave[4:8] = wave[size_offset : size_offset + 4] = declared_size.to_bytes(4, "little")
    assert len(WAVE.read(bytes(wave))) == 8000


def test_rate_may_be_a_float_with_an_integer_value():
    samples = speech(0.5, 8000)
    for rate in (8000.0, np.float64(8000), np.int32(8000)):
        np.testing.assert_array_equal(WAVE.read((samples, rate)), WAVE.read((samples, 8000)))


def test_manifest_entry_round_trip():
    assert AudioPreprocessor.of(MEL.manifest_entry) == MEL
    for numbers in (
        {"sampling_rate": "fast"},
        {"features": "smell"},
        {"loud": 1},
        {"features": LOG_MEL, "num_mel_bins": 0},
    ):
        with pytest.raises(ModelFileError, match="damaged"):
            AudioPreprocessor.of(Preprocessing("audio", numbers))


def test_recordings_in_blocks_are_those_of_soundfile(monkeypatch):
    """Channels are averaged in float64, whatever the size of a block."""
    stereo = np.stack([speech(0.1, seed=1), speech(0.1, seed=2)], 1) / 4
    data = io.BytesIO()
    soundfile.write(data, stereo, 16000, format="FLAC")
    expected = soundfile.read(io.BytesIO(data.getvalue()))[0].mean(1).astype(np.float32)
    for size in (2, 334, 1 << 22):
        monkeypatch.setattr("tformer_runtime.preprocess.audio.READ_SAMPLES", size)
        np.testing.assert_array_equal(WAVE.read(data.getvalue()), expected)


def test_silence_that_was_compressed_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr("tformer_runtime.preprocess.audio.FREE_SAMPLES", 1000)
    data = io.BytesIO()
    soundfile.write(data, np.zeros(1 << 18), 16000, format="FLAC")
    size = len(data.getvalue())
    assert 128 * size < 1 << 18
    with pytest.raises(InputError, match=f"more than {128 * size:,} samples, too many for a file of {size:,} bytes"):
        WAVE.read(data.getvalue())
