"""The application of `tformer-serve` on Ray Serve: OpenAI's client, streams, replicas that die, many models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import yaml
from pydantic import ValidationError
from support.servers import HANG_SECONDS, write_chat_model
from support.toy_models import Toy

from tformer_runtime import Model, OptionError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tformer[ray]'")
from ray import serve  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from tformer_serve.ray import ServeArguments, app  # noqa: E402
from tformer_serve.ray.deployment import _Replica, replica_app  # noqa: E402
from tformer_serve.registry import ModelFile  # noqa: E402

SCALING = Path(__file__).parents[2] / "docs" / "scaling.md"
PROMPTS = ["abc", "hello", "z", "xyz", "quick", "brown", "fox", "jumps"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    paths = {f"letters-{i}": Toy(seed=i, encoder=False).write(folder / f"letters-{i}.onnx") for i in range(3)}
    return {**paths, "chat": write_chat_model(folder / "chat.onnx")}


@pytest.fixture(scope="module")
def references(models):
    return {name: Model.load(path, "cpu", threads=1) for name, path in models.items()}


@pytest.fixture(scope="module")
def run_app(cluster):
    """Return a function that runs the application, or updates it, and returns its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def run(files, replicas=1, **arguments):
        node = app(ServeArguments(files=[str(file) for file in files], device="cpu", **arguments))
        deployment = node._bound_deployment.options(num_replicas=replicas, ray_actor_options={"num_cpus": 0.3})
        serve.run(deployment.bind(), route_prefix="/")
        return f"http://127.0.0.1:{port}"

    yield run
    serve.shutdown()


def client_of(url, **settings):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=HANG_SECONDS, **{"max_retries": 0, **settings})


def text_of(reference, prompt, tokens):
    return reference.generate(prompt, max_new_tokens=tokens).text


def test_openai_client_and_streams(run_app, models, references):
    url = run_app([models["letters-0"], models["chat"]])
    with client_of(url) as client:
        assert [model.id for model in client.models.list()] == ["letters-0", "chat"]
        answer = client.completions.create(model="letters-0", prompt="abc", max_tokens=12).choices[0].text
        assert answer == text_of(references["letters-0"], "abc", 12)
        chat = references["chat"]
        expected = chat.generate(chat.prompt("hello"), max_new_tokens=12).text
        messages = [{"role": "user", "content": "hello"}]
        stream = client.chat.completions.create(model="chat", messages=messages, max_tokens=12, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == expected
        assert len([piece for piece in pieces if piece]) > 1
        with pytest.raises(openai.NotFoundError, match="this server has letters-0, chat"):
            client.completions.create(model="none", prompt="abc")
    assert httpx.get(f"{url}/health/ready", trust_env=False).json()["status"] == "ready"
    assert "tformer_requests_total" in httpx.get(f"{url}/metrics", trust_env=False).text


@pytest.mark.thorough
def test_update_and_dead_replica_lose_no_request(run_app, models, references):
    """Clients ask without a pause while the replicas are exchanged one by one, and while one is killed."""
    url = run_app([models["letters-0"]], replicas=2)
    expected = {prompt: text_of(references["letters-0"], prompt, 16) for prompt in PROMPTS}
    ends, answers = threading.Event(), []

    def ask(prompt):
        # A request whose replica is killed ends with an error, which OpenAI's client sends again.
        with client_of(url, max_retries=20) as client:
            while not ends.is_set():
                answers.append((prompt, client.completions.create(model="letters-0", prompt=prompt, max_tokens=16)))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(ask, prompt) for prompt in PROMPTS]
        try:
            before = two_replicas()
            run_app([models["letters-0"]], replicas=2, timeout=HANG_SECONDS)
            updated = two_replicas()
            os.kill(min(updated), signal.SIGKILL)
            two_replicas(but=min(updated))
        finally:
            ends.set()
        for future in asked:
            future.result(HANG_SECONDS)
    assert not before & updated
    assert len(answers) >= len(PROMPTS)
    assert all(answer.choices[0].text == expected[prompt] for prompt, answer in answers)


def two_replicas(but=None):
    """Wait until two replicas run, and return their processes. but: a process that is none of them."""
    wait_until(lambda: len(replica_pids() - {but}) == 2)
    return replica_pids()


def replica_pids():
    """Return the processes of the replicas that run."""
    running = serve.status().applications["default"].deployments["tformer"].replica_states.get("RUNNING", 0)
    pids = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ServeReplica:default:tformer"):
                pids.add(process.pid)
    return pids if len(pids) == running else set()  # while one starts or ends


def wait_until(holds):
    pause = threading.Event()
    for _ in range(HANG_SECONDS * 5):
        if holds():
            return
        pause.wait(0.2)
    raise AssertionError("it does not hold")


def test_replica_holds_a_few_of_many_models(run_app, models, references):
    names = ["letters-0", "letters-1", "letters-2"]
    url = run_app([models[name] for name in names], max_models_per_replica=2)
    with client_of(url) as client:
        for name in [*names, *names]:  # each leaves before its turn comes again
            header = {"serve_multiplexed_model_id": name}
            answer = client.completions.create(model=name, prompt="abc", max_tokens=8, extra_headers=header)
            assert answer.choices[0].text == text_of(references[name], "abc", 8)
            assert name in [model.id for model in client.models.list()]
            wait_until(lambda: len(list(client.models.list())) <= 2)
        assert client.models.retrieve("letters-0").id == "letters-0"
        with pytest.raises(openai.NotFoundError, match="this server has letters-0, letters-1, letters-2"):
            client.completions.create(model="none", prompt="abc")
        wide = "abc" * 10_000
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="letters-1", prompt=wide)


def test_replica_whose_model_has_ended_is_unhealthy(models):
    replica = _Replica()
    replica.app = replica_app(ServeArguments(files=["-"], device="cpu"), [ModelFile("letters", models["letters-0"])])
    served = replica.app.state.server.models
    served.start(1)
    replica.check_health()
    asyncio.run(served["letters"].aio.close())  # as after an error of its thread
    with pytest.raises(RuntimeError, match="the thread of letters has ended"):
        replica.check_health()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"files": []}, ValidationError, "files"),
        ({"files": ["a.onnx"], "treads": 2}, ValidationError, "treads"),
        ({"files": ["a.onnx"], "timeout": 0}, ValidationError, "timeout"),
        ({"files": ["?=a.onnx"]}, OptionError, "not a name for a model"),
        ({"files": ["a.onnx"], "max_body": "much"}, OptionError, "max_body must be a number of bytes"),
        ({"files": ["a.onnx"], "api_key_file": "/none/keys"}, OptionError, "/none/keys"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        app(ServeArguments(**arguments))


def test_config_of_the_documentation(models):
    """Ray Serve's schema takes the config, and the application takes its arguments."""
    (text,) = re.findall(r'```yaml title="serve.yaml"\n(.*?)```', SCALING.read_text(), re.DOTALL)
    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = config.applications
    module, _, attribute = application.import_path.partition(":")
    assert getattr(__import__(module, fromlist=[attribute]), attribute) is app
    assert app(application.args)._bound_deployment.name == "tformer"
    (deployment,) = application.deployments
    assert deployment.name == "tformer"
    assert deployment.autoscaling_config["target_ongoing_requests"] > 0
