"""Tuning: the choice of kernels follows from measured times, and every kernel form matches PyTorch."""

from __future__ import annotations

import itertools
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

from tformer_export import export
from tformer_export.cli import command
from tformer_export.common.kernel_choices import (  # fmt: skip
    BIAS_BEFORE_GELU,
    CHOICES,
    FEW_ROWS_KERNEL,
    GIVEN_KEYS_ATTENTION,
    NORMS,
    PROJECTIONS,
    ROTARY,
    SUM_BEFORE_NORM,
    THREADS,
    WHOLE_ATTENTION,
    KernelChoice,
    few_rows_limits,
    session_settings,
)
from tformer_export.common.onnx_writer import save
from tformer_export.common.paired_timing import MAX_ROUNDS, MIN_GAIN, MIN_ROUNDS, time_in_turns
from tformer_export.compile import analyse
from tformer_export.quantize import measure, quantize_weights
from tformer_export.sources.torch_module import from_module
from tformer_export.tune.tune import make_timed_request, tune
from tformer_export.verify.parity import ParityGate
from tformer_runtime.base.errors import OptionError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import SessionSettings, SpecialTokens
from tformer_runtime.format.model_file import read_manifest

IDS, WIDTH, HEADS, HEAD_SIZE, MAX_LENGTH, PAD_ID = 29, 32, 2, 16, 40, 0


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, y, mask, turn=lambda x: x):
        q, k, v = (
            p(z).unflatten(2, (HEADS, HEAD_SIZE)).transpose(1, 2) for p, z in ((self.q, x), (self.k, y), (self.v, y))
        )
        return self.out(F.scaled_dot_product_attention(turn(q), turn(k), v, mask).transpose(1, 2).flatten(2))


