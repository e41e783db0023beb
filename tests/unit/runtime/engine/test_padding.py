"""Requests of ragged lengths are padded to arrays, and masks follow from the lengths."""

from __future__ import annotations

import numpy as np
import pytest

from tformer_runtime import InputError
from tformer_runtime.engine.padding import padded_request_arrays
from tformer_runtime.format.manifest import BATCH_AXIS, EncodeStage, RequestInput

IDS = RequestInput("src", "int64", (BATCH_AXIS, "time"), pad=9)
ROWS = {"src": [np.array([1, 2, 3]), np.array([4])]}


def test_ids_are_padded_with_the_pad_id_of_their_input():
    assert padded_request_arrays([IDS], ROWS, 2)["src"].tolist() == [[1, 2, 3], [4, 9, 9]]


@pytest.mark.parametrize(
    ("dtype", "keep", "expected"),
    [
        ("bool", True, [[True, True, True], [True, False, False]]),
        ("bool", False, [[False, False, False], [False, True, True]]),
        ("int64", True, [[1, 1, 1], [1, 0, 0]]),
        ("float32", True, [[1, 1, 1], [1, 0, 0]]),
    ],
)
def test_masks_follow_lengths(dtype, keep, expected):
    mask = RequestInput("mask", dtype, (BATCH_AXIS, "time"), "mask", of="src", keep=keep)
    derived = padded_request_arrays([mask, IDS], ROWS, 2)["mask"]
    assert derived.dtype == dtype
    assert derived.tolist() == expected


def test_mask_may_have_axes_of_size_one():
    mask = RequestInput("mask", "bool", (BATCH_AXIS, 1, 1, "time"), "mask", of="src")
    assert padded_request_arrays([mask, IDS], ROWS, 2)["mask"].shape == (2, 1, 1, 3)


def test_features_are_padded_along_free_axes():
    audio = RequestInput("audio", "float32", (BATCH_AXIS, "frames", 2), "data")
    derived = padded_request_arrays([audio], {"audio": [np.ones((3, 2)), np.ones((1, 2))]}, 2)["audio"]
    assert derived.shape == (2, 3, 2)
    assert derived.sum() == 8
    with pytest.raises(InputError, match="shape"):
        padded_request_arrays([audio], {"audio": [np.ones((3, 5))]}, 1)
    with pytest.raises(InputError, match="2 axes a row, not 1"):
        padded_request_arrays([audio], {"audio": [np.ones(3)]}, 1)


def test_row_of_any_layout_has_its_numbers_in_an_aligned_array_of_the_input_s_type():
    """onnxruntime reads the array where it lies."""
    numbers = np.arange(1, 7)
    shifted = np.frombuffer(b"\0" + numbers.astype(np.int64).tobytes(), np.int64, offset=1)
    assert not shifted.flags.aligned
    for row in (
        numbers.astype(">i8"),
        numbers.repeat(2)[::2],
        numbers[::-1][::-1],
        numbers.astype(np.float32),
        shifted,
    ):
        array = padded_request_arrays([IDS], {"src": [row]}, 1)["src"]
        assert array.tolist() == [[1, 2, 3, 4, 5, 6]]
        assert array.dtype == np.dtype("int64")
        assert array.flags.c_contiguous
        assert array.flags.aligned


def test_mask_of_no_rows_is_refused():
    mask = RequestInput("mask", "bool", (BATCH_AXIS, "time"), "mask", of="other")
    with pytest.raises(InputError, match="mask of other"):
        padded_request_arrays([mask, IDS], ROWS, 2)


PAIR = [RequestInput(name, "float32", (BATCH_AXIS, "frames", 2), "data") for name in ("left", "right")]


def test_row_that_is_shorter_than_the_model_needs_is_refused():
    rows = {"src": [np.array([1, 2, 3]), np.array([4, 5])]}
    assert padded_request_arrays([IDS], rows, 2, encode=EncodeStage((IDS,), (), min_lengths={"time": 2}))[
        "src"
    ].shape == (2, 3)
    with pytest.raises(InputError, match="input src is 2 long and the model needs at least 3"):
        padded_request_arrays([IDS], rows, 2, encode=EncodeStage((IDS,), (), min_lengths={"time": 3}))


def test_every_free_axis_may_have_a_least_length():
    image = RequestInput("image", "float32", (BATCH_AXIS, 3, "height", "width"), "data")
    encode = EncodeStage((image,), (), min_lengths={"height": 4, "width": 4})
    padded_request_arrays([image], {"image": [np.ones((3, 4, 5))]}, 1, encode=encode)
    with pytest.raises(InputError, match="input image is 3 long and the model needs at least 4"):
        padded_request_arrays([image], {"image": [np.ones((3, 9, 3))]}, 1, encode=encode)


def test_inputs_of_one_axis_are_equally_long_in_each_row():
    rows = {"left": [np.ones((3, 2)), np.ones((1, 2))], "right": [np.ones((3, 2)), np.ones((1, 2))]}
    encode = EncodeStage(tuple(PAIR), ())
    assert padded_request_arrays(PAIR, rows, 2, encode=encode)["right"].shape == (2, 3, 2)
    rows["right"][1] = np.ones((2, 2))
    with pytest.raises(InputError, match="inputs left and right are 1 and 2 long, and the model needs them equally"):
        padded_request_arrays(PAIR, rows, 2, encode=encode)


def test_input_that_is_longer_than_another_may_be_is_refused():
    other = [PAIR[0], RequestInput("right", "float32", (BATCH_AXIS, "others", 2), "data")]
    encode = EncodeStage(tuple(other), (), no_longer_than={"frames": ("others",)})
    rows = {"left": [np.ones((3, 2)), np.ones((1, 2))], "right": [np.ones((3, 2)), np.ones((4, 2))]}
    padded_request_arrays(other, rows, 2, encode=encode)
    rows["left"][0] = np.ones((4, 2))
    with pytest.raises(InputError, match="left and right are 4 and 3 long, and the model needs left to be no longer"):
        padded_request_arrays(other, rows, 2, encode=encode)
