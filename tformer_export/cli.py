"""`tformer-export SOURCE`: results to standard error, for the result is a file."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tformer_export.common.degradation_budget import Budget
from tformer_runtime.base.errors import MissingExtraError, OptionError, TformerError

_ID = click.IntRange(min=0)
NEEDED = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime")


def _budget(context: click.Context, parameter: click.Parameter, value: str | None) -> Budget | None:
    try:
        return Budget.of(value) if value is not None else None
    except OptionError as error:
        raise click.BadParameter(str(error), context, parameter) from error


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write; by default SOURCE.onnx.")
@click.option("--factory", help="package.module:function that makes the module of a SOURCE without one.")
@click.option("--config", type=click.Path(path_type=Path), help="A JSON file with the factory's keyword arguments.")
@click.option("--quantize", type=click.Choice(["none", "int8", "int4", "mixed"]), default="none", show_default=True)
@click.option(
    "--optimize-for",
    type=click.Choice(["throughput", "latency", "balanced"]),
    default="throughput",
    show_default=True,
    help="Kernels of quantised products. throughput: a row's result is the same alone and in any batch, and memory is "
    "least. latency: one row, or a few, are decoded faster, rounded otherwise than in a batch, with the decoder's "
    "weights held twice. balanced: that for large products alone.",
)
@click.option(
    "--activations",
    type=click.Choice(["rows", "fixed"]),
    default="rows",
    show_default=True,
    help="Scales of what quantised products read. rows: each row has its own. fixed: learnt from the calibration data, "
    "or from random ids; faster, the more so the more rows, but rows louder than those data are clipped.",
)
@click.option(
    "--cache",
    type=click.Choice(["float", "int8"]),
    default="float",
    show_default=True,
    help="What keys and values of earlier positions are held in. int8: a quarter of the memory, and faster steps where "
    "much is cached, for slower prompts.",
)
@click.option("--target", type=click.Choice(["cpu", "cuda", "portable"]), default="cpu", show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="Of products and caches. fp16 and bf16 are for CUDA: fp16 is the default of a file that is not quantised, and "
    "bf16 is for values beyond fp16's range.",
)
@click.option("--max-length", type=click.IntRange(min=2), help="Of a sequence; by default what the model allows.")
@click.option(
    "--max-degradation",
    metavar="SHARE",
    callback=_budget,
    help="Share of tokens that may change, 1% or 0.01, or times the perplexity, 1.02x; of mixed by default 1.01x.",
)
@click.option(
    "--calibration",
    metavar="FILE",
    help="Lines of text, of names of images, or of source, tab and target, to fit and measure with.",
)
@click.option(
    "--min-speed", type=click.FloatRange(0), metavar="TIMES", help="Refuse a quantised file slower than that."
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json, for all inputs.")
@click.option(
    "--chat-template", type=click.Path(path_type=Path), help="Jinja text that makes a prompt of a conversation."
)
@click.option(
    "--task",
    help="What the model does, such as text-classification; by default what SOURCE says. A folder is loaded for it.",
)
@click.option("--labels", metavar="A,B,…", help="The labels of a classifier, in the order of its scores.")
@click.option(
    "--problem",
    type=click.Choice(["single_label", "multi_label", "regression"]),
    help="What a classifier's scores are: of one label that holds, of several that may, or numbers themselves.",
)
@click.option(
    "--pool",
    type=click.Choice(["mean", "first", "max", "last"]),
    help="One vector for each input of a model that gives one for each position.",
)
@click.option("--normalize", is_flag=True, help="Pooled vectors have length 1.")
@click.option("--step", metavar="NAME", help="The autoregressive input; by default what SOURCE says.")
@click.option("--start", metavar="ID", type=_ID, multiple=True, help="What decoding starts from; repeatable.")
@click.option("--end", metavar="ID", type=_ID, multiple=True, help="What ends a sequence; repeatable.")
@click.option("--pad", metavar="ID", type=_ID, help="The padding, which the model may hide by its id.")
@click.option(
    "--alignments",
    metavar="[LAYERS]",
    is_flag=False,
    flag_value="",
    help="Give alignments: of all layers, of the last, or of layers and heads such as 2,3:0.",
)
@click.option(
    "--shortlist",
    metavar="FILE",
    help="Learn from lines as of --calibration which ids go with a source, and compute the logits of these alone.",
)
@click.option(
    "--attention", is_flag=True, help="Give the weights of all attentions, of a model that is run once for an input."
)
@click.option("--hidden", metavar="NAME", multiple=True, help="Give the output of this submodule; repeatable.")
@click.option(
    "--tune", is_flag=True, help="Measure on this machine which forms of operators are the fastest, and keep them."
)
@click.option("--report", type=click.Path(path_type=Path), help="Write the report here, as JSON.")
@click.option("--trust-pickle", is_flag=True, help="Load a pickled module, which runs the code that it names.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
def command(source: str, output: Path | None, report: Path | None, **options: Any) -> None:
    """Turn SOURCE, a trained PyTorch Transformer, into one ONNX file that decodes incrementally, or refuse.

    SOURCE is a checkpoint of save_checkpoint, a state dict (with --factory), a .pt2 of torch.export.save (with --step),
    a Hugging Face folder, package.module:factory, or a pickled module (with --trust-pickle).
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"exporting needs {', '.join(missing)}: pip install 'tformer[export,gpu]'")
    output = output or _default_output(source)
    if report is not None:
        from tformer_export.common.atomic_output import check_writable

        check_writable(report, options["force"])
        if options["quantize"] == "mixed":
            if report.suffix == ".png":
                raise click.UsageError(f"a picture is put beside the report as {report}: name another for the report")
            check_writable(report.with_suffix(".png"), options["force"])
        if report.absolute() == output.absolute():
            raise click.UsageError("--report and the output are the same file: name another for the report")
    console = Console(stderr=True)
    with _refusal_reported(report, source):
        if console.is_terminal:
            with console.status("reading") as status:
                made = _export(source, output, lambda stage: status.update(stage), **options)
        else:
            made = _export(source, output, lambda stage: None, **options)
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, text in made.rows():
        table.add_row(label, Text(text))
    if report is not None:
        made.write(report)
        if made.mixture is not None:
            table.add_row("picture", Text(_draw(made.mixture, report.with_suffix(".png"))))
    console.print(table)