class Everything(nn.Module):
    """A model with a use for every choice: an encoder, rotary positions, two kinds of norm, residual sums."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(IDS, WIDTH), nn.Embedding(IDS, WIDTH)
        self.encoder, self.self_attention, self.cross = Attention(), Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.root, self.wide, self.out = RootMeanSquare(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, IDS)
        angles_of_half = torch.outer(
            torch.arange(MAX_LENGTH).float(), 100.0 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        )
        self.register_buffer("angles", torch.cat([angles_of_half, angles_of_half], 1))

    def turn(self, x):
        angles, (one, other) = self.angles[: x.shape[2]], x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()

    def forward(self, src, tgt):
        keep = torch.where(src != PAD_ID, 0.0, -1e9)[:, None, None]
        x = self.source(src)
        x = self.norms[0](x + self.encoder(x, x, keep))
        y = self.decode_target(tgt, self.turn)
        return self.out(self.norms[2](y + self.cross(y, x, keep)))

    def decode_target(self, tgt, turn):
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        y = F.gelu(self.wide(self.target(tgt)))
        return self.norms[1](y + self.self_attention(self.root(y), self.root(y), causal, turn))


EXAMPLE = {"src": torch.tensor([[3, 4, 5], [6, 7, 8]]), "tgt": torch.tensor([[3, 4, 5], [6, 7, 8]])}
SPECIAL = SpecialTokens((1,), (2,), PAD_ID)


class Decoder(Everything):
    def forward(self, tgt):
        return self.out(self.decode_target(tgt, lambda x: x))


class Encoder(nn.Module):
    """A single-pass model."""

    def __init__(self):
        super().__init__()
        everything = Everything()
        self.source, self.encoder, self.norm = everything.source, everything.encoder, everything.norms[0]

    def forward(self, src):
        x = self.source(src)
        return self.norm(x + self.encoder(x, x, (src != PAD_ID)[:, None, None]))


@pytest.fixture(scope="module")
def analysed():
    source = from_module(Everything().eval(), EXAMPLE, "tgt", special_tokens=SPECIAL)
    return analyse(source, "cpu", MAX_LENGTH)


def write_engine(model, manifest, path):
    return Engine(save(model, manifest, path), device="cpu", threads=1)


def operators(model):
    return sorted(node.op_type for node in model.graph.all_nodes())


# -- choices ---------------------------------------------------------------------------------------------------


def no_pause():
    """Replace the pause between measurements."""


def constant(seconds):
    return lambda rows: seconds


def noisy(*ratios):
    """Return a request with one time for each turn, repeated. The first turn is a warm-up."""
    turns = iter([1.0, *ratios * MAX_ROUNDS])
    return lambda rows: next(turns)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("tformer_export.tune.tune.PAUSE_SECONDS", 0.0)


def make_choice(name, *forms):
    return KernelChoice(name, forms, lambda compiled: True)


def make_builder(times, built_forms=None):
    """Return a function from forms to a request, whose time is the product of the times of all forms that are not the
    default."""

    def build(forms):
        if built_forms is not None:
            built_forms.append(dict(forms))
        return constant(float(np.prod([times.get(form, 1.0) for form in forms.values()])))

    return build


def test_fastest_form_of_each_choice_is_kept():
    choices = [make_choice("norms", "a", "b", "c"), make_choice("sums", "d", "e")]
    built_forms = []
    tuning = tune(make_builder({"b": 0.9, "c": 0.7, "e": 1.2}, built_forms), choices, (1, 8), no_pause)
    assert tuning.forms == {"norms": "c", "sums": "d"}
    assert tuning.ratio == pytest.approx(0.7)
    assert built_forms[1:] == [
        {"norms": "b"},
        {"norms": "c"},
        {"norms": "c", "sums": "e"},
    ]  # with the forms that were kept before
    assert [t.ratio for t in tuning.decisions[0].trials] == pytest.approx([1, 0.9, 0.7])
    assert tuning.decisions[0].trials[2].seconds == pytest.approx({1: 0.7, 8: 0.7})


@pytest.mark.parametrize(("ratio", "kept"), [(1 - MIN_GAIN + 0.01, "a"), (1 - MIN_GAIN - 0.01, "b")])
def test_form_below_min_gain_is_not_kept(ratio, kept):
    assert tune(make_builder({"b": ratio}), [make_choice("norms", "a", "b")], (1,), no_pause).forms == {"norms": kept}


def test_gain_within_spread_does_not_win():
    steady, unsteady = ((0.92, 0.9, 0.88), (0.7, 0.9, 1.1))  # both have the same median
    for times, wins in ((steady, True), (unsteady, False)):
        first, trial = time_in_turns({"a": constant(1.0), "b": noisy(*times)}, (1,), no_pause)
        assert trial.ratio == pytest.approx(0.9)
        assert trial.wins == wins
        assert first.ratio == 1


def test_batch_sizes_have_equal_weight():
    """A form is faster for one row and slower for eight, or the reverse: the geometric mean of the ratios decides."""
    for one, eight, kept in ((0.5, 1.5, "b"), (0.8, 1.3, "a")):

        def build(forms, one=one, eight=eight):
            return lambda rows: {1: one, 8: eight}[rows] * rows if forms else float(rows)

        assert tune(build, [make_choice("norms", "a", "b")], (1, 8), no_pause).forms == {"norms": kept}


def test_choice_may_set_its_own_batch_sizes():
    measured_rows = []

    def build(forms):
        return lambda rows: measured_rows.append(rows) or 1.0

    tune(build, [KernelChoice("few", ("a", "b"), lambda compiled: True, rows=(2, 4))], (1, 32), no_pause)
    assert set(measured_rows) == {2, 4}


def test_defaults_stay_unless_all_kept_forms_together_win():
    """A form wins its own race by chance."""
    lucky_times = [1.0, *[0.5] * MAX_ROUNDS]

    def build(forms):
        return (lambda rows: lucky_times.pop(0) if lucky_times else 1.0) if forms else constant(1.0)

    tuning = tune(build, [make_choice("norms", "a", "b")], (1,), no_pause)
    assert not lucky_times
    assert tuning.forms == {"norms": "a"}
    assert tuning.ratio == 1
    assert tuning.table() == [
        ("tuned", "for batches of 1: the default forms stay"),
        ("  norms", "*a 1000 ms; b 500 ms (0.50 ± 0.00 ×)"),
    ]


@pytest.mark.parametrize("moment", [20, 50, 80, 200])
def test_measured_speed_is_unaffected_by_a_slow_period(analysed, tmp_path, monkeypatch, moment):
    """Both measured files are the same. The machine becomes three times slower at some moment."""
    compiled = analysed.compile()
    engine = write_engine(compiled.model, compiled.manifest, tmp_path / "model.onnx")
    gate = ParityGate(analysed.source, compiled.inputs)
    now = itertools.accumulate(1.0 if n < moment else 3.0 for n in itertools.count())
    clock = SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(sys.modules[measure.__module__], "time", clock)
    assert measure(gate, engine, engine).speed == pytest.approx(1)


def test_form_that_loses_every_round_is_dropped_early():
    runs = []

    def slow(rows):
        runs.append(rows)
        return 2.0

    time_in_turns({"a": constant(1.0), "b": slow}, (1,), no_pause)
    assert len(runs) == 1 + MIN_ROUNDS


def test_ratio_is_unaffected_by_slowdown_of_the_machine():
    """Only ratios within a round count."""
    clock = {"a": 0, "b": 0}

    def drifting(name, factor):
        def run(rows):
            clock[name] += 1
            return factor * clock[name]

        return run

    _, trial = time_in_turns({"a": drifting("a", 1.0), "b": drifting("b", 0.9)}, (1,), no_pause)
    assert trial.ratio == pytest.approx(0.9)
    assert trial.spread == pytest.approx(0)


# -- every form computes the same -----------------------------------------------------------------------------------

CHANGES = {  # the operators that a form that is not the default has more and fewer of
    GIVEN_KEYS_ATTENTION.name: ("Softmax", "MultiHeadAttention"),
    WHOLE_ATTENTION.name: ("MultiHeadAttention", "GroupQueryAttention"),
    ROTARY.name: ("Neg", None),
    NORMS.name: ("Sqrt", "RMSNormalization"),
    PROJECTIONS.name: ("MatMul", "Split"),
    SUM_BEFORE_NORM.name: None,
    BIAS_BEFORE_GELU.name: None,
    THREADS.name: None,
}
OTHER_FORMS = [(choice, form) for choice in CHOICES if choice != FEW_ROWS_KERNEL for form in choice.forms[1:]]


@pytest.mark.parametrize(("choice", "form"), OTHER_FORMS, ids=[f"{c.name}: {f}" for c, f in OTHER_FORMS])
def test_each_form_matches_source_model(analysed, tmp_path, choice, form):
    forms = {choice.name: form}
    default, compiled = analysed.compile(), analysed.compile(forms)
    assert choice.applies(default) or choice == THREADS
    before, after = operators(default.model), operators(compiled.model)
    change = CHANGES[choice.name]
    if change is None:
        assert before == after
        assert session_settings(forms) != SessionSettings()
    else:
        added, removed = change
        assert after.count(added) > before.count(added)
        assert removed is None or after.count(removed) < before.count(removed)
    manifest = replace(compiled.manifest, session=session_settings(forms))
    engine = write_engine(compiled.model, manifest, tmp_path / "model.onnx")
    report = ParityGate(analysed.source, compiled.inputs, compiled.locator).check(engine)
    assert report.relative_error < 1e-5
    assert report.tokens_equal == report.tokens


def test_all_other_forms_together_match_source_model(analysed, tmp_path):
    forms = {choice.name: choice.forms[-1] for choice in CHOICES}
    compiled = analysed.compile(forms)
    engine = write_engine(compiled.model, compiled.manifest, tmp_path / "model.onnx")
    assert ParityGate(analysed.source, compiled.inputs).check(engine).relative_error < 1e-5
    assert compiled.manifest.decode.shares_context


def test_rows_share_a_context_in_every_form(analysed, tmp_path):
    """Beams, three rows for each of two requests, against the same rows with a request each."""
    compiled = analysed.compile({GIVEN_KEYS_ATTENTION.name: "products and softmax"})
    assert compiled.manifest.decode.shares_context
    engine = write_engine(compiled.model, compiled.manifest, tmp_path / "model.onnx")
    gate = ParityGate(analysed.source, compiled.inputs)
    sources = [gate.draw_request(n)["src"] for n in (5, 9)]
    tokens = np.arange(12).reshape(6, 2) + 3
    shared = engine.start({"src": sources}, 2)
    engine.reorder(shared, np.repeat([0, 1], 3))
    separate = engine.start({"src": [sources[i // 3] for i in range(6)]}, 6)
    np.testing.assert_allclose(engine.step(shared, tokens), engine.step(separate, tokens), atol=1e-5)


@pytest.mark.parametrize("form", FEW_ROWS_KERNEL.forms)
@pytest.mark.parametrize("bits", [8, 4])
def test_each_small_batch_limit_matches_float_file(analysed, tmp_path, form, bits):
    compiled, forms = analysed.compile(), {FEW_ROWS_KERNEL.name: form}
    gate = ParityGate(analysed.source, compiled.inputs)
    before = write_engine(compiled.model.clone(), compiled.manifest, tmp_path / "before.onnx")
    quantization = quantize_weights(compiled.model, bits, "latency", "tgt", few_rows=few_rows_limits(forms))
    after = write_engine(compiled.model, compiled.manifest, tmp_path / "after.onnx")
    kinds = operators(compiled.model)
    assert ("MatMulNBits" in kinds) == (form != "none")
    assert quantization.count > 0
    measure(gate, before, after, exact=False)  # refuses a file whose batches change a row by more than rounding does
    limit = next(
        (v.const_value for v in compiled.model.graph.initializers.values() if v.name == "few.max_tokens"), None
    )
    expected = {"none": None, FEW_ROWS_KERNEL.default: {8: 2, 4: 3}[bits]}.get(
        form, int(form[0]) if form[0].isdigit() else None
    )
    assert (None if limit is None else int(limit.numpy())) == expected


# -- exports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def patch_times(monkeypatch):
    """Replace the time of requests by a time that depends on the forms of their file. The engine still runs them."""
    real = make_timed_request

    def patch(times):
        def make_timed_request(gate, engine):
            request, forms = real(gate, engine), engine.manifest.kernel_forms
            factor = float(np.prod([times.get(form, 1.0) for form in forms.values()]))
            return lambda rows: factor if request(rows) > 0 else 0.0

        monkeypatch.setattr("tformer_export.tune.tune.make_timed_request", make_timed_request)

    return patch


def test_file_and_report_name_kept_forms(tmp_path, patch_times):
    times = {"a product each": 0.9, "one": 0.9, "4 rows": 0.9, "written out": 1.5, "SkipLayerNormalization": 0.99}
    patch_times(times)
    path, report_file = tmp_path / "model.onnx", tmp_path / "report.json"
    report = export(
        Decoder(), path, {"tgt": EXAMPLE["tgt"]}, "tgt", special_tokens=SPECIAL, max_length=MAX_LENGTH,
        quantization="int8", optimize_for="latency", tune=True,
    )  # fmt: skip
    kept = {
        NORMS.name: NORMS.default, PROJECTIONS.name: "a product each", SUM_BEFORE_NORM.name: SUM_BEFORE_NORM.default,
        BIAS_BEFORE_GELU.name: BIAS_BEFORE_GELU.default, FEW_ROWS_KERNEL.name: "4 rows",
    }  # fmt: skip
    if (os.cpu_count() or 1) > 1:
        kept[THREADS.name] = "one"
    assert report.tuning.forms == kept
    assert report.tuning.rows == (1,)
    assert report.tuning.ratio == pytest.approx(0.9 ** (len(kept) - 3))
    assert report.tokens_equal
    manifest = read_manifest(path)
    assert manifest.kernel_forms == kept
    assert manifest.session == SessionSettings(threads=1 if THREADS.name in kept else None)
    model = onnx.load(path)
    kinds = operators(ir.from_proto(model))
    assert "Split" not in kinds
    assert {"GroupQueryAttention", "RMSNormalization", "MatMulNBits"} < set(kinds)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    assert numpy_helper.to_array(initializers["few.max_tokens"]) == 4
    assert list(tmp_path.iterdir()) == [path]
    report.write(report_file)
    decisions = json.loads(report_file.read_text())["tuning"]["decisions"]
    assert {decision["choice"]: decision["kept"] for decision in decisions} == kept
    table = dict(report.rows())
    assert f"{report.tuning.ratio:.2f}" in table["tuned"]
    assert "*a product each" in table["  projections of one value"]


def test_single_pass_model_is_tuned(tmp_path, patch_times):
    patch_times({"MultiHeadAttention": 0.5})
    path = tmp_path / "model.onnx"
    report = export(Encoder(), path, {"src": EXAMPLE["src"]}, tune=True, optimize_for="latency")
    expected_choices = {
        WHOLE_ATTENTION.name,
        PROJECTIONS.name,
        SUM_BEFORE_NORM.name,
    }  # the choices that apply to this model
    assert set(report.tuning.forms) - {THREADS.name} == expected_choices
    assert report.tuning.forms[WHOLE_ATTENTION.name] == "MultiHeadAttention"
    assert "GroupQueryAttention" not in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("target", ["cuda", "portable"])
def test_other_targets_cannot_be_tuned(tmp_path, target):
    with pytest.raises(OptionError, match=f"says nothing of the target {target}"):
        export(Encoder(), tmp_path / "model.onnx", {"src": EXAMPLE["src"]}, target=target, tune=True)


def test_command_line_passes_tune_option(tmp_path, monkeypatch):
    passed = []
    source = SimpleNamespace(special_tokens=SPECIAL)
    monkeypatch.setattr("tformer_export.sources.load_source", lambda *_, **__: source)
    monkeypatch.setattr(
        "tformer_export.api.export_source", lambda source, path, options, *_: passed.append(options) or Report()
    )
    for arguments, expected in ((["--tune"], True), ([], False)):
        result = CliRunner().invoke(command, ["a.module:make", "-o", str(tmp_path / "out.onnx"), *arguments])
        assert result.exit_code == 0, result.output
        assert passed[-1].tune is expected


class Report:
    mixture = None

    def rows(self):
        return [("source", "a module")]
