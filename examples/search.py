"""Find the lines of a file that are closest in meaning to a question, with a sentence encoder in int8.

python examples/search.py sentence-transformers/all-MiniLM-L6-v2 LINES.txt "Who eats?"
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tformer_export import export, load_source
from tformer_runtime import Model


def search(model: str, lines: list[str], question: str, file: Path, top_k: int = 3) -> list[tuple[float, str]]:
    """Export the model if `file` is not there. Return the closest lines with their cosines, the closest first."""
    if not file.exists():
        export(load_source(model), file, quantization="int8")
    with Model.load(file) as encoder:
        vectors = encoder.embed([*lines, question])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors[:-1] @ vectors[-1]
    return [(float(cosines[i]), lines[i]) for i in np.argsort(-cosines, kind="stable")[:top_k]]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    for cosine, line in search(sys.argv[1], lines, sys.argv[3], Path(f"search-{Path(sys.argv[1]).name}.onnx")):
        print(f"{cosine:.3f}  {line}")
