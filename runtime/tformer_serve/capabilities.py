"""The paths of a model, and what a form for it needs to know."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.base.extras import install_command
from tformer_runtime.format.manifest import CROSS_ATTENTIONS, Manifest
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.preprocess.input_line import reads_json
from tformer_runtime.preprocess.series import SeriesPreprocessor
from tformer_runtime.tasks import (
    BaseTask,
    Classifier,
    CtcRecognition,
    Features,
    FillMask,
    QuestionAnswering,
    TokenClassification,
    generates,
    is_speech_to_text,
    task_of,
)

_PATHS: dict[type[BaseTask], tuple[str, ...]] = {
    Classifier: ("/v1/classify",),
    TokenClassification: ("/v1/entities",),
    QuestionAnswering: ("/v1/answer",),
    FillMask: ("/v1/fill",),
    CtcRecognition: ("/v1/audio/transcriptions",),
}
_PATHS_OF_VECTORS = ("/v1/embeddings", "/v1/similarity", "/v1/rerank")


def capabilities_of(manifest: Manifest) -> dict[str, Any]:
    """Return the paths that a model has, and facts for its form.

    reads: "text", "images", "audio", "series" or "numbers".
    aligns: whether /v1/generate gives cross_attentions.
    times: the parts of a transcription that have times, "word" or "segment".
    mask: the token that /v1/fill fills in.
    series: the columns of a history, those of a forecast, and the lengths of both.
    """
    series = SeriesPreprocessor.of(manifest)
    if series is not None:
        facts = {
            "columns": list(series.columns) or [str(number + 1) for number in range(series.features)],
            "targets": series.names,
            "horizon": series.horizon,
            "min_context_length": series.min_context_length,
            "max_context_length": series.max_context_length,
        }
        return {"paths": ["/v1/forecast"], "reads": "series", "series": facts}
    if generates(manifest):
        can_chat = manifest.chat_template is not None and manifest.takes_prompt and find_spec("jinja2") is not None
        chat = ["/v1/chat/completions"] if can_chat else []
        aligns = any(extra.kind == CROSS_ATTENTIONS for extra in manifest.extras)
        reads = _kind_of_input(manifest)
        completions = [] if reads_json(manifest) or reads == "images" else ["/v1/completions"]
        return {"paths": [*chat, *completions, "/v1/generate"], "reads": reads, "aligns": aligns}
    if is_speech_to_text(manifest):
        return {"paths": ["/v1/audio/transcriptions"], "reads": "audio", "times": "segment"}
    if manifest.decode is not None:
        return {"paths": [], "reads": "numbers"}
    task = task_of(manifest)
    capabilities: dict[str, Any] = {"paths": _paths_of_task(task), "reads": _kind_of_input(manifest)}
    if isinstance(task, FillMask):
        capabilities["mask"] = task.mask_token
    if isinstance(task, CtcRecognition):
        capabilities["times"] = "word"
    return capabilities


def missing_packages(manifest: Manifest) -> list[str]:
    """Return a sentence for each package that requests of a model need and that is not installed."""
    needs = []
    if manifest.chat_template is not None and manifest.takes_prompt:
        needs.append(("jinja2", "chat templates need jinja2", "chat"))
        needs.append(("llguidance", "tools and response_format need llguidance", "constrain"))
    if image_inputs(manifest.preprocessing):
        needs.append(("PIL", "reading images needs Pillow", "image"))
    if audio_of(manifest) is not None:
        needs.append(("soundfile", "reading audio needs soundfile", "audio"))
    return [f"{purpose}: {install_command(extra)}" for name, purpose, extra in needs if find_spec(name) is None]


def _paths_of_task(task: BaseTask) -> list[str]:
    if isinstance(task, Features):
        try:
            task.must_pool("a vector")
        except UnsupportedCallError:
            return []
        return list(_PATHS_OF_VECTORS)
    paths = next((list(paths) for kind, paths in _PATHS.items() if isinstance(task, kind)), [])
    outputs = task.manifest.encode.outputs if task.manifest.encode else ()
    if isinstance(task, Classifier) and task.names == Classifier.names and outputs and outputs[0].shape[-1] == 1:
        paths.append("/v1/rerank")  # a cross-encoder
    return paths


def _kind_of_input(manifest: Manifest) -> str:
    if audio_of(manifest) is not None:
        return "audio"
    if manifest.encode is not None and not manifest.takes_prompt and image_inputs(manifest.preprocessing):
        return "images"
    return "text" if manifest.tokenizer_of else "numbers"
