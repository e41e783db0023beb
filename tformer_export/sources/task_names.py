"""What a transformers class is for: asked of transformers, whose automatic classes list the classes of each task."""

from __future__ import annotations

from typing import Any

from tformer_runtime.base.errors import SourceError

GENERATES, TRANSLATES = "text-generation", "text2text-generation"
FEATURES, CLASSIFIES = "feature-extraction", "text-classification"
LABELS_TOKENS, ANSWERS, FILLS = "token-classification", "question-answering", "fill-mask"
IMAGE_FEATURES, CLASSIFIES_IMAGES = "image-feature-extraction", "image-classification"
CLASSES = (CLASSIFIES, CLASSIFIES_IMAGES)  # tasks with one label or several for an input as a whole
RECOGNIZES = "automatic-speech-recognition"
TASKS = {  # automatic class → task; a class that several list is taken for the first
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
    "AutoModel": FEATURES,
}


def purpose_of(kind: type) -> str | None:
    """The task of a class, or of the nearest class that it is made from; None if transformers lists none of them."""
    return next((task for base in kind.__mro__ if (task := purpose_named(base.__name__)) is not None), None)


def purpose_named(name: str) -> str | None:
    """The task of the class of this name."""
    import transformers

    for auto, task in TASKS.items():
        if name in _classes(getattr(transformers, auto, None)):
            return task
    return None


def class_for(config: Any, task: str | None) -> tuple[Any, str]:
    """The class to load a folder with, and its task. task: for another than the one that the folder was saved as.

    SourceError for what is saved as a class of a task that nothing here serves, and for a task that the model has no
    class for.
    """
    import transformers

    task = FEATURES if task == IMAGE_FEATURES else task  # of one class, whatever is read
    saved = [str(name) for name in getattr(config, "architectures", None) or ()]
    found = next((known for name in saved if (known := purpose_named(name)) is not None), None)
    if task in TASKS.values():
        found = task
    elif found is None and any(hasattr(transformers, name) for name in saved):
        raise SourceError(
            f"it holds a {saved[0]}, which serves none of the tasks {', '.join(dict.fromkeys(TASKS.values()))}: export "
            f"it as one of them (--task), or load it in Python and give an example of its inputs"
        )
    if found in (GENERATES, TRANSLATES, None):
        found = TRANSLATES if config.is_encoder_decoder else GENERATES
    own = [
        getattr(transformers, name) for name in saved if hasattr(transformers, name) and purpose_named(name) == found
    ]
    if own:
        return own[0], found
    for auto, served in TASKS.items():
        if served == found and type(config) in getattr(transformers, auto)._model_mapping:
            return getattr(transformers, auto), found
    raise SourceError(f"transformers has no class of {type(config).__name__} for {found}: name another --task")


def _classes(auto: Any) -> set[str]:
    """The names of the classes that an automatic class chooses from."""
    held = auto._model_mapping._model_mapping.values() if auto is not None else ()
    return {name for names in held for name in ((names,) if isinstance(names, str) else names)}
