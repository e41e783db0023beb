"""Tasks other than text generation.

base                    the base class: settings, arrays of an input, result of outputs, formats of the command line
classification          labels and their probabilities
features                a vector per input; cosines
token_classification    labelled spans of a text
question_answering      the span of a context that answers a question
fill_mask               tokens for a mask
image_tasks             classification and features of images
speech                  speech recognition: results and settings of both kinds
ctc_recognition         speech recognition by scores of tokens at each frame (CTC)
speech_to_text          speech recognition by a generative model
forecasting             the steps that follow a series of numbers
single_pass             run a single-pass model on many inputs
given_tokens            values at tokens of the caller: scores, attention weights, hidden states
settings                flags of the command line

To add a task, write a subclass of `base.BaseTask` and add it to `TASKS`.
"""

from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.series import SeriesPreprocessor
from tformer_runtime.tasks.base import BaseTask
from tformer_runtime.tasks.classification import Classification, Classifier
from tformer_runtime.tasks.ctc_recognition import CtcRecognition
from tformer_runtime.tasks.features import Features
from tformer_runtime.tasks.fill_mask import Filled, FillMask, MaskCandidate
from tformer_runtime.tasks.forecasting import Forecasting
from tformer_runtime.tasks.image_tasks import ImageClassifier, ImageFeatures
from tformer_runtime.tasks.question_answering import Answer, QuestionAnswering
from tformer_runtime.tasks.speech import Segment, Transcription
from tformer_runtime.tasks.speech_to_text import SpeechToText
from tformer_runtime.tasks.token_classification import Span, TokenClassification

TASKS: tuple[type[BaseTask], ...] = (
    Classifier,
    Features,
    TokenClassification,
    QuestionAnswering,
    FillMask,
    ImageClassifier,
    ImageFeatures,
    CtcRecognition,
    SpeechToText,
    Forecasting,
)


def task_of(manifest: Manifest) -> BaseTask:
    """Return the task of a single-pass model, a forecaster or a speech recognizer.

    A task without a class, or one that needs a tokenizer in a file without one, becomes `Features`, whose results are
    the outputs of the model.
    """
    if SeriesPreprocessor.of(manifest) is not None:
        return Forecasting(manifest)
    if manifest.decode is not None and manifest.task in CtcRecognition.names:
        return SpeechToText(manifest)
    kind = next((kind for kind in TASKS if manifest.task in kind.names), Features)
    return (Features if kind.needs_tokenizer and not manifest.tokenizer_of else kind)(manifest)


def is_speech_to_text(manifest: Manifest) -> bool:
    """Return whether a file transcribes speech by generating text."""
    decodes = manifest.decode is not None and not manifest.decode.features
    return decodes and manifest.task in CtcRecognition.names and audio_of(manifest) is not None


def generates(manifest: Manifest) -> bool:
    """Return whether a file generates: it decodes ids, and is not a speech recognizer."""
    return manifest.decode is not None and not manifest.decode.features and not is_speech_to_text(manifest)


__all__ = [
    "TASKS",
    "Answer",
    "BaseTask",
    "Classification",
    "Classifier",
    "CtcRecognition",
    "Features",
    "FillMask",
    "Filled",
    "Forecasting",
    "MaskCandidate",
    "QuestionAnswering",
    "Segment",
    "Span",
    "SpeechToText",
    "TokenClassification",
    "Transcription",
    "generates",
    "is_speech_to_text",
    "task_of",
]
