"""The command ``tformer-train``."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import click

from tformer_runtime.base.errors import MissingExtraError, TformerError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder of the run [default: runs/<name of the recipe>]."
)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint in the folder, if there is one.")
@click.option("--force", is_flag=True, help="Start again in a folder that already holds a run.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads to use [default: PyTorch's choice].")
@click.version_option(package_name="tformer")
def main(recipe: Path, output: Path | None, resume: bool, force: bool, threads: int | None) -> None:
    """Train a model by RECIPE, a TOML file, and print the path of the resulting model.pt."""
    if resume and force:
        raise click.UsageError("--resume continues a run and --force starts again: use one of them")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    # A recipe may name factories in files of the current folder, as `python -m` would find them.
    sys.path.insert(0, str(Path.cwd()))
    try:
        click.echo(train_recipe(recipe, output or _default_output(recipe), resume, force, threads))
    except TformerError as error:
        click.echo(f"tformer-train: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("tformer-train: interrupted; the same command with --resume continues the run", err=True)
        sys.exit(130)


def train_recipe(recipe: Path, output: Path, resume: bool, force: bool, threads: int | None) -> Path:
    """Train by the file `recipe` in the folder `output`; return the path of model.pt.

    Raises MissingExtraError if a package of the extra `train` is not installed, and the errors of `load_recipe` and
    `tformer_models.training.train`.
    """
    from tformer_models.recipe import load_recipe

    loaded = load_recipe(recipe)
    try:
        import torch

        from tformer_models.training import train
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"training needs the package {error.name}, which is not installed: pip install 'tformer[train]'"
        ) from error
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    if threads:
        torch.set_num_threads(threads)
    return train(loaded, output, resume=resume, force=force)


def _default_output(recipe: Path) -> Path:
    """Return the default folder of a run: models/g2p/recipe.toml → runs/g2p, tiny.toml → runs/tiny."""
    return Path("runs") / (recipe.absolute().parent.name if recipe.stem == "recipe" else recipe.stem)
