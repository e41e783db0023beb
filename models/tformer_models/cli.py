"""The command ``tformer-train``."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import click

from tformer_runtime.base.errors import MissingExtraError
from tformer_runtime.cli.errors import errors_as_sentences

logger = logging.getLogger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Write the run to this folder.  [default: runs/<name of the recipe>]",
)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint in the folder, if there is one.")
@click.option("--force", is_flag=True, help="Start again in a folder that already holds a run.")
@click.option(
    "--threads", metavar="N", type=click.IntRange(min=1), help="Use N CPU threads.  [default: PyTorch's choice]"
)
@click.option("--quiet", is_flag=True, help="Write only errors to standard error.")
@click.option("--verbose", is_flag=True, help="Write the messages of Lightning, and the traceback of an error.")
@click.version_option(package_name="tformer")
def main(
    recipe: Path, output: Path | None, resume: bool, force: bool, threads: int | None, quiet: bool, verbose: bool
) -> None:
    """Train a model by RECIPE, a TOML file, and print the path of the resulting model.pt."""
    if resume and force:
        raise click.UsageError("--resume continues a run and --force starts again: use one of them")
    if quiet and verbose:
        raise click.UsageError("--quiet writes nothing but errors: not with --verbose")
    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, stream=sys.stderr, format="%(message)s")
    # A recipe may name factories in files of the current folder, as `python -m` would find them.
    sys.path.insert(0, str(Path.cwd()))
    hint = "interrupted; the same command with --resume continues the run"
    with errors_as_sentences("tformer-train", verbose, interrupted=hint):
        folder = output or _default_output(recipe)
        click.echo(train_recipe(recipe, folder, resume, force, threads, quiet=quiet, verbose=verbose))


def train_recipe(
    recipe: Path,
    output: Path,
    resume: bool,
    force: bool,
    threads: int | None,
    *,
    quiet: bool = False,
    verbose: bool = False,
) -> Path:
    """Train by the file `recipe` in the folder `output`; return the path of model.pt.

    quiet: show no progress bar and no warnings of Lightning.
    verbose: let Lightning log its messages.
    Raises MissingExtraError if a package of the extra `train` is not installed, and the errors of `load_recipe` and
    `tformer_models.training.train`.
    """
    from tformer_models.recipe import load_recipe

    loaded = load_recipe(recipe)
    logger.info("recipe: %s, %d steps; loading PyTorch", recipe, loaded.training.steps)
    try:
        import torch

        from tformer_models.training import train
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"training needs the package {error.name}, which is not installed: pip install 'tformer[train]'"
        ) from error
    level = logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING
    logging.getLogger("lightning.pytorch").setLevel(level)
    logging.getLogger("matplotlib").setLevel(level)
    warnings.filterwarnings("ignore", module="lightning")
    if threads:
        torch.set_num_threads(threads)
    return train(loaded, output, resume=resume, force=force, quiet=quiet)


def _default_output(recipe: Path) -> Path:
    """Return the default folder of a run: models/g2p/recipe.toml → runs/g2p, tiny.toml → runs/tiny."""
    return Path("runs") / (recipe.absolute().parent.name if recipe.stem == "recipe" else recipe.stem)