def _draw(mixture: Any, path: Path) -> str:
    """The frontier beside the report; says where it is, or what is missing for it."""
    from tformer_export.quantize.frontier_plot import draw

    try:
        draw(mixture, path)
    except MissingExtraError as error:
        return str(error)
    return str(path)


@contextmanager
def _refusal_reported(report: Path | None, source: str) -> Iterator[None]:
    """A refusal is a report too: what was refused, with what words, as which kind of error."""
    try:
        yield
    except TformerError as error:
        if report is not None:
            from tformer_export.report import write_json

            write_json(report, {"refused": str(error), "kind": type(error).__name__, "source": source})
        raise


def _default_output(source: str) -> Path:
    path = Path(source)
    if path.exists():
        return path.with_suffix(".onnx") if path.is_file() else path.with_name(path.resolve().name + ".onnx")
    return Path(source.rsplit(":", 1)[-1] + ".onnx")


def _export(
    source: str,
    output: Path,
    progress: Callable[[str], None],
    *,
    factory: str | None,
    config: Path | None,
    tokenizer: Path | None,
    chat_template: Path | None,
    step: str | None,
    trust_pickle: bool,
    task: str | None,
    labels: str | None,
    start: tuple[int, ...],
    end: tuple[int, ...],
    pad: int | None,
    alignments: str | None,
    **options: Any,
) -> Any:
    from tformer_export.api import export
    from tformer_export.common.atomic_output import check_writable
    from tformer_export.sources import load_source

    check_writable(output, options["force"])
    options["alignments"] = _layers(alignments) if alignments is not None else None
    text = _tokenizer(tokenizer) if tokenizer is not None else None
    options["chat_template"] = None if chat_template is None else _read("--chat-template", chat_template)
    loaded = load_source(
        source,
        step=step,
        factory=factory,
        config=config,
        trust_pickle=trust_pickle,
        tokenizer=tokenizer is None,
        task=task or ("feature-extraction" if options["pool"] else None),
    )
    options["labels"] = [label.strip() for label in labels.split(",")] if labels is not None else None
    if start or end or pad is not None:
        held = loaded.special
        options["special"] = replace(
            held, start=start or held.start, end=end or held.end, pad=held.pad if pad is None else pad
        )
    return export(loaded, output, tokenizer=text, task=task, progress=progress, **options)


def _layers(text: str) -> Any:
    """Nothing, last, or layers and layer:head with commas between them."""
    if text in ("", "last"):
        return text or True
    pairs = [re.fullmatch(r"(\d+)(?::(\d+))?", part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise OptionError(f"--alignments takes last, or layers such as 2,3:0, not {text!r}; put SOURCE before it")
    return [int(m[1]) if m[2] is None else (int(m[1]), int(m[2])) for m in pairs if m]


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{flag} {path} is not UTF-8") from error


def _tokenizer(tokenizer: Path) -> str:
    from tokenizers import Tokenizer

    text = _read("--tokenizer", tokenizer)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises plain Exception
        raise OptionError(f"--tokenizer {tokenizer} is not in tokenizers' JSON format: {error}") from error
    return text


def main() -> None:
    """Entry point: errors of ours are one sentence on standard error and exit status 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half made is removed
    try:
        command(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (TformerError, KeyboardInterrupt) as error:
        print(f"tformer-export: {error}" if isinstance(error, TformerError) else "interrupted", file=sys.stderr)
        sys.exit(1 if isinstance(error, TformerError) else 130)
