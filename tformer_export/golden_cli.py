"""`tformer-golden MODEL.onnx`: write the golden file of a model file, or compare the model file with one.

It needs no torch. Exit status: 0 done, 1 refused or different, 2 wrong usage.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from tformer_runtime.base.errors import ModelFileError, OutputError, ParityError
from tformer_runtime.base.extras import import_onnxruntime
from tformer_runtime.cli.errors import TERMINATED, errors_as_sentences

_PATH = click.Path(path_type=Path)
MAX_SHOWN = 10  # differences


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=_PATH)
@click.option("-o", "--output", type=_PATH, help="Write this file.  [default: MODEL.golden.json]")
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Draw the requests from this seed."
)
@click.option("--check", type=_PATH, metavar="GOLDEN.json", help="Compare the model with this golden file instead.")
@click.option("--verbose", is_flag=True, help="Write the traceback of an error.")
@click.version_option(package_name="tformer")
@click.pass_context
def command(
    context: click.Context, model: Path, output: Path | None, force: bool, seed: int, check: Path | None, verbose: bool
) -> None:
    """Write seeded requests of MODEL and their results to a golden file.

    A runtime in another language proves by it that it reads the model right.
    """
    for name in ("output", "force", "seed"):
        if check is not None and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--check writes no file: leave out --{name}.")
    with errors_as_sentences("tformer-golden", verbose):
        import_onnxruntime()
        if check is not None:
            _compare(model, check)
        else:
            _write(model, output, force, seed)


def _write(model: Path, output: Path | None, force: bool, seed: int) -> None:
    from tformer_export.verify.golden.record import make_golden, write_golden
    from tformer_runtime.base.special_files import check_output_name

    if not model.is_file():
        raise ModelFileError(f"{model} {'is not a file' if model.exists() else 'does not exist'}: give a model file")
    output = output or model.with_suffix(".golden.json")
    check_output_name(output)
    weights = model.with_name(f"{model.name}.data")
    if output.resolve() in (model.resolve(), weights.resolve()):
        raise OutputError(f"{output} is the model's own place: give another path")
    if not output.parent.is_dir() or output.is_dir():  # known before the work
        reason = "it is a folder" if output.is_dir() else f"there is no folder {output.parent}"
        raise OutputError(f"{output} cannot be written: {reason}")
    if output.exists() and not force:
        raise OutputError(f"{output} exists: give --force to overwrite it, or another path")
    golden = make_golden(model, seed)
    write_golden(golden, output)
    click.echo(f"{output}, {output.stat().st_size / 1e6:.2f} MB", err=True)


def _compare(model: Path, check: Path) -> None:
    from tformer_export.verify.golden.replay import differences, read_golden

    found = list(differences(read_golden(check), model))
    for difference in found[:MAX_SHOWN]:
        click.echo(difference)
    if found:
        raise ParityError(f"{model} differs from {check} in {len(found)} results")
    click.echo(f"{model} gives the results of {check}", err=True)


def main() -> None:
    """Run the command. SIGTERM ends it with status 143."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    command()
