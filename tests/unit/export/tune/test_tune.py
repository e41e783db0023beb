"""Which form is kept follows from the times; and every form of every choice computes what PyTorch does."""

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
from tformer_export.common.paired_timing import MIN_GAIN, MIN_ROUNDS, ROUNDS, time_in_turns
from tformer_export.compile import analyse
from tformer_export.quantize import measure, quantize
from tformer_export.sources.torch_module import from_module
from tformer_export.tune.tune import make_request, tune
from tformer_export.verify.parity import ParityGate
from tformer_runtime.base.errors import OptionError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest, SessionSettings, SpecialTokens
from tformer_runtime.format.model_file import read_manifest

IDS, WIDTH, HEADS, SIZE, LENGTH, PAD = 29, 32, 2, 16, 40, 0


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
        q, k, v = (p(z).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for p, z in ((self.q, x), (self.k, y), (self.v, y)))
        return self.out(F.scaled_dot_product_attention(turn(q), turn(k), v, mask).transpose(1, 2).flatten(2))


class Everything(nn.Module):
    """Something for every choice: an encoder, rotary positions, two kinds of norm, residual sums."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(IDS, WIDTH), nn.Embedding(IDS, WIDTH)
        self.encoder, self.own, self.cross = Attention(), Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.root, self.wide, self.out = RootMeanSquare(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, IDS)
        at = torch.outer(torch.arange(LENGTH).float(), 100.0 ** -(torch.arange(0, SIZE, 2) / SIZE))
        self.register_buffer("angles", torch.cat([at, at], 1))

    def turn(self, x):
        angles, (one, other) = self.angles[: x.shape[2]], x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()

    def forward(self, src, tgt):
        keep = torch.where(src != PAD, 0.0, -1e9)[:, None, None]
        x = self.source(src)
        x = self.norms[0](x + self.encoder(x, x, keep))
        y = self.decoded(tgt, self.turn)
        return self.out(self.norms[2](y + self.cross(y, x, keep)))

    def decoded(self, tgt, turn):
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        y = F.gelu(self.wide(self.target(tgt)))
        return self.norms[1](y + self.own(self.root(y), self.root(y), causal, turn))


EXAMPLE = {"src": torch.tensor([[3, 4, 5], [6, 7, 8]]), "tgt": torch.tensor([[3, 4, 5], [6, 7, 8]])}
SPECIAL = SpecialTokens((1,), (2,), PAD)


class Decoder(Everything):
    def forward(self, tgt):
        return self.out(self.decoded(tgt, lambda x: x))


class Encoder(nn.Module):
    """A model that is run once."""

    def __init__(self):
        super().__init__()
        whole = Everything()
        self.source, self.encoder, self.norm = whole.source, whole.encoder, whole.norms[0]

    def forward(self, src):
        x = self.source(src)
        return self.norm(x + self.encoder(x, x, (src != PAD)[:, None, None]))


@pytest.fixture(scope="module")
def understood():
    source = from_module(Everything().eval(), EXAMPLE, "tgt", special_tokens=SPECIAL)
    return analyse(source, "cpu", LENGTH)


def engine_of(model, manifest, path):
    return Engine(save(model, manifest, path), device="cpu", threads=1)


def operators(model):
    return sorted(node.op_type for node in model.graph.all_nodes())


# -- what is chosen -----------------------------------------------------------------------------------------------


def silent():
    """In the place of a pause."""


def constant(seconds):
    return lambda rows: seconds


def noisy(*ratios):
    """A time for each turn, over and over; the first is that of waking up."""
    turns = iter([1.0, *ratios * ROUNDS])
    return lambda rows: next(turns)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("tformer_export.tune.tune.PAUSE_SECONDS", 0.0)


def always(name, *forms):
    return KernelChoice(name, forms, lambda compiled: True)


def built(times, made=None):
    """Forms → requests whose time is the product of what `times` has for each form that is not the default."""

    def build(forms):
        if made is not None:
            made.append(dict(forms))
        return constant(float(np.prod([times.get(form, 1.0) for form in forms.values()])))

    return build


def test_the_fastest_form_of_each_choice_is_kept():
    choices = [always("norms", "a", "b", "c"), always("sums", "d", "e")]
    made = []
    tuning = tune(built({"b": 0.9, "c": 0.7, "e": 1.2}, made), choices, (1, 8), silent)
    assert tuning.forms == {"norms": "c", "sums": "d"}
    assert tuning.ratio == pytest.approx(0.7)
    assert made[1:] == [{"norms": "b"}, {"norms": "c"}, {"norms": "c", "sums": "e"}]  # with what was kept before
    assert [t.ratio for t in tuning.decisions[0].trials] == pytest.approx([1, 0.9, 0.7])
    assert tuning.decisions[0].trials[2].seconds == pytest.approx({1: 0.7, 8: 0.7})


@pytest.mark.parametrize(("ratio", "kept"), [(1 - MIN_GAIN + 0.01, "a"), (1 - MIN_GAIN - 0.01, "b")])
def test_a_form_that_is_hardly_faster_is_not_kept(ratio, kept):
    assert tune(built({"b": ratio}), [always("norms", "a", "b")], (1,), silent).forms == {"norms": kept}


def test_what_a_form_gains_must_be_beyond_its_spread():
    steady, unsteady = ((0.92, 0.9, 0.88), (0.7, 0.9, 1.1))  # of the same median
    for times, wins in ((steady, True), (unsteady, False)):
        first, trial = time_in_turns({"a": constant(1.0), "b": noisy(*times)}, (1,), silent)
        assert trial.ratio == pytest.approx(0.9)
        assert trial.wins == wins
        assert first.ratio == 1


def test_batch_sizes_count_alike():
    """Faster for one row and slower for eight, or the other way round: the ratios' geometric mean decides."""
    for one, eight, kept in ((0.5, 1.5, "b"), (0.8, 1.3, "a")):

        def build(forms, one=one, eight=eight):
            return lambda rows: {1: one, 8: eight}[rows] * rows if forms else float(rows)

        assert tune(build, [always("norms", "a", "b")], (1, 8), silent).forms == {"norms": kept}


