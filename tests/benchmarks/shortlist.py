"""Coverage of parallel text by a shortlist, and the speed of requests with one.

    python tests/benchmarks/shortlist.py LINES.tsv [--models FOLDER] [--precision int8 float32] [--rows 1 8 32]

Each line of LINES.tsv is a source, a tab and its target, some ten thousand in all (for example messages of programs
from the catalogues in /usr/share/locale). One byte-pair vocabulary is trained on both sides. First the script prints
the share of lines whose targets consist of candidates, for lines that were learned from and for others. Then it
measures whole requests of 32 steps on the model of `batches.py`, with candidates and with all ids, interleaved; medians
of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from batches import VOCABULARY, module
from msgspec.structs import replace
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tformer_export import export
from tformer_export.common.onnx_writer import save
from tformer_export.quantize import quantize_weights
from tformer_export.shortlist import MIN_EQUAL_SHARE, separate_projection, with_columns
from tformer_export.shortlist.learn import Associations, Line, associate, each_needed
from tformer_runtime import Model
from tformer_runtime.engine.shortlist import Shortlist, union_of_candidates
from tformer_runtime.format.manifest import MANIFEST_KEY, Manifest

BYTE_PAIRS = 16000
STEPS, ROUNDS, BATCHES = 32, 3, 4
QUIET = 0.05  # seconds before a measurement


def read(path: Path) -> list[Line]:
    pairs = [line.rstrip("\n").split("\t")[:2] for line in path.open(encoding="utf-8") if "\t" in line]
    np.random.default_rng(0).shuffle(pairs)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BYTE_PAIRS, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    cut = [[np.array(tokenizer.encode(text).ids, np.int64) for text in pair] for pair in pairs]
    return [Line(source + 1, (target,)) for source, target in cut if len(source) and len(target)]


def coverage(lines: list[Line]) -> None:
    held, others = lines[::8], [line for number, line in enumerate(lines) if number % 8]
    every, part = associate(lines, VOCABULARY), associate(others, VOCABULARY)
    seen, unseen = every.needs(lines), part.needs(held)
    for common in (64, 256, 1024, 2048):
        each = int(np.sort(each_needed(seen, len(lines), common))[int(np.ceil(MIN_EQUAL_SHARE * len(lines))) - 1])
        table = shortlist(every, common, each)
        count = np.mean([len(table.candidates({"src": line.source - 1})) for line in lines[:500]])
        covered = np.mean(each_needed(unseen, len(held), common) <= each)
        tokens = np.mean((unseen[1] < common) | (unseen[2] < each))
        print(
            f"{MIN_EQUAL_SHARE:.1%} of {len(lines)} lines: {common} common, {each} a source id, {count:.0f} "
            f"candidates; "
            f"of others {covered:.1%}, {tokens:.1%} of tokens",
            flush=True,
        )


def shortlist(learned: Associations, common: int, each: int) -> Shortlist:
    starts, ids = learned.tables(common, each, VOCABULARY)
    source_starts = starts[1:]
    return Shortlist(
        VOCABULARY,
        np.sort(learned.frequent[:common]),
        {"src": (source_starts - source_starts[0], ids[source_starts[0] :])},
    )


def prepared(folder: Path, precision: str) -> Path:
    """Write the model with a separate projection and without an end token."""
    plain, path = folder / "float32.onnx", folder / f"shortlist-{precision}.onnx"
    if not plain.exists():
        ids = torch.randint(10, 100, (2, 6))
        export(
            module(),
            plain,
            {"src": ids, "tgt": ids},
            "tgt",
            special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
        )
    model = ir.load(plain)
    manifest = Manifest.from_json(model.metadata_props[MANIFEST_KEY])
    separate_projection(model)
    if precision == "int8":
        quantize_weights(model)
        manifest = replace(manifest, quantization="int8")
    manifest = with_columns(model, manifest)
    return save(model, replace(manifest, special_tokens=replace(manifest.special_tokens, eos_token_ids=())), path)


def speed(model: Model, table: Shortlist, sources: list[list[int]], rows: int, beams: int) -> str:
    batches = [sources[i:j] for i, j in pairwise(range(0, rows * (BATCHES + 1), rows))]
    ratios, columns = [], []
    for turn in range(ROUNDS):
        for batch in batches:
            spent = {}
            for on in (True, False):
                time.sleep(QUIET)
                begun = time.perf_counter()
                list(model.generate_batch(batch, batch_size=rows, num_beams=beams, max_new_tokens=STEPS, shortlist=on))
                spent[on] = time.perf_counter() - begun
            union = union_of_candidates([table.candidates({"src": np.array(source)}) for source in batch], VOCABULARY)
            columns.append(0 if union is None else len(union))
            ratios += [spent[False] / spent[True]] * bool(turn)
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.mean(columns):.0f} columns, {statistics.median(ratios):.2f} × ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lines", type=Path)
    parser.add_argument("--precision", nargs="+", default=["int8", "float32"], choices=["int8", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beams", type=int, nargs="+", default=[1])
    parser.add_argument("--common", type=int, nargs="+", default=[1000])
    parser.add_argument("--each", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", type=Path, help="keep the models in this folder, or take them from it")
    args = parser.parse_args()
    lines = read(args.lines)
    coverage(lines)
    half = len(lines) // 2
    learned = associate(lines[:half], VOCABULARY)
    sources = [(line.source - 1).tolist() for line in lines[half:] if 12 <= len(line.source) <= 36]
    with tempfile.TemporaryDirectory() as scratch:
        for precision in args.precision:
            model = Model.load(prepared(args.models or Path(scratch), precision), threads=args.threads)
            for common in args.common:
                model.engine.shortlist = table = shortlist(learned, common, args.each)
                for rows in args.rows:
                    for beams in args.beams:
                        print(f"{precision}, {rows} × {beams}:", speed(model, table, sources, rows, beams), flush=True)


if __name__ == "__main__":
    main()
