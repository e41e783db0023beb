"""Export the models of this repository and write some small ones, with golden files, for the tests of runtime/web.

    python export_models.py FOLDER

It keeps the files in the folder whose sources are still the same: checkpoint, arguments and code.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[4]
CODE = ("tformer_export", "runtime/tformer_runtime", "models/tformer_models", "tests/support")
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("", "runtime", "models", "tests")]

GOLDEN = "--golden"
EXTRAS = ("--cross-attentions", "--hidden-states", "decoder_norm", "--hidden-states", "encoder_norm")
INT8, INT4, WEB = ("--quantize", "int8"), ("--quantize", "int4"), ("--target", "web")
EXPORTS: dict[str, tuple[str, ...]] = {
    "g2p": ("g2p", GOLDEN),
    "g2p-int8": ("g2p", GOLDEN, *INT8),
    "g2p-extras": ("g2p", GOLDEN, *EXTRAS),
    "g2p-web": ("g2p", GOLDEN, *WEB),
    "g2p-web-int8": ("g2p", GOLDEN, *WEB, *INT8),
    "g2p-web-int4": ("g2p", GOLDEN, *WEB, *INT4),
    "words": ("words", GOLDEN),
    "words-int8": ("words", GOLDEN, *INT8),
    "words-web-int8": ("words", GOLDEN, *WEB, *INT8),
    "languages": ("languages", GOLDEN),
    "languages-int8": ("languages", GOLDEN, *INT8),
    "languages-web": ("languages", GOLDEN, *WEB),
    "languages-attentions": ("languages", "--attentions"),
    "elnino": ("elnino", GOLDEN),
    "elnino-int8": ("elnino", GOLDEN, *INT8),
    "elnino-web": ("elnino", GOLDEN, *WEB),
}
FOLDERS = {  # tiny models with random weights, as transformers writes them: their makers in tests/support
    "tiny-whisper": ("tiny_whisper", "seeded_model", "seeded_processor"),
    "tiny-llava": ("image_models", "llava", "llava_processor"),
    "tiny-smolvlm": ("image_models", "smolvlm", "tiles_processor"),
}
SHORTLISTS = {"shortlist": "none", "shortlist-int8": "int8"}  # name → quantization
TOYS = "toys"  # the small ones, which are written together
KEYS = "keys.json"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    keys = folder / KEYS
    known = json.loads(keys.read_text()) if keys.exists() else {}
    current = dict(_keys())
    old = [name for name, key in current.items() if known.get(name) != key]
    if not old:
        return
    # torch takes seconds to import, and both processes use one core.
    groups = _groups(old)
    with ProcessPoolExecutor(2) as pool:
        for names, _ in zip(groups, pool.map(_make, [folder] * len(groups), groups), strict=True):
            known |= {name: current[name] for name in names}
            keys.write_text(json.dumps(known))


def _groups(names: list[str]) -> list[list[str]]:
    """Return the names in groups that one process makes: the files of a checkpoint share its captured graph."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(EXPORTS[name][0] if name in EXPORTS else name, []).append(name)
    return sorted(groups.values(), key=len, reverse=True)


def _keys() -> Iterator[tuple[str, str]]:
    """Yield the name of each file and the digest of its sources."""
    code = hashlib.sha256(Path(__file__).read_bytes())
    for name in CODE:
        for path in sorted((REPOSITORY / name).rglob("*.py")):
            code.update(path.read_bytes())
    for name in (TOYS, *FOLDERS, *SHORTLISTS):
        yield name, code.hexdigest()
    for name, args in EXPORTS.items():
        key = code.copy()
        key.update(_checkpoint(args).read_bytes())
        yield name, key.hexdigest()


def _checkpoint(args: tuple[str, ...]) -> Path:
    return REPOSITORY / "models" / args[0] / "model.pt"


def _make(folder: Path, names: list[str]) -> None:
    name = names[0]
    if name == TOYS:
        _write_toys(folder)
    elif name in FOLDERS:
        _export_folder(folder, name)
    elif name in SHORTLISTS:
        _export_with_shortlist(folder / f"{name}.onnx", SHORTLISTS[name])
    else:
        _export_checkpoint(folder, names)


