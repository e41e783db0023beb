"""Train a tiny Whisper to write which notes are played, with times, and save dictation/; write short.wav and long.wav.

Its window is a second. The notes are those of tasks_notes.py; in German the note B is called H.
"""

import numpy as np
import soundfile
import torch
import transformers
from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

RATE, STEPS = 16000, 50  # a window has 50 steps of 20 ms
NOTES = dict(zip("CDEFGAB", [261.63, 293.66, 329.63, 349.23, 392.0, 440.0, 493.88], strict=True))
BYTES = sorted(bytes_to_unicode().values())
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
ID = {token: i for i, token in enumerate(BYTES + SPECIAL)}
END, TIME = ID["<|endoftext|>"], len(ID)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
random = np.random.default_rng(1)
torch.manual_seed(1)
torch.set_num_threads(1)


def melody(text):
    """Samples, and (first step, last step, letter) of each note."""
    parts, notes, at = [np.zeros(int(RATE * random.uniform(0.04, 0.12)))], [], 0
    for letter in text:
        at = sum(map(len, parts))
        time = np.arange(int(RATE * random.uniform(0.12, 0.2))) / RATE
        tone = sum(np.sin(2 * np.pi * NOTES[letter] * k * time) / k**2 for k in (1, 2, 3))
        parts.append(0.3 * random.uniform(0.6, 1) * np.minimum(1, np.minimum(time, time[::-1]) * 50) * tone)
        notes.append((at / RATE, (at + len(time)) / RATE, letter))
        parts.append(np.zeros(int(RATE * random.uniform(0.05, 0.1))))
    audio = np.concatenate(parts)
    return (audio + 0.003 * random.standard_normal(len(audio))).astype(np.float32), notes


def example():
    """A window of a melody, and its ids."""
    audio, notes = melody(random.choice(list(NOTES), random.integers(1, 10)))
    begin = random.choice([0.0, *(end for _, end, _ in notes[:-1])])
    german, times = random.random() < 0.5, random.random() < 0.7
    ids = [ID["<|startoftranscript|>"], ID["<|de|>" if german else "<|en|>"], ID["<|transcribe|>"]]
    ids += [] if times else [ID["<|notimestamps|>"]]
    for start, end, letter in notes:
        start, end = (round((seconds - begin) * STEPS) for seconds in (start, end))
        if start >= 0 and end <= STEPS:
            text = ID["H" if german and letter == "B" else letter]
            ids += [TIME + start, text, TIME + end] if times else [text]
        elif 0 <= start < STEPS and times:
            ids.append(TIME + start)  # it is read in the next window
    return audio[int(begin * RATE) :][:RATE], [*ids, END]


config = transformers.WhisperConfig(
    vocab_size=TIME + STEPS + 1, num_mel_bins=40, d_model=64, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0,
    max_source_positions=STEPS, max_target_positions=40, init_std=0.05, pad_token_id=END, bos_token_id=END,
    eos_token_id=END, decoder_start_token_id=ID["<|startoftranscript|>"],
)  # fmt: skip
model = transformers.WhisperForConditionalGeneration(config).train()
extractor = WhisperFeatureExtractor(feature_size=40, chunk_length=1)
steps = 1200
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
for _ in range(steps):
    recordings, ids = zip(*(example() for _ in range(24)), strict=True)
    features = extractor(list(recordings), sampling_rate=RATE, return_tensors="pt").input_features
    given = torch.nn.utils.rnn.pad_sequence([torch.tensor(row[:-1]) for row in ids], True, END)
    wanted = torch.nn.utils.rnn.pad_sequence([torch.tensor(row[1:]) for row in ids], True, -100)
    wanted[:, 0] = ID["<|en|>"]  # a recording does not tell its language
    loss = model(input_features=features, decoder_input_ids=given, labels=wanted).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()
model.generation_config = transformers.GenerationConfig(
    decoder_start_token_id=ID["<|startoftranscript|>"], eos_token_id=END, pad_token_id=END, bos_token_id=END,
    max_length=40, suppress_tokens=[ID[token] for token in SPECIAL[4:9]], begin_suppress_tokens=[END],
    no_timestamps_token_id=ID["<|notimestamps|>"], max_initial_timestamp_index=STEPS, is_multilingual=True,
    lang_to_id={token: ID[token] for token in ("<|en|>", "<|de|>")},
    task="transcribe", task_to_id={"transcribe": ID["<|transcribe|>"], "translate": ID["<|translate|>"]},
)  # fmt: skip
model.eval().save_pretrained("dictation")
tokenizer = WhisperTokenizer(vocab={token: i for i, token in enumerate(BYTES)}, merges=[])
tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
times = [f"<|{i / STEPS:.2f}|>" for i in range(STEPS + 1)]
tokenizer.add_tokens([transformers.AddedToken(token, special=False, normalized=False) for token in times])
WhisperProcessor(extractor, tokenizer).save_pretrained("dictation")

soundfile.write("short.wav", melody("CAB")[0], RATE)
soundfile.write("long.wav", melody("CDEFGAB")[0], RATE)
print(f"dictation/: {sum(p.numel() for p in model.parameters()):,} parameters, loss {loss.item():.2f}")
