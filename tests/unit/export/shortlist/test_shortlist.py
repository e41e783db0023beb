"""Shortlists: the learned tables, and results against the same file with all ids and against PyTorch."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from msgspec.structs import force_setattr
from support.native_products import PATHS, requires_kernels
from support.small_models import EXAMPLE, Mixer, refusal

import tformer_runtime.engine.shortlist as runtime
from tformer_export import export
from tformer_export.shortlist.check import check_columns
from tformer_export.shortlist.columns import add_gathered_columns
from tformer_export.shortlist.learn import Line, associate, each_needed
from tformer_export.shortlist.make import make_shortlist
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime import (
    AsyncModel,
    GenerationOptions,
    Model,
    ModelFileError,
    OptionError,
    ParityError,
    UnsupportedCallError,
    UnsupportedModelError,
)
from tformer_runtime.backend.native_kernels import OFF, PRODUCTS_ALONE, VARIABLE
from tformer_runtime.cli.resumed_model import ResumedModel
from tformer_runtime.decoding.batch_rows import candidates_of
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.model_file import read_manifest, read_mapped_model
from tformer_runtime.rewriting.product_rewrite import replace_products

IDS, START, END, MAX_NEW_TOKENS = 600, 1, 2, 10
DRAW = np.random.default_rng(0)
SOURCES = [DRAW.integers(10, 60, DRAW.integers(3, 8)).tolist() for _ in range(60)]


def make_module(tied):
    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 4, "encoder_layers": 1, "decoder_layers": 1, "feedforward": 64, "max_length": 24}
    model = Seq2SeqTransformer(IDS, IDS, dropout=0.0, tie_output=tied, **sizes).eval()
    with torch.no_grad():
        model.output.weight.normal_(0, 1)
    return model


@pytest.fixture(scope="module", params=["float32, tied", "int8"])
def exported(request, tmp_path_factory):
    """Export a model with a shortlist and return it with its file, its report and the gate and engine of the check."""
    folder, checks = tmp_path_factory.mktemp("shortlist"), {}
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"src": source}) + "\n" for source in SOURCES))
    ids = torch.randint(10, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    quantize = "int8" if request.param == "int8" else "none"
    model = make_module(tied=quantize == "none")

    def record_check(gate, engine):
        checks.update(gate=gate, engine=engine)
        return check_columns(gate, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tformer_export.shortlist.add.check_columns", record_check)
        report = export(
            model, folder / "model.onnx", {"src": ids, "tgt": ids}, "tgt", quantization=quantize, shortlist=lines,
            special_tokens={"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": 0},
            generation_defaults={"max_new_tokens": MAX_NEW_TOKENS},
        )  # fmt: skip
    file = Model.load(folder / "model.onnx", threads=1)
    return SimpleNamespace(model=model, file=file, report=report, lines=lines, exact=quantize == "int8", **checks)


def candidates_by_hand(file, source):
    """Return the candidates of a source, looked up in the tables one by one."""
    table = file.engine.shortlist
    starts, ids = table.tables["src"]
    return sorted(set(table.common.tolist()).union(*(ids[starts[i] : starts[i + 1]].tolist() for i in source)))


def assert_same_result(actual, expected, exact=True):
    assert actual.token_ids == expected.token_ids
    if exact:
        assert actual.token_logprobs == expected.token_logprobs
    np.testing.assert_allclose(actual.token_logprobs, expected.token_logprobs, atol=1e-4)


# -- learning -----------------------------------------------------------------------------------------------------


def test_associations_match_ibm_model_1():
    lines = [Line(DRAW.integers(1, 8, 4), (DRAW.integers(0, 9, 5),)) for _ in range(40)]
    pairs = [(sorted({0, *line.source.tolist()}), line.targets[0].tolist()) for line in lines]
    p = defaultdict(lambda: 1.0)
    for _ in range(5):
        counts = defaultdict(float)
        for sources, targets in pairs:
            for t in targets:
                for s in sources:
                    counts[t, s] += p[t, s] / sum(p[t, other] for other in sources)
        total = {s: sum(count for (_, other), count in counts.items() if other == s) for _, s in counts}
        p = defaultdict(float, {(t, s): count / total[s] for (t, s), count in counts.items()})
    learned = associate(lines, 9)
    starts, ids = learned.tables(0, 3, 7)
    for s in range(1, 8):
        expected = sorted((t for t, other in p if other == s), key=lambda t: -p[t, s])[:3]
        assert sorted(ids[starts[s] : starts[s + 1]].tolist()) == sorted(expected)
    times = np.bincount(np.concatenate([targets for _, targets in pairs]))
    assert (np.diff(times[learned.frequent]) <= 0).all()


def test_needed_table_size_covers_all_targets():
    lines = [Line(DRAW.integers(1, 30, 5), (DRAW.integers(0, 50, 6),)) for _ in range(60)]
    learned = associate(lines[:50], 50)
    needed = each_needed(learned.needs(lines), len(lines), common=5)
    for each in (1, 3, 9):
        starts, ids = learned.tables(5, each, 29)
        for line, need in zip(lines, needed, strict=True):
            candidates = {*learned.frequent[:5].tolist()}.union(
                *(ids[starts[s] : starts[s + 1]].tolist() for s in line.source)
            )
            assert (need <= each) == (set(line.targets[0].tolist()) <= candidates)


@pytest.mark.thorough
def test_shortlist_projection_has_no_small_batch_form(tmp_path, monkeypatch):
    """The output projection alone is large enough for a kernel for few rows."""
    monkeypatch.setattr("tformer_export.quantize.rewrite.MIN_WEIGHT_VALUES", IDS * 32)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"src": source}) + "\n" for source in SOURCES))
    ids = torch.randint(10, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    for shortlist in (lines, None):
        path = tmp_path / "model.onnx"
        report = export(
            make_module(tied=False), path, {"src": ids, "tgt": ids}, "tgt", quantization="int8", optimize_for="latency",
            shortlist=shortlist, special_tokens={"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": 0},
        )  # fmt: skip
        nodes = list(ir.load(path).graph.all_nodes())
        has_shortlist = shortlist is not None
        assert ("MatMulNBits" in {node.op_type for node in nodes}) != has_shortlist
        assert any(node.name == "few" for node in nodes) != has_shortlist
        assert ("few rows" in dict(report.rows())) == has_shortlist
        assert any(product.few for product in report.products.values()) != has_shortlist
        assert read_manifest(path).decode.small_batch_limit == (None if has_shortlist else 2)
        path.unlink()


# -- decoding -----------------------------------------------------------------------------------------------------


def test_learning_data_decode_as_with_all_ids(exported):
    assert exported.report.shortlist.lines == len(SOURCES)
    assert exported.report.shortlist.equal >= 0.995
    with_shortlist, with_all_ids = ([*exported.file.generate_batch(SOURCES, shortlist=on)] for on in (True, False))
    assert np.mean([a.token_ids == b.token_ids for a, b in zip(with_shortlist, with_all_ids, strict=True)]) >= 0.995
    counts = [len(candidates_by_hand(exported.file, source)) for source in SOURCES]
    assert exported.report.shortlist.candidates == pytest.approx(np.mean(counts))
    assert np.mean(counts) <= runtime.max_columns(IDS) < IDS / 2
    shortlist_info = exported.file.info()["shortlist"]
    assert shortlist_info["equal"] == exported.report.shortlist.equal
    assert "ids a request" in dict(exported.report.rows())["shortlist"]


def test_results_match_source_model_restricted_to_candidates(exported):
    if exported.exact:
        pytest.skip("the source computes in float32")
    for source in DRAW.integers(10, 60, (12, 5)).tolist():
        candidates, ids = candidates_by_hand(exported.file, source), [START]
        while len(ids) <= MAX_NEW_TOKENS and ids[-1] != END:
            with torch.no_grad():
                logits = exported.model(torch.tensor([source]), torch.tensor([ids]))[0, -1].numpy()
            ids.append(candidates[int(logits[candidates].argmax())])
        result = exported.file.generate(source)
        assert list(result.token_ids) == ids[1:]


def test_logits_of_candidates_match_logits_of_all_ids(exported):
    engine, rows = exported.file.engine, SOURCES[:3]
    row_candidates = [np.array(candidates_by_hand(exported.file, row)) for row in rows]
    for candidates in (row_candidates, [row_candidates[0], None, row_candidates[2]]):
        states = [engine.start({"src": rows}, 3, candidates=ids_of_rows) for ids_of_rows in (None, candidates)]
        tokens = np.full((3, 1), START)
        for _ in range(4):
            full_logits, shortlist_logits = (engine.step(state, tokens).copy() for state in states)
            for row, ids in enumerate(candidates):
                ids = np.arange(IDS) if ids is None else ids
                np.testing.assert_allclose(
                    shortlist_logits[row, ids], full_logits[row, ids], rtol=0, atol=0 if exported.exact else 1e-4
                )
                assert (np.delete(shortlist_logits[row], ids) == -np.inf).all()
            tokens = full_logits.argmax(-1)[:, None]
    assert len(states[1].candidates.ids) == 0  # a row without candidates needs all columns


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 5, "num_return_sequences": 2}])
def test_single_request_matches_request_of_a_batch(exported, options):
    batch = [
        *exported.file.generate_batch(SOURCES[:14], batch_size=5, **options)
    ]  # further requests join when rows end
    for source, index, result in zip(SOURCES, range(14), batch, strict=False):
        single = next(iter(ResumedModel(exported.file, index).generate_batch([source], **options)))
        assert_same_result(result, single, exported.exact)
        assert set(result.token_ids) <= {*candidates_by_hand(exported.file, source)}


def test_columns_are_gathered_once_for_unchanged_rows(exported, monkeypatch):
    gathered_ids = []
    set_gathered = runtime.Candidates.set_gathered
    monkeypatch.setattr(
        runtime.Candidates,
        "set_gathered",
        lambda self, weight: (gathered_ids.append(self.pending_ids), set_gathered(self, weight)),
    )
    exported.file.generate(SOURCES[0], num_beams=3)
    assert [ids.tolist() for ids in gathered_ids] == [candidates_by_hand(exported.file, SOURCES[0])]


def test_columns_are_gathered_after_rows_join(exported):
    engine = exported.file.engine
    row_candidates = [np.arange(30), np.arange(20, 60)]
    states = [
        engine.start({"src": [row]}, 1, joins=True, candidates=[ids])
        for row, ids in zip(SOURCES[:2], row_candidates, strict=True)
    ]
    for state in states:
        engine.step(state, np.array([[START]]))
    state, other = states
    assert state.candidates.ids.tolist() == row_candidates[0].tolist()
    engine.join(state, other)
    for gathered in (0, 60, 60):
        engine.step(state, np.array([[5], [6]]))
        assert len(state.candidates.ids) == gathered


@pytest.mark.parametrize("max_columns", [0, IDS])
def test_results_do_not_depend_on_gathering_of_columns(exported, monkeypatch, max_columns):
    expected = [*exported.file.generate_batch(SOURCES[:8], num_beams=2)]
    monkeypatch.setattr(runtime, "max_columns", lambda vocabulary: max_columns)
    for one, other in zip(exported.file.generate_batch(SOURCES[:8], num_beams=2), expected, strict=True):
        assert_same_result(one, other, exported.exact)


@requires_kernels
@pytest.mark.parametrize("path", PATHS)
def test_native_kernels_keep_results(exported, monkeypatch, path):
    """Gathered columns are given to the file at each step, so that their product stays with onnxruntime."""
    results = []
    for kernels in (OFF, path):  # attention by kernels changes last bits
        monkeypatch.setenv(VARIABLE, OFF if kernels == OFF else f"{path},{PRODUCTS_ALONE}")
        model = Model.load(exported.file.engine.session.path, "cpu", threads=1)
        assert model.info()["kernels"] == (None if kernels == OFF else f"native kernels {path}")
        results.append([*model.generate_batch(SOURCES[:8])])
    for actual, expected in zip(*results, strict=True):
        assert_same_result(actual, expected, exported.exact)


def test_records_name_the_projection_for_all_ids(exported):
    """Its copy for gathered columns has no stored weights, and no record."""
    path = exported.file.engine.session.path
    stored = read_manifest(path).stored_products
    count = replace_products(*read_mapped_model(path), lambda product, files: 1, stored=stored).products
    assert count == len(stored.products)
    projections = [name for name in stored.products if name.startswith(("all/", "shortlist/"))]
    assert [name.split("/")[0] for name in projections] == (["all"] if exported.exact else [])


def test_requests_with_and_without_shortlist_share_batches(exported):
    async def all_at_once():
        async with AsyncModel(exported.file, max_batch_size=4) as shared:
            return await asyncio.gather(
                *(shared.generate(source, shortlist=i % 3 > 0) for i, source in enumerate(SOURCES[:9]))
            )

    for i, result in enumerate(asyncio.run(all_at_once())):
        assert_same_result(result, exported.file.generate(SOURCES[i], shortlist=i % 3 > 0), exported.exact)


def test_prompt_lookup_preserves_results(exported):
    for source in SOURCES[:4]:
        assert_same_result(
            exported.file.generate(source, prompt_lookup=True), exported.file.generate(source), exact=False
        )


def test_memory_of_columns_is_counted_and_released(exported):
    model = Model.load(exported.file.engine.session.path, threads=1, max_memory=1 << 20)
    expected = [result.token_ids for result in exported.file.generate_batch(SOURCES[:6])]
    assert [result.token_ids for result in model.generate_batch(SOURCES[:6])] == expected
    assert model.memory()["used_bytes"] == 0
    engine = model.engine
    state = engine.start({"src": SOURCES[:1]}, 1, candidates=[np.arange(30)])
    full = engine.start({"src": SOURCES[:1]}, 1)
    assert state.nbytes - full.nbytes == 30 * 32 * (1 if exported.exact else 4)
    shortlist, full = engine.decode.shortlist, engine.memory_estimate.bytes_needed(8, {"time": 5})
    max_candidates = min(runtime.max_columns(IDS), shortlist.common + 5 * shortlist.each)
    assert engine.memory_estimate.bytes_needed(8, {"time": 5}, num_named_ids=0) - full == max_candidates * 32 * (
        1 if exported.exact else 4
    )


# -- options ------------------------------------------------------------------------------------------------------


def test_ids_named_by_options_are_candidates(exported):
    source = SOURCES[0]
    outside = next(i for i in range(10, IDS) if i not in candidates_by_hand(exported.file, source))
    assert exported.file.generate(source, logit_bias={outside: 1000.0}).token_ids[0] == outside
    assert exported.file.generate(source, forced_bos_token_id=outside).token_ids[0] == outside
    result, with_all_ids = (
        exported.file.generate(source, forced_prefix=[outside], shortlist=on) for on in (True, False)
    )
    assert result.token_ids[0] == with_all_ids.token_ids[0] == outside
    assert np.isfinite(result.token_logprobs[0])
    np.testing.assert_allclose(exported.file.score(source, [outside]), with_all_ids.token_logprobs[:1], atol=1e-4)


def test_processors_and_guides_use_all_ids(exported):
    source, all_finite = SOURCES[0], []
    outside = next(i for i in range(10, IDS) if i not in candidates_by_hand(exported.file, source))

    def processor(ids, logits):
        all_finite.append(np.isfinite(logits[..., 1:]).all())  # 0 is padding, which is never generated
        return np.where(np.arange(IDS) == outside, 1.0, 0.0)

    assert set(exported.file.generate(source, logits_processor=processor).token_ids) == {outside}
    assert all(all_finite)
    engine, prompt = exported.file.engine, np.array([START])
    settings = Settings.of(GenerationOptions(), {})
    tasks = [SequenceTask(0, prompt, 4, settings, sources={"src": np.array(source)}, guide=g) for g in (None, object())]
    unconstrained, constrained = candidates_of(engine, tasks)
    assert unconstrained.tolist() == candidates_by_hand(exported.file, source)
    assert constrained is None


def test_file_without_shortlist_raises_unsupported_call_error(exported, tmp_path):
    model = Model.load(exported.file.engine.session.path, threads=1)
    decode_manifest = model.engine.manifest.decode
    force_setattr(decode_manifest, "shortlist", None)
    with pytest.raises(UnsupportedCallError, match="holds no shortlist: export the model with --shortlist FILE"):
        model.generate(SOURCES[0], shortlist=True)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_wrong_columns_raise_parity_error(exported, monkeypatch):
    assert exported.report.shortlist is not None
    engine = Engine(exported.file.engine.session.path, "cpu", threads=1)
    assert check_columns(exported.gate, engine) <= (0 if exported.exact else 1e-5)
    set_gathered = runtime.Candidates.set_gathered

    def set_shifted_columns(self, weight):
        set_gathered(self, engine.session.device_tensor(np.roll(weight.numpy(), 1, axis=1)))

    monkeypatch.setattr(runtime.Candidates, "set_gathered", set_shifted_columns)
    with pytest.raises(ParityError, match="logits of candidates differ from those of all ids by"):
        check_columns(exported.gate, engine)


def test_too_small_shortlist_is_refused(exported, monkeypatch):
    engine = Engine(exported.file.engine.session.path, "cpu", threads=1)
    monkeypatch.setattr("tformer_export.shortlist.make.max_columns", lambda vocabulary: 6)
    with pytest.raises(ParityError, match=r"no shortlist of at most 6 ids gives 99.5% .* give more"):
        make_shortlist(engine, exported.lines)
    short_file = exported.lines.with_name("few.jsonl")
    short_file.write_text(json.dumps({"src": SOURCES[0]}))
    with pytest.raises(OptionError, match=r"--shortlist .*few.jsonl holds 1 lines that can be used: give 8 or more"):
        make_shortlist(engine, short_file)


def test_model_without_encoder_is_refused(tmp_path):
    lines = tmp_path.parent / f"{tmp_path.name}.txt"
    lines.write_text("[5]\n")
    message = refusal(Mixer, tmp_path, OptionError, example=EXAMPLE, shortlist=lines)
    assert "this model has not both: export it without --shortlist" in message
    assert "there is no file" in refusal(Mixer, tmp_path, OptionError, shortlist=tmp_path / "nothing")


@pytest.mark.parametrize("op", ["LogSoftmax", "CumSum"])
def test_operators_across_logits_are_refused(op):
    hidden = ir.Value(name="hidden", shape=ir.Shape([1, 1, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    weight = ir.Value(name="weight", const_value=ir.tensor(np.ones((4, 9), np.float32)))
    product = ir.node("MatMul", [hidden, weight])
    after = ir.node(op, [product.outputs[0]])
    graph = ir.Graph([hidden], [after.outputs[0]], nodes=[product, after], initializers=[weight])
    with pytest.raises(UnsupportedModelError, match=f"output projection .*{op}.*: export it without one"):
        add_gathered_columns(ir.Model(graph, ir_version=10))


def test_damaged_table_is_refused():
    table = runtime.Shortlist(9, np.array([1, 5]), {"src": (np.array([0, 2, 2]), np.array([3, 4], np.int32))})
    text = table.to_text()
    assert text == table.to_text()
    restored = runtime.Shortlist.from_text(text)
    assert restored.candidates({"src": np.array([0])}, [7]).tolist() == [1, 3, 4, 5, 7]
    assert restored.candidates({"src": np.array([1, 8])}).tolist() == [1, 5]
    for damaged in (text[:-40], "?", "AAAA"):
        with pytest.raises(ModelFileError, match=r"shortlist is damaged \(.*\): export the model again"):
            runtime.Shortlist.from_text(damaged)


@pytest.mark.parametrize(
    ("common", "starts", "ids", "message"),
    [
        ([1, 9], [0, 2, 2], [3, 4], "ids outside the vocabulary"),
        ([1, -1], [0, 2, 2], [3, 4], "ids outside the vocabulary"),
        ([1, 5], [0, 2, 2], [3, 9], "ids outside the vocabulary"),
        ([1, 5], [0, 3, 3], [3, 4], "do not follow each other"),
        ([1, 5], [2, 0, 2], [3, 4], "do not follow each other"),
        ([1, 5], [], [3, 4], "do not follow each other"),
        ([1.0, 5.0], [0, 2, 2], [3, 4], "not lists of ids"),
        ([[1], [5]], [0, 2, 2], [3, 4], "not lists of ids"),
        ([1, 5], [0, 2, 2], [[3, 4]], "not lists of ids"),
    ],
)
def test_impossible_tables_are_refused(common, starts, ids, message):
    starts = np.array(starts, np.int64)
    text = runtime.Shortlist(9, np.array(common), {"src": (starts, np.array(ids))}).to_text()
    with pytest.raises(ModelFileError, match=message):
        runtime.Shortlist.from_text(text)


def test_tables_that_unpack_to_more_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr(runtime, "MAX_UNPACKED_BYTES", 10_000)
    zeros = np.zeros(100_000, np.int64)
    text = runtime.Shortlist(9, zeros, {}).to_text()
    assert len(text) < 10_000
    with pytest.raises(ModelFileError, match="too large"):
        runtime.Shortlist.from_text(text)
