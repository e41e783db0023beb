"""The gate sees mutations of a graph that change its results, at any batch, length and division into steps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from support.families import llama
from support.handwritten_case import BLOCK, VOCABULARY

from soundness.mutations import mutations
from tformer_export.compile import analyse
from tformer_export.sources.hugging_face.folder import from_transformers
from tformer_export.sources.torch_module import from_module
from tformer_export.verify.differences import logit_differences
from tformer_export.verify.parity import ParityGate
from tformer_export.verify.report import TOLERANCE
from tformer_models.seq2seq import Seq2SeqTransformer
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import MANIFEST_KEY, SpecialTokens

IN_THE_SUITE = 60  # mutations of each model; all of them in `make thorough`
LEAST_SCORE = 0.99
DIVISIONS = ((1, 1), (2, 5), (3, 24), (5, 2))  # rows of a batch, and positions of a step


def encoder_decoder():
    torch.manual_seed(0)
    module = Seq2SeqTransformer(
        VOCABULARY, VOCABULARY, width=16, heads=2, encoder_layers=1, decoder_layers=1, feedforward=24, max_length=BLOCK,
        positions="learned", tie_output=False,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    return from_module(module, {"src": ids, "tgt": ids}, "tgt", special_tokens=SpecialTokens((1,), (2,), 0))


SOURCES = {"encoder-decoder": encoder_decoder, "rotary decoder": lambda: from_transformers(llama("sdpa"))}


class Checked:
    """A source, its gate, its file and the file's results."""

    def __init__(self, name, path):
        self.source, self.path = SOURCES[name](), path
        self.source.module.eval()
        compiled = analyse(self.source, "cpu", BLOCK).compile()
        compiled.model.metadata_props[MANIFEST_KEY] = compiled.manifest.to_json()
        ir.save(compiled.model, path)
        self.model, self.inputs = onnx.load(path), compiled.inputs
        ParityGate(self.source, self.inputs).check(Engine(path, "cpu", threads=1))
        self.expected = self.results(Engine(path, "cpu", threads=1))

    def results(self, engine):
        """Return logits for random ids, which are not those of the gate."""
        rng = np.random.default_rng(7)
        found = []
        for rows, each in DIVISIONS:
            names = [name for name in self.inputs if name != self.source.step_input]
            requests = {name: [rng.integers(3, 30, n) for n in rng.integers(1, 20, rows)] for name in names}
            tokens = rng.integers(3, 30, (rows, BLOCK - 1))
            state = engine.start(requests, rows)
            for begin in range(0, tokens.shape[1], each):
                found.append(engine.step(state, tokens[:, begin : begin + each], logit_positions="all"))
        return found

    def changes(self, engine):
        """Return whether results of a file differ by more than the gate allows."""
        pairs = zip(self.results(engine), self.expected, strict=True)
        return any(
            a.shape != b.shape or not float(logit_differences(np.asarray(a), np.asarray(b)).max()) <= TOLERANCE
            for a, b in pairs
        )

    def accepts(self, engine):
        try:
            ParityGate(self.source, self.inputs).check(engine)
        except Exception:  # a mutation may end the gate in any way but well
            return False
        return True


def judge(name, folder, count):
    """Count the mutations by their outcome. Return the counts and the names of the unseen mutations."""
    checked, outcomes, unseen = Checked(name, folder / "model.onnx"), Counter(), []
    for mutation in mutations(checked.model):
        if count is not None and sum(outcomes[o] for o in ("seen", "unseen")) >= count:
            break
        onnx.save(mutation.model, folder / "mutated.onnx")
        try:
            engine = Engine(folder / "mutated.onnx", "cpu", threads=1)
            changes = checked.changes(engine)
        except Exception:  # a graph that does not run is not a file
            outcomes["does not run"] += 1
            continue
        if not changes:
            outcomes["same results"] += 1
        elif checked.accepts(engine):
            outcomes["unseen"] += 1
            unseen.append(mutation.name)
        else:
            outcomes["seen"] += 1
    return outcomes, unseen


@pytest.mark.parametrize("name", SOURCES)
def test_gate_sees_mutations(name, tmp_path):
    outcomes, unseen = judge(name, tmp_path, IN_THE_SUITE)
    assert outcomes["seen"] >= LEAST_SCORE * IN_THE_SUITE, unseen


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOURCES)
def test_mutation_score(name, tmp_path):
    outcomes, unseen = judge(name, tmp_path, None)
    score = outcomes["seen"] / (outcomes["seen"] + outcomes["unseen"])
    print(f"{name}: {score:.2%} of {outcomes['seen'] + outcomes['unseen']}", dict(outcomes), unseen)
    assert score >= LEAST_SCORE, unseen
