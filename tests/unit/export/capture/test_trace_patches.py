"""A trace with the patches gives the graph that torch gives alone, and repeats less work."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tformer_export.capture.trace_patches import (
    kept_results_not_made_again,
    results_not_described,
)


class Layers(nn.Module):
    """Two equal layers, views, writes in place, several results of an operation and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layers(x)
        y[:, -1:] += x[:, :1]
        turned = torch.view_as_complex(y.unflatten(-1, (4, 2)).contiguous())
        best, places = y.flatten(1).topk(3)
        return y.transpose(1, 2), torch.view_as_real(turned.conj() * turned).sum((-1, -2)), best, places


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Layers().eval()


def traced(module: nn.Module) -> torch.export.ExportedProgram:
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with torch.no_grad():
        return torch.export.export(module, (torch.ones(3, 10, 8),), dynamic_shapes=free).run_decompositions()


def described(program: torch.export.ExportedProgram) -> str:
    """Return a program with shape, strides, type, device and dispatch keys of each value."""
    lines = [f"{program.graph}", f"{program.range_constraints}", f"{program.graph_signature}"]
    for node in program.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                keys = torch._C._dispatch_key_set(value)
                value = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, keys
            lines.append(f"{node.name} {value}")
    return "\n".join(lines)


def test_traced_program_is_that_of_torch(module):
    expected = described(traced(module))
    with kept_results_not_made_again():
        assert described(traced(module)) == expected


def test_kept_results_are_made_for_equal_calls_alone(module, monkeypatch):
    made: list[object] = []
    make = FakeTensorMode._output_from_cache_entry
    monkeypatch.setattr(FakeTensorMode, "_output_from_cache_entry", lambda *args: made.append(args) or make(*args))

    def count() -> tuple[int, int]:
        made.clear()
        FakeTensorMode.cache_clear()
        traced(module)
        return len(made), FakeTensorMode.cache_info().hits

    with_trials, _ = count()
    with kept_results_not_made_again():
        calls, hits = count()
    assert 0 < calls == hits < with_trials


def test_trace_with_numbers_makes_no_tensors_without_data(module, monkeypatch):
    kinds: Counter[str] = Counter()
    make = FakeTensorMode.__init__
    monkeypatch.setattr(
        FakeTensorMode, "__init__", lambda *args, **options: kinds.update(made=1) or make(*args, **options)
    )
    with torch.no_grad():
        expected = make_fx(module, pre_dispatch=True)(torch.ones(2, 3, 8))
    assert kinds["made"] > 20
    kinds.clear()
    with torch.no_grad(), results_not_described():
        assert f"{make_fx(module, pre_dispatch=True)(torch.ones(2, 3, 8)).graph}" == f"{expected.graph}"
    assert not kinds


def test_torch_is_as_before_after_the_patches():
    before = dict(vars(FakeTensorMode)), proxy_tensor.set_meta, proxy_tensor.extract_val
    for patch in (kept_results_not_made_again, results_not_described):
        with patch():
            pass
    assert (dict(vars(FakeTensorMode)), proxy_tensor.set_meta, proxy_tensor.extract_val) == before
