"""Adapters that PEFT makes for tiny models, with random weights: PEFT starts the second factor of LoRA from zero."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch


def make_adapter(model: Any, config: Any, folder: Path, base: Path | str, seed: int = 0, size: float = 0.3) -> Any:
    """Put an adapter of random weights on a copy of the model, save it, and return PEFT's model.

    base: the name of the base model in the adapter's settings.
    """
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * size)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    return adapted


def greedy(model: Any, ids: list[int], steps: int) -> tuple[list[int], np.ndarray]:
    """Return the ids that generate() chooses greedily, and the natural logarithms of their probabilities."""
    out = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=steps,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    chosen = out.sequences[0, -len(out.logits) :]
    logprobs = torch.stack([logits[0] for logits in out.logits]).log_softmax(-1)
    return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].numpy()
