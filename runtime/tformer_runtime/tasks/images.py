"""Images: classification and features as of texts, of what a file's preparation makes of pictures (`images`)."""

from __future__ import annotations

from tformer_runtime.tasks.base import READ, Task
from tformer_runtime.tasks.classification import Classifier
from tformer_runtime.tasks.features import Features
from tformer_runtime.tasks.flags import Flag


class _OfImages(Task):
    """Without the options of reading texts."""

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        return {heading: flags for heading, flags in super().every_flag().items() if heading != READ}


class ImageClassifier(_OfImages, Classifier):
    names = ("image-classification",)
    does = "classifies images"


class ImageFeatures(_OfImages, Features):
    names = ("image-feature-extraction",)
    does = "turns each image into numbers"
