"""Mixed-precision quantisation: the simulation, the cost of each matrix and the choice of bits, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.native_products import PATHS, native_operators, requires_kernels
from torch.nn import functional as F

from tformer_export.calibration.samples import Sample, Samples
from tformer_export.common.degradation_budget import DegradationBudget
from tformer_export.common.onnx_writer import save
from tformer_export.compile import analyse
from tformer_export.quantize import BitPlanner, quantize_weights
from tformer_export.quantize.input_statistics import read_second_moments
from tformer_export.quantize.matrices import FLOAT_BITS, find_matrices
from tformer_export.quantize.rounding.choose_rounding import Rounding
from tformer_export.quantize.simulate import Simulation
from tformer_export.quantize.token_quality import ReferenceDistribution, predictions
from tformer_export.sources.torch_module import from_module
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import OptionError, ParityError
from tformer_runtime.backend.native_kernels import OFF, VARIABLE
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import SpecialTokens
from tformer_runtime.rewriting.product_rewrite import FLOAT_OPERATOR, OPERATOR

SOURCE_VOCABULARY, TARGET_VOCABULARY, WIDTH = 40, 37, 32
SENSITIVE_LAYER = "decoder.0.feedforward.contract"  # has a weight that 4 bits cannot represent with its neighbours


class Case:
    """A tiny seeded model, compiled and written, with random sources and likely targets of the module as samples."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.module = Seq2SeqTransformer(
            SOURCE_VOCABULARY,
            TARGET_VOCABULARY,
            width=WIDTH,
            heads=2,
            encoder_layers=1,
            decoder_layers=1,
            feedforward=48,
            max_length=24,
        ).eval()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(1.5 * parameter)
            layer = self.module.get_submodule(SENSITIVE_LAYER)
            layer.weight[:, 7] = 9 * layer.weight.abs().max()
            self.module.decoder[0].feedforward.expand.bias[
                7
            ] = -100.0  # the Relu behind it makes the operand of the large weights zero
        ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
        special = SpecialTokens((1,), (2,), 0)
        self.source = from_module(self.module, {"src": ids, "tgt": ids}, "tgt", special_tokens=special)
        compiled = analyse(self.source, "cpu").compile()
        self.model, self.manifest, self.folder = compiled.model, compiled.manifest, folder
        self.engine = self.write_engine(self.model, "model.onnx")
        random = np.random.default_rng(1)
        self.samples = [
            Sample(
                {"src": random.integers(3, SOURCE_VOCABULARY, 3 + i % 5)},
                np.concatenate([[1], random.integers(3, TARGET_VOCABULARY, 8 - i % 3)]),
                1,
            )
            for i in range(96)
        ]

    def write_engine(self, model, name):
        return Engine(save(model, self.manifest, self.folder / name), device="cpu", threads=1)

    def logits(self, sample):
        with torch.no_grad():
            return self.module(torch.tensor(sample.request["src"])[None], torch.tensor(sample.tokens[:-1])[None])[0]

    def find_matrix(self, name):
        """Return the product that a Linear became, alone or merged with other Linears."""
        weight = self.module.get_submodule(name).weight.detach().numpy().T
        for matrix in find_matrices(self.model):
            constant = matrix.read(self.model)
            if constant.shape[0] == weight.shape[0] and any(
                np.array_equal(constant[:, at : at + weight.shape[1]], weight)
                for at in range(0, constant.shape[1] - weight.shape[1] + 1, WIDTH)
            ):
                return matrix
        raise AssertionError(name)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("bits"))


def test_matrices_match_linear_layers_without_duplicates(case):
    matrices = find_matrices(case.model)
    modules = [m for name, m in case.module.named_modules() if isinstance(m, torch.nn.Linear) and name != "output"]
    assert sum(m.shape[0] * m.shape[1] for m in matrices if not m.is_table) == sum(m.weight.numel() for m in modules)
    source, tied = sorted((m for m in matrices if m.is_table), key=lambda m: len(m.products))
    assert (source.shape, source.products) == ((WIDTH, SOURCE_VOCABULARY), [])
    assert tied.shape == (WIDTH, TARGET_VOCABULARY)
    assert len(tied.products) == 1
    assert source.choices == tied.choices == (8,)  # too small for 4
    assert len({m.name for m in matrices}) == len(matrices)


