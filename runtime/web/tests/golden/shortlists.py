"""Results of the Python runtime for files with a shortlist, and candidates of random tables."""

from __future__ import annotations

import base64
import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from golden_file import GoldenFile

from tformer_runtime import Model
from tformer_runtime.decoding.request import Result
from tformer_runtime.engine.shortlist import Shortlist, max_columns

BUILD = Path(__file__).resolve().parents[4] / "build" / "web"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"shortlist": False},
    {"num_beams": 4, "num_return_sequences": 3},
    {"forced_prefix": [300, 17], "top_logprobs": 20},
    {"forced_bos_token_id": 321, "num_beams": 2},
    {"logit_bias": {444: 30.0}, "max_new_tokens": 4},
    {"temperature": 1.3, "seed": 5, "num_return_sequences": 2},
    {"suppress_tokens": [11, 12, 13, 14], "repetition_penalty": 1.4},
    {"logit_bias": dict.fromkeys(range(200, 500), 0.5)},  # more candidates than columns are gathered for
]


def plain(result: Result) -> dict[str, Any]:
    return {
        "ids": result.token_ids,
        "score": result.score,
        "top": result.top_logprobs,
        "alternatives": [plain(one) for one in result.alternatives],
    }


def model_case(name: str) -> dict[str, Any]:
    model, random = Model.load(BUILD / f"{name}.onnx", threads=1), np.random.default_rng(1)
    sources = [random.integers(10, 60, random.integers(1, 9)).tolist() for _ in range(9)]
    runs = [[options, [plain(r) for r in model.generate_batch(sources, **options)]] for options in OPTIONS]
    assert runs[0][1] != runs[1][1]
    return {"kind": "model", "name": name, "sources": sources, "runs": runs}


def tables_case() -> dict[str, Any]:
    random, cases = np.random.default_rng(2), []
    for number, size in enumerate((40, 900, 5000)):
        tables = {}
        for name in ("src", "tags")[: 1 + number % 2]:
            lengths = random.integers(0, 6, 30)
            ids = random.integers(0, size, lengths.sum()).astype((np.int32, np.int64)[number % 2])
            tables[name] = np.concatenate([[0], lengths.cumsum()]), ids
        shortlist = Shortlist(size, np.unique(random.integers(0, size, 9)), tables)
        requests = []
        for _ in range(5):
            sources = {name: random.integers(0, 40, 7) for name in ("src", "tags")}
            named = random.integers(0, size + 5, 2).tolist()
            ids = shortlist.candidates(sources, named).tolist()
            requests.append([{name: array.tolist() for name, array in sources.items()}, named, ids])
        cases.append([shortlist.to_text(), size, max_columns(size), requests])
    return {"kind": "tables", "cases": cases}


def damaged_case() -> dict[str, Any]:
    """Return texts that are not shortlists, each with the reason that the error names."""
    good = Shortlist(9, np.array([1]), {"src": (np.array([0, 1, 2]), np.array([3, 4]))})
    with_ids = good.to_text()
    whole = base64.b64decode(with_ids)
    texts = {
        "missing": None,
        "letters": "!!!",
        "cut short": base64.b64encode(whole[: len(whole) // 2]).decode(),
        "no archive": base64.b64encode(bytes(200)).decode(),
        "ids outside": Shortlist(4, good.common, good.tables).to_text(),
        "starts in disorder": Shortlist(9, good.common, {"src": (np.array([0, 2, 1]), np.array([3, 4]))}).to_text(),
        "starts beyond": Shortlist(9, good.common, {"src": (np.array([0, 1, 3]), np.array([3, 4]))}).to_text(),
        "floats": Shortlist(9, np.array([1.0]), {}).to_text(),
        "axes": Shortlist(9, np.array([[1]]), {}).to_text(),
        "damaged": base64.b64encode(whole[:70] + bytes(20) + whole[90:]).decode(),
        "an entry again and again": repeated(whole, bytes(2 << 20), 400),
        "bytes that become words": Shortlist(9, np.zeros(110_000_000, np.int8), {}).to_text(),
    }
    return {"kind": "damaged", "texts": texts}


def repeated(archive: bytes, padding: bytes, count: int) -> str:
    """Return an archive with a stored entry that is whole but for unused bytes at its end, and is listed many times."""
    file = io.BytesIO(archive)
    with zipfile.ZipFile(file, "a") as added:
        content = io.BytesIO()
        np.save(content, np.array([1]))
        added.writestr(zipfile.ZipInfo("other.npy"), content.getvalue() + padding, zipfile.ZIP_STORED)
    whole = file.getvalue()
    end = whole.rindex(b"PK\x05\x06")
    entry = whole[whole.rindex(b"PK\x01\x02") : end]
    (entries,) = struct.unpack_from("<H", whole, end + 10)
    tail = bytearray(whole[end:])
    struct.pack_into("<H", tail, 10, entries + count)
    return base64.b64encode(whole[:end] + entry * count + tail).decode()


def mask_case() -> dict[str, Any]:
    """Return a table of the mask of a request input, which has no ids."""
    table = (np.array([0, 1, 2]), np.array([3, 4]))
    return {"kind": "mask", "text": Shortlist(600, np.array([1]), {"src_mask": table}).to_text()}


def main() -> None:
    cases = [model_case("shortlist"), model_case("shortlist-int8"), tables_case(), damaged_case(), mask_case()]
    GoldenFile().write(cases)


main()
