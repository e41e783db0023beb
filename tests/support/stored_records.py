"""Records of quantised products in the metadata of models that have no manifest."""

from __future__ import annotations

import msgspec
import onnx
import onnx_ir as ir

from tformer_export.common.onnx_writer import collect_products
from tformer_runtime.format.stored_forms import StoredProducts

KEY = "tests.stored_products"


def with_records(model: ir.Model) -> ir.Model:
    """Store the records of a model in its metadata, and return it."""
    model.metadata_props[KEY] = msgspec.json.encode(collect_products(model)).decode()
    return model


def records_of(model: bytes) -> StoredProducts:
    """Return the records of `with_records`; none for another model."""
    entries = {entry.key: entry.value for entry in onnx.ModelProto.FromString(model).metadata_props}
    return msgspec.json.decode(entries.get(KEY, "{}"), type=StoredProducts)
