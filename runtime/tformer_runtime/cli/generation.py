"""Generation on the command line: what is particular there to a file that decodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tformer_runtime.cli.heatmaps import Drawing
from tformer_runtime.cli.job import Asked, Batches, Job, Write
from tformer_runtime.cli.options import GROUPS, generation_options
from tformer_runtime.decoding.request import Result
from tformer_runtime.decoding.speculation import PROMPT
from tformer_runtime.format.info import identity
from tformer_runtime.model import Model
from tformer_runtime.tasks.base import ids_of
from tformer_runtime.tasks.settings import HOW, LIMIT, Flag, bytes_of, switch

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input

_BESIDE = {
    "alignments": Flag("--alignments", "OUT.png", "Draw what each token attended to; - only adds it to --json.", str),
    "hidden": switch("--hidden", "Add the file's hidden states to --json."),
    "timing": switch("--timing", "Add the seconds to the first token, and for each more, to --json."),
}
_OF_THE_RUN = {
    "chat": switch("--chat", "An input is a message, or a JSON list of messages, for the file's chat template."),
    "system": Flag("--system", "TEXT", "A message before each conversation.", str),
    "stream": switch("--stream", "Write text as it comes, one input after the other."),
    **LIMIT,
    "no_shortlist": switch("--no-shortlist", "Choose among all ids, where the file has a shortlist."),
}


class Generation:
    """The kind of a file with a decode stage. `GROUPS` are the options that `GenerationOptions` has too."""

    does = "generates text"

    @classmethod
    def every_flag(cls) -> dict[str, dict[str, Flag]]:
        groups = {heading: dict(flags) for heading, flags in GROUPS.items()}
        groups["Beside the text"] |= _BESIDE
        return {**groups, HOW: dict(_OF_THE_RUN)}

    def job(self, given: Mapping[str, Any], asked: Asked) -> Job:
        """given: by name, the texts of options as they stand in `GROUPS`, to be read by `generation_options`."""
        _check(given, asked)
        return _Generating(given, asked)


def _check(given: Mapping[str, Any], asked: Asked) -> None:
    """Refuse what does not go together."""
    drawn = given.get("alignments") not in (None, "-")
    if given.get("stream"):
        if asked.ids or asked.as_json or asked.output or given.get("num_return_sequences") not in (None, "1"):
            raise click.UsageError(
                "--stream writes text to standard output: not with --ids, --json, --output-file, --num-return-sequences"
            )
        if given.get("alignments") or given.get("hidden"):
            raise click.UsageError("--stream writes text alone: not with --alignments, --hidden")
    if given.get("system") is not None and not given.get("chat"):
        raise click.UsageError("--system is of a conversation: give --chat too")
    if given.get("chat") and asked.ids:
        raise click.UsageError("--chat puts texts into a template: not with --ids")
    if asked.resume and drawn:
        raise click.UsageError("--resume goes on with results alone: not with --alignments OUT.png")
    for name in ("hidden", "timing", "top_logprobs", "alignments"):
        if given.get(name) and not asked.as_json and not (name == "alignments" and drawn):
            flag = "--alignments -" if name == "alignments" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} adds to --json: give that too")


class _Generating(Job):
    def __init__(self, given: Mapping[str, Any], asked: Asked) -> None:
        texts = {name: text for name, text in given.items() if name not in {**_BESIDE, **_OF_THE_RUN}}
        draft, alignments = texts.get("draft"), given.get("alignments")
        self.as_json, self.ids, self.timing = asked.as_json, asked.ids, bool(given.get("timing"))
        self.options = generation_options(
            {**texts, "draft": draft and PROMPT},
            asked.ids,
            alignments=True if alignments else None,
            hidden=given.get("hidden") or None,
            shortlist=False if given.get("no_shortlist") else None,
        )
        self.draft = Path(draft) if draft and draft != PROMPT else None
        self.batch_size = 1 if draft else 32
        self.streams = bool(given.get("stream"))
        self.chats, self.system = bool(given.get("chat")), given.get("system")
        self._prompt: Callable[..., Input]  # the model's, once that is loaded
        self.max_memory = bytes_of(given["max_memory"]) if given.get("max_memory") is not None else None
        self.drawing = Drawing(Path(alignments), asked.force) if alignments not in (None, "-") else None
        self.resumes = self.drawing is None
        names = {name: flag.flag for flags in GROUPS.values() for name, flag in flags.items()}
        draft_file = {"--draft": identity(self.draft)} if self.draft and asked.output else {}
        self.asked = {
            **{names.get(name, f"--{name}"): value for name, value in self.options.given().items()},
            **({"--timing": True} if self.timing else {}),
            **({"--chat": True} if self.chats else {}),
            **({"--system": self.system} if self.system is not None else {}),
            **draft_file,
        }

    def read(self, line: str) -> Input:
        if self.chats:
            return self._prompt(_messages(line), self.system)
        return ids_of(line) if self.ids else line

    def prepare(self, model: Model, device: str, threads: int | None) -> None:
        self._prompt = model.prompt
        if self.draft:
            # Threads of its own would wait for the model's, which spin: `GenerationOptions.draft`.
            self.options = self.options.with_({"draft": Model.load(self.draft, device, threads=1)})

    def run(
        self, model: Model, values: Iterable[Input], how: Batches, write: Write, advance: Callable[[], None]
    ) -> None:
        if not self.streams:
            super().run(model, values, how, write, advance)
            return
        for value in values:
            for piece in model.stream(value, self.options):
                click.echo(piece, nl=False)
            click.echo()

    def results(self, model: Model, values: Iterable[Input], how: Batches) -> Iterator[Result]:
        return model.generate_batch(values, self.options, how.size, workers=how.workers, first=how.first)

    def written(self, result: Result, index: int) -> str:
        ranked = (result, *result.alternatives)
        return "".join(self._line(each, index, rank) + "\n" for rank, each in enumerate(ranked))

    def _line(self, result: Result, index: int, rank: int) -> str:
        if self.as_json:
            return json.dumps(self._fields(result, index, rank), ensure_ascii=False)
        if self.ids:
            return " ".join(map(str, result.token_ids))
        return " ".join(result.text.splitlines())  # one line per result, whatever the text; --json keeps line breaks

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
        if result.alignments is not None:
            fields["alignments"] = _numbers(result.alignments)
        if result.hidden:
            fields["hidden"] = {name: _numbers(value) for name, value in result.hidden.items()}
        return fields


def _messages(line: str) -> Any:
    """A message, or the messages that a JSON list holds."""
    if not line.lstrip().startswith("["):
        return line
    try:
        return json.loads(line)
    except ValueError:
        return line  # a text that begins so


def _numbers(array: Any) -> Any:
    """Nested lists of six significant digits, which is what float32 tells."""
    return [_numbers(a) for a in array] if array.ndim else float(f"{array:.6g}")
