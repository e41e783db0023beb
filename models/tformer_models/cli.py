"""The command line of training: ``tformer-train RECIPE``."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import click

from tformer_export.common.checkpoint import MissingExtraError, TformerError


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder of the run [default: runs/<name of the recipe>]."
)
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint, if there is one.")
@click.option("--force", is_flag=True, help="Begin anew in a folder that holds a run already.")
@click.option("--threads", type=click.IntRange(min=1), help="Processor threads to use [default: PyTorch's choice].")
def main(recipe: Path, output: Path | None, resume: bool, force: bool, threads: int | None) -> None:
    """Train a model by RECIPE, a TOML file; prints the path of the model.pt that comes of it."""
    if resume and force:
        raise click.UsageError("--resume goes on with a run and --force begins anew; choose one")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    sys.path.insert(
        0, str(Path.cwd())
    )  # a recipe may name factories in files beside it, as `python -m` would find them
    try:
        click.echo(run(recipe, output or _default_output(recipe), resume=resume, force=force, threads=threads))
    except TformerError as error:
        click.echo(f"tformer-train: {error}", err=True)
        sys.exit(1)


def run(recipe: Path, output: Path, *, resume: bool, force: bool, threads: int | None) -> Path:
    from tformer_models.recipe import load_recipe

    options = load_recipe(recipe)
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
    return train(options, output, resume=resume, force=force)


def _default_output(recipe: Path) -> Path:
    """models/g2p/recipe.toml → runs/g2p, tiny.toml → runs/tiny"""
    return Path("runs") / (recipe.absolute().parent.name if recipe.stem == "recipe" else recipe.stem)
