"""transformers as published: `generate()` and `forward` of its classes in PyTorch, in fp32."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from versus.engines import hugging_face, only
from versus.engines.batched import in_batches, left_padded, right_padded
from versus.shapes import Case, Shape


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    only(precision, "fp32")
    return sum(file.stat().st_size for file in hugging_face(folder, shape).glob("*.safetensors"))


class Engine:
    """An engine for any model with the calls of transformers."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        classes = {
            "translate": transformers.AutoModelForSeq2SeqLM,
            "continue": transformers.AutoModelForCausalLM,
            "embed": transformers.AutoModel,
        }
        self.kind = shape.kind
        self.model = classes[shape.kind].from_pretrained(hugging_face(folder, shape)).eval()

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        import torch

        ids = torch.tensor(inputs)
        with torch.inference_mode():
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if self.kind == "embed":
                return None, self.model(**given).last_hidden_state.mean(1).tolist()
            times: list[float] = []
            generated = self.model.generate(
                **given, num_beams=case.beams, do_sample=False, min_new_tokens=case.new, max_new_tokens=case.new,
                stopping_criteria=[_Clock(times)], **self.options,
            )  # fmt: skip
        first = times[0] if self.kind == "continue" and case.beams == 1 else None
        return first, generated[:, 1 if self.kind == "translate" else case.prompt :].tolist()

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        return in_batches(inputs, functools.partial(self._generate, new=new))

    def _generate(self, inputs: list[Sequence[int]], new: int) -> list[list[int]]:
        import torch

        padded = right_padded if self.kind == "translate" else left_padded
        ids, mask = map(torch.from_numpy, padded(inputs))
        with torch.inference_mode():
            generated = self.model.generate(
                input_ids=ids, attention_mask=mask, num_beams=1, do_sample=False, min_new_tokens=new,
                max_new_tokens=new, **self.options,
            )  # fmt: skip
        return generated[:, -new:].tolist()

    def score(self, inputs: list[list[int]], last: int) -> list[float]:
        import torch

        ids = torch.tensor(inputs)
        with torch.inference_mode():
            scores = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().log_softmax(-1)
        return scores[:, :-1].gather(-1, ids[:, 1:, None])[:, -last:].flatten().tolist()


class _Clock:
    """A stopping criterion that stops nothing and records the time of each token."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def __call__(self, ids: Any, scores: Any, **others: Any) -> Any:
        import torch

        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)
