"""A file with one changed byte is refused, wherever the byte is."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil

import onnx
import onnx_ir as ir
import pytest
from support.command_lines import run
from support.toy_models import Toy

from tformer_export.common import onnx_writer
from tformer_runtime import Model, ModelFileError
from tformer_runtime.format.digest import (
    CHUNK_BYTES,
    DIGEST_KEY,
    ENTRY_BYTES,
    WEIGHTS_DIGEST_KEY,
    Digest,
    check_digest,
    digest_entry,
    digest_of,
)
from tformer_runtime.format.manifest import MANIFEST_KEY
from tformer_runtime.format.model_file import read_metadata
from tformer_runtime.format.open_files import OpenFiles


def read_digest(path):
    """Return the digest at the end of a file; None for a file without one."""
    with path.open("rb") as file:
        return digest_of(file)[0]


def checked_digest(path, threads=4):
    with path.open("rb", buffering=0) as file:
        return check_digest(file, None, None, threads)


def verify_file(path):
    return OpenFiles(path).verify()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A file as the exporter writes it."""
    folder = tmp_path_factory.mktemp("digest")
    path = Toy(encoder=False).write(folder / "toy.onnx")
    model = ir.from_proto(onnx.load(path))
    onnx_writer.write(model, path)
    return path


@pytest.fixture
def split(toy, tmp_path, monkeypatch):
    """A file with its weights in a second one."""
    monkeypatch.setattr(onnx_writer, "MAX_FILE_BYTES", 1)
    monkeypatch.setattr(onnx_writer, "MAX_INLINE_BYTES", 64)
    path = tmp_path / "split.onnx"
    onnx_writer.write(ir.from_proto(onnx.load(toy)), path)
    assert onnx_writer.data_file(path).stat().st_size > 1000
    return path


def digest_as_documented(content):
    """Return the digest of bytes as the documentation defines it."""
    chunks = [content[begin : begin + 2**20] for begin in range(0, len(content), 2**20)]
    return hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()


def test_digest_is_that_of_the_bytes_before_it(toy, split):
    for path in (toy, split):
        content = path.read_bytes()
        expected = digest_as_documented(content[:-ENTRY_BYTES])
        assert read_digest(path) == expected == read_metadata(path)[DIGEST_KEY] == verify_file(path)
    data = onnx_writer.data_file(split).read_bytes()
    assert read_metadata(split)[WEIGHTS_DIGEST_KEY] == f"{digest_as_documented(data)} split.onnx.data"
    onnx.checker.check_model(str(toy))