def test_a_choice_may_have_batch_sizes_of_its_own():
    asked = []

    def build(forms):
        return lambda rows: asked.append(rows) or 1.0

    tune(build, [KernelChoice("few", ("a", "b"), lambda compiled: True, rows=(2, 4))], (1, 32), silent)
    assert set(asked) == {2, 4}


def test_the_defaults_stay_unless_what_was_kept_wins_as_a_whole():
    """A form that wins its race by luck."""
    luck = [1.0, *[0.5] * ROUNDS]

    def build(forms):
        return (lambda rows: luck.pop(0) if luck else 1.0) if forms else constant(1.0)

    tuning = tune(build, [always("norms", "a", "b")], (1,), silent)
    assert not luck
    assert tuning.forms == {"norms": "a"}
    assert tuning.ratio == 1
    assert tuning.table() == [
        ("tuned", "for batches of 1: the default forms stay"),
        ("  norms", "*a 1000 ms; b 500 ms (0.50 ± 0.00 ×)"),
    ]


@pytest.mark.parametrize("moment", [20, 50, 80, 200])
def test_the_speed_of_a_quantised_file_is_not_that_of_a_slow_minute(understood, tmp_path, monkeypatch, moment):
    """The same file as before and after, on a machine that is three times as slow from some moment on."""
    compiled = understood.compile()
    engine = engine_of(compiled.model, compiled.manifest, tmp_path / "model.onnx")
    gate = ParityGate(understood.source, compiled.inputs)
    now = itertools.accumulate(1.0 if n < moment else 3.0 for n in itertools.count())
    clock = SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(sys.modules[measure.__module__], "time", clock)
    assert measure(gate, engine, engine).speed == pytest.approx(1)


