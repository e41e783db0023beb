"""A tiny Whisper with random weights, whose window is one second, and recordings for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

RATE, WINDOW = 16000, 50  # WINDOW: the number of steps of 20 ms in a window
BYTES = sorted(bytes_to_unicode().values())
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
ID = {token: len(BYTES) + i for i, token in enumerate(SPECIAL)}
FIRST_TIMESTAMP_ID = ID["<|notimestamps|>"] + 1
LANGUAGES = {token: ID[token] for token in ("<|en|>", "<|de|>", "<|fr|>")}
END = ID["<|endoftext|>"]


def seeded_model():
    torch.manual_seed(11)
    config = transformers.WhisperConfig(
        vocab_size=FIRST_TIMESTAMP_ID + WINDOW + 1, num_mel_bins=12, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=WINDOW, max_target_positions=40, init_std=0.6, pad_token_id=END, bos_token_id=END,
        eos_token_id=END, decoder_start_token_id=ID["<|startoftranscript|>"],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=ID["<|startoftranscript|>"], eos_token_id=END, pad_token_id=END, bos_token_id=END,
        max_length=40, suppress_tokens=[3, 7, *(ID[t] for t in SPECIAL[5:10])], begin_suppress_tokens=[32, END],
        no_timestamps_token_id=ID["<|notimestamps|>"], max_initial_timestamp_index=10, is_multilingual=True,
        lang_to_id=LANGUAGES, task_to_id={"transcribe": ID["<|transcribe|>"], "translate": ID["<|translate|>"]},
    )  # fmt: skip
    return model


def random_audio(seconds, seed):
    random, time = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * p * time) * np.sin(9 * time + p) for p in random.uniform(100, 5000, 6))
    return (0.1 * tones + 0.02 * random.standard_normal(len(time))).astype(np.float32)


def seeded_processor():
    """Return the processor of `seeded_model`."""
    times = [transformers.AddedToken(f"<|{i * 0.02:.2f}|>", special=False, normalized=False) for i in range(WINDOW + 1)]
    tokenizer = WhisperTokenizer(vocab={token: i for i, token in enumerate(BYTES)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(times)
    assert tokenizer.convert_tokens_to_ids("<|notimestamps|>") == ID["<|notimestamps|>"]
    assert tokenizer.convert_tokens_to_ids("<|0.02|>") == FIRST_TIMESTAMP_ID + 1
    return WhisperProcessor(WhisperFeatureExtractor(feature_size=12, chunk_length=1), tokenizer)


def write_folder(folder: Path) -> None:
    """Write the model and its processor as transformers does."""
    seeded_model().save_pretrained(folder)
    seeded_processor().save_pretrained(folder)
