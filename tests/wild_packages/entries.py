"""All entries, by name."""

from __future__ import annotations

import torch

from wild_packages import carried_values, encoders, images, language_models, translators

for _name in (
    "nms",
    "qnms",
):  # torchvision cannot be imported without its operators, and a wheel for CUDA has none here
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

KINDS = (language_models, carried_values, translators, encoders, images)
ENTRIES = {entry.name: entry for kind in KINDS for entry in kind.ENTRIES}