def test_a_form_that_loses_every_round_is_measured_no_longer():
    runs = []

    def slow(rows):
        runs.append(rows)
        return 2.0

    time_in_turns({"a": constant(1.0), "b": slow}, (1,), silent)
    assert len(runs) == 1 + MIN_ROUNDS


def test_a_machine_that_slows_down_changes_nothing():
    """Only ratios within a round count."""
    clock = {"a": 0, "b": 0}

    def drifting(name, factor):
        def run(rows):
            clock[name] += 1
            return factor * clock[name]

        return run

    _, trial = time_in_turns({"a": drifting("a", 1.0), "b": drifting("b", 0.9)}, (1,), silent)
    assert trial.ratio == pytest.approx(0.9)
    assert trial.spread == pytest.approx(0)


# -- every form computes the same -----------------------------------------------------------------------------------

CHANGES = {  # what a form that is not the default has more and less of
    GIVEN_KEYS_ATTENTION.name: ("Softmax", "MultiHeadAttention"),
    WHOLE_ATTENTION.name: ("MultiHeadAttention", "GroupQueryAttention"),
    ROTARY.name: ("Neg", None),
    NORMS.name: ("Sqrt", "RMSNormalization"),
    PROJECTIONS.name: ("MatMul", "Split"),
    SUM_BEFORE_NORM.name: None,
    BIAS_BEFORE_GELU.name: None,
    THREADS.name: None,
}
OTHERS = [(choice, form) for choice in CHOICES if choice != FEW_ROWS_KERNEL for form in choice.forms[1:]]


@pytest.mark.parametrize(("choice", "form"), OTHERS, ids=[f"{c.name}: {f}" for c, f in OTHERS])
def test_each_form_computes_what_the_source_does(understood, tmp_path, choice, form):
    forms = {choice.name: form}
    default, compiled = understood.compile(), understood.compile(forms)
    assert choice.applies(default) or choice == THREADS
    before, after = operators(default.model), operators(compiled.model)
    change = CHANGES[choice.name]
    if change is None:
        assert before == after
        assert session_settings(forms) != SessionSettings()
    else:
        more, less = change
        assert after.count(more) > before.count(more)
        assert less is None or after.count(less) < before.count(less)
    manifest = Manifest(**{**vars(compiled.manifest), "session": session_settings(forms)})
    engine = engine_of(compiled.model, manifest, tmp_path / "model.onnx")
    report = ParityGate(understood.source, compiled.inputs, compiled.locator).check(engine)
    assert report.relative_error < 1e-5
    assert report.tokens_equal == report.tokens


def test_all_other_forms_together(understood, tmp_path):
    forms = {choice.name: choice.forms[-1] for choice in CHOICES}
    compiled = understood.compile(forms)
    engine = engine_of(compiled.model, compiled.manifest, tmp_path / "model.onnx")
    assert ParityGate(understood.source, compiled.inputs).check(engine).relative_error < 1e-5
    assert compiled.manifest.decode.shares_context


