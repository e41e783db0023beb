"""Two threads export at the same time: torch is patched for the whole process, so one capture follows the other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest
import torch
from support.small_models import EXAMPLE, LENGTH, Mixer, Small, captured_of, causal, joined

from tformer_export import export
from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK
from tformer_runtime import Model

PROMPT, NEW_TOKENS = [3, 4, 5], 6


class Attention(Mixer):
    """Causal attention over projections of `data`, for which torch.Tensor is patched while it is traced."""

    def forward(self, x, tgt):
        query, key, value = self.heads(x)
        mask = causal(x).data
        return joined(torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))


class Doubled(Attention):
    def forward(self, x, tgt):
        return 2 * super().forward(x, tgt)


class Traced(Small):
    """Notes the thread in `log` when a trace of its forward begins and ends, and sleeps in between."""

    def __init__(self, mixer, log):
        super().__init__(mixer)
        self.note = log.append  # a list of the module itself would be restored after the trace

    def forward(self, tgt):
        if type(tgt) is torch.Tensor:  # not a fake tensor of a trace
            return super().forward(tgt)
        self.note(threading.get_ident())
        time.sleep(0.05)
        logits = super().forward(tgt)
        self.note(threading.get_ident())
        return logits


def greedy(module):
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


def test_two_threads_export_two_models_at_the_same_time(tmp_path):
    log = []
    start = threading.Barrier(2)
    models = {"one": Traced(Attention, log).eval(), "two": Traced(Doubled, log).eval()}

    def run(name):
        start.wait(60)
        return export(models[name], tmp_path / f"{name}.onnx", EXAMPLE, "tgt", max_length=LENGTH)

    with ThreadPoolExecutor(2) as pool:
        reports = dict(zip(models, pool.map(run, models), strict=True))

    assert len(set(log)) == 2
    assert log[::2] == log[1::2]  # no trace begins within another thread's
    for name, report in reports.items():
        assert report.tokens_equal
        model = Model.load(tmp_path / f"{name}.onnx", device="cpu")
        result = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, num_beams=1)
        assert tuple(result.token_ids) == greedy(models[name])
    assert "data" not in vars(torch.Tensor)
    assert torch.nn.modules.transformer._detect_is_causal_mask.__module__ == "torch.nn.modules.transformer"


def test_a_capture_waits_for_the_lock():
    with ThreadPoolExecutor(1) as pool:
        with TORCH_PATCH_LOCK:
            capturing = pool.submit(captured_of, Small(Attention))
            with pytest.raises(TimeoutError):
                capturing.result(0.3)
        assert capturing.result(60).nodes
