"""Code that no traced graph can represent is refused with the line of the user's code, without internals of torch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support.small_models import EXAMPLE, VOCABULARY, WIDTH, Mixer, Small, here, refusal
from torch import nn

from tformer_export import export
from tformer_runtime import SourceError, UnsupportedModelError

SIZE_ADVICE = (
    "The file has to run at any size: take sizes from x.shape, slice tables to the length, and make no Python number "
    "or list of a size"
)

# -- sizes ------------------------------------------------------------------------------------------------------------

BATCH_SIZE_NAME, LENGTH_NAME = "the batch size of 'tgt'", "the length of 'tgt'"


class BothViewed(Mixer):
    def forward(self, x, tgt):
        return torch.relu(x).view(3, 5, -1)  # HERE


class BatchViewed(Mixer):
    def forward(self, x, tgt):
        return x.reshape(3, -1, WIDTH)  # HERE


class TableUnsliced(Mixer):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, WIDTH))

    def forward(self, x, tgt):
        return x + self.table  # HERE


class LengthAsserted(Mixer):
    def forward(self, x, tgt):
        assert x.shape[1] == 5  # HERE
        return x


class LengthDecides(Mixer):
    def forward(self, x, tgt):
        return -x if x.shape[1] == 5 else x  # HERE


class RowsUnbound(Mixer):
    def forward(self, x, tgt):
        first, second, third = x  # HERE
        return torch.stack([first, second, third])


@pytest.mark.parametrize(
    ("mixer", "size_name"),
    [
        (BothViewed, f"{BATCH_SIZE_NAME} and {LENGTH_NAME}"),
        (BatchViewed, BATCH_SIZE_NAME),
        (TableUnsliced, LENGTH_NAME),
        (LengthAsserted, LENGTH_NAME),
        (LengthDecides, LENGTH_NAME),
        (RowsUnbound, BATCH_SIZE_NAME),
    ],
)
def test_fixed_size_is_refused(mixer, size_name, tmp_path):
    example = {"tgt": torch.ones(3, 5, dtype=torch.int64)}
    message = refusal(mixer, tmp_path, example=example)
    assert message == f"forward fixes a size to the example's: {size_name}, at {here(mixer.forward)}. {SIZE_ADVICE}"


class TableOfTwelve(Mixer):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(12, WIDTH))

    def forward(self, x, tgt):
        return x + self.table  # HERE


def test_table_of_the_example_length_is_refused(tmp_path):
    example = {"tgt": torch.ones(1, 12, dtype=torch.int64)}
    assert refusal(TableOfTwelve, tmp_path, example=example) == (
        f"forward runs on the example but not at other sizes (tgt (3, 5)), at {here(TableOfTwelve.forward)}: "
        "RuntimeError: The size of tensor a (5) must match the size of tensor b (12) at non-singleton dimension 1. The "
        "file has to run at any size: take sizes from x.shape and slice tables to the length"
    )


class OddPositions(Mixer):
    def forward(self, x, tgt):
        return torch.stack([torch.relu(x[:, i]) if i % 2 else x[:, i] for i in range(x.shape[1])], 1)  # HERE


def test_loop_that_does_other_operations_at_other_positions_is_refused(tmp_path):
    assert refusal(OddPositions, tmp_path) == (
        f"forward computes the positions of 'tgt' one by one in Python, at {here(OddPositions.forward)}, which fixes "
        "their number to the example's. Compute all positions at once with operations on tensors"
    )


class OddStates(Mixer):
    def forward(self, x, tgt):
        state, states = torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):  # HERE
            state = torch.relu(state + x[:, i]) if i % 2 else state + x[:, i]
            states.append(state)
        return torch.stack(states, 1)


def test_recurrence_that_does_other_operations_at_other_positions_is_refused(tmp_path):
    assert refusal(OddStates, tmp_path) == (
        f"forward computes each position from the one before it, at {here(OddStates.forward)}, by other operations at "
        "other positions. Let each run of the loop do the same operations on the rows of its position and on values of "
        "the run before, which keep their shape"
    )


class ThreeChunks(Mixer):
    def forward(self, x, tgt):
        first, second, third = x.chunk(3)  # HERE
        return torch.cat([first, second, third])


def test_limited_batch_is_refused(tmp_path):
    assert refusal(ThreeChunks, tmp_path) == (
        f"forward runs for at most 3 rows at once, by {here(ThreeChunks.forward)}. The file has to run for any number "
        "of rows: take it from x.shape[0]"
    )


class NoMoreThanNine(Mixer):
    def forward(self, x, tgt):
        if x.shape[1] > 9:  # HERE
            raise ValueError("too long")
        return x


def test_max_length_beyond_limit_of_forward_is_refused(tmp_path):
    message = refusal(NoMoreThanNine, tmp_path, max_length=10)
    limit = f"at most 9 is possible, by {here(NoMoreThanNine.forward)}"
    assert message == f"the model cannot run at a length of 10: {limit}"


class OddLengthsOnly(Mixer):
    def forward(self, x, tgt):
        assert x.shape[1] % 2, "odd lengths only"  # HERE
        return x


def test_lengths_that_forward_rejects_are_refused(tmp_path):
    message = refusal(OddLengthsOnly, tmp_path, max_length=12)
    assert message == (
        f"forward runs on the example but not at other sizes (tgt (1, 6)), at {here(OddLengthsOnly.forward)}: "
        "AssertionError: odd lengths only. The file has to run at any size up to the maximum length: let forward do so "
        "too"
    )


# -- control flow -----------------------------------------------------------------------------------------------------


class Branch(Mixer):
    def forward(self, x, tgt):
        if x.sum() > 0:  # HERE
            return x
        return -x


class While(Mixer):
    def forward(self, x, tgt):
        num_iterations = 3
        while num_iterations and x.abs().max() > 1:  # HERE
            x, num_iterations = x / 2, num_iterations - 1
        return x


class BranchOnItem(Mixer):
    def forward(self, x, tgt):
        largest = tgt.max().item()
        return x if largest > 3 else -x  # HERE


@pytest.mark.parametrize("mixer", [Branch, While, BranchOnItem])
def test_branch_on_data_is_refused(mixer, tmp_path, capfd):
    """The error is one sentence. Messages of torch about the graph are not shown."""
    assert refusal(mixer, tmp_path) == (
        f"forward lets the values of its data decide which code runs, at {here(mixer.forward)}. A file has one "
        "execution path for all inputs: choose with torch.where or a mask, or remove the check"
    )
    assert capfd.readouterr() == ("", "")


class NumberForPython(Mixer):
    def forward(self, x, tgt):
        return x + torch.ones(int(tgt.max())).sum()  # HERE


def test_number_read_into_python_is_refused(tmp_path):
    assert refusal(NumberForPython, tmp_path) == (
        f"forward reads a number out of its data into Python, at {here(NumberForPython.forward)}. A file has no "
        "Python: keep the number a tensor, and let no size depend on it"
    )


class ListOfData(Mixer):
    def forward(self, x, tgt):
        return x + torch.tensor(x[:, :, 0].tolist())[:, :, None]  # HERE


def test_data_as_list_is_refused(tmp_path):
    line = here(ListOfData.forward)
    assert refusal(ListOfData, tmp_path) == (
        f"forward reads its data into Python, at {line}. A file has no Python: keep it in tensors"
    )


class Numpy(Mixer):
    def forward(self, x, tgt):
        return x + torch.from_numpy(np.tanh(x.numpy()))  # HERE


def test_numpy_in_forward_is_refused(tmp_path):
    assert refusal(Numpy, tmp_path) == (
        f"forward hands a tensor to numpy, at {here(Numpy.forward)}. Only torch's operations can be exported: write it "
        "with them"
    )


class FormattedNumber(Mixer):
    def forward(self, x, tgt):
        return x * len(f"{x.sum().item():.0f}")  # HERE


def test_other_untraceable_code_is_refused(tmp_path):
    assert refusal(FormattedNumber, tmp_path) == (
        f"forward runs, but torch.export cannot trace it, at {here(FormattedNumber.forward)}: TypeError: unsupported "
        "format string passed to SymFloat.__format__. Write that line with torch's operations on tensors"
    )


# -- forward fails by itself ------------------------------------------------------------------------------------------


class Raises(Mixer):
    def forward(self, x, tgt):
        raise ValueError("an activation 'geglu'\nis not known")  # HERE


class Misshaped(Mixer):
    def forward(self, x, tgt):
        return x @ torch.ones(3, 3)  # HERE


@pytest.mark.parametrize(
    ("mixer", "error"),
    [
        (Raises, "ValueError: an activation 'geglu'"),
        (Misshaped, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (6x16 and 3x3)"),
    ],
)
def test_error_of_forward_raises_source_error(mixer, error, tmp_path):
    message = refusal(mixer, tmp_path, SourceError)
    assert message == f"forward fails by itself on the example, at {here(mixer.forward)}: {error}"


def test_example_ids_beyond_vocabulary_are_refused(tmp_path):
    example = {"tgt": torch.tensor([[3, VOCABULARY]])}
    assert refusal(FormattedNumber, tmp_path, SourceError, example=example) == (
        f"the example's ids go from 3 to {VOCABULARY}, but the table that they are looked up in has {VOCABULARY} rows, "
        f"at {here(Small.forward)}: give ids of the model's vocabulary"
    )


class Keeps(Mixer):
    def __init__(self):
        super().__init__()
        self.memory = None

    def forward(self, x, tgt):
        if self.memory is None:
            self.memory = x
        return x + self.memory


def test_value_that_is_kept_between_calls_is_refused_by_its_name(tmp_path):
    message = refusal(Keeps, tmp_path)
    assert message.startswith("forward changes mix.memory, and so keeps something from one call to the next")


# -- only while operations are recorded -------------------------------------------------------------------------------


class Nested(Mixer):
    def forward(self, x, tgt):
        rows = torch.nested.nested_tensor(list(x), layout=torch.jagged)  # HERE
        return torch.nested.to_padded_tensor(rows * 2, 0.0)


class Sparse(Mixer):
    def forward(self, x, tgt):
        near = torch.ones(x.shape[1], x.shape[1]).tril().to_sparse()  # HERE
        return torch.stack([torch.sparse.mm(near, row) for row in x])


class Masked(Mixer):
    def forward(self, x, tgt):
        scores = x @ x.transpose(1, 2)
        seen = torch.ones(scores.shape, dtype=torch.bool).tril()
        return torch.masked.masked_tensor(scores, seen).softmax(-1).to_tensor(0.0) @ x  # HERE


@pytest.mark.parametrize(
    ("mixer", "name"),
    [(Nested, "nested tensor"), (Sparse, "tensor of the layout"), (Masked, "tensor of the class MaskedTensor")],
)
@pytest.mark.filterwarnings("ignore")
def test_tensor_that_no_file_has_is_refused_by_its_name(mixer, name, tmp_path):
    message = refusal(mixer, tmp_path)
    assert message.startswith(f"forward makes a {name}")
    assert f"at {here(mixer.forward)}, and a file has plain tensors alone" in message


class Conditional(Mixer):
    def forward(self, x, tgt):
        return torch.cond(x.mean() > 0, lambda x: x * 2, lambda x: x - 1, (x,))  # HERE


def test_operation_that_runs_graphs_is_refused_by_its_name(tmp_path):
    message = refusal(Conditional, tmp_path)
    assert message.startswith(f"`cond` at {here(Conditional.forward)} chooses or repeats operations by its data")


class Watched(Mixer):
    """A module that refuses to run below a mode, of which torch has several."""

    def forward(self, x, tgt):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("not below a mode")  # HERE
        return x


def test_forward_that_runs_by_itself_is_not_said_to_fail_by_itself(tmp_path):
    assert refusal(Watched, tmp_path) == (
        f"forward runs, but not while the export records its operations, at {here(Watched.forward)}: RuntimeError: not "
        "below a mode. Write that line with torch's operations on plain tensors"
    )


# -- where the numbers are --------------------------------------------------------------------------------------------


def test_weights_on_meta_device_are_refused(tmp_path):
    assert refusal(Small(Mixer).to("meta"), tmp_path, SourceError) == (
        "position is on the meta device, so it holds no numbers: load the model's weights on the CPU first"
    )


def test_example_on_meta_device_is_refused(tmp_path):
    message = refusal(Small(Mixer), tmp_path, SourceError, example={"tgt": EXAMPLE["tgt"].to("meta")})
    assert message.startswith("tgt is on the meta device")


def test_autocast_in_forward_is_refused_and_rounding_is_exported(tmp_path):
    """A file has no kernels for half precision, in which autocast computes. Rounding to half precision is exported."""

    class Cast(nn.Module):
        def __init__(self, autocast):
            super().__init__()
            self.layer, self.autocast = nn.Linear(8, 9), autocast

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                return self.layer(x.to(torch.bfloat16).float()).float()

    message = r"gives bfloat16, in which a file cannot compute\. Leave out autocast"
    with pytest.raises(UnsupportedModelError, match=message):
        export(Cast(True).eval(), tmp_path / "model.onnx", {"x": torch.randn(2, 3, 8)})
    assert not list(tmp_path.iterdir())
    assert export(Cast(False).eval(), tmp_path / "model.onnx", {"x": torch.randn(2, 3, 8)}).size


def test_half_precision_model_is_exported_in_float32(tmp_path):
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 9)).half()
    report = export(model, tmp_path / "model.onnx", {"input": torch.randn(2, 3, 8).half()})
    assert report.max_abs_error < 1e-5
    assert next(model.parameters()).dtype == torch.float16  # the module of the caller is unchanged


# -- state between calls ----------------------------------------------------------------------------------------------


class Counted(Mixer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, tgt):
        self.calls += 1  # HERE
        return x * self.calls


class WeightThatShrinks(Mixer):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, tgt):
        self.scale.mul_(0.9)  # HERE
        return x * self.scale


@pytest.mark.parametrize(("mixer", "name"), [(Counted, "calls"), (WeightThatShrinks, "scale")])
def test_buffer_changed_by_forward_is_refused(mixer, name, tmp_path):
    model = Small(mixer)
    before = copy.deepcopy(model.state_dict())
    assert refusal(model, tmp_path) == (
        f"forward changes mix.{name}, at {here(mixer.forward)}, and so keeps something from one call to the next, "
        "which a file does not. Let forward take the whole sequence and compute from it alone: a cache is made by the "
        "export itself"
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Remembers(Mixer):
    calls = 0

    def forward(self, x, tgt):
        self.calls += 1
        return x * self.calls


def test_attribute_changed_by_forward_is_refused(tmp_path):
    model = Small(Remembers)
    assert refusal(model, tmp_path) == (
        "forward gives another output when it is called again with the same inputs: it changes mix.calls. A file keeps "
        "nothing between calls but the caches that are made for it: let forward take the whole sequence and depend on "
        "nothing else"
    )
    assert "calls" not in vars(model.mix)


class KeptForLooking(Mixer):
    """A module that keeps attention weights for plots: no result depends on them."""

    def forward(self, x, tgt):
        self.activations = torch.tanh(x)
        tgt[:, :1] = 1
        return self.activations


def test_unread_attribute_of_forward_is_exported(tmp_path):
    model = Small(KeptForLooking)
    assert export(model, tmp_path / "model.onnx", EXAMPLE, "tgt", max_length=12).max_abs_error < 1e-5
