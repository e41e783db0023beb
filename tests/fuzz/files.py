"""Targets: files of models, checkpoints, and journals of runs."""

from __future__ import annotations

import functools
import io
import json
import zipfile
from pathlib import Path
from random import Random

from fuzz import models
from fuzz.mutations import mutate_bytes, mutate_json, mutate_message, parse_message, write_message
from fuzz.target import Target, WrongOutcomeError
from tformer_runtime import Model
from tformer_runtime.base.errors import TformerError
from tformer_runtime.cli.result_file import ResultFile
from tformer_runtime.format.info import file_info, info_lines
from tformer_runtime.format.manifest import MANIFEST_KEY
from tformer_runtime.format.model_file import read_manifest

METADATA_FIELD = 14  # of ModelProto
JOURNAL_INPUTS = ("one", "two", "three", "é")
PICKLE_WORDS = (
    b"cbuiltins\neval\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n",
    b"]",
    b"}",
    b"(",
    b"t",
    b"R",
    b".",
    b"\x94",
    b"h\x00",
    b"\x80\x02",
    b"X\xff\xff\xff\x7f",
    b"r\xff\xff\xff\x7f",
    b"\x8a\xff",
    b"a",
    b"b",
    b"s",
    b"u",
    b"2",
    b"B\xff\xff\xff\x7f",
    b"\x8d\xff\xff\xff\xff\xff\xff\x00\x00",
    b"Q",
    b"0",
)


def write(name: str, data: bytes) -> Path:
    path = models.folder() / name
    path.write_bytes(data)
    return path


def run_file(data: bytes) -> None:
    """Describe a file and run it on one input of its kind."""
    path = write("case.onnx", data)
    try:
        run_path(path)
    finally:
        path.unlink()


def run_path(path: Path) -> None:
    info_lines(file_info(path, read_manifest(path)))
    model = Model.load(path, "cpu", threads=1)
    manifest = model.engine.manifest
    if manifest.decode is not None:
        model.generate("abc", max_new_tokens=3)
    else:
        history = [[1.0, 2.0]] * 5
        list(model.forecast_batch([history])) if "history" in manifest.preprocessing else list(model.predict(["abc"]))


def seed_files() -> list[bytes]:
    return [path().read_bytes() for path in (models.translator, models.writer, models.embedder, models.forecaster)]


def manifest_of(path: Path) -> bytes:
    return json.dumps(json.loads(read_manifest(path).to_json())).encode()


@functools.cache
def bases() -> dict[str, list]:
    """Return the fields of the file of each task, without its manifest."""
    paths = (models.translator(), models.writer(), models.embedder(), models.forecaster())
    fields = {}
    for path in paths:
        message = parse_message(path.read_bytes())
        assert message is not None
        fields[read_manifest(path).task] = [field for field in message if field[0] != METADATA_FIELD]
    return fields


def run_manifest(data: bytes) -> None:
    """Put a manifest into the file of its task, and run the file."""
    try:
        task = json.loads(data)["task"]
        fields = bases()[task]
    except (ValueError, LookupError, TypeError, RecursionError):
        fields = bases()["translate"]
    entry = write_message([(1, 2, MANIFEST_KEY.encode()), (2, 2, data)])
    run_file(write_message([*fields, (METADATA_FIELD, 2, entry)]))


@functools.cache
def seed_checkpoints() -> list[bytes]:
    import torch
    from torch import nn

    from tformer_export.common.checkpoint import save_checkpoint

    torch.manual_seed(0)
    path = models.folder() / "seed.pt"
    save_checkpoint(
        nn.Linear(2, 3),
        path,
        factory="torch.nn:Linear",
        arguments={"in_features": 2, "out_features": 3},
        step_input=None,
        task="embed",
        tokenizer='{"model": {}}',
    )
    old, state = io.BytesIO(), io.BytesIO()
    torch.save(torch.load(path), old, _use_new_zipfile_serialization=False)
    torch.save({"model": nn.Linear(2, 3).state_dict(), "epoch": 3}, state)
    return [path.read_bytes(), old.getvalue(), state.getvalue()]


