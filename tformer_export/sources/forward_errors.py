"""Runs of forward, and its errors as sentences: which of forward, its example and this export is the cause."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tformer_export.common.module_state import tensors_of, unchanged
from tformer_export.common.source_lines import line_of_error
from tformer_export.sources.base import Source
from tformer_runtime.base.errors import SourceError, TformerError, UnsupportedModelError, error_summary


def outputs_of(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a module and return copies of the tensors among its results."""
    with torch.no_grad():
        output = module(*(value.clone() for value in inputs.values()))
    return [leaf.clone() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def run_example(source: Source) -> tuple[torch.Tensor, ...]:
    """Run the module of a source on its example. Raises SourceError if it fails."""
    try:
        with source.eval_mode(), torch.no_grad():
            outputs = source.module(*source.example.values())
    except TformerError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise _fails_on_example(source, error) from error
    return outputs if isinstance(outputs, tuple) else (outputs,)


def failure_at(source: Source, sized: Mapping[str, torch.Tensor], error: Exception) -> TformerError:
    """Return the error for a forward that fails at other sizes while its operations are watched.

    It fails on the example too, or only at these sizes, or only while it is watched. Cost: up to two runs, and a copy
    of the weights.
    """
    again = _plain_error(source, source.example)
    if again is not None:
        return _fails_on_example(source, again)
    at_sizes = _plain_error(source, sized)
    if at_sizes is not None:
        return UnsupportedModelError(
            f"forward runs on the example but not at other sizes ({_described(sized)}), at {line_of_error(at_sizes)}: "
            f"{error_summary(at_sizes)}. The file has to run at any size: take sizes from x.shape and slice tables to "
            f"the length{explain_relations(source)}"
        )
    return UnsupportedModelError(
        f"forward runs, but not while the export records its operations, at {line_of_error(error)}: "
        f"{error_summary(error).rstrip('.')}. Write that line with torch's operations on plain tensors"
    )


def explain_relations(source: Source) -> str:
    """Return a sentence on the lengths of several inputs; empty for a single one."""
    if len({*source.caller_inputs} - {source.step_input}) < 2:
        return ""
    return (
        ". Two inputs may have to be equally long, or one no longer than the other; a file holds no other relation of "
        "their lengths, so give them one length, or cut and pad them in forward"
    )


def _plain_error(source: Source, inputs: Mapping[str, torch.Tensor]) -> Exception | None:
    """Return the error of forward when nothing watches it. The module is as before afterwards."""
    before = [(tensor, tensor.detach().clone()) for _, tensor in tensors_of(source.module)]
    try:
        with unchanged(source.module), torch.random.fork_rng(devices=[]):
            outputs_of(source.module, inputs)
    except Exception as error:  # the user's code may raise anything
        return error
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
    return None


def _fails_on_example(source: Source, error: Exception) -> SourceError:
    out_of_range = _ids_out_of_range(error)
    if out_of_range is not None and not source.made_example:
        return SourceError(out_of_range)
    of_ids = "following scalar types: Long, Int" in str(error)
    hint = ("; ids are whole numbers, torch.int64" if of_ids else "") + _described_masks(source)
    reason = f"at {line_of_error(error)}: {error_summary(error).rstrip('.')}{hint}"
    if not source.made_example:
        return SourceError(f"forward fails by itself on the example, {reason}")
    one_row = {name: value[:1] for name, value in source.example.items()}
    if _plain_error(source, one_row) is None:
        return SourceError(
            f"forward takes one row and no batch of rows, {reason}. A file runs batches: set what the error asks for, "
            "or give an example without a batch axis to run rows one by one"
        )
    return SourceError(
        f"forward fails on the example that was made for it, as none was given ({_described(source.example)}), "
        f"{reason}. Give one that it takes: example={{name: tensor}} in export, or (module, example) from a factory"
    )


def _described(inputs: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())


def _described_masks(source: Source) -> str:
    """Return a hint on the axes of masks, which are the caller's description; empty without masks."""
    if source.made_example:
        return ""
    axes = [f"{mask.kind}({mask.of!r}) as ({', '.join(map(str, mask.shape))})" for mask in source.masks.values()]
    return f"; it was called with {' and '.join(axes)}, and shape=(…) gives other axes" if axes else ""


def _ids_out_of_range(error: Exception) -> str | None:
    """Return a message if an embedding was indexed beyond its rows, read from the frame of the lookup; else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is nn.functional.embedding.__code__ and isinstance(error, IndexError):
            values: dict[str, Any] = frame.f_locals
            ids, table = values["input"], values["weight"]
            return (
                f"the example's ids go from {int(ids.min())} to {int(ids.max())}, but the table that they are looked "
                f"up in has {table.shape[0]} rows, at {line_of_error(error)}: give ids of the model's vocabulary"
            )
    return None
