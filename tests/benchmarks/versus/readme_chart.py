"""The README's chart: milliseconds of a decode step with each engine, as the page of results has them.

python tests/benchmarks/versus/readme_chart.py    # after docs/benchmarks/results.md has new figures
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "benchmarks" / "results.md"
CHART = ROOT / "docs" / "benchmarks" / "step.svg"
TABLE, CASE = "Milliseconds for a decode step:", "int8, 1 row, 16 tokens"
ENGINES = "tformer", "llama.cpp", "OpenVINO", "optimum-onnx", "CTranslate2"
OURS, OTHERS = "#2e86ab", "#a0a0a0"


def published(page: str) -> dict[str, float]:
    """Return engine → milliseconds of a step, from the text of the page of results."""
    lines = iter(page[page.index(TABLE) :].splitlines())
    header = next(line for line in lines if line.startswith("|"))
    case = next(line for line in lines if line.startswith(f"| {CASE} |"))
    names, values = ([cell.strip() for cell in line.strip("|").split("|")] for line in (header, case))
    figures = dict(zip(names, values, strict=True))
    return {engine: float(re.match(r"[\d.]+", figures[engine])[0]) for engine in ENGINES}


def draw(milliseconds: dict[str, float], path: Path) -> None:
    """Draw a bar for each engine, the first one in its own colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text, and two drawings of the same figures are the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif"}):
        figure, axis = pyplot.subplots(figsize=(7.2, 1.9), layout="constrained")
        names = list(milliseconds)
        axis.barh(names, list(milliseconds.values()), 0.7, color=[OURS, *[OTHERS] * (len(names) - 1)])
        for place, value in enumerate(milliseconds.values()):
            axis.text(value, place, f" {value:.2f} ms", va="center", fontsize=9)
        axis.invert_yaxis()
        axis.set_title("One step of a decoder of 134 M in int8, two cores: shorter is faster", loc="left", fontsize=10)
        axis.set_xlim(0, 1.12 * max(milliseconds.values()))
        axis.xaxis.set_visible(False)
        axis.tick_params(length=0, labelsize=9)
        axis.spines[:].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw(published(RESULTS.read_text(encoding="utf-8")), CHART)
