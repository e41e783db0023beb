"""`tformer-run`: a model file on the command line.

Standard output holds results only. What is said besides goes to standard error. Exit status: 0 done, 1 the work
failed, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from tformer_runtime.cli_options import OPTIONS, Command, as_written, bytes_of, generation_options
from tformer_runtime.errors import InputError, MemoryBudgetError, OptionError, TformerError
from tformer_runtime.generate import Result
from tformer_runtime.info import file_info, info_lines
from tformer_runtime.inputs import Value
from tformer_runtime.journal import ResultFile
from tformer_runtime.manifest import KEY
from tformer_runtime.model import Model
from tformer_runtime.modelfile import read_manifest, read_metadata
from tformer_runtime.options import GenerationOptions
from tformer_runtime.plot import Drawing
from tformer_runtime.speculate import PROMPT

LONGEST = 64 << 20  # bytes of a line

_AT_LEAST_1 = click.IntRange(min=1)


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="MODEL.onnx", type=click.Path(path_type=Path))
@click.argument("inputs", metavar="[INPUT ...]", nargs=-1)
@click.option("--input-file", metavar="F|-", help="Read inputs from a file, one a line; - is standard input.")
@click.option("--output-file", metavar="F", type=click.Path(path_type=Path), help="Write results to a file.")
@click.option("--resume", is_flag=True, help="Go on with the output file of a run that was stopped.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", type=_AT_LEAST_1, help="Threads of one operator.  [default: one per core, 1 with workers]")
@click.option("--batch-size", type=_AT_LEAST_1, help="Inputs computed together.  [default: 32, 1 with a draft]")
@click.option("--workers", type=_AT_LEAST_1, help="Batches side by side.  [default: one per core for --input-file]")
@click.option("--max-memory", metavar="SIZE", help="Bytes that caches may take, such as 500M or 2G.")
@click.option("--stream", is_flag=True, help="Write text as it comes, one input after the other.")
@click.option("--ids", is_flag=True, help="Inputs and results are ids between spaces.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--timing", is_flag=True, help="Add the seconds to the first token, and for each more, to --json.")
@click.option("--alignments", metavar="OUT.png", help="Draw what each token attended to; - only adds it to --json.")
@click.option("--hidden", is_flag=True, help="Add the file's hidden states to --json.")
@click.option("--no-shortlist", is_flag=True, help="Choose among all ids, where the file has a shortlist.")
@click.option("--info", is_flag=True, help="Say what the file is, and stop.")
@click.version_option(package_name="tformer")
def main(model: Path, info: bool, as_json: bool, **asked: Any) -> None:
    """Run a model on each INPUT, or on each line of a file or of standard input."""
    with _sentences():
        if info:
            facts = file_info(model, read_manifest(model))
            click.echo(json.dumps(facts, ensure_ascii=False) if as_json else "\n".join(info_lines(facts)))
        else:
            _check_usage(as_json=as_json, **asked)
            _run(model, as_json=as_json, **asked)


def _check_usage(as_json: bool, **asked: Any) -> None:
    """Refuse what does not go together."""
    drawn = asked["alignments"] not in (None, "-")
    if asked["inputs"] and asked["input_file"]:
        raise click.UsageError("give INPUT or --input-file, not both")
    if asked["stream"]:
        if asked["ids"] or as_json or asked["output_file"] or asked["num_return"] not in (None, "1"):
            raise click.UsageError(
                "--stream writes text to standard output: not with --ids, --json, --output-file, --num-return"
            )
        if asked["alignments"] or asked["hidden"]:
            raise click.UsageError("--stream writes text alone: not with --alignments, --hidden")
    if asked["resume"] and not asked["output_file"]:
        raise click.UsageError("--resume goes on with an output file: give --output-file too")
    if asked["resume"] and drawn:
        raise click.UsageError("--resume goes on with results alone: not with --alignments OUT.png")
    for name in ("hidden", "timing", "top_logprobs", "alignments"):
        if asked[name] and not as_json and not (name == "alignments" and drawn):
            flag = "--alignments -" if name == "alignments" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} adds to --json: give that too")


def _run(
    model: Path,
    inputs: tuple[str, ...],
    input_file: str | None,
    output_file: Path | None,
    resume: bool,
    force: bool,
    device: str,
    threads: int | None,
    batch_size: int | None,
    workers: int | None,
    max_memory: str | None,
    stream: bool,
    ids: bool,
    as_json: bool,
    timing: bool,
    alignments: str | None,
    hidden: bool,
    no_shortlist: bool,
    draft: str | None,
    **texts: Any,
) -> None:
    if not inputs and not input_file:
        if sys.stdin.isatty():
            raise click.UsageError("there is no INPUT: give some, or --input-file")
        input_file = "-"
    options = generation_options(
        {**texts, "draft": draft and PROMPT},
        ids,
        alignments=True if alignments else None,
        hidden=hidden or None,
        shortlist=False if no_shortlist else None,
    )
    drafts = Path(draft) if draft and draft != PROMPT else None
    memory = bytes_of(max_memory) if max_memory is not None else None
    drawing = Drawing(Path(alignments), force) if alignments not in (None, "-") else None
    file: ResultFile | None = None
    if output_file:
        flags = {"--ids": ids, "--json": as_json, "--timing": timing, "--draft": drafts and _identity(drafts)}
        asked = _asked(model, options, flags)
        file = ResultFile(output_file, asked, force, resume, keep=drawing is None)
    done = file.done if file else 0
    if workers is None:
        workers = _cores() if input_file and threads is None and not stream and device != "cuda" else 1
    threads = 1 if workers > 1 and threads is None else threads
    loaded = Model.load(model, device, threads, memory)
    if drafts:
        options = options.with_({"draft": Model.load(drafts, device, threads)})
    if loaded.device == "cuda":
        workers = 1
    if device == "auto":
        click.echo(f"device: {loaded.device}", err=True)
    if resume:
        click.echo(f"resume: {done} inputs are done", err=True)
    lines: Iterable[str] = inputs or _lines(input_file or "-")
    if file:
        lines = file.rest(lines)
    values: Iterator[Value] = (_value(line, number, ids) for number, line in enumerate(lines, done + 1))
    if stream:
        with _located(None if inputs else input_file):
            _stream(loaded, values, options)
        return
    if drawing:
        values = drawing.watch(values)
    if batch_size is None:
        batch_size = 1 if draft else 32
    results = loaded.generate_batch(values, options, batch_size, workers=workers, first=done)
    write = file.add if file else sys.stdout.write  # which a progress bar puts something else in place of
    with (
        file or contextlib.nullcontext(),
        _located(None if inputs else input_file),
        _progress(input_file, done) as advance,
    ):
        for index, result in enumerate(results, done):
            ranked = (result, *result.alternatives)
            write("".join(_line(each, index, rank, ids, as_json, timing) + "\n" for rank, each in enumerate(ranked)))
            if drawing:
                drawing.add(loaded, result)
            advance()
        if drawing:
            drawing.finish()
    sys.stdout.flush()


def _stream(model: Model, values: Iterable[Value], options: GenerationOptions) -> None:
    for value in values:
        for piece in model.stream(value, options):
            click.echo(piece, nl=False)
        click.echo()


def _cores() -> int:
    """How many workers are worth having: those of Python's own work take turns."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(own, 8)