def mutate_checkpoint(data: bytes, rng: Random) -> bytes:
    """Change bytes of a file, or of a member of the archive, whose checksum and sizes are then right."""
    if rng.random() < 0.4 or not zipfile.is_zipfile(io.BytesIO(data)):
        return mutate_bytes(data, rng, PICKLE_WORDS)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # a changed archive
        return mutate_bytes(data, rng, PICKLE_WORDS)
    at = rng.randrange(len(members))
    name, content = members[at]
    match rng.randrange(6):
        case 0:
            del members[at]
        case 1:
            members.append(members[at])
        case 2:
            members[at] = (mutate_bytes(name.encode(), rng).decode("latin-1"), content)
        case 3:
            members[at] = (name, bytes(rng.choice((1 << 10, 1 << 24))))
        case _:
            at = next((i for i, (name, _) in enumerate(members) if name.endswith("data.pkl")), at)
            members[at] = (members[at][0], mutate_bytes(members[at][1], rng, PICKLE_WORDS))
    out = io.BytesIO()
    with zipfile.ZipFile(
        out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for name, content in members:
            try:
                archive.writestr(name, content)
            except (ValueError, IndexError):  # a name that no archive can have
                archive.writestr("x", content)
    return out.getvalue()


def run_checkpoint(data: bytes) -> None:
    """Load a checkpoint, build its module, and read the file as a state dict."""
    from tformer_export.common.checkpoint import load_checkpoint
    from tformer_export.sources.load import load_source
    from tformer_export.sources.state_dict import read_weights

    path = write("case.pt", data)
    errors = []
    for read in (
        lambda: load_checkpoint(path).build(),
        lambda: read_weights(path, ["weight", "bias"]),
        lambda: load_source(path),
    ):
        try:
            read()
        except TformerError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def run_program(data: bytes) -> None:
    """Read a file as a program of torch.export, which a stranger can name .pt2."""
    from tformer_export.sources.load import load_source

    load_source(write("case.pt2", data))


def seed_journals() -> list[bytes]:
    path = models.folder() / "seed-out.txt"
    with ResultFile(path, {"MODEL.onnx": "x"}) as out:
        for line in out.rest(JOURNAL_INPUTS[:2]):
            out.add(f"{line}\n")
        out._write_journal()
        journal = path.with_name("seed-out.txt.part.json").read_bytes()
        out._progress = type(out._progress)()
    path.unlink()
    return [journal, b"{}"]


def run_journal(data: bytes) -> None:
    """Resume a run from a journal. The file ends with the result of the last input."""
    path = models.folder() / "out.txt"
    part, journal = path.with_name("out.txt.part"), path.with_name("out.txt.part.json")
    part.write_text("one\ntwo\nthr")
    journal.write_bytes(data)
    try:
        with ResultFile(path, {"MODEL.onnx": "x"}, resume=True) as out:
            for line in out.rest(JOURNAL_INPUTS):
                out.add(f"{line}\n")
        if not path.read_text().endswith("é\n"):
            raise WrongOutcomeError(f"the results are {path.read_text()!r}")
    finally:
        for each in (path, part, journal):
            each.unlink(missing_ok=True)


MANIFEST_KEYS = (
    "pad",
    "max_length",
    "vocabulary",
    "of",
    "kind",
    "numbers",
    "preprocessing",
    "chat_template",
    "adapters",
)

FILES = [
    Target("model-file", seed_files, mutate_bytes, run_file),
    Target(
        "manifest",
        lambda: [
            manifest_of(path()) for path in (models.translator, models.writer, models.embedder, models.forecaster)
        ],
        lambda data, rng: mutate_json(data, rng, keys=MANIFEST_KEYS),
        run_manifest,
    ),
    Target("graph", seed_files, mutate_message, run_file),
    Target("checkpoint", seed_checkpoints, mutate_checkpoint, run_checkpoint),
    Target("journal", seed_journals, mutate_json, run_journal),
]
