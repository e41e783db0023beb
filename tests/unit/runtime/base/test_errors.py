"""The fields of errors, from which other programs make messages of their own."""

from __future__ import annotations

import pytest
from support.toy_models import Toy

from tformer_runtime import GenerationOptions, InputError, Model, OptionError
from tformer_runtime.base.errors import with_input_number


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"top_p": "much"}, "top_p"),
        ({"beam_size": 2}, "beam_size"),
        ({"stop_strings": [3]}, "stop_strings"),
        ({"regex": "a", "choices": ["b"]}, None),
    ],
)
def test_option_error_has_the_name_of_its_option(options, name):
    with pytest.raises(OptionError) as caught:
        GenerationOptions(**options)
    assert caught.value.option == name
    assert caught.value.input_number is None
    assert name is None or name in str(caught.value)


def test_error_of_an_input_has_its_number_and_its_reason(tmp_path):
    model = Model.load(Toy().write(tmp_path / "toy.onnx"), device="cpu", threads=1)
    with pytest.raises(InputError) as caught:
        list(model.generate_batch([[3, 4], []], max_new_tokens=2))
    assert caught.value.input_number == 2
    assert str(caught.value) == f"input 2: {caught.value.reason}"


def test_number_of_an_input_keeps_the_other_fields():
    error = with_input_number(OptionError("top_k must be 1", option="top_k"), 3)
    assert (str(error), error.reason, error.input_number, error.option) == (
        "input 3: top_k must be 1", "top_k must be 1", 3, "top_k",
    )  # fmt: skip
