"""Tasks of transformers' classes, which the automatic classes of transformers list."""

from __future__ import annotations

from typing import Any

from tformer_runtime.base.errors import SourceError

GENERATES, TRANSLATES = "text-generation", "text2text-generation"
FEATURES, CLASSIFIES = "feature-extraction", "text-classification"
LABELS_TOKENS, ANSWERS, FILLS = "token-classification", "question-answering", "fill-mask"
IMAGE_FEATURES, CLASSIFIES_IMAGES = "image-feature-extraction", "image-classification"
CLASSES = (CLASSIFIES, CLASSIFIES_IMAGES)  # tasks with one label or several for an input as a whole
ANSWERS_IMAGES = "image-text-to-text"
RECOGNIZES = "automatic-speech-recognition"
TASKS = {  # automatic class → task; the first one that lists a class counts
    "AutoModelForCausalLM": GENERATES,
    "AutoModelForSeq2SeqLM": TRANSLATES,
    "AutoModelForSequenceClassification": CLASSIFIES,
    "AutoModelForTokenClassification": LABELS_TOKENS,
    "AutoModelForQuestionAnswering": ANSWERS,
    "AutoModelForMaskedLM": FILLS,
    "AutoModelForImageClassification": CLASSIFIES_IMAGES,
    "AutoModelForCTC": RECOGNIZES,
    "AutoModelForSpeechSeq2Seq": RECOGNIZES,
    "AutoModelForTextEncoding": FEATURES,
    "AutoModelForImageTextToText": ANSWERS_IMAGES,
    "AutoModel": FEATURES,
}


def task_of_class(kind: type) -> str | None:
    """Return the task of a class or of its nearest base class; None if transformers lists none of them."""
    return next((task for base in kind.__mro__ if (task := task_of_class_name(base.__name__)) is not None), None)


def task_of_class_name(name: str) -> str | None:
    """Return the task of the class of this name; None if transformers does not list it."""
    import transformers

    for auto, task in TASKS.items():
        if name in _classes(getattr(transformers, auto, None)):
            return task
    return None


def class_for(config: Any, task: str | None) -> tuple[Any, str]:
    """Return the class with which to load a folder, and its task.

    task: the task to load the folder for; by default that of the saved class.

    Raises SourceError for a saved class without a supported task, and for a task that the model has no class for.
    """
    import transformers

    task = FEATURES if task == IMAGE_FEATURES else task  # both tasks have the same classes
    saved = [str(name) for name in getattr(config, "architectures", None) or ()]
    chosen = next((known for name in saved if (known := task_of_class_name(name)) is not None), None)
    if task in TASKS.values():
        chosen = task
    elif chosen is None and any(hasattr(transformers, name) for name in saved):
        raise SourceError(
            f"it holds a {saved[0]}, which serves none of the tasks {', '.join(dict.fromkeys(TASKS.values()))}: export "
            f"it as one of them (--task), or load it in Python and give an example of its inputs"
        )
    if chosen in (GENERATES, TRANSLATES, None):
        chosen = TRANSLATES if config.is_encoder_decoder else GENERATES
    classes = [
        getattr(transformers, name)
        for name in saved
        if hasattr(transformers, name) and task_of_class_name(name) == chosen
    ]
    if classes:
        return classes[0], chosen
    for auto, served in TASKS.items():
        if served == chosen and type(config) in getattr(transformers, auto)._model_mapping:
            return getattr(transformers, auto), chosen
    raise SourceError(f"transformers has no class of {type(config).__name__} for {chosen}: name another --task")


def _classes(auto: Any) -> set[str]:
    """Return the names of the classes that an automatic class chooses from."""
    names_of_configs = auto._model_mapping._model_mapping.values() if auto is not None else ()
    return {name for names in names_of_configs for name in ((names,) if isinstance(names, str) else names)}
