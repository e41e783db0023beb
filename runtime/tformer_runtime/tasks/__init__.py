"""Tasks besides generating.

base                    what a task is: settings, one input's arrays, a result from outputs, a line of text
classification          labels and their probabilities
features                a vector for each input; cosines
token_classification    labelled spans of a text
question_answering      the part of a context that answers a question
fill_mask               tokens for a mask
image_tasks             classification and features of images
ctc_recognition         speech to text, by scores of tokens at each frame
speech_to_text          speech to text, by a model that generates
forecasting             the steps that follow a series of numbers
single_pass             run a model once for each of many inputs, whatever its task
windows                 run many inputs in batches, results in their order
settings                options of the command line

To add a task, write a class like these and put it into `TASKS`.
"""

from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.series import Series
from tformer_runtime.tasks.base import Task
from tformer_runtime.tasks.classification import Classification, Classifier
from tformer_runtime.tasks.ctc_recognition import Recognition, Segment, Transcription
from tformer_runtime.tasks.features import Features
from tformer_runtime.tasks.fill_mask import Candidate, Filled, Filling
from tformer_runtime.tasks.forecasting import Forecasting
from tformer_runtime.tasks.image_tasks import ImageClassifier, ImageFeatures
from tformer_runtime.tasks.question_answering import Answer, Answers
from tformer_runtime.tasks.speech_to_text import Dictation
from tformer_runtime.tasks.token_classification import Entities, Span

TASKS: tuple[type[Task], ...] = (
    Classifier,
    Features,
    Entities,
    Answers,
    Filling,
    ImageClassifier,
    ImageFeatures,
    Recognition,
    Dictation,
    Forecasting,
)


def task_of(manifest: Manifest) -> Task:
    """The task of a model that is run once, or forecasts; one that no class serves, or that is done on texts in a file
    without a tokenizer, gives its outputs as they are, as features."""
    if Series.of(manifest) is not None:
        return Forecasting(manifest)
    if manifest.decode is not None and manifest.task in Recognition.names:
        return Dictation(manifest)
    kind = next((kind for kind in TASKS if manifest.task in kind.names), Features)
    return (Features if kind.of_texts and not manifest.tokenizer_of else kind)(manifest)


def dictates(manifest: Manifest) -> bool:
    """Whether a file writes what it hears: what it decodes are the ids of what is said."""
    decodes = manifest.decode is not None and not manifest.decode.features
    return decodes and manifest.task in Recognition.names and audio_of(manifest) is not None


def generates(manifest: Manifest) -> bool:
    """Whether what a file is for is to generate: it decodes ids, and no task makes something else of them."""
    return manifest.decode is not None and not manifest.decode.features and not dictates(manifest)


__all__ = [
    "TASKS",
    "Answer",
    "Answers",
    "Candidate",
    "Classification",
    "Classifier",
    "Dictation",
    "Entities",
    "Features",
    "Filled",
    "Filling",
    "Forecasting",
    "Recognition",
    "Segment",
    "Span",
    "Task",
    "Transcription",
    "dictates",
    "generates",
    "task_of",
]
