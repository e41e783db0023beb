"""`tformer-run`: a model file on the command line.

Standard output holds results only. What is said besides goes to standard error. Exit status: 0 done, 1 the work
failed, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import click

from tformer_runtime.errors import InputError, OptionError, OutputError, TformerError
from tformer_runtime.generate import Result
from tformer_runtime.info import file_info, info_lines
from tformer_runtime.inputs import Value
from tformer_runtime.model import Model
from tformer_runtime.modelfile import read_manifest
from tformer_runtime.options import GenerationOptions
from tformer_runtime.plot import Drawing

_AT_LEAST_1 = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="MODEL.onnx", type=click.Path(path_type=Path))
@click.argument("inputs", metavar="[INPUT ...]", nargs=-1)
@click.option("--input-file", metavar="F|-", help="Read inputs from a file, one a line; - is standard input.")
@click.option("--output-file", metavar="F", type=click.Path(path_type=Path), help="Write results to a file.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", type=_AT_LEAST_1, help="Threads of one operator.  [default: one per core]")
@click.option("--beam-size", type=_AT_LEAST_1, help="Hypotheses kept at each step; 1 is greedy.")
@click.option("--num-return", type=_AT_LEAST_1, help="Results for each input, each on a line of its own.")
@click.option("--max-new-tokens", type=_AT_LEAST_1, help="Generate at most so many tokens.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Sample, logits divided by this; 0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), help="Sample from the k likeliest tokens.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample from the likeliest that sum to p.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the sampling.")
@click.option("--batch-size", type=_AT_LEAST_1, default=32, show_default=True, help="Inputs computed together.")
@click.option("--stream", is_flag=True, help="Write text as it comes, one input after the other.")
@click.option("--ids", is_flag=True, help="Inputs and results are ids between spaces.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--alignments", metavar="OUT.png", help="Draw what each token attended to; - only adds it to --json.")
@click.option("--hidden", is_flag=True, help="Add the file's hidden states to --json.")
@click.option("--info", is_flag=True, help="Say what the file is, and stop.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.version_option(package_name="tformer")
def main(model: Path, info: bool, as_json: bool, **asked: Any) -> None:
    """Run a model on each INPUT, or on each line of a file or of standard input."""
    with _sentences():
        if info:
            facts = file_info(model, read_manifest(model))
            click.echo(json.dumps(facts, ensure_ascii=False) if as_json else "\n".join(info_lines(facts)))
        else:
            _run(model, as_json=as_json, **asked)


def _run(
    model: Path,
    inputs: tuple[str, ...],
    input_file: str | None,
    output_file: Path | None,
    device: str,
    threads: int | None,
    batch_size: int,
    stream: bool,
    ids: bool,
    as_json: bool,
    force: bool,
    alignments: str | None,
    hidden: bool,
    **options: Any,
) -> None:
    if inputs and input_file:
        raise click.UsageError("give INPUT or --input-file, not both")
    if stream and (ids or as_json or output_file or (options["num_return"] or 1) > 1):
        raise click.UsageError(
            "--stream writes text to standard output: not with --ids, --json, --output-file, --num-return"
        )
    if stream and (alignments or hidden):
        raise click.UsageError("--stream writes text alone: not with --alignments, --hidden")
    if (hidden or alignments == "-") and not as_json:
        raise click.UsageError(f"{'--hidden' if hidden else '--alignments -'} adds to --json: give that too")
    if not inputs and not input_file:
        if sys.stdin.isatty():
            raise click.UsageError("there is no INPUT: give some, or --input-file")
        input_file = "-"
    if output_file and output_file.exists() and not force:
        raise OutputError(f"{output_file} exists already: give --force to overwrite it")
    options |= {"alignments": True if alignments else None, "hidden": hidden or None}
    given = GenerationOptions(**{name: value for name, value in options.items() if value is not None})
    drawing = Drawing(Path(alignments), force) if alignments not in (None, "-") else None
    lines = inputs if inputs else _lines(input_file or "-")
    values: Iterator[Value] = (_value(line, number, ids) for number, line in enumerate(lines, 1))
    loaded = Model.load(model, device, threads)
    if device == "auto":
        click.echo(f"device: {loaded.device}", err=True)
    with _located(None if inputs else input_file):
        if stream:
            for value in values:
                for piece in loaded.stream(value, given):
                    click.echo(piece, nl=False)
                click.echo()
            return
        if drawing:
            values = drawing.watch(values)
        results = loaded.generate_batch(values, given, batch_size)
        with _output(output_file, force) as out, _progress(input_file) as advance:
            for index, result in enumerate(results):
                for rank, each in enumerate((result, *result.alternatives)):
                    out.write(_line(each, index, rank, ids, as_json) + "\n")
                if drawing:
                    drawing.add(loaded, result)
                advance()
        if drawing:
            drawing.finish()


def _line(result: Result, index: int, rank: int, ids: bool, as_json: bool) -> str:
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
            for number, line in enumerate(file, 1):
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
def _output(path: Path | None, force: bool) -> Iterator[IO[str]]:
    """Standard output, or a file that takes its place only when it is whole."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8", newline="\n") as file:
            yield file
        if path.exists() and not force:
            raise OutputError(f"{path} exists already: give --force to overwrite it")
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress(source: str | None) -> Iterator[Callable[[], None]]:
    """How many inputs are done, on a terminal's standard error, unless results go to a terminal too."""
    if not source or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed} inputs"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Each error as one sentence on standard error, and the exit status that belongs to it."""
    try:
        yield
    except TformerError as error:
        click.echo(f"tformer-run: {' '.join(str(error).split())}", err=True)
        sys.exit(2 if isinstance(error, OptionError) else 1)
    except BrokenPipeError:
        # Whoever read the results has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("tformer-run: interrupted", err=True)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
