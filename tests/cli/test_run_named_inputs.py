"""A generative model of several inputs runs from the command line and behind the server, as its source does."""

from __future__ import annotations

import json
import re

import pytest
import torch
from msgspec.structs import replace
from support.command_lines import failed, run
from support.servers import RunningServer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F

from tformer_export import export
from tformer_runtime import Model
from tformer_runtime.preprocess.input_line import reads_json

LENGTH = 6
WORDS = ["<pad>", "<s>", "</s>", *["how", "old", "are", "you", "where", "is", "it"]]
QUESTIONS = [("how old are you", 1), ("where is it", 3)]


class Styled(nn.Module):
    """Answers a question in a style, which is a number for each row."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.words, self.styles, self.places = nn.Embedding(40, d), nn.Embedding(4, d), nn.Embedding(64, d)
        self.out = nn.Linear(d, 40)

    def forward(self, question, style, answer_so_far):
        memory = self.words(question) + self.styles(style)[:, None]
        x = self.words(answer_so_far) + self.places(torch.arange(answer_so_far.shape[1]))
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        scores = (x @ memory.transpose(1, 2)).masked_fill((question == 0)[:, None], -1e9)
        return self.out(x + scores.softmax(-1) @ memory)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Styled().eval()


@pytest.fixture(scope="module")
def path(module, tmp_path_factory):
    path, ids = tmp_path_factory.mktemp("named") / "styled.onnx", torch.tensor([[5, 6, 7]])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    export(
        module,
        path,
        {"question": ids, "style": torch.tensor([1]), "answer_so_far": ids},
        "answer_so_far",
        axes={"style": (0,)},
        special_tokens={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        tokenizer={"question": tokenizer.to_str()},
        max_length=64,
    )
    return path


@pytest.fixture(scope="module")
def expected(module):
    """Return the greedy ids of the source for each question."""
    answers = []
    for question, style in QUESTIONS:
        ids, answer = torch.tensor([[WORDS.index(word) for word in question.split()]]), [1]
        for _ in range(LENGTH):
            with torch.no_grad():
                answer.append(int(module(ids, torch.tensor([style]), torch.tensor([answer]))[0, -1].argmax()))
        answers.append(answer[1:])
    assert all(2 not in answer for answer in answers)
    return answers


def lines(as_ids: bool) -> list[str]:
    return [
        json.dumps({"question": [WORDS.index(w) for w in q.split()] if as_ids else q, "style": style})
        for q, style in QUESTIONS
    ]


@pytest.mark.parametrize("as_ids", [False, True])
def test_lines_of_json_name_the_inputs(path, expected, tmp_path, as_ids):
    options = ["--ids", "--max-new-tokens", LENGTH]
    of_arguments = run(path, *lines(as_ids), *options)
    assert [[int(word) for word in line.split()] for line in of_arguments.stdout.splitlines()] == expected
    (tmp_path / "in").write_text("\n".join(lines(as_ids)))
    assert run(path, "--input-file", tmp_path / "in", *options).stdout == of_arguments.stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("how old are you", 'not JSON .*and the model reads several inputs: give {"question": …, "style": …}'),
        ('{"question": "how"}', "the model reads question, style, not question"),
        ("[" * 100_000, "nested too deeply"),
        ('{"question": "how", "style": "loud"}', "style"),
    ],
)
def test_line_of_another_form_is_refused(path, line, says):
    assert re.search(says, failed(run(path, line, "--ids")))


def test_info_names_the_inputs_as_they_are(path):
    assert "  answer_so_far: int64 (batch, new)" in run(path, "--info").stdout.splitlines()


def test_server_names_the_path_that_takes_several_inputs(path, expected):
    with RunningServer({"styled": path}) as server:
        (entry,) = server.http().get("/v1/models").json()["data"]
        assert entry["tformer"]["paths"] == ["/v1/generate"]
        body = {"model": "styled", "max_new_tokens": LENGTH}
        for line, ids in zip(lines(as_ids=False), expected, strict=True):
            answer = server.post("/v1/generate", {**body, "input": json.loads(line)}).json()
            assert answer["results"][0]["token_ids"] == ids
        refused = server.post("/v1/completions", {"model": "styled", "prompt": "how old are you"})
        assert refused.status_code == 400
        assert "reads question, style, not a prompt: send its input to /v1/generate" in refused.text


@pytest.mark.parametrize(
    ("inputs", "step", "expected"),
    [
        ({"src": ("ids", (None,))}, True, False),
        ({"history": ("data", (None, 4))}, True, True),
        ({"a": ("ids", (None,)), "b": ("data", (3,))}, False, True),
        ({"ids": ("ids", (None,)), "types": ("types", (None,))}, False, False),
    ],
)
def test_lines_are_json_for_several_inputs_or_numbers(path, inputs, step, expected):
    manifest = Model.load(path, "cpu").manifest
    spec = manifest.encode.inputs[0]
    specs = [replace(spec, name=name, role=role, shape=("batch", *shape)) for name, (role, shape) in inputs.items()]
    manifest = replace(manifest, encode=replace(manifest.encode, inputs=tuple(specs)), tokenizer_of={})
    assert reads_json(manifest if step else replace(manifest, decode=None)) == expected
