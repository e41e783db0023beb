"""The fields of errors, from which other programs make messages of their own."""

from __future__ import annotations

import pytest
from support.toy_models import Toy

from tformer_runtime import (
    GenerationOptions,
    InputError,
    Model,
    OptionError,
    OutOfMemoryError,
    UnsupportedCallError,
)
from tformer_runtime.base.errors import MORE_MEMORY, typed_memory_error, with_input_number


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


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (MemoryError(), ""),
        (MemoryError("Unable to allocate 3.20 GiB for an array with shape (2, 3)"), " (3.2 GiB more were asked for)"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
            ),
            " (4 GiB more were asked for)",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has"), " (20.5 MiB more were asked for)"),
        (RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"), ""),
        (
            RuntimeError("Failed to allocate memory for requested buffer of size 1073741824"),
            " (1 GiB more were asked for)",
        ),
        (OSError(12, "Cannot allocate memory"), ""),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ""),
    ],
)
def test_missing_memory_is_named_with_its_amount_whichever_library_says_so(error, wanted):
    typed = typed_memory_error(error, MORE_MEMORY)
    assert type(typed) is OutOfMemoryError
    assert str(typed) == f"there is not enough memory{wanted}: {MORE_MEMORY}"
    assert typed.__cause__ is error


def test_missing_memory_is_found_behind_other_errors():
    error = ValueError("the graph cannot be translated")
    error.__cause__ = KeyError("another")
    error.__cause__.__context__ = MemoryError()
    assert type(typed_memory_error(error)) is OutOfMemoryError


@pytest.mark.parametrize("error", [ValueError("a shape"), OSError(28, "No space left"), InputError("out of memory")])
def test_other_errors_stay(error):
    assert typed_memory_error(error) is error


def test_error_of_the_project_stays_whatever_caused_it():
    """Its own words decide what a server answers: a model whose thread has ended is not mended by a later try."""
    error = UnsupportedCallError("the model computes no more")
    error.__cause__ = MemoryError()
    assert typed_memory_error(error) is error


def test_causes_in_a_circle_have_an_end():
    error = RuntimeError("no word about it")
    error.__cause__ = error
    assert typed_memory_error(error) is error
