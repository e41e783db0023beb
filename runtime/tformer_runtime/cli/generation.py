"""The job of generation: the flags of a generative file, their checks, and the format of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from tformer_runtime.base.errors import InputError
from tformer_runtime.cli.heatmaps import HeatMapWriter
from tformer_runtime.cli.job import BatchSettings, Job, RunOptions, Write, count_several
from tformer_runtime.cli.options import GROUPS, generation_options
from tformer_runtime.decoding.options import OPTIONS, OUTPUT
from tformer_runtime.decoding.request import Result
from tformer_runtime.format.info import file_fingerprint
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.model import Model
from tformer_runtime.preprocess.chat_template import messages_of_line
from tformer_runtime.preprocess.input_line import line_input
from tformer_runtime.tasks.settings import MAX_MEMORY_FLAG, RUN_HEADING, Flag, bytes_of, switch

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input

_TIMING = switch("--timing", "Add the seconds to the first token, and per further token, to --json.")
_JSON_ONLY = (*(name for name, spec in OPTIONS.items() if spec.json_only), "timing")
_RUN_FLAGS = {
    "chat": switch(
        "--chat",
        "Read each input as a message, or as a JSON list of messages, and apply the chat template of the file.",
    ),
    "system": Flag("--system", "TEXT", "Begin each conversation with this system message. Needs --chat.", str),
    "image": Flag(
        "--image",
        "FILE",
        "Put an image into each prompt: before the message with --chat, else where the text names it. Repeatable.",
        list,
        repeated=True,
    ),
    "stream": switch("--stream", "Write text while it is generated, one input after the other."),
    **MAX_MEMORY_FLAG,
}


class Generation:
    """The kind of a generative file. `GROUPS` are the flags of `GenerationOptions`."""

    does = "generates text"

    @classmethod
    def all_flags(cls) -> dict[str, dict[str, Flag]]:
        groups = {heading: dict(flags) for heading, flags in GROUPS.items()}
        groups[OUTPUT]["timing"] = _TIMING
        return {**groups, RUN_HEADING: dict(_RUN_FLAGS)}

    def job(self, flag_values: Mapping[str, Any], options: RunOptions) -> Job:
        """Return the job of a run.

        flag_values: the values of the flags of `all_flags`, by name; texts for those in `GROUPS`.
        Raise click.UsageError for flags that do not go together, OptionError for an impossible value.
        """
        _check(flag_values, options)
        return GenerationJob(flag_values, options)


def _check(flag_values: Mapping[str, Any], options: RunOptions) -> None:
    """Raise click.UsageError for flags that do not go together."""
    draws = flag_values.get("cross_attentions") not in (None, "-")
    if flag_values.get("stream"):
        several_results = flag_values.get("num_return_sequences") not in (None, "1")
        if options.ids or options.as_json or options.output_file or several_results:
            raise click.UsageError(
                "--stream writes text to standard output: not with --ids, --json, --output-file, --num-return-sequences"
            )
        if flag_values.get("cross_attentions") or flag_values.get("hidden_states"):
            raise click.UsageError("--stream writes text alone: not with --cross-attentions, --hidden-states")
    if flag_values.get("system") is not None and not flag_values.get("chat"):
        raise click.UsageError("--system needs --chat: give both")
    if flag_values.get("draft_model") and flag_values.get("prompt_lookup"):
        raise click.UsageError("--draft-model and --prompt-lookup both guess tokens: give one of them")
    if flag_values.get("chat") and options.ids:
        raise click.UsageError("--chat puts texts into a template: not with --ids")
    if options.resume and draws:
        raise click.UsageError("--resume cannot continue images: not with --cross-attentions OUT.png")
    in_json = [f"--{name.replace('_', '-')}" for name in _JSON_ONLY if flag_values.get(name)]
    if flag_values.get("cross_attentions") and not draws:
        in_json.append("--cross-attentions -")
    if in_json and not options.as_json:
        raise click.UsageError(f"{in_json[0]} needs --json: give both")


class GenerationJob(Job):
    def __init__(self, flag_values: Mapping[str, Any], options: RunOptions) -> None:
        texts = {name: text for name, text in flag_values.items() if name in OPTIONS}
        draft, heat_map = texts.pop("draft_model", None), flag_values.get("cross_attentions")
        self.as_json, self.ids, self.timing = options.as_json, options.ids, bool(flag_values.get("timing"))
        self.options = generation_options(texts, options.ids)
        self.draft = Path(draft) if draft else None
        self.batch_size = 1 if draft or self.options.prompt_lookup else 32
        self.streams = bool(flag_values.get("stream"))
        self.images = list(flag_values.get("image") or ())
        self.chats, self.system = bool(flag_values.get("chat")), flag_values.get("system")
        self._keeps_line_breaks = False  # in texts; see `results`
        self._manifest: Manifest  # set by `prepare`, as the next two
        self._prompt: Callable[..., Input]  # Model.prompt
        self._image_prompt: Callable[..., Input]  # Model.image_prompt
        self.max_memory = bytes_of(flag_values["max_memory"]) if flag_values.get("max_memory") is not None else None
        self.heat_maps = HeatMapWriter(Path(heat_map), options.force) if heat_map not in (None, "-") else None
        self.can_resume = self.heat_maps is None
        flags = {name: flag.flag for group in GROUPS.values() for name, flag in group.items()}
        names = {name: flag for name, flag in flags.items() if not flag.startswith("--no-")}  # values are the options'
        draft_file = {"--draft-model": file_fingerprint(self.draft)} if self.draft and options.output_file else {}
        self.result_options = {
            **{names.get(name, f"--{name}"): value for name, value in self.options.to_dict().items()},
            **({"--timing": True} if self.timing else {}),
            **({"--chat": True} if self.chats else {}),
            **({"--image": self.images} if self.images else {}),
            **({"--system": self.system} if self.system is not None else {}),
            **draft_file,
        }

    def read(self, line: str) -> Input:
        if self.chats:
            return self._prompt(_with_images(messages_of_line(line), self.images), self.system)
        prompt = line_input(line, self._manifest, self.ids)
        return self._image_prompt(prompt, self.images) if self.images else prompt

    def prepare(self, model: Model, device: str, threads: int | None) -> None:
        self._manifest, self._prompt, self._image_prompt = model.manifest, model.prompt, model.image_prompt
        if self.draft:
            # More threads would wait for the spinning threads of the model: docs/generation.md.
            self.options = self.options.replace({"draft_model": Model.load(self.draft, device, threads=1)})

    def run(
        self, model: Model, inputs: Iterable[Input], batches: BatchSettings, write: Write, advance: Callable[[], None]
    ) -> None:
        if not self.streams:
            super().run(model, inputs, batches, write, advance)
            return
        for value in inputs:
            for piece in model.stream(value, self.options):
                click.echo(piece, nl=False)
            click.echo()

    def results(self, model: Model, inputs: Iterable[Input], batches: BatchSettings) -> Iterator[Result]:
        """Run the model on all inputs. The text of the only answer of a chat keeps its line breaks."""
        if self.chats:
            several, inputs = count_several(inputs, batches.index_offset)
            self._keeps_line_breaks = not several
        return model.generate_batch(inputs, self.options, batches.size, workers=batches.workers)

    def format_result(self, result: Result, index: int) -> str:
        ranked = (result, *result.alternatives)
        return "".join(self._line(each, index, rank) + "\n" for rank, each in enumerate(ranked))

    def _line(self, result: Result, index: int, rank: int) -> str:
        if self.as_json:
            return json.dumps(self._fields(result, index, rank), ensure_ascii=False)
        if self.ids:
            return " ".join(map(str, result.token_ids))
        # Several results are one line each.
        keeps_line_breaks = self._keeps_line_breaks and rank == 0 and not result.alternatives
        return result.text if keeps_line_breaks else " ".join(result.text.splitlines())

    def _fields(self, result: Result, index: int, rank: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": index,
            "rank": rank,
            "text": result.text,
            "token_ids": result.token_ids,
            "score": result.score,
            "finish_reason": result.finish_reason,
            "token_logprobs": result.token_logprobs,
        }
        if result.top_logprobs:
            fields["top_logprobs"] = result.top_logprobs
        if self.timing and result.timing is not None:
            fields["timing"] = asdict(result.timing)
        if result.speculation is not None:
            fields["speculation"] = asdict(result.speculation)
        if result.cross_attentions is not None:
            fields["cross_attentions"] = _numbers(result.cross_attentions)
        if result.hidden_states:
            fields["hidden_states"] = {name: _numbers(value) for name, value in result.hidden_states.items()}
        return fields


def _with_images(messages: Any, images: list[str]) -> Any:
    """Return the messages with images before the last one.

    Raise InputError for a last message that is not a text.
    """
    if not images:
        return messages
    *before, last = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    content = last.get("content") if isinstance(last, Mapping) else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InputError("--image puts images before a message, and the last of these messages has no content")
    image_parts = [{"type": "image", "image": image} for image in images]
    return [*before, {**last, "content": [*image_parts, *parts]}]


def _numbers(array: Any) -> Any:
    """Return nested lists of numbers with six significant digits, the precision of float32."""
    return [_numbers(part) for part in array] if array.ndim else float(f"{array:.6g}")