def test_rows_that_share_a_context_may_do_so_in_any_form(understood, tmp_path):
    """Beams: three rows each, of two requests, against the same rows with a request each."""
    compiled = understood.compile({GIVEN_KEYS_ATTENTION.name: "products and softmax"})
    assert compiled.manifest.decode.shares_context
    engine = engine_of(compiled.model, compiled.manifest, tmp_path / "model.onnx")
    gate = ParityGate(understood.source, compiled.inputs)
    given = [gate.draw_request(n)["src"] for n in (5, 9)]
    tokens = np.arange(12).reshape(6, 2) + 3
    shared = engine.start({"src": given}, 2, repeat=3)
    alone = engine.start({"src": [given[i // 3] for i in range(6)]}, 6)
    np.testing.assert_allclose(engine.step(shared, tokens), engine.step(alone, tokens), atol=1e-5)


@pytest.mark.parametrize("form", FEW_ROWS_KERNEL.forms)
@pytest.mark.parametrize("bits", [8, 4])
def test_each_limit_of_few_rows_computes_the_same(understood, tmp_path, form, bits):
    compiled, forms = understood.compile(), {FEW_ROWS_KERNEL.name: form}
    gate = ParityGate(understood.source, compiled.inputs)
    before = engine_of(compiled.model.clone(), compiled.manifest, tmp_path / "before.onnx")
    made = quantize(compiled.model, bits, "latency", "tgt", few_rows=few_rows_limits(forms))
    after = engine_of(compiled.model, compiled.manifest, tmp_path / "after.onnx")
    kinds = operators(compiled.model)
    assert ("MatMulNBits" in kinds) == (form != "none")
    assert made.count > 0
    measure(gate, before, after, exact=False)  # refuses a row that its batch changes by more than rounding does
    limit = next((v.const_value for v in compiled.model.graph.initializers.values() if v.name == "few.most"), None)
    wanted = {"none": None, FEW_ROWS_KERNEL.default: {8: 2, 4: 3}[bits]}.get(
        form, int(form[0]) if form[0].isdigit() else None
    )
    assert (None if limit is None else int(limit.numpy())) == wanted


# -- exports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch):
    """Requests take the time that is told for the forms of their file, and the engine really runs them besides."""
    real = make_request

    def patch(times):
        def told(gate, engine):
            request, forms = real(gate, engine), engine.manifest.kernel_forms
            factor = float(np.prod([times.get(form, 1.0) for form in forms.values()]))
            return lambda rows: factor if request(rows) > 0 else 0.0

        monkeypatch.setattr("tformer_export.tune.tune.make_request", told)

    return patch


def test_the_file_has_what_was_kept_and_says_so(tmp_path, timed):
    times = {"a product each": 0.9, "one": 0.9, "4 rows": 0.9, "written out": 1.5, "SkipLayerNormalization": 0.99}
    timed(times)
    path, said = tmp_path / "model.onnx", tmp_path / "report.json"
    report = export(
        Decoder(), path, {"tgt": EXAMPLE["tgt"]}, "tgt", special_tokens=SPECIAL, max_length=LENGTH,
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
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    assert numpy_helper.to_array(held["few.most"]) == 4
    assert list(tmp_path.iterdir()) == [path]
    report.write(said)
    told = json.loads(said.read_text())["tuning"]["decisions"]
    assert {decision["choice"]: decision["kept"] for decision in told} == kept
    table = dict(report.rows())
    assert f"{report.tuning.ratio:.2f}" in table["tuned"]
    assert "*a product each" in table["  projections of one value"]


def test_a_model_that_is_run_once_is_tuned(tmp_path, timed):
    timed({"MultiHeadAttention": 0.5})
    path = tmp_path / "model.onnx"
    report = export(Encoder(), path, {"src": EXAMPLE["src"]}, tune=True, optimize_for="latency")
    applied = {WHOLE_ATTENTION.name, PROJECTIONS.name, SUM_BEFORE_NORM.name}  # of what the model has
    assert set(report.tuning.forms) - {THREADS.name} == applied
    assert report.tuning.forms[WHOLE_ATTENTION.name] == "MultiHeadAttention"
    assert "GroupQueryAttention" not in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("target", ["cuda", "portable"])
def test_another_target_is_not_tuned_for_here(tmp_path, target):
    with pytest.raises(OptionError, match=f"says nothing of the target {target}"):
        export(Encoder(), tmp_path / "model.onnx", {"src": EXAMPLE["src"]}, target=target, tune=True)


def test_the_command_line_takes_it(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr("tformer_export.cli._load", lambda *_: (None, None))
    monkeypatch.setattr("tformer_export.cli._export", lambda *a: asked.update(tune=a[3].tune) or _Report())
    for arguments, wanted in ((["--tune"], True), ([], False)):
        done = CliRunner().invoke(command, ["a.module:make", "-o", str(tmp_path / "out.onnx"), *arguments])
        assert done.exit_code == 0, done.output
        assert asked["tune"] is wanted


class _Report:
    mixture = None

    def rows(self):
        return [("source", "a module")]
