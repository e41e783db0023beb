"""Label texts with a fine-tuned classifier in int8, quantised with texts of your own.

    python examples/classify.py distilbert/distilbert-base-uncased-finetuned-sst-2-english TEXTS.txt

The texts of the file calibrate the quantisation, and are labelled. The export is refused if more than a tenth of the
labels change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tformer_export import Quantization, export, load_source
from tformer_runtime import Model
from tformer_runtime.tasks.classification import Classification


def classify(model: str, texts: Path, file: Path) -> list[Classification]:
    """Export the model if `file` is not there. Return a label with its probability for each line of `texts`."""
    if not file.exists():
        export(load_source(model), file, quantization=Quantization("int8", calibration=texts, max_degradation=0.1))
    with Model.load(file) as classifier:
        return classifier.classify(texts.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    texts = Path(sys.argv[2])
    for result in classify(sys.argv[1], texts, Path(f"classify-{Path(sys.argv[1]).name}-{texts.stem}.onnx")):
        print(f"{result.label}\t{result.score:.3f}")