@pytest.mark.parametrize(
    "size",
    [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 6 * CHUNK_BYTES + 7],
)
def test_digest_of_whole_and_broken_chunks(size, tmp_path):
    """Writing gets pieces of any length, and reading takes chunks on any number of threads."""
    draw = random.Random(size)
    content = draw.randbytes(size)
    expected, digest, place = digest_as_documented(content), Digest(), 0
    while place < size:
        end = place + draw.choice((1, 1000, CHUNK_BYTES // 2, CHUNK_BYTES, 3 * CHUNK_BYTES))
        digest.update(content[place:end])
        digest.hexdigest()  # changes nothing
        place = end
    assert digest.hexdigest() == expected
    path = tmp_path / "file"
    path.write_bytes(content + digest_entry(expected))
    for threads in (1, 2, 3, 100):
        assert checked_digest(path, threads) == expected
    for place in {0, size // 2, size - 1} if size else ():
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed + digest_entry(expected))
        with pytest.raises(ModelFileError, match="is damaged"):
            checked_digest(path, 2)
    if size > CHUNK_BYTES:
        path.write_bytes(content[CHUNK_BYTES:] + content[:CHUNK_BYTES] + digest_entry(expected))
        with pytest.raises(ModelFileError, match="is damaged"):
            checked_digest(path)


def test_file_of_an_earlier_version_is_refused_and_not_taken_for_damaged(toy, tmp_path):
    """Files of version 9 end with another digest."""
    model = onnx.load(toy)
    for entry in model.metadata_props:
        if entry.key == MANIFEST_KEY:
            entry.value = json.dumps({**json.loads(entry.value), "version": 9})
        elif entry.key == DIGEST_KEY:
            entry.key = "tformer.digest"
    path = tmp_path / "earlier.onnx"
    onnx.save(model, path)
    with pytest.raises(
        ModelFileError, match=r"an earlier tformer \(its manifest has version 9.*export the model again"
    ):
        Model.load(path, device="cpu")
    assert "an earlier tformer" in run(path, "--verify").stderr


def test_digests_of_a_file_do_not_stay_in_a_copy(split, tmp_path, monkeypatch):
    monkeypatch.undo()
    copy = tmp_path / "whole.onnx"
    onnx_writer.write(ir.load(split), copy)
    assert WEIGHTS_DIGEST_KEY not in read_metadata(copy)
    assert verify_file(copy) == read_digest(copy)


def test_changed_bytes_are_refused(toy, tmp_path):
    content, copy, draw = toy.read_bytes(), tmp_path / "copy.onnx", random.Random(0)
    for place in (0, len(content) - ENTRY_BYTES - 1, len(content) - 1, *draw.choices(range(len(content)), k=60)):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        copy.write_bytes(changed)
        if read_digest(copy) is None:  # the entry itself is damaged: nothing else is
            assert place >= len(content) - ENTRY_BYTES
            continue
        with pytest.raises(ModelFileError):
            Model.load(copy, device="cpu")
        with pytest.raises(ModelFileError):
            verify_file(copy)


def test_weights_in_a_second_file_are_compared_too(split):
    Model.load(split, device="cpu")
    data = onnx_writer.data_file(split)
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"split\.onnx\.data is damaged, or was changed after its export"):
        Model.load(split, device="cpu")
    Model.load(split, device="cpu", verify=False)
    data.unlink()
    with pytest.raises(ModelFileError, match=r"split\.onnx\.data cannot be read: No such file"):
        Model.load(split, device="cpu")


def test_second_file_is_the_one_that_onnxruntime_reads(split, tmp_path):
    """A link leads to both files; a pair with other names has the weights that its graph names, or none."""
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "latest.onnx"
    link.symlink_to(split)
    Model.load(link, device="cpu")
    other = tmp_path / "other.onnx"
    shutil.copy(split, other)
    Model.load(other, device="cpu")  # its graph names split.onnx.data, which is there
    data = onnx_writer.data_file(split)
    shutil.copy(data, onnx_writer.data_file(other))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"split\.onnx\.data is damaged"):
        Model.load(other, device="cpu")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(ModelFileError, match="a pipe or a device"):
        Model.load(split, device="cpu")


def test_command_verifies_and_names_the_damage(toy, tmp_path):
    good = run(toy, "--verify")
    assert (good.exit_code, good.stdout) == (0, f"{toy} is as exported: digest {read_digest(toy)}\n")
    rewritten, damaged = tmp_path / "rewritten.onnx", tmp_path / "damaged.onnx"
    onnx.save(onnx.load(toy), rewritten)
    rewritten.write_bytes(rewritten.read_bytes() + b"\x32\x00")  # a description, as another tool may add one
    content = bytearray(toy.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    for path, message in ((rewritten, "does not end with a digest"), (damaged, "damaged")):
        result = run(path, "--verify")
        assert result.exit_code == 1
        assert message in result.stderr
        assert not result.stdout
    Model.load(rewritten, device="cpu")  # files without a digest can be opened


def test_pickled_model_is_verified_again(toy, tmp_path):
    path = tmp_path / "toy.onnx"
    shutil.copy(toy, path)
    pickled = pickle.dumps(Model.load(path, device="cpu"))
    content = bytearray(path.read_bytes())
    content[-ENTRY_BYTES - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelFileError):
        pickle.loads(pickled)
