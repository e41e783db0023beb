"""A shortlist: what is learned, and that a file with one computes what it computes without, of the candidates alone."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
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
from tformer_runtime.decoding.batch_rows import candidates_of
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.sequence import SequenceTask
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.model_file import read_manifest

IDS, START, END, MOST = 600, 1, 2, 10
DRAW = np.random.default_rng(0)
SOURCES = [DRAW.integers(10, 60, DRAW.integers(3, 8)).tolist() for _ in range(60)]


def module(tied):
    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 4, "encoder_layers": 1, "decoder_layers": 1, "feedforward": 64, "max_length": 24}
    model = Seq2SeqTransformer(IDS, IDS, dropout=0.0, tie_output=tied, **sizes).eval()
    with torch.no_grad():
        model.output.weight.normal_(0, 1)
    return model


@pytest.fixture(scope="module", params=["float32, tied", "int8"])
def made(request, tmp_path_factory):
    """model: the source. file: the model. gate, engine: as the export checked them. report, lines."""
    folder, seen = tmp_path_factory.mktemp("shortlist"), {}
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"src": source}) + "\n" for source in SOURCES))
    ids = torch.randint(10, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    quantize = "int8" if request.param == "int8" else "none"
    model = module(tied=quantize == "none")

    def checked(gate, engine):
        seen.update(gate=gate, engine=engine)
        return check_columns(gate, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tformer_export.shortlist.add.check_columns", checked)
        report = export(
            model, folder / "model.onnx", {"src": ids, "tgt": ids}, "tgt", quantization=quantize, shortlist=lines,
            special_tokens={"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": 0},
            generation_defaults={"max_new_tokens": MOST},
        )  # fmt: skip
    file = Model.load(folder / "model.onnx", threads=1)
    return SimpleNamespace(model=model, file=file, report=report, lines=lines, exact=quantize == "int8", **seen)


def allowed(file, source):
    """The candidates of a source, from the tables by hand."""
    table = file.engine.shortlist
    starts, ids = table.tables["src"]
    return sorted(set(table.common.tolist()).union(*(ids[starts[i] : starts[i + 1]].tolist() for i in source)))


def same(one, other, exact=True):
    assert one.token_ids == other.token_ids
    if exact:
        assert one.token_logprobs == other.token_logprobs
    np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-4)


# Learning


def test_associations_are_those_of_ibm_model_1():
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


def test_what_lines_need_is_what_gives_them_all_their_targets():
    lines = [Line(DRAW.integers(1, 30, 5), (DRAW.integers(0, 50, 6),)) for _ in range(60)]
    learned = associate(lines[:50], 50)
    needed = each_needed(learned.needs(lines), len(lines), common=5)
    for each in (1, 3, 9):
        starts, ids = learned.tables(5, each, 29)
        for line, need in zip(lines, needed, strict=True):
            own = {*learned.frequent[:5].tolist()}.union(
                *(ids[starts[s] : starts[s + 1]].tolist() for s in line.source)
            )
            assert (need <= each) == (set(line.targets[0].tolist()) <= own)


@pytest.mark.thorough
def test_a_stage_is_not_there_twice_for_a_projection_that_is_set_apart(tmp_path, monkeypatch):
    """The output projection alone is large enough for a kernel for few rows."""
    monkeypatch.setattr("tformer_export.quantize.rewrite.MIN_WEIGHT_VALUES", IDS * 32)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"src": source}) + "\n" for source in SOURCES))
    ids = torch.randint(10, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    for shortlist in (lines, None):
        path = tmp_path / "model.onnx"
        report = export(
            module(tied=False), path, {"src": ids, "tgt": ids}, "tgt", quantization="int8", optimize_for="latency",
            shortlist=shortlist, special_tokens={"bos_token_id": [START], "eos_token_id": [END], "pad_token_id": 0},
        )  # fmt: skip
        nodes = list(ir.load(path).graph.all_nodes())
        apart = shortlist is not None
        assert ("MatMulNBits" in {node.op_type for node in nodes}) != apart
        assert any(node.name == "few" for node in nodes) != apart
        assert ("few rows" in dict(report.rows())) == apart
        assert any(product.few for product in report.products.values()) != apart
        assert read_manifest(path).decode.small_batch_limit == (None if apart else 2)
        path.unlink()


# What it computes


def test_the_data_decode_as_with_all_ids(made):
    assert made.report.shortlist.lines == len(SOURCES)
    assert made.report.shortlist.equal >= 0.995
    short, every = ([*made.file.generate_batch(SOURCES, shortlist=on)] for on in (True, False))
    assert np.mean([a.token_ids == b.token_ids for a, b in zip(short, every, strict=True)]) >= 0.995
    counts = [len(allowed(made.file, source)) for source in SOURCES]
    assert made.report.shortlist.candidates == pytest.approx(np.mean(counts))
    assert np.mean(counts) <= runtime.max_columns(IDS) < IDS / 2
    held = made.file.info()["shortlist"]
    assert held["equal"] == made.report.shortlist.equal
    assert "ids a request" in dict(made.report.rows())["shortlist"]


def test_results_are_those_of_the_source_model_restricted_to_the_candidates(made):
    if made.exact:
        pytest.skip("the source computes in float32")
    for source in DRAW.integers(10, 60, (12, 5)).tolist():
        own, ids = allowed(made.file, source), [START]
        while len(ids) <= MOST and ids[-1] != END:
            with torch.no_grad():
                logits = made.model(torch.tensor([source]), torch.tensor([ids]))[0, -1].numpy()
            ids.append(own[int(logits[own].argmax())])
        result = made.file.generate(source)
        assert list(result.token_ids) == ids[1:]


def test_logits_are_those_of_all_ids_where_a_row_has_candidates(made):
    engine, rows = made.file.engine, SOURCES[:3]
    own = [np.array(allowed(made.file, row)) for row in rows]
    for candidates in (own, [own[0], None, own[2]]):
        states = [engine.start({"src": rows}, 3, candidates=given) for given in (None, candidates)]
        tokens = np.full((3, 1), START)
        for _ in range(4):
            every, short = (engine.step(state, tokens).copy() for state in states)
            for row, ids in enumerate(candidates):
                ids = np.arange(IDS) if ids is None else ids
                np.testing.assert_allclose(short[row, ids], every[row, ids], rtol=0, atol=0 if made.exact else 1e-4)
                assert (np.delete(short[row], ids) == -np.inf).all()
            tokens = every.argmax(-1)[:, None]
    assert len(states[1].candidates.ids) == 0  # a row that wants all ids has all columns computed


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 5, "num_return_sequences": 2}])
def test_a_row_alone_is_the_same_as_among_others(made, options):
    together = [*made.file.generate_batch(SOURCES[:14], batch_size=5, **options)]  # others join as rows end
    for source, index, result in zip(SOURCES, range(14), together, strict=False):
        alone = next(iter(made.file.numbered_from(index).generate_batch([source], **options)))
        same(result, alone, made.exact)
        assert set(result.token_ids) <= {*allowed(made.file, source)}


def test_columns_are_gathered_once_while_the_rows_stay(made, monkeypatch):
    held = []
    hold = runtime.Candidates.set_gathered
    monkeypatch.setattr(
        runtime.Candidates, "set_gathered", lambda self, weight: (held.append(self.pending_ids), hold(self, weight))
    )
    made.file.generate(SOURCES[0], num_beams=3)
    assert [ids.tolist() for ids in held] == [allowed(made.file, SOURCES[0])]


def test_columns_wait_for_rows_that_come(made):
    engine = made.file.engine
    own = [np.arange(30), np.arange(20, 60)]
    states = [
        engine.start({"src": [row]}, 1, joins=True, candidates=[ids]) for row, ids in zip(SOURCES[:2], own, strict=True)
    ]
    for state in states:
        engine.step(state, np.array([[START]]))
    state, other = states
    assert state.candidates.ids.tolist() == own[0].tolist()
    engine.join(state, other)
    for gathered in (0, 60, 60):
        engine.step(state, np.array([[5], [6]]))
        assert len(state.candidates.ids) == gathered


@pytest.mark.parametrize("pays", [0, IDS])
def test_results_do_not_depend_on_whether_columns_are_gathered(made, monkeypatch, pays):
    expected = [*made.file.generate_batch(SOURCES[:8], num_beams=2)]
    monkeypatch.setattr(runtime, "max_columns", lambda vocabulary: pays)
    for one, other in zip(made.file.generate_batch(SOURCES[:8], num_beams=2), expected, strict=True):
        same(one, other, made.exact)


def test_requests_with_and_without_share_batches(made):
    async def all_at_once():
        async with AsyncModel(made.file, max_batch_size=4) as shared:
            return await asyncio.gather(
                *(shared.generate(source, shortlist=i % 3 > 0) for i, source in enumerate(SOURCES[:9]))
            )

    for i, result in enumerate(asyncio.run(all_at_once())):
        same(result, made.file.generate(SOURCES[i], shortlist=i % 3 > 0), made.exact)


def test_a_draft_changes_nothing(made):
    for source in SOURCES[:4]:
        same(made.file.generate(source, prompt_lookup=True), made.file.generate(source), exact=False)


def test_memory_is_counted_and_given_back(made):
    model = Model.load(made.file.engine.session.path, threads=1, max_memory=1 << 20)
    expected = [result.token_ids for result in made.file.generate_batch(SOURCES[:6])]
    assert [result.token_ids for result in model.generate_batch(SOURCES[:6])] == expected
    assert model.memory()["held"] == 0
    engine = model.engine
    state = engine.start({"src": SOURCES[:1]}, 1, candidates=[np.arange(30)])
    without = engine.start({"src": SOURCES[:1]}, 1)
    assert state.nbytes - without.nbytes == 30 * 32 * (1 if made.exact else 4)
    held, without = engine.decode.shortlist, engine.memory_estimate.bytes_needed(8, {"time": 5})
    most = min(runtime.max_columns(IDS), held.common + 5 * held.each)
    assert engine.memory_estimate.bytes_needed(8, {"time": 5}, num_named_ids=0) - without == most * 32 * (
        1 if made.exact else 4
    )


# What options ask for


def test_ids_that_options_name_may_come(made):
    source = SOURCES[0]
    outside = next(i for i in range(10, IDS) if i not in allowed(made.file, source))
    assert made.file.generate(source, logit_bias={outside: 1000.0}).token_ids[0] == outside
    assert made.file.generate(source, forced_bos_token_id=outside).token_ids[0] == outside
    result, every = (made.file.generate(source, forced_prefix=[outside], shortlist=on) for on in (True, False))
    assert result.token_ids[0] == every.token_ids[0] == outside
    assert np.isfinite(result.token_logprobs[0])
    np.testing.assert_allclose(made.file.score(source, [outside]), every.token_logprobs[:1], atol=1e-4)


def test_what_may_ask_for_any_id_is_computed_of_all(made):
    source, seen = SOURCES[0], []
    outside = next(i for i in range(10, IDS) if i not in allowed(made.file, source))

    def processor(ids, logits):
        seen.append(np.isfinite(logits).all())
        return np.where(np.arange(IDS) == outside, 1.0, 0.0)

    assert set(made.file.generate(source, logits_processor=processor).token_ids) == {outside}
    assert all(seen)
    engine, prompt = made.file.engine, np.array([START])
    settings = Settings.of(GenerationOptions(), {})
    tasks = [SequenceTask(0, prompt, 4, settings, sources={"src": np.array(source)}, guide=g) for g in (None, object())]
    plain, constrained = candidates_of(engine, tasks)
    assert plain.tolist() == allowed(made.file, source)
    assert constrained is None


def test_a_file_without_one_says_how_to_have_one(made, tmp_path):
    model = Model.load(made.file.engine.session.path, threads=1)
    held = model.engine.manifest.decode
    object.__setattr__(held, "shortlist", None)
    with pytest.raises(UnsupportedCallError, match="holds no shortlist: export the model with --shortlist FILE"):
        model.generate(SOURCES[0], shortlist=True)


# What is refused


def test_columns_that_are_others_are_noticed(made, monkeypatch):
    assert made.report.shortlist is not None
    engine = Engine(made.file.engine.session.path, "cpu", threads=1)
    assert check_columns(made.gate, engine) <= (0 if made.exact else 1e-5)
    hold = runtime.Candidates.set_gathered

    def wrong(self, weight):
        hold(self, engine.session.device_tensor(np.roll(weight.numpy(), 1, axis=1)))

    monkeypatch.setattr(runtime.Candidates, "set_gathered", wrong)
    with pytest.raises(ParityError, match="logits of candidates differ from those of all ids by"):
        check_columns(made.gate, engine)


def test_too_small_a_shortlist_is_refused(made, monkeypatch):
    engine = Engine(made.file.engine.session.path, "cpu", threads=1)
    monkeypatch.setattr("tformer_export.shortlist.make.max_columns", lambda vocabulary: 6)
    with pytest.raises(ParityError, match=r"no shortlist of at most 6 ids gives 99.5% .* give more"):
        make_shortlist(engine, made.lines)
    few = made.lines.with_name("few.jsonl")
    few.write_text(json.dumps({"src": SOURCES[0]}))
    with pytest.raises(OptionError, match=r"--shortlist .*few.jsonl holds 1 lines that can be used: give 8 or more"):
        make_shortlist(engine, few)


def test_a_model_without_an_encoder_has_none(tmp_path):
    lines = tmp_path.parent / f"{tmp_path.name}.txt"
    lines.write_text("[5]\n")
    said = refusal(Mixer, tmp_path, OptionError, example=EXAMPLE, shortlist=lines)
    assert "this model has not both: export it without --shortlist" in said
    assert "there is no file" in refusal(Mixer, tmp_path, OptionError, shortlist=tmp_path / "nothing")


@pytest.mark.parametrize("op", ["LogSoftmax", "CumSum"])
def test_logits_that_depend_on_each_other_have_none(op):
    hidden = ir.Value(name="hidden", shape=ir.Shape([1, 1, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    weight = ir.Value(name="weight", const_value=ir.tensor(np.ones((4, 9), np.float32)))
    product = ir.node("MatMul", [hidden, weight])
    after = ir.node(op, [product.outputs[0]])
    graph = ir.Graph([hidden], [after.outputs[0]], nodes=[product, after], initializers=[weight])
    with pytest.raises(UnsupportedModelError, match=f"output projection .*{op}.*: export it without one"):
        add_gathered_columns(ir.Model(graph, ir_version=10))


def test_a_damaged_table_is_refused():
    table = runtime.Shortlist(9, np.array([1, 5]), {"src": (np.array([0, 2, 2]), np.array([3, 4], np.int32))})
    text = table.to_text()
    assert text == table.to_text()
    again = runtime.Shortlist.from_text(text)
    assert again.candidates({"src": np.array([0])}, [7]).tolist() == [1, 3, 4, 5, 7]
    assert again.candidates({"src": np.array([1, 8])}).tolist() == [1, 5]
    for wrong in (text[:-40], "?", "AAAA"):
        with pytest.raises(ModelFileError, match="shortlist is damaged: export the model again"):
            runtime.Shortlist.from_text(wrong)