def _asked(model: Path, options: GenerationOptions, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the results depend on beside the inputs, by its name on the command line."""
    names = {name: option.flag for name, option in OPTIONS.items()}
    return {
        "MODEL.onnx": _identity(model),
        **{names.get(name, f"--{name}"): value for name, value in options.given().items()},
        **{flag: given for flag, given in flags.items() if given},
    }


def _identity(model: Path) -> str:
    size = file_info(model, read_manifest(model))["bytes"]
    digest = hashlib.sha256(read_metadata(model)[KEY].encode()).hexdigest()  # of the manifest, which has the weights'
    return f"{size} bytes, {digest[:16]}"


def _line(result: Result, index: int, rank: int, ids: bool, as_json: bool, timing: bool) -> str:
    if as_json:
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
        if timing and result.timing is not None:
            fields["timing"] = asdict(result.timing)
        if result.speculation is not None:
            fields["speculation"] = asdict(result.speculation)
        if result.alignments is not None:
            fields["alignments"] = _numbers(result.alignments)
        if result.hidden:
            fields["hidden"] = {name: _numbers(value) for name, value in result.hidden.items()}
        return json.dumps(fields, ensure_ascii=False)
    if ids:
        return " ".join(map(str, result.token_ids))
    return " ".join(result.text.splitlines())  # one line per result, whatever the text; --json keeps line breaks


def _numbers(array: Any) -> Any:
    """Nested lists of six significant digits, which is what float32 tells."""
    return [_numbers(a) for a in array] if array.ndim else float(f"{array:.6g}")


def _value(line: str, number: int, ids: bool) -> Value:
    if not ids:
        return line
    try:
        return [int(word) for word in line.split()]
    except ValueError:
        raise InputError(f"input {number}: {line[:60]!r} is not a list of ids") from None


def _lines(source: str) -> Iterator[str]:
    """Lines of a file or of standard input (-), as text, without their ends."""
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST), b""), 1):
                if len(line) == LONGEST:
                    raise InputError(f"input {number}: it is longer than {LONGEST >> 20} MiB")
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise InputError(f"input {number}: it is not UTF-8") from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _located(source: str | None) -> Iterator[None]:
    """Say where in the input file an input is that was refused."""
    try:
        yield
    except InputError as error:
        place = "line" if source in (None, "-") else f"{source}, line"
        raise InputError(re.sub(r"^input (\d+):", rf"{place} \1:", str(error)) if source else str(error)) from error


@contextlib.contextmanager
def _progress(source: str | None, done: int) -> Iterator[Callable[[], None]]:
    """How many inputs are done, on a terminal's standard error, unless results go to a terminal too."""
    if not source or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed} inputs"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, completed=done)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Each error as one sentence on standard error, and the exit status that belongs to it."""
    try:
        yield
    except TformerError as error:
        sentence = as_written(str(error)) if isinstance(error, (OptionError, MemoryBudgetError)) else str(error)
        _fail(sentence, error, status=2 if isinstance(error, OptionError) else 1)
    except BrokenPipeError:
        # Whoever read the results has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        _fail("interrupted", error, status=128 + signal.SIGINT)


def _fail(sentence: str, error: BaseException, status: int) -> NoReturn:
    notes = getattr(error, "__notes__", ())
    click.echo(f"tformer-run: {' '.join('; '.join((sentence, *notes)).split())}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
