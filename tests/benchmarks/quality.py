"""What few bits cost a trained model: tformer's files next to llama.cpp's, made from the same weights.

    python tests/benchmarks/quality.py [--only int4] [--only Q4] [--windows 128] [--threads 1]

The first run trains a Llama of 7 million weights, in half an hour on one core, on text that every installation has
(`quality/corpus.py`). It is seeded, an interrupted one continues, and the model stays in --folder. Some files of the
text are held out: windows of ids of them calibrate, and windows of others are measured on. tformer's files are exported
again when the exporter has changed. llama.cpp comes from `make .venv-llama/.ready`.

Each file reads the same windows, teacher-forced, in a process of its own. Its next-token distributions are compared
with those of transformers in fp32: the growth of the perplexity with the standard error of the windows' paired
differences, the mean Kullback-Leibler divergence, and the share of positions with the same most likely token. Bits of a
weight count all matrices, tables and norms with their scales and zero points, without names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from kernels import describe_machine

sys.path.insert(0, str(Path(__file__).parent))
from quality import corpus, importance, model
from quality.distance import REFERENCE, WINDOWS, compare, summary
from quality.forms import CALIBRATION, FORMS, OURS, SHAPE, TEXT, WHOLE, Form
from versus.client import ROOT, PeerError, Worker
from versus.table import markdown_table

BUILD = ROOT / "build"
CALIBRATED_WINDOWS = 128
LEAST_SAME, MOST_DIVERGENCE = 0.999, 1e-4  # of files in fp32
TIMEOUT = 7200.0  # seconds of one answer
HEAD = (
    "", "file, bytes", "weights, bytes", "bits a weight", "perplexity", "growth, %", "divergence, 10⁻³ nats",
    "same top-1, %",
)  # fmt: skip


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--only", multiple=True, help="Only forms with this in their name, and fp32; may be given several times.")
@click.option("--windows", default=128, show_default=True, help=f"Windows of {SHAPE.max_length} ids that are measured.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=BUILD / "quality", help="Folder of the text and the models."
)
@click.option("--out", type=click.Path(path_type=Path), default=BUILD / "quality.json", help="File of the results.")
def main(only: tuple[str, ...], windows: int, threads: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(threads)
    folder = folder.absolute()
    forms = [form for form in FORMS if form in WHOLE or not only or any(text in form.label for text in only)]
    source = _source(folder)
    with tempfile.TemporaryDirectory(dir=folder) as compared:
        base = _reference(source, folder, Path(compared), windows)
        results: dict[Form, dict[str, Any]] = {}
        reasons = []
        for form in forms:
            click.echo(form.label, err=True)
            try:
                results[form] = _measured(form, folder, compared, threads)
            except PeerError as error:
                if form == WHOLE[0]:
                    raise click.ClickException(f"{form.label}: {error}") from error
                reasons.append(f"- {form.label}: {error}")
                continue
            if form in WHOLE:
                _check(form, summary(results[form], base))
    parameters = source.num_parameters()
    constants = results[WHOLE[0]]["weights"] - 4 * parameters
    rows = [_row(form, result, base, parameters, constants) for form, result in results.items()]
    rows.sort(key=lambda row: -row["bits"])
    about = {
        "machine": describe_machine(),
        "parameters": parameters,
        "trained_ids": model.STEPS * model.ROWS * SHAPE.max_length,
        "measured_ids": windows * SHAPE.max_length,
        "perplexity": summary(base, base)["perplexity"],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**about, "rows": rows, "reasons": reasons}, indent=1))
    click.echo("\n\n".join(filter(None, [_title(about), markdown_table(HEAD, map(_cells, rows)), "\n".join(reasons)])))


def _source(folder: Path) -> Any:
    """Return the trained model of transformers, and write the data that calibrate."""
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(model.prepare(folder)).eval()
    lines = folder / TEXT / CALIBRATION
    if not lines.exists():
        ids = corpus.windows(corpus.part(folder / TEXT, "calibration"), CALIBRATED_WINDOWS, SHAPE.max_length)
        importance.write(source, ids, folder / importance.IMPORTANCE)
        lines.write_text("".join(f"{row}\n" for row in ids.tolist()))
    return source


def _reference(source: Any, folder: Path, compared: Path, count: int) -> dict[str, list[float]]:
    """Write the windows and the source's logits of them; return the source's figures."""
    length = SHAPE.max_length
    windows = corpus.windows(corpus.part(folder / TEXT, "evaluation"), count, length + 1).astype(np.int64)
    np.save(compared / WINDOWS, windows)
    shape = (count, length, SHAPE.vocabulary)
    logits = np.lib.format.open_memmap(compared / REFERENCE, "w+", np.float32, shape)
    with torch.inference_mode():
        for ids, row in zip(windows, logits, strict=True):
            row[:] = source(torch.from_numpy(ids[None, :-1]), use_cache=False).logits[0].numpy()
    rows = iter(logits)
    return compare(compared, lambda _: next(rows))


def _measured(form: Form, folder: Path, compared: str, threads: int) -> dict[str, Any]:
    """Return what a process of the engine tells of its file."""
    with Worker(form.peer, threads, folder / "workers.log", TIMEOUT) as worker:
        worker.ask("prepare", shape=asdict(SHAPE), folder=str(folder), precision=form.name)
        return worker.ask("measure", folder=str(folder), compared=compared, form=form.name, threads=threads)


def _check(form: Form, figures: Mapping[str, float]) -> None:
    """Raise an error if a file in fp32 differs from the source: then nothing else can be compared."""
    if figures["same"] < LEAST_SAME or figures["divergence"] > MOST_DIVERGENCE:
        raise click.ClickException(
            f"{form.label} is not the source: {figures['same']:.2%} of the tokens are the same, and the divergence is "
            f"{figures['divergence']:.1e} nats. At least {LEAST_SAME:.1%} and at most {MOST_DIVERGENCE:.0e} are wanted"
        )


def _row(
    form: Form, result: Mapping[str, Any], base: Mapping[str, Sequence[float]], parameters: int, constants: int
) -> dict[str, Any]:
    """Return a row of the results. constants: bytes of a file of tformer's that are not weights, such as angles."""
    weights = result["weights"] - (constants if form.peer == OURS else 0)
    return {
        "engine": form.peer.name,
        "form": form.name,
        "file": result["file"],
        "weights": weights,
        "bits": 8 * weights / parameters,
        **summary(result, base),
        "windows": {name: result[name] for name in base},
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['engine']} {row['form']}",
        f"{row['file']:,}",
        f"{row['weights']:,}",
        f"{row['bits']:.2f}",
        f"{row['perplexity']:.4f}",
        f"{100 * row['growth']:+z.3f} ± {100 * row['growth_error']:.3f}",
        f"{1e3 * row['divergence']:z.3f} ± {1e3 * row['divergence_error']:.3f}",
        f"{100 * row['same']:.2f} ± {100 * row['same_error']:.2f}",
    ]


def _title(about: Mapping[str, Any]) -> str:
    return (
        f"A Llama of {about['parameters']:,} weights, trained on {about['trained_ids']:,} ids; perplexity "
        f"{about['perplexity']:.4f} on {about['measured_ids']:,} ids of other files. {about['machine']}"
    )


if __name__ == "__main__":
    main()
