"""Results and settings as values: compared, hashed, shown and pickled without their arrays and times."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from support.toy_models import Toy

from tformer_runtime import GenerationOptions, Model
from tformer_runtime.decoding.options import Settings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model.load(Toy(extras=True, seed=27).write(tmp_path_factory.mktemp("toy") / "toy.onnx"), "cpu", threads=1)


def test_arrays_and_times_are_not_compared_or_shown(model):
    bare = model.generate("hello", max_new_tokens=6)
    full = model.generate("hello", max_new_tokens=6, cross_attentions=True, hidden_states=True)
    assert bare.cross_attentions is None
    assert full.cross_attentions is not None
    assert bare.timing != full.timing
    assert bare == full
    assert hash(bare) == hash(full)
    assert repr(bare) == repr(full)
    assert repr(full).startswith(f"Result(text={full.text!r}, token_ids={full.token_ids!r}, score=")
    assert "attentions" not in repr(full)
    assert "timing" not in repr(full)


def test_each_compared_field_makes_results_differ(model):
    result, other = model.generate("hello", max_new_tokens=6), model.generate("hello", max_new_tokens=5)
    assert result != other
    wide = model.generate("hello", max_new_tokens=6, num_beams=2, num_return_sequences=2)
    assert wide.alternatives
    assert wide != model.generate("hello", max_new_tokens=6, num_beams=2)
    assert model.generate("hello", max_new_tokens=6, top_logprobs=2) != result
    assert result != (result.text, result.token_ids)


def test_a_pickled_result_keeps_its_arrays_and_times(model):
    result = model.generate("hello", max_new_tokens=6, cross_attentions=True)
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result
    assert copy.timing == result.timing
    np.testing.assert_array_equal(copy.cross_attentions, result.cross_attentions)


def test_results_are_frozen(model):
    result = model.generate("hello", max_new_tokens=2)
    for record, name in ((result, "text"), (result.timing, "first_token"), (model.manifest, "task")):
        with pytest.raises(AttributeError):
            setattr(record, name, None)


class Unhashable:
    __hash__ = None

    def __call__(self, ids, logits):
        return logits


def test_settings_with_a_processor_that_has_no_hash_are_hashable():
    processor = Unhashable()
    one, same, other = (
        Settings.of(GenerationOptions(logits_processor=p, temperature=0.5, seed=3), {})
        for p in (processor, processor, Unhashable())
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert len({one, same, other}) == 2
    assert one != Settings.of(GenerationOptions(temperature=0.5, seed=4), {})
