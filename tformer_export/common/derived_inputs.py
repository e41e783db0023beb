"""Arguments of forward that follow from an input's lengths: masks, lengths and positions.

The user describes them instead of passing them. They are built inside the traced model, from one (batch, time)
keep-mask for each request input. Rows of the step input hold no padding, so its masks follow from sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tformer_runtime.base.errors import OptionError

Axis = str | int
BATCH, TIME = "batch", "time"


@dataclass(frozen=True)
class Mask:
    """One derived argument.

    kind: "padding", "causal", "lengths" or "positions".
    of: the input whose lengths determine the argument.
    keep: the value of a mask where a position may be read; "additive" means 0 there and −inf elsewhere.
    dtype: the dtype of the argument.
    shape: its axes: "batch", "time" (of the input `of`), the name of another input for the length of that input, or 1.
        The last axis of a causal mask may be a number of keys: those behind the sequence are hidden.
    start: the first position.
    """

    kind: str
    of: str
    keep: bool | str = True
    dtype: torch.dtype = torch.bool
    shape: tuple[Axis, ...] = (BATCH, TIME)
    start: int = 0

    def __post_init__(self) -> None:
        times, batches = self.shape.count(TIME), self.shape.count(BATCH)
        subject = f"the shape of {self.kind}({self.of!r})"
        if self.keep not in (True, False, "additive"):
            raise OptionError(f"keep is True, False or 'additive', not {self.keep!r}")
        if self.keep == "additive" and not self.dtype.is_floating_point:
            raise OptionError(f"an additive mask is of a floating point dtype, not {self.dtype}")
        keys = self.shape[-1] if self.kind == "causal" else 1
        sizes = [axis for axis in self.shape if isinstance(axis, int) and axis != 1]
        if batches > 1 or sizes not in ([], [keys]):
            raise OptionError(f"{subject} has 'batch' once at most, and no size but 1: not {self.shape}")
        if self.kind == "causal" and times + len(sizes) != 2:
            raise OptionError(f"{subject} has 'time' twice, for queries and keys: not {self.shape}")
        if self.kind == "padding" and not (times and batches):
            raise OptionError(f"{subject} has 'batch' and 'time': not {self.shape}")
        if self.kind == "positions" and times != 1:
            raise OptionError(f"{subject} has 'time' once: not {self.shape}")

    @property
    def depends_on_padding(self) -> bool:
        """Whether the argument differs between the rows of a padded batch."""
        return self.kind in ("padding", "lengths") or (self.kind == "causal" and BATCH in self.shape)

    def build(self, keep: torch.Tensor, lengths: Mapping[Axis, int], padded: bool) -> torch.Tensor:
        """Build the argument.

        keep: (batch, time) bool, true at the valid positions of `of`.
        lengths: name of an input → its length.
        padded: whether positions may be invalid; if not, a causal mask is the same for all rows.
        """
        if self.kind == "lengths":
            return keep.to(self.dtype).sum(1)
        if self.kind == "positions":
            positions = torch.arange(self.start, keep.shape[1] + self.start, dtype=self.dtype)
            return self._arranged(positions, (TIME,), keep, lengths)
        if self.kind == "causal":
            allowed = torch.ones(keep.shape[1], keep.shape[1], dtype=torch.bool).tril()
            if padded and BATCH in self.shape:
                arranged = self._arranged(allowed & keep[:, None], (BATCH, "query", TIME), keep, lengths)
            else:
                arranged = self._arranged(allowed, ("query", TIME), keep, lengths)
            return self._encoded(self._with_room(arranged))
        return self._encoded(self._arranged(keep, (BATCH, TIME), keep, lengths))

    def _arranged(
        self, value: torch.Tensor, axes: tuple[str, ...], keep: torch.Tensor, lengths: Mapping[Axis, int]
    ) -> torch.Tensor:
        """Return a value with these axes in the order of `shape`, repeated along the axes that it lacks."""
        axes_of = (*self.shape[:-1], TIME) if self._number_of_keys else self.shape
        key = len(axes_of) - 1 - axes_of[::-1].index(TIME)  # the last "time" is the axis of keys
        shape = ["query" if axis == TIME and at != key else axis for at, axis in enumerate(axes_of)]
        sizes: dict[Axis, int] = {BATCH: keep.shape[0], TIME: keep.shape[1], "query": keep.shape[1], 1: 1, **lengths}
        value = value.permute([axes.index(str(axis)) for axis in shape if axis in axes])
        for at, axis in enumerate(shape):
            value = value if axis in axes else value.unsqueeze(at)
        return value.expand([-1 if axis in axes else sizes[axis] for axis in shape])

    @property
    def _number_of_keys(self) -> int | None:
        """The fixed number of keys of a causal mask."""
        keys = self.shape[-1] if self.kind == "causal" else 1
        return keys if isinstance(keys, int) and keys != 1 else None

    def _with_room(self, allowed: torch.Tensor) -> torch.Tensor:
        """Hide the keys behind the sequence."""
        if self._number_of_keys is None:
            return allowed
        return torch.nn.functional.pad(allowed, (0, self._number_of_keys - allowed.shape[-1]))

    def _encoded(self, keep: torch.Tensor) -> torch.Tensor:
        if self.keep == "additive":
            return torch.zeros(keep.shape, dtype=self.dtype).masked_fill(~keep, float("-inf"))
        return (keep if self.keep else ~keep).to(self.dtype)


def padding(
    of: str,
    keep: bool | str = True,
    dtype: torch.dtype | None = None,
    shape: tuple[Axis, ...] = (BATCH, TIME),
) -> Mask:
    """Describe a padding mask: it marks the valid positions of the input `of`.

    keep: the value at valid positions, True or False (1 or 0 in other dtypes), or "additive": 0 there, −inf elsewhere.
    dtype: by default bool, or float32 if additive.
    shape: ("batch", "time"), or another order or number of axes, such as ("batch", 1, 1, "time"). The name of another
        input is an axis of its length: a mask of cross-attention may be ("batch", "tgt", "time").
    """
    return Mask("padding", of, keep, dtype or _dtype(keep), tuple(shape))


def causal(
    of: str,
    keep: bool | str = True,
    dtype: torch.dtype | None = None,
    shape: tuple[Axis, ...] = (TIME, TIME),
) -> Mask:
    """Describe a causal mask: each position of the input `of` may attend to itself and to earlier positions.

    keep, dtype: see `padding`.
    shape: ("time", "time"). With "batch", such as ("batch", 1, "time", "time"), the mask hides padding as well. With a
        number, such as ("time", 4096), it has as many keys, and those behind the sequence are hidden: for a forward
        that attends to a cache of this length.
    """
    return Mask("causal", of, keep, dtype or _dtype(keep), tuple(shape))


def lengths(of: str, dtype: torch.dtype = torch.int64) -> Mask:
    """Describe the number of valid positions of the input `of`, (batch,)."""
    return Mask("lengths", of, dtype=dtype, shape=(BATCH,))


def positions(
    of: str, dtype: torch.dtype = torch.int64, shape: tuple[Axis, ...] = (BATCH, TIME), start: int = 0
) -> Mask:
    """Describe the positions of the input `of`, counted from `start`: (batch, time), or ("time",), or (1, "time")."""
    return Mask("positions", of, dtype=dtype, shape=tuple(shape), start=start)


def _dtype(keep: bool | str) -> torch.dtype:
    return torch.float32 if keep == "additive" else torch.bool
