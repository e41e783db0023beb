"""Images: classification and features as of texts, of what a file's preparation makes of pictures (`images`)."""

from __future__ import annotations

from tformer_runtime.tasks.base import Task
from tformer_runtime.tasks.classification import Classifier
from tformer_runtime.tasks.features import Features


class _OfImages(Task):
    """Of which none is too long."""

    cuts = False


class ImageClassifier(_OfImages, Classifier):
    names = ("image-classification",)
    does = "classifies images"


class ImageFeatures(_OfImages, Features):
    names = ("image-feature-extraction",)
    does = "turns each image into numbers"
