"""A model whose logits are NaN or infinite for an input: that request ends with an InputError, and no other does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.toy_models import LETTERS, WIDTH, Toy

from tformer_runtime import InputError, Model
from tformer_runtime.decoding.sequence import NOT_FINITE

BAD = LETTERS.index("q")


@pytest.fixture(scope="module", params=["nan", "inf"])
def model(request, tmp_path_factory):
    """Return a decoder whose embedding of the letter q is not a number."""
    path = tmp_path_factory.mktemp("bad") / "model.onnx"
    Toy(encoder=False, seed=5, end=()).write(path)
    file = onnx.load(path)
    tables = [t for t in _initializers(file.graph) if list(t.dims) == [len(LETTERS), WIDTH]]
    assert tables
    for table in tables:
        values = numpy_helper.to_array(table).copy()
        values[BAD] = float(request.param)
        table.CopyFrom(numpy_helper.from_array(values, table.name))
    onnx.save(file, path)
    return Model.load(path, "cpu")


def _initializers(graph):
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _initializers(attribute.g)


OPTIONS = [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 3}, {"top_logprobs": 2}, {"prompt_lookup": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_request_without_numbers_ends_alone(model, options):
    good = [
        result.text
        for result in model.generate_batch(["ab", "cde"], max_new_tokens=6, suppress_tokens=[BAD], **options)
    ]
    with pytest.raises(InputError, match=NOT_FINITE):
        model.generate("aqb", max_new_tokens=6, suppress_tokens=[BAD], **options)
    results = model.generate_batch(["ab", "aqb", "cde"], max_new_tokens=6, suppress_tokens=[BAD], **options)
    assert next(results).text == good[0]
    with pytest.raises(InputError, match=f"input 2: {NOT_FINITE}"):
        next(results)
    assert [
        r.text for r in model.generate_batch(["ab", "cde"], max_new_tokens=6, suppress_tokens=[BAD], **options)
    ] == good


def test_score_without_numbers_is_refused(model):
    assert np.isfinite(model.score("a", "bc")).all()
    with pytest.raises(InputError, match=NOT_FINITE):
        model.score("aq", "bc")
