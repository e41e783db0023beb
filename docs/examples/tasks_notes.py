"""Train a tiny wav2vec 2.0 to hear which notes are played and save the folder notes/; write some melodies.

Its letters are C D E F G A B, a note each, of the octave above middle C. A rest separates words.
The melodies are melody.wav, slow.flac and stereo.wav.
"""

import json
from pathlib import Path

import numpy as np
import soundfile
import torch
import transformers

RATE = 16000
NOTES = dict(zip("CDEFGAB", [261.63, 293.66, 329.63, 349.23, 392.0, 440.0, 493.88], strict=True))
VOCABULARY = ["<pad>", "<unk>", "|", *NOTES]

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
random = np.random.default_rng(1)
torch.manual_seed(1)
torch.set_num_threads(1)


def melody(text, seconds=0.16, rate=RATE):
    """A note for each letter, a rest for each space, some silence around each, and noise."""
    parts = [np.zeros(int(rate * 0.05))]
    for letter in text:
        time = np.arange(int(rate * seconds * random.uniform(0.8, 1.2))) / rate
        envelope = np.minimum(1, np.minimum(time, time[::-1]) * 50)
        tone = sum(np.sin(2 * np.pi * NOTES[letter] * k * time) / k**2 for k in (1, 2, 3)) if letter in NOTES else 0
        parts += [0.3 * random.uniform(0.6, 1) * envelope * tone * (letter in NOTES), np.zeros(int(rate * 0.04))]
    audio = np.concatenate(parts)
    return (audio + 0.003 * random.standard_normal(len(audio))).astype(np.float32)


def text():
    return " ".join("".join(random.choice(list(NOTES), random.integers(1, 4))) for _ in range(random.integers(1, 3)))


Path("notes").mkdir(exist_ok=True)
Path("notes/vocab.json").write_text(json.dumps({token: i for i, token in enumerate(VOCABULARY)}))
tokenizer = transformers.Wav2Vec2CTCTokenizer("notes/vocab.json", bos_token=None, eos_token=None)
extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=True)
processor = transformers.Wav2Vec2Processor(extractor, tokenizer)
config = transformers.Wav2Vec2Config(
    vocab_size=len(VOCABULARY), hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
    conv_dim=(64, 64), conv_kernel=(400, 4), conv_stride=(160, 2), num_feat_extract_layers=2, feat_extract_norm="layer",
    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, pad_token_id=0, ctc_loss_reduction="mean",
    mask_time_prob=0.0, layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    feat_proj_dropout=0.0, final_dropout=0.0,
)  # fmt: skip
model = transformers.Wav2Vec2ForCTC(config).train()
steps = 600
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
for _ in range(steps):
    texts = [text() for _ in range(16)]
    batch = processor([melody(t) for t in texts], sampling_rate=RATE, padding=True, return_tensors="pt")
    labels = tokenizer([t.replace(" ", "|") for t in texts], padding=True, return_tensors="pt")
    ids = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
    loss = model(**batch, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()
model.eval().save_pretrained("notes")
processor.save_pretrained("notes")

soundfile.write("melody.wav", melody("CDE FG"), RATE)
soundfile.write("slow.flac", melody("BAG", 0.19), RATE)
soundfile.write("stereo.wav", np.stack([melody("ACE", rate=44100)] * 2, 1), 44100)
print(f"notes/: {sum(p.numel() for p in model.parameters()):,} parameters, loss {loss.item():.2f}")
