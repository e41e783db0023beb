"""Classification and features of images, which `preprocess.images` turns into pixels."""

from __future__ import annotations

from tformer_runtime.tasks.base import BaseTask
from tformer_runtime.tasks.classification import Classifier
from tformer_runtime.tasks.features import Features


class _ImageTask(BaseTask):
    """Images are resized, so none is too long."""

    can_truncate = False


class ImageClassifier(_ImageTask, Classifier):
    names = ("image-classification",)
    does = "classifies images"


class ImageFeatures(_ImageTask, Features):
    names = ("image-feature-extraction",)
    does = "turns each image into numbers"
