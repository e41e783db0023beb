"""`tformer-export org/name`: a model of the hub, from the cache without a network and from a server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import huggingface_hub.constants
import peft
import pytest
import torch
from support.hf_models import gpt2
from support.peft_adapters import greedy, make_adapter

from tformer_runtime import Model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny-1.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    gpt2().save_pretrained(path)
    (path / "modeling_own.py").write_text("raise SystemExit('this code must not run')")
    return path


@pytest.fixture
def cache(folder, tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it out, with links from the files of a commit to blobs."""
    hub = tmp_path / "hub"
    repo = hub / "models--someone--tiny-1.5"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for file in folder.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        (repo / "blobs" / digest).write_bytes(file.read_bytes())
        (repo / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{digest}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return repo


def test_model_in_the_cache_exports_without_a_network(cache, run):
    status, err = run(REPO)
    assert status == 0, err
    assert re.search(r"^source +tiny-1.5, ", err, re.MULTILINE)
    prompt = [1, 5, 7]
    expected = gpt2().generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    assert list(Model.load("tiny-1.5.onnx", "cpu").generate(prompt, max_new_tokens=6).token_ids) == expected
    assert run(REPO, "--revision", COMMIT, "-o", "again.onnx")[0] == 0


def test_local_path_wins_over_a_hub_id(cache, refused):
    os.makedirs(REPO)
    assert refused(REPO, "-o", "out.onnx") == f"{REPO} is not a Hugging Face folder: it holds no config.json"
    assert "--revision names a version of a model" in refused(REPO, "--revision", "main", "-o", "out.onnx")


def test_models_that_the_cache_lacks_are_refused_offline(cache, refused):
    offline = "and HF_HUB_OFFLINE is set: download the model once without it"
    assert refused("someone/other") == (
        f"there is no file or folder someone/other, the cache of the Hugging Face hub does not hold it, {offline}"
    )
    assert f"does not hold it in revision v2, {offline}" in refused(REPO, "--revision", "v2")
    assert "there is no file or folder someone/model.pt: name a checkpoint" in refused("someone/model.pt")


def test_adapter_in_the_cache_is_merged_into_its_base_there(cache, run, tmp_path, caplog):
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    adapted = make_adapter(gpt2(), lora, tmp_path / "adapter", REPO)
    repo = cache.parent / "models--someone--formal"
    for name in ("refs", "snapshots"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (tmp_path / "adapter").rename(repo / "snapshots" / COMMIT)
    status, err = run("someone/formal")
    assert status == 0, err
    assert f"names {REPO} as its base model, which is loaded from the hub" in caplog.text
    prompt = [1, 5, 7]
    expected = greedy(adapted, prompt, 6)[0]
    assert list(Model.load("formal.onnx", "cpu").generate(prompt, max_new_tokens=6).token_ids) == expected
    assert run(REPO, "--adapters", "someone/formal", "-o", "switched.onnx")[0] == 0
    result = Model.load("switched.onnx", "cpu").generate(prompt, adapter="formal", max_new_tokens=6)
    assert list(result.token_ids) == expected


class Hub(BaseHTTPRequestHandler):
    """The hub's endpoints that a download asks: information, the tree of a commit, and files."""

    repos: ClassVar[dict[str, dict[str, bytes]]] = {}
    served: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        repo = next((name for name in self.repos if f"/{name}/" in path + "/"), None)
        if repo == "someone/gated" and self.headers.get("Authorization") != "Bearer secret":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        if repo is None:
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if "/revision/" in path and path.rsplit("/", 1)[-1] not in ("main", COMMIT):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        files = self.repos[repo]
        if path.startswith("/api/") and "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": sha(b)} for n, b in files.items()]
            return self.answer(200, json.dumps(tree).encode())
        if path.startswith("/api/"):
            return self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode())
        name = path.split(f"/resolve/{COMMIT}/")[1]
        if self.command == "GET":
            self.served.append(f"{repo}/{name}")
        return self.answer(200, files[name], {"ETag": f'"{sha(files[name])}"', "X-Repo-Commit": COMMIT})

    def answer(self, status, content, headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


def sha(content):
    return hashlib.sha1(content).hexdigest()


SCRIPT = """
import json, sys
from tformer_export.sources.hugging_face.hub import download
from tformer_runtime import SourceError
for repo, revision in json.load(sys.stdin):
    try:
        folder = download(repo, revision)
        print(json.dumps(sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())))
    except SourceError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def hub(folder):
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    rest = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
    Hub.repos = {
        REPO: {**files, "pytorch_model.bin": b"a pickle", "onnx/model.onnx": b"", "README.md": b"", "vocab.txt": b"a"},
        "someone/pickled": {**rest, "pytorch_model.bin": b"a pickle", "other.bin": b"another"},
        "someone/vectors": {**files, "2_Dense/config.json": b"{}", "2_Dense/pytorch_model.bin": b"a pickle"},
        "someone/gated": files,
        "someone/adapter": {
            "adapter_config.json": b"{}", "adapter_model.safetensors": b"", "adapter_model.bin": b"a pickle",
        },
    }  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def ask(hub, home, *requests, **environment):
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*", **environment}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **settings},
        input=json.dumps(requests),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "No files matched" not in result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_downloads_from_the_hub(hub, tmp_path):
    downloaded, pickled, vectors, adapter, gated, unknown, revision = ask(
        hub,
        tmp_path,
        (REPO, None),
        ("someone/pickled", None),
        ("someone/vectors", None),
        ("someone/adapter", None),
        ("someone/gated", None),
        ("someone/none", None),
        (REPO, "v2"),
    )
    assert downloaded == ["config.json", "generation_config.json", "model.safetensors", "vocab.txt"]
    assert pickled == ["config.json", "generation_config.json", "pytorch_model.bin"]
    assert "2_Dense/pytorch_model.bin" in vectors
    assert adapter == ["adapter_config.json", "adapter_model.safetensors"]
    assert gated.startswith("someone/gated is gated on the Hugging Face hub: accept its conditions at https://")
    assert "the Hugging Face hub has no model of that name that you may read: correct the name" in unknown
    assert revision.startswith(f"{REPO} has no revision v2 on the Hugging Face hub: name one of its branches")
    Hub.served.clear()
    with_token, again = ask(hub, tmp_path, ("someone/gated", None), (REPO, "main"), HF_TOKEN="secret")
    assert (with_token, again) == (["config.json", "generation_config.json", "model.safetensors"], downloaded)
    assert {name.rsplit("/", 1)[0] for name in Hub.served} == {"someone/gated"}  # the other one is in the cache


def test_hub_that_cannot_be_reached_is_named(tmp_path):
    (message,) = ask("http://127.0.0.1:9", tmp_path, ("someone/none", None))
    assert "the cache of the Hugging Face hub does not hold it, and the hub cannot be reached (" in message
