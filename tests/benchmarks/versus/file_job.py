"""A program that reads a file of texts and writes a file of results, for an engine without such a program.

    python -m versus.file_job MODULE '{"shape": …, "folder": …, "precision": …, "threads": 2, "texts": …, "results": …,
                                       "new": 16}'

A text is a line of token ids, and so is a result. The engine's `many` decides on its batches.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

from versus.engines import UnavailableError
from versus.shapes import shape_of


def main() -> None:
    warnings.simplefilter("ignore")
    module, job = importlib.import_module(sys.argv[1]), json.loads(sys.argv[2])
    make = getattr(module, "FileEngine", module.Engine)
    engine = make(Path(job["folder"]), shape_of(job["shape"]), job["precision"], job["threads"])
    if not hasattr(engine, "many"):
        sys.exit("it has no call for texts of mixed lengths")
    inputs = [[int(word) for word in line.split()] for line in Path(job["texts"]).read_text().splitlines()]
    try:
        results = engine.many(inputs, job["new"])
    except UnavailableError as error:
        sys.exit(str(error))
    Path(job["results"]).write_text("".join(" ".join(map(str, ids)) + "\n" for ids in results))


if __name__ == "__main__":
    main()
