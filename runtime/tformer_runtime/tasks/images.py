"""Images: classification and features as of texts, of what a file's preparation makes of pictures."""

from __future__ import annotations

from tformer_runtime.tasks.classification import Classifier
from tformer_runtime.tasks.features import Features
from tformer_runtime.tasks.flags import Flag


class ImageClassifier(Classifier):
    names = ("image-classification",)
    does = "classifies images"

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        """Without those of reading texts."""
        return {heading: dict(flags) for heading, flags in cls.flags.items()}


class ImageFeatures(Features):
    names = ("image-feature-extraction",)
    does = "turns each image into numbers"

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        """Without those of reading texts."""
        return {heading: dict(flags) for heading, flags in cls.flags.items()}
