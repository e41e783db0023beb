"""Quantised single-pass models: outputs near to PyTorch's, independent rows, and a budget."""

from __future__ import annotations

import functools
import json

import numpy as np
import onnx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F

from tformer_export import Quantization, build, export, padding
from tformer_export.calibration.samples import single_pass_sample
from tformer_export.quantize.output_quality import ReferenceOutputs, cosine_similarity, measure_outputs
from tformer_export.sources.torch_module import from_module
from tformer_export.verify.parity import ParityGate
from tformer_runtime import OptionError, ParityError
from tformer_runtime.engine.engine import Engine

VOCABULARY, WIDTH, HEADS, LOUD_ID = 60, 32, 2, 3
LETTERS = "-abcdefghijklmnopqrstuvwxyz"
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class States(nn.Module):
    """The encoder of torch with a mask that hides padding: a state for each token."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(40, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src, hidden):
        x = self.embed(src) + self.places(torch.arange(src.shape[1]))
        return self.layers(x, src_key_padding_mask=hidden)


class Sentence(nn.Module):
    """Attention by hand over packed queries, keys and values. Returns a vector of length 1; 0 is padding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.packed = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.expand = nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(2))
        self.contract = nn.ModuleList(nn.Linear(64, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, src):
        x, keep = self.embed(src), src != 0
        for i in range(2):
            q, k, v = self.packed[i](x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(2, 3) / 4).masked_fill(~keep[:, None, None], -1e9)
            x = self.norms[i](x + self.out[i]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
            x = self.norms[i + 2](x + self.contract[i](F.gelu(self.expand[i](x))))
        weights = keep[:, :, None].float()
        return F.normalize((x * weights).sum(1) / weights.sum(1), dim=1)


class Forecast(nn.Module):
    """Numbers of two series → the next eight of both."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 16)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)

    def forward(self, history):
        return self.out(self.layer(self.into(history))[:, -1]).unflatten(1, (8, 2))


def classifier():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64,
        max_position_embeddings=40, num_labels=4, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """Compile each module once, for all of its exports."""
    cache, analyse = {}, build.analyse

    def analyse_once(source, *rest):
        key = source.name, len(source.tokenizers)
        if key not in cache:
            cache[key] = analyse(source, *rest)
        return cache[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "analyse", analyse_once)
        yield


class Case:
    """A seeded module and the options of its export."""

    def __init__(self, make, **options):
        torch.manual_seed(1)
        self.module, self.options = make().eval(), {"example": {"src": IDS}, **options}

    def export(self, path, weights, calibration=None, max_degradation=None, **more):
        quantization = Quantization(weights, calibration=calibration, max_degradation=max_degradation)
        return export(self.module, path, **{**self.options, "quantization": quantization, "force": True, **more})

    @torch.no_grad()
    def expected(self, ids):
        """Return the output of PyTorch for one row without padding."""
        row = torch.tensor(np.asarray(ids))[None]
        if isinstance(self.module, States):
            return self.module(row, torch.zeros_like(row, dtype=torch.bool))[0].numpy()
        actual = self.module(row)
        return (actual if isinstance(actual, torch.Tensor) else actual.logits)[0].numpy()


CASES = {
    "states": functools.partial(Case, States, masks={"hidden": padding("src", keep=False)}),
    "sentence": functools.partial(Case, Sentence, special_tokens={"pad_token_id": 0}),
    "classes": functools.partial(
        Case, classifier, example={"input_ids": IDS}, masks={"attention_mask": padding("input_ids")}, output="logits",
        task="text-classification",
    ),
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)
# A row in steps of 1/127 of its largest number, some 2.5 times its deviation, errs by 2.5 / 127 / √12 = 0.6 % of it,
# and so do the weights: 0.8 % a product, some eight in a row, so 2.3 %; with 4 bits in blocks 8 % a product and 24 %.
MAX_RELATIVE_ERRORS = {"int8": 0.08, "int4": 0.6}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Return a function from name and quantisation to the case, an engine of its file and the report. It exports on
    first use."""
    folder = tmp_path_factory.mktemp("once")

    @functools.cache
    def get(name, quantize="int8"):
        case = CASES[name]()
        report = case.export(folder / f"{name}-{quantize}.onnx", quantize)
        return case, Engine(folder / f"{name}-{quantize}.onnx", device="cpu", threads=1), report

    return get


def run(engine, rows):
    (spec,) = [i for i in engine.manifest.encode.inputs if i.role != "mask"]
    (value,) = engine.encode({spec.name: [np.asarray(row) for row in rows]}, len(rows)).values()
    return value.numpy().copy()


def random_rows(seed, *lengths):
    random = np.random.default_rng(seed)
    return [random.integers(LOUD_ID + 1, VOCABULARY, n) for n in lengths]


@each
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_outputs_are_near_pytorch(cases, name, quantize):
    case, engine, report = cases(name, quantize)
    rows = random_rows(0, 9, 9, 4, 4, 4, 17)
    expected = np.concatenate([case.expected(row).ravel() for row in rows])
    actual = np.concatenate([run(engine, [row])[0].ravel() for row in rows])
    assert 0 < np.sqrt(np.mean((actual - expected) ** 2) / np.var(expected)) < MAX_RELATIVE_ERRORS[quantize]
    degradation = report.degradation.quality
    assert degradation.cosine > 1 - MAX_RELATIVE_ERRORS[quantize] ** 2 / 2  # the angle is the error across, or less
    assert 0 < degradation.relative_error < MAX_RELATIVE_ERRORS[quantize]
    assert engine.manifest.quantization == quantize
    product_bits = {p.bits for p in report.products.values()}
    assert product_bits == {int(quantize[3:])}
    if quantize == "int4":
        assert degradation.cosine < cases(name)[2].degradation.quality.cosine


@each
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_single_row_equals_row_of_a_batch(cases, name, quantize):
    _, engine, report = cases(name, quantize)
    rows = random_rows(2, 9, 9, 9, 9)
    batch = run(engine, rows)
    # Results are equal bit for bit, except for a mean over positions: onnxruntime sums one row in another order.
    same = np.array_equal if name != "sentence" else functools.partial(np.allclose, rtol=0, atol=1e-6)
    for row, ids in enumerate(rows):
        assert same(run(engine, [ids])[0], batch[row])
    rows[1][::2] = LOUD_ID
    changed = run(engine, rows)
    assert np.array_equal(changed[[0, 2, 3]], batch[[0, 2, 3]])
    assert not np.allclose(changed[1], batch[1], atol=1e-3)
    ragged = random_rows(3, 9, 3, 14, 6)
    batch = run(engine, ragged)
    for row, ids in enumerate(ragged):  # sums over padding have another order, which moves a result by at most one step
        alone = run(engine, [ids])[0]
        valid = batch[row][: len(alone)] if alone.ndim > 1 else batch[row]
        np.testing.assert_allclose(valid, alone, rtol=0, atol=np.ptp(alone) / 127)
    assert report.degradation.row_difference < 1 / 127


def test_encoder_uses_fused_kernels(cases):
    """The parity gate compares the kernels of the unquantised file with PyTorch."""
    kinds = {node.op_type for node in onnx.load(cases("states")[1].session.path).graph.node}
    assert {"GroupQueryAttention", "MatMulIntegerToFloat"} <= kinds
    assert kinds.isdisjoint({"MultiHeadAttention", "MatMulInteger", "Reciprocal"})


def test_quality_matches_torch(cases):
    _, eight, _ = cases("states")
    _, four, _ = cases("states", "int4")
    samples = [single_pass_sample({"src": ids}) for ids in random_rows(4, *range(3, 12), *range(3, 12))]
    quality = ReferenceOutputs(eight, samples).quality(four)
    ids = [sample.request["src"] for sample in samples]
    before, after = (torch.tensor(np.concatenate([run(e, [row])[0] for row in ids])) for e in (eight, four))
    cosines = F.cosine_similarity(before.double(), after.double())
    assert quality.positions == sum(map(len, ids)) == len(cosines)
    assert quality.cosine == pytest.approx(float(cosines.mean()), rel=1e-6)
    assert quality.least_cosine == pytest.approx(float(cosines.min()), rel=1e-6)
    error = (after - before).double().pow(2)
    assert quality.relative_error == pytest.approx(
        float(error.mean().sqrt() / before.double().std(correction=0)), rel=1e-5
    )
    assert quality.divergence == pytest.approx(float((error.sum(1) / before.double().pow(2).sum(1)).mean()), rel=1e-5)
    assert quality.agreement == float((before.argmax(1) == after.argmax(1)).double().mean())
    assert not quality.of_classes
    assert quality.changed == 1 - quality.cosine


def test_cosine_similarity_of_zero_vectors():
    zero, one = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    actual = [float(cosine_similarity(*pair)[0]) for pair in ((zero, zero), (zero, one), (one, -one))]
    assert actual == pytest.approx([1, 0, -1])


def test_class_scores_are_recognised(cases, tmp_path):
    report = cases("classes")[2]
    quality = report.degradation.quality
    assert quality.of_classes
    assert quality.positions == 64
    assert quality.changed == 1 - quality.agreement
    assert any("keep their class" in text for _, text in report.degradation.rows())
    assert not any("keep their class" in text for _, text in cases("sentence")[2].degradation.rows())

    class Words(nn.Sequential):  # scores as wide as the vocabulary are classes
        def forward(self, src):
            return super().forward(src)

    class Likely(Words):
        def forward(self, src):
            return super().forward(src).mean(1).softmax(1)

    for architecture, width in ((Words, VOCABULARY), (Likely, 40)):
        module = architecture(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, width))
        class_report = export(module, tmp_path / "x.onnx", {"src": IDS}, quantization="int8", force=True)
        assert class_report.degradation.quality.of_classes


BUDGETS = {
    "states": (1e-7, r"quantisation takes 0\.\d+% off the mean cosine and 0.00% is allowed; no file was written"),
    "classes": (0, r"quantisation changes \d+\.\d% of the classes and 0.0% is allowed; no file was written: .*MB"),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_exceeded_budget_is_refused(name, tmp_path):
    case, (small_budget, message) = CASES[name](), BUDGETS[name]
    with pytest.raises(ParityError, match=message):
        case.export(tmp_path / "out.onnx", "int4", max_degradation=small_budget)
    assert list(tmp_path.iterdir()) == []
    report = case.export(tmp_path / "out.onnx", "int8", max_degradation=0.1)
    assert report.degradation.quality.changed <= 0.1


def test_options_that_do_not_apply_raise_option_error(tmp_path):
    case = CASES["sentence"]()
    for options, message in (
        ({"max_degradation": "1.02x"}, "a single-pass model has no perplexity to be multiplied by 1.02"),
        (
            {"optimize_for": "latency"},
            "latency chooses kernels for steps of two or three tokens, and a single-pass model",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            case.export(tmp_path / "out.onnx", "int8", **options)

    class Best(Sentence):
        def forward(self, src):
            return super().forward(src).argmax(1)

    with pytest.raises(OptionError, match="is measured on scores or vectors, but the model returns int64"):
        export(Best(), tmp_path / "out.onnx", {"src": IDS}, quantization="int8", special_tokens={"pad_token_id": 0})
    assert list(tmp_path.iterdir()) == []


def test_mixture_is_calibrated_on_texts(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="-"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    random = np.random.default_rng(5)
    lines = ["".join(random.choice(list(LETTERS[1:]), random.integers(4, 13))) for _ in range(160)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    case = CASES["sentence"]()
    text_options = {"tokenizer": tokenizer.to_str(), "calibration": tmp_path / "lines.txt"}
    fitted = case.export(tmp_path / "four.onnx", "int4", **text_options).degradation.quality
    report = case.export(tmp_path / "out.onnx", "mixed", max_degradation=fitted.changed / 3, **text_options)
    mixture, quality = report.mixture, report.degradation.quality
    assert quality.changed <= fitted.changed / 3
    assert quality.positions == mixture.positions == 40
    assert {layer.bits for layer in mixture.layers} >= {4, 8}
    assert all(layer.divergence[4] > 0 for layer in mixture.layers if 4 in layer.divergence)
    assert sum(4 in layer.divergence for layer in mixture.layers) == len(mixture.layers) - 1  # a small table has 8
    sizes = [point.size for point in mixture.frontier]
    assert sizes == sorted(sizes, reverse=True)
    assert mixture.rows()[0][1].startswith("on 40 vectors, ")
    assert "cosine 0.9" in mixture.rows()[1][1]
    json.dumps(report.to_dict())
    # On lines outside the calibration data, vectors are nearer to PyTorch's with calibration than without.
    plain = case.export(tmp_path / "plain.onnx", "int4", tokenizer=tokenizer.to_str())
    assert plain.degradation is not None
    losses = []
    for file in ("four.onnx", "plain.onnx"):
        engine = Engine(tmp_path / file, device="cpu", threads=1)
        rows = [np.array([LETTERS.index(c) for c in line]) for line in lines[3::4]]
        losses.append(np.mean([1 - case.expected(row) @ run(engine, [row])[0] for row in rows]))
    assert 0 < losses[0] < losses[1]


def test_forecast_is_quantized_within_budget(tmp_path):
    torch.manual_seed(0)
    module, random = Forecast().eval(), np.random.default_rng(0)
    series = random.standard_normal((24, 16, 2)).astype(np.float32)
    (tmp_path / "lines").write_text("\n".join(json.dumps({"history": one.tolist()}) for one in series))
    report = export(
        module, tmp_path / "out.onnx", {"history": torch.tensor(series[:2])},
        quantization=Quantization("int8", calibration=tmp_path / "lines", max_degradation="0.5%"),
    )  # fmt: skip
    assert report.degradation.quality.positions == 6
    engine = Engine(tmp_path / "out.onnx", device="cpu", threads=1)
    with torch.no_grad():
        expected = module(torch.tensor(series)).numpy()
    actual = run(engine, list(series))
    assert 0 < np.sqrt(np.mean((actual - expected) ** 2) / np.var(expected)) < MAX_RELATIVE_ERRORS["int8"]
    assert np.array_equal(run(engine, [series[3]])[0], actual[3])


def test_dependence_between_rows_is_refused(cases, tmp_path):
    case, engine, _ = cases("states")
    ids = {"src": IDS}
    gate = ParityGate(from_module(case.module, ids, None, masks=case.options["masks"]), make_input_facts(engine))

    class OneScale(Engine):
        """An encoder with one scale for all rows, which rounds a result by the largest number of any row."""

        def encode(self, requests, rows, *more):
            ((name, value),) = super().encode(requests, rows, *more).items()
            states = value.numpy()
            step = np.abs(states).max() / 16
            return {name: type("Value", (), {"numpy": lambda self: np.round(states / step) * step})()}

    reference = ReferenceOutputs(engine, [single_pass_sample({"src": row}) for row in random_rows(6, *[8] * 8)])
    assert measure_outputs(gate, engine, engine, reference).quality.cosine == pytest.approx(1)
    with pytest.raises(ParityError, match=r"a row's result changes with its neighbours by .* no file was written"):
        measure_outputs(gate, engine, OneScale(engine.session), reference)


def make_input_facts(engine):
    """Return the input facts that the gate needs, from the file."""
    from tformer_export.analysis.input_facts import InputFacts

    return {
        spec.name: InputFacts(VOCABULARY, VOCABULARY, 0, masked=True, max_length=40)
        for spec in engine.manifest.encode.inputs
    }