def test_second_moments_match_inputs_of_pytorch_modules(case, tmp_path):
    inputs = {}
    modules = {name: m for name, m in case.module.named_modules() if isinstance(m, torch.nn.Linear)}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, []).append(args[0][0]))
        for name, m in modules.items()
    ]
    for sample in case.samples:
        case.logits(sample)
    for hook in hooks:
        hook.remove()
    moments = dict(read_second_moments(case.model, case.manifest, case.samples, tmp_path / "inputs.onnx"))
    assert set(moments) == {m.name for m in find_matrices(case.model) if m.products}
    assert len(inputs) > 8
    for name, rows in inputs.items():
        x = torch.cat(rows).double().numpy()
        np.testing.assert_allclose(moments[case.find_matrix(name).name].matrix, x.T @ x / len(x), rtol=1e-3, atol=1e-5)


def test_quality_matches_torch(case):
    """The second model is the same model with the sources of its samples reversed."""
    reference = ReferenceDistribution(case.engine, case.samples)

    class Backwards(Engine):
        def start(self, requests, rows, **more):
            return super().start({n: [v[::-1].copy() for v in values] for n, values in requests.items()}, rows, **more)

    other = Backwards(case.folder / "model.onnx", device="cpu", threads=1)
    quality = reference.quality(other)
    divergence, agreement, losses = [], [], []
    for sample in case.samples:
        before = case.logits(sample)
        after = case.logits(Sample({"src": sample.request["src"][::-1].copy()}, sample.tokens, 1))
        divergence.append(
            F.kl_div(after.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        )
        agreement.append(before.argmax(-1) == after.argmax(-1))
        target = torch.tensor(sample.tokens[1:])
        losses.append(torch.stack([F.cross_entropy(x, target, reduction="none") for x in (before, after)], 1))
    assert quality.positions == sum(map(len, agreement))
    assert 0 < quality.token_agreement == float(torch.cat(agreement).double().mean()) < 1
    assert quality.divergence == pytest.approx(float(torch.cat(divergence).mean()), rel=1e-4)
    before, after = torch.cat(losses).mean(0).tolist()
    assert quality.loss == pytest.approx(after, rel=1e-5)
    assert quality.perplexity_ratio == pytest.approx(np.exp(after - before), rel=1e-5)


def test_simulation_matches_quantized_file(case, tmp_path, monkeypatch):
    monkeypatch.setattr("tformer_export.quantize.matrices.MIN_TABLE_VALUES_IN_4_BITS", 1)
    matrices = find_matrices(case.model)
    rounding = Rounding(case.model, matrices)
    simulation = Simulation(case.model, case.manifest, rounding.dequantize, tmp_path / "simulated.onnx")
    float_logits = dict(predictions(case.engine, case.samples[:12]))

    def simulated(bits):
        simulation.set_bits(bits)
        return dict(predictions(simulation.engine, case.samples[:12]))

    for at, logits in simulated({}).items():
        np.testing.assert_allclose(logits, float_logits[at], atol=1e-4)
    assert [m.choices for m in matrices if m.is_table] == [(4, 8)] * 2
    choices = [8 if m.is_table else (4, 8, FLOAT_BITS)[i % 3] for i, m in enumerate(matrices)]
    for matrix_bits in ([8] * len(matrices), choices, [max(m.choices[0], 4) for m in matrices]):
        bits = {m.name: b for m, b in zip(matrices, matrix_bits, strict=True)}
        model = case.model.clone()
        integers = {
            name: rounding.integers(m, bits[m.name])
            for m in matrices
            for name in m.readers
            if bits[m.name] != FLOAT_BITS
        }
        quantize_weights(model, {name: bits[m.name] for m in matrices for name in m.readers}, integers=integers)
        file_logits = dict(
            predictions(case.write_engine(model, f"{matrix_bits[0]}{matrix_bits[1]}.onnx"), case.samples[:12])
        )
        simulated_logits = simulated(bits)
        file_errors = [np.abs(file_logits[at] - float_logits[at]).max() for at in float_logits]
        simulation_errors = [np.abs(file_logits[at] - simulated_logits[at]).max() for at in float_logits]
        assert (
            np.median(simulation_errors) < 1e-4 < 0.02 * np.median(file_errors)
        )  # an activation on an edge may round the other way
        assert max(simulation_errors) < 0.5 * max(file_errors)
    for at, logits in simulated({}).items():
        np.testing.assert_allclose(logits, float_logits[at], atol=1e-4)


@requires_kernels
@pytest.mark.parametrize("path", PATHS)
def test_native_kernels_keep_tokens_of_a_file_with_integers_and_floats(case, monkeypatch, tmp_path, path):
    """Sums of floats differ in the last bits, so that an activation at the edge of two integers may round to the other.

    This changes it by 1/127 of the row's largest activation.
    """
    matrices, model = find_matrices(case.model), case.model.clone()
    bits = {p: (4, 8, FLOAT_BITS)[i % 3] for i, matrix in enumerate(matrices) for p in matrix.products}
    quantize_weights(model, bits)
    file = save(model, case.manifest, tmp_path / "mixed.onnx")
    assert native_operators(file) >= {OPERATOR, FLOAT_OPERATOR}
    logits = []
    for kernels in (OFF, path):
        monkeypatch.setenv(VARIABLE, kernels)
        engine = Engine(file, device="cpu", threads=1)
        assert (engine.session.kernels is None) == (kernels == OFF)
        logits.append(dict(predictions(engine, case.samples[:12])))
    for at, expected in logits[0].items():
        np.testing.assert_allclose(logits[1][at], expected, rtol=0, atol=np.ptp(expected) / 127)
        np.testing.assert_array_equal(logits[1][at].argmax(-1), expected.argmax(-1))


def make_planner(case, folder):
    samples = Samples(case.samples[::2], case.samples[1::2])
    return BitPlanner(case.model, case.manifest, case.engine, lambda: samples, folder)


def test_sensitive_layer_keeps_more_bits(case, tmp_path):
    bit_planner = make_planner(case, tmp_path)
    sensitive = case.find_matrix(SENSITIVE_LAYER)
    uniform_plan = bit_planner.uniform(4)
    assert set(uniform_plan.bits.values()) == {4, 8}
    plans = bit_planner.mixed(DegradationBudget(tokens=0.15))
    plan, mixture = plans[0], plans[0].mixture
    assert list(tmp_path.iterdir()) == []
    by_loss = sorted(mixture.layers, key=lambda layer: -layer.divergence.get(4, 0))
    assert by_loss[0].readers == sensitive.readers
    assert plan.bits[sensitive.name] > 4
    assert list(plan.bits.values()).count(4) >= 3
    chosen = mixture.frontier[mixture.chosen]
    assert chosen.quality.changed <= 0.15 < mixture.frontier[-1].quality.changed
    assert [p.size for p in mixture.frontier] == sorted((p.size for p in mixture.frontier), reverse=True)
    assert [p.mixture.frontier[p.mixture.chosen].size for p in plans] == sorted(
        p.mixture.frontier[p.mixture.chosen].size for p in plans
    )
    assert sum(chosen.layers.values()) == len(mixture.layers)
    for layer in mixture.layers:
        assert {plan.bits[reader] for reader in layer.readers} == {layer.bits}
    assert set(plan.integers) == {
        reader for m in bit_planner.matrices if plan.bits[m.name] != FLOAT_BITS for reader in m.readers
    }


def test_calibration_reduces_loss_of_four_bits(case, tmp_path):
    reference = ReferenceDistribution(case.engine, case.samples[1::2])
    losses = []
    for with_calibration in (False, True):
        bit_planner = make_planner(case, tmp_path)
        if with_calibration:
            bit_planner.fit_integers((4,))
        simulation = Simulation(case.model, case.manifest, bit_planner.rounding.dequantize, tmp_path / "simulated.onnx")
        simulation.set_bits({m.name: min(m.choices) for m in bit_planner.matrices})
        losses.append(reference.quality(simulation.engine).divergence)
    assert 0 < losses[1] < 0.5 * losses[0]


def test_mixture_of_few_bits_keeps_sensitive_layer_in_more(case, tmp_path):
    bit_planner = make_planner(case, tmp_path)
    least = 8 * sum(m.size(min(m.choices)) for m in bit_planner.matrices) / count_weights(bit_planner)
    plan = bit_planner.mixed(DegradationBudget(), max_bits=least + 1)[0]
    size = sum(m.size(plan.bits[m.name]) for m in bit_planner.matrices)
    assert least < 8 * size / count_weights(bit_planner) <= least + 1
    assert plan.bits[case.find_matrix(SENSITIVE_LAYER).name] > 4
    assert plan.mixture.budget == f"{least + 1:g} bits for each weight"
    with pytest.raises(OptionError, match="allow more than max_bits 4"):
        bit_planner.mixed(DegradationBudget(), max_bits=4)


def count_weights(bit_planner):
    return sum(m.shape[0] * m.shape[1] for m in bit_planner.matrices)


def test_budget_that_no_mixture_meets_is_refused(case, tmp_path):
    bit_planner = make_planner(case, tmp_path)
    with pytest.raises(ParityError, match=r"no mixture of bits stays within 0.5 times the perplexity; .* the nearest"):
        bit_planner.mixed(DegradationBudget(perplexity=0.5))
    assert bit_planner.suggest_mixture(DegradationBudget(tokens=0.9)).startswith("--quantize mixed would fit, with ")
