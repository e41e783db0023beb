"""Train a decoder of your own on a toy language, export it, and run the file without PyTorch.

    python examples/own_module.py

A line of the language is a word and its mirror image: `abc|cba`. The module is plain PyTorch: it takes the whole
sequence, and knows nothing of a cache. The exporter finds in its graph which tensors to keep from step to step.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

from tformer_export import export
from tformer_runtime import Model

LETTERS = "abcdefgh"
TOKENS = ["<pad>", "<s>", "</s>", "|", *LETTERS]
PAD, START, END = 0, 1, 2
MAX_LETTERS = 6
MAX_LENGTH = 2 * MAX_LETTERS + 3


class Decoder(nn.Module):
    """A causal Transformer over at most MAX_LENGTH tokens."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(TOKENS), width)
        self.positions = nn.Embedding(MAX_LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.logits = nn.Linear(width, len(TOKENS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, time). Returns logits (batch, time, tokens)."""
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(ids) + self.positions(torch.arange(length))
        return self.logits(self.layers(x, mask=mask, is_causal=True))


def line(word: str) -> list[int]:
    """Return the ids of a word, a bar, and the word backwards, between the tokens of start and end."""
    return [START, *(TOKENS.index(token) for token in f"{word}|{word[::-1]}"), END]


def train(steps: int = 600) -> Decoder:
    """Train with random words of 1 to MAX_LETTERS letters: 20 seconds on one core."""
    torch.manual_seed(0)
    draws = random.Random(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        words = ["".join(draws.choices(LETTERS, k=draws.randint(1, MAX_LETTERS))) for _ in range(64)]
        rows = [torch.tensor(line(word)) for word in words]
        batch = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def mirror(file: Path, words: list[str]) -> list[str]:
    """Return the mirror images that the exported file writes. It needs numpy and onnxruntime, not PyTorch."""
    prompts = [line(word)[: len(word) + 2] for word in words]  # up to the bar
    with Model.load(file) as model:
        results = model.generate_batch(prompts, max_new_tokens=MAX_LETTERS + 1)
        return ["".join(TOKENS[i] for i in result.token_ids if i > END) for result in results]


def main(file: Path, steps: int = 600) -> list[str]:
    """Train, export to `file`, and print what the file writes for a few words."""
    model = train(steps)
    special_tokens = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
    example = {"ids": torch.tensor([line("abc")])}  # its sizes do not matter
    export(model, file, example, step_input="ids", special_tokens=special_tokens, force=True)
    words = ["abc", "hgfe", "dad", "facade"]
    mirrored = mirror(file, words)
    for word, answer in zip(words, mirrored, strict=True):
        print(word, "→", answer)
    return mirrored


if __name__ == "__main__":
    main(Path("mirror.onnx"))
