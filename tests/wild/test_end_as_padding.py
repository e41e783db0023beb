"""A decoder that pads its sequences with the id of the end, and hides that id from all positions."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn as nn
from tiny import WIDTH, Attention

from tformer_export import export
from tformer_runtime import Model

VOCABULARY, START, END = 29, 1, 2


class PadsWithEnd(nn.Module):
    """A row that begins with the end has no visible position: its attention is NaN. No sequence begins so."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attention()
        self.leave = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        time = ids.shape[1]
        later = torch.triu(torch.ones(time, time, dtype=torch.uint8), diagonal=1)[None]
        hidden = (ids.eq(END).unsqueeze(1).expand(-1, time, -1) + later).gt(0)
        x = self.embed(ids) + torch.linspace(0, 1, 64)[:time, None]
        x = (x + self.attention(x, hidden[:, None])) * ids.ne(END).float()[..., None]
        return self.leave(x)


def test_decodes_as_the_module(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, path = PadsWithEnd().eval(), tmp_path / "model.onnx"
    special = {"bos_token_id": START, "eos_token_id": END}
    ids = torch.tensor([[1, 5, 6, 7]])
    export(model, path, {"ids": ids}, step_input="ids", special_tokens=special, max_length=32)
    prompts = [[1, 9, 4, 8, 8], [1], [1, 20, 3]]
    results = Model.load(path, "cpu", threads=1).generate_batch(prompts, max_new_tokens=12)
    for prompt, result in zip(prompts, results, strict=True):
        row = list(prompt)
        while len(row) < len(prompt) + 12 and END not in row:
            with torch.no_grad():
                row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
        assert list(result.token_ids) == row[len(prompt) :]