def _export_checkpoint(folder: Path, names: list[str]) -> None:
    """Export files of one checkpoint. Those with the same extra outputs share its captured graph."""
    from support.shared_analysis import shared_analysis

    from tformer_export.cli import command

    analysed: dict = {}
    for name in names:
        args = EXPORTS[name]
        options = [*args[1:], "--output", str(folder / f"{name}.onnx"), "--force", "--quiet"]
        if GOLDEN in options:
            options.insert(options.index(GOLDEN) + 1, str(folder / f"{name}.golden.json"))
        extras = tuple(arg for arg in args if arg in EXTRAS)
        with shared_analysis(extras, analysed):
            command([str(_checkpoint(args)), *options], standalone_mode=False)


def _export_folder(folder: Path, name: str) -> None:
    """Export a model of transformers from a folder, and write its golden file."""
    import transformers

    from tformer_export import export
    from tformer_export.sources import load_source
    from tformer_export.verify.golden.record import make_golden, write_golden

    transformers.utils.logging.disable_progress_bar()
    module, model, processor = FOLDERS[name]
    makers = import_module(f"support.{module}")
    path = folder / f"{name}.onnx"
    with TemporaryDirectory() as source:
        getattr(makers, model)().save_pretrained(source)
        getattr(makers, processor)().save_pretrained(source)
        path.unlink(missing_ok=True)
        export(load_source(source), path)
    write_golden(make_golden(path), folder / f"{name}.golden.json")


def _export_with_shortlist(path: Path, quantization: str) -> None:
    """Export a translator with random weights, 600 ids and a shortlist, which has 10 to 59 of the ids as sources."""
    import numpy as np
    import torch

    from tformer_export import export
    from tformer_export.verify.golden.record import make_golden, write_golden
    from tformer_models.seq2seq import Seq2SeqTransformer

    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 4, "encoder_layers": 1, "decoder_layers": 1, "feedforward": 64, "max_length": 24}
    model = Seq2SeqTransformer(600, 600, dropout=0.0, tie_output=quantization == "none", **sizes).eval()
    with torch.no_grad():
        model.output.weight.normal_(0, 1)
    random = np.random.default_rng(0)
    sources = [random.integers(10, 60, random.integers(3, 8)).tolist() for _ in range(60)]
    ids = torch.randint(10, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as temporary:
        lines = Path(temporary) / "lines.jsonl"
        lines.write_text("".join(json.dumps({"src": source}) + "\n" for source in sources))
        path.unlink(missing_ok=True)
        export(
            model, path, {"src": ids, "tgt": ids}, "tgt", quantization=quantization, shortlist=lines,
            special_tokens={"bos_token_id": [1], "eos_token_id": [2], "pad_token_id": 0},
            generation_defaults={"max_new_tokens": 10},
        )  # fmt: skip
    write_golden(make_golden(path), path.with_suffix(".golden.json"))


def _write_toys(folder: Path) -> None:
    """Write small files of all kinds of caches, contexts and tasks, and their golden files."""
    from support.served_tasks import write_tasks
    from support.toy_models import Toy

    from tformer_export.verify.golden.record import make_golden, write_golden

    toys = {
        "toy-scatter": Toy(attention="scatter-pair", seed=6, layers=2),
        "toy-stride": Toy(stride=3, seed=8, extras=True),
        "toy-shared-context": Toy(shares=True, seed=9, select=False),
        "toy-carries": Toy(encoder=False, carries=True, seed=12),
    }
    for name, toy in toys.items():
        toy.write(folder / f"{name}.onnx")
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    written = write_tasks(tasks)
    for name in ("vector", "states", "spans", "answers", "masks", "images", "audio", "series"):
        (folder / f"toy-{name}.onnx").write_bytes(written[name].read_bytes())
        toys[f"toy-{name}"] = written[name]
    for name in toys:
        write_golden(make_golden(folder / f"{name}.onnx"), folder / f"{name}.golden.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
