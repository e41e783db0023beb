"""tformer_export: a PyTorch Transformer → one ONNX file that decodes incrementally, proven equal to its source.

from tformer_export import export
report = export(model, "model.onnx", example={"src": src_ids, "tgt": tgt_ids}, step_input="tgt")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer_export.api import export
    from tformer_export.common.checkpoint import load_checkpoint, save_checkpoint
    from tformer_export.common.task import Task
    from tformer_export.options import ExtraOutputs, Quantization
    from tformer_export.report import ExportReport
    from tformer_export.sources import causal, lengths, load_source, padding, positions
    from tformer_export.sources.hugging_face.images import image

__all__ = [
    "ExportReport",
    "ExtraOutputs",
    "Quantization",
    "Task",
    "causal",
    "export",
    "image",
    "lengths",
    "load_checkpoint",
    "load_source",
    "padding",
    "positions",
    "save_checkpoint",
]

_HOMES = {
    "ExportReport": "report",
    "ExtraOutputs": "options",
    "Quantization": "options",
    "Task": "common.task",
    "causal": "sources",
    "export": "api",
    "image": "sources.hugging_face.images",
    "lengths": "sources",
    "load_checkpoint": "common.checkpoint",
    "load_source": "sources",
    "padding": "sources",
    "positions": "sources",
    "save_checkpoint": "common.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import on first use: reading a checkpoint's format must not load the compiler."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tformer_export' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"tformer_export.{_HOMES[name]}"), name)
