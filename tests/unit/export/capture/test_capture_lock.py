"""Exports in two threads: torch is patched for the whole process, so captures run one after the other."""

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
    """Causal attention with a mask from `data`, for which torch.Tensor is patched during a trace."""

    def forward(self, x, tgt):
        query, key, value = self.heads(x)
        mask = causal(x).data
        return joined(torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))


class Doubled(Attention):
    def forward(self, x, tgt):
        return 2 * super().forward(x, tgt)


class Traced(Small):
    """Record the thread in `log` at the start and at the end of each trace of forward."""

    def __init__(self, mixer, log):
        super().__init__(mixer)
        self.append_to_log = log.append  # a list as an attribute of the module would be restored after the trace

    def forward(self, tgt):
        if type(tgt) is torch.Tensor:  # a trace has fake tensors
            return super().forward(tgt)
        self.append_to_log(threading.get_ident())
        time.sleep(0.05)
        logits = super().forward(tgt)
        self.append_to_log(threading.get_ident())
        return logits


def greedy_ids(module):
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


def test_two_threads_export_two_models(tmp_path):
    log = []
    start = threading.Barrier(2)
    models = {"one": Traced(Attention, log).eval(), "two": Traced(Doubled, log).eval()}

    def run(name):
        start.wait(60)
        return export(models[name], tmp_path / f"{name}.onnx", EXAMPLE, "tgt", max_length=LENGTH)

    with ThreadPoolExecutor(2) as pool:
        reports = dict(zip(models, pool.map(run, models), strict=True))

    assert len(set(log)) == 2
    assert log[::2] == log[1::2]  # no trace begins during the trace of another thread
    for name, report in reports.items():
        assert report.tokens_equal
        model = Model.load(tmp_path / f"{name}.onnx", device="cpu")
        result = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, num_beams=1)
        assert tuple(result.token_ids) == greedy_ids(models[name])
    assert "data" not in vars(torch.Tensor)
    assert torch.nn.modules.transformer._detect_is_causal_mask.__module__ == "torch.nn.modules.transformer"


def test_capture_waits_for_the_lock():
    with ThreadPoolExecutor(1) as pool:
        with TORCH_PATCH_LOCK:
            capturing = pool.submit(captured_of, Small(Attention))
            with pytest.raises(TimeoutError):
                capturing.result(0.3)
        assert capturing.result(60).nodes
