"""Requests that are refused: each with a status, one sentence, and the field that it is about. Nothing is ignored."""

from __future__ import annotations

import json

import pytest
from openai import BadRequestError

from tformer_serve import app, body_route
from tformer_serve.schemas.completions import CompletionRequest

COMPLETION = {"model": "letters", "prompt": "hello"}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "a"}]}
GENERATE = {"model": "letters", "input": "hello"}
TOOL = {"type": "function", "function": {"name": "run"}}
WRONG = {"type": "foo"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

COMPLETIONS = {
    "unknown": ({"foo": 1}, "foo", "there is no option 'foo': leave it out, or correct its name"),
    "echo": ({"echo": True}, "echo", "this server has no echo: the answer is without the prompt"),
    "suffix": ({"suffix": "b"}, "suffix", "this server has no suffix: "),
    "best_of": ({"best_of": 3}, "best_of", "this server has no best_of: "),
    "model": ({"model": "other"}, "model", "there is no model 'other': this server has pronounce, letters, chat"),
    "no prompt": ({"prompt": None}, "prompt", "prompt should be a valid "),
    "empty prompt": ({"prompt": ""}, None, None),
    "no prompts": ({"prompt": []}, None, "the prompt is an empty list: give a text, ids, or"),
    "prompts": ({"prompt": [[5]] * 2049}, "prompt", "prompt has more than 2,048 parts: send fewer"),
    "texts": ({"prompt": ["a"] * 2049}, "prompt", "prompt has more than 2,048 parts: send fewer"),
    "character": ({"prompt": "é"}, None, "'é' (character 1 of the input) is not in the model's vocabulary"),
    "id": ({"prompt": [99]}, None, "id 99 (number 1 of the input) is not in the model's vocabulary"),
    "long": ({"prompt": "a" * 70}, None, "the input is 71 tokens long and the model holds 64"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "max_tokens must be a whole number of at least 1, not 0"),
    "text as number": ({"max_tokens": "5"}, "max_tokens", "max_tokens should be a valid integer, not '5'"),
    "temperature": ({"temperature": -1.0}, "temperature", "temperature must be 0, or a number of at least 1e-6"),
    "top_p": ({"top_p": 1.5}, "top_p", "top_p must be more than 0 and at most 1, not 1.5"),
    "n": ({"n": 3}, "n", "n=3 gives 3 equal answers without sampling: set a temperature above 0"),
    "wide": ({"n": 9, "temperature": 1}, "n", "n=9 needs more rows than the 8 of this server"),
    "seed": ({"seed": 3}, "seed", "seed=3 changes nothing without sampling: set a temperature"),
    "bias": ({"logit_bias": {"x": 1.0}}, "logit_bias", "logit_bias must be a mapping from token ids to numbers"),
    "logprobs": ({"logprobs": 6}, "logprobs", "logprobs should be less than or equal to 5, not 6"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options needs stream"),
    "long stop": ({"stop": ["ab"] * 600}, "stop", "stop has 1,200 characters, and this server takes at most 1,024"),
    "form": ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type should be 'text', "),
    "schema": ({"response_format": {"type": "json_schema"}}, "response_format", "response_format has a json_schema if"),
    "words": (
        {"response_format": {"type": "json_object"}}, None,
        "JSON needs '\"', for which the model's vocabulary has no token that adds it alone",
    ),
}  # fmt: skip
CHATS = {
    "unknown in a message": ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x", "there is no"),
    "role": ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "messages[0].role should be 'sys"),
    "no content": ({"messages": [{"role": "user"}]}, None, "a message needs a content"),
    "no messages": ({"messages": []}, "messages", "messages"),
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, None, "the model reads no images: leave out"),
    "two limits": ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "max_tokens and max_completion_tokens"),
    "limit": ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be a whole number"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs: true"),
    "functions": ({"functions": [{}]}, "functions", "this server has no functions: send tools"),
    "effort": ({"reasoning_effort": "low"}, "reasoning_effort", "this server has no reasoning_effort: "),
    "store": ({"store": True}, "store", "store may be False here: leave it out"),
    "modalities": ({"modalities": ["audio"]}, "modalities", "modalities may be ['text'] here: leave it out"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    "tool": ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice",
             "tool_choice names 'fly', and the tools are run"),
    "tool of many": ({"tools": [{**TOOL, "function": {"name": f"t{i}"}} for i in range(99)],
                      "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice",
                     "and the tools are t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and 89 more"),
    "tool name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "tools[0]"),
    "tool and form": ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format",
                      "response_format and tools exclude each other"),
    "bad schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": WRONG}}}, None,
                   "the response_format cannot be used: "),
    "no template": ({"model": "letters"}, None, "the file has no chat template: export the model from a folder"),
}  # fmt: skip
GENERATES = {
    "unknown": ({"max_tokens": 1}, "max_tokens", "there is no option 'max_tokens'"),
    "value": ({"top_k": -1}, "top_k", "top_k must be a whole number of at least 0, not -1"),
    "processor": ({"logits_processor": "x"}, "logits_processor", "this server has no logits_processor: it is a func"),
    "draft": ({"draft_model": "x"}, "draft_model", "this server has no draft_model: it is a model"),
    "beams": ({"num_beams": 9}, "num_beams", "num_beams=9 needs more rows than the 8 of this server"),
    "top": ({"top_logprobs": 101}, "top_logprobs", "top_logprobs=101 is more than the 100 of this server"),
    "contradiction": ({"num_beams": 3, "temperature": 1.0}, None, "num_beams=3 and sampling"),
    "constraint": ({"regex": "(", }, None, "the regex '(' cannot be used: "),
    "long constraint": ({"regex": "a" * 70_000}, "regex", "regex has 70,000 bytes, and this server compiles at most"),
    "long choices": ({"choices": ["a" * 40_000, "b" * 40_000]}, "choices", "choices has 80,000 bytes"),
    "biases": ({"logit_bias": {str(i): 1 for i in range(10_001)}}, "logit_bias", "logit_bias has 10,001 ids, and"),
    "suppressed": ({"suppress_tokens": [5] * 10_001}, "suppress_tokens", "suppress_tokens has 10,001 ids, and this"),
    "bad words": ({"bad_words_ids": [[5]] * 10_001}, "bad_words_ids", "bad_words_ids has 10,001 ids, and this server"),
    "attentions": ({"cross_attentions": True}, None, "holds no cross-attention weights: export the model with"),
    "names": ({"input": {"wrong": "a"}}, None, "the model reads tgt, not wrong"),
    "number": ({"input": 5}, "input", "input should be a valid "),
    "input of a file": ({"input": {"base64": "AAAA"}}, None, "tgt"),
}  # fmt: skip
TABLE = [
    *(("/v1/completions", COMPLETION, name, case) for name, case in COMPLETIONS.items()),
    *(("/v1/chat/completions", CHAT, name, case) for name, case in CHATS.items()),
    *(("/v1/generate", GENERATE, name, case) for name, case in GENERATES.items()),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "number", range(len(TABLE)), ids=[f"{path.split('/')[2]} {name}" for path, _, name, _ in TABLE]
)
def test_refusal_names_the_field(server, number, stream):
    path, body, _, (changes, param, sentence) = TABLE[number]
    answer = server.post(path, {**body, **changes, "stream": stream})
    if sentence is None or (stream and "stream_options" in changes):  # an empty prompt; options that a stream has
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == (404 if changes.get("model") == "other" else 400), answer.text
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_fields_of_null_are_as_if_left_out(server):
    body = {**COMPLETION, "max_tokens": 4}
    nulls = dict.fromkeys(("suffix", "stop", "n", "seed", "logprobs", "user", "best_of", "echo", "response_format"))
    plain, with_nulls = (server.post("/v1/completions", b).json()["choices"] for b in (body, {**body, **nulls}))
    assert plain == with_nulls


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000])
def test_body_that_is_no_object_is_refused(server, body):
    with server.http() as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "body" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": [*range(300), "a", *["b"] * 300]}),
        ("/v1/completions", {**COMPLETION, "prompt": [[1.5] * 300] * 300}),
        ("/v1/completions", {**COMPLETION, "stop": [1] * 300}),
        ("/v1/completions", {**COMPLETION, **{f"unknown{i}": i for i in range(300)}}),
        ("/v1/completions", {**COMPLETION, "logit_bias": {str(i): "x" for i in range(300)}}),
        ("/v1/chat/completions", {**CHAT, "messages": [5] * 300}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{}] * 300}]}),
        ("/v1/chat/completions", {**CHAT, "tools": [{}] * 300}),
    ],
)
def test_first_errors_of_a_body_end_its_checks(server, monkeypatch, path, body):
    """A client could otherwise let the server make a million errors, of which one is told."""
    counts, tell = [0], app.validation_error
    monkeypatch.setattr(app, "validation_error", lambda errors: counts.append(len(errors)) or tell(errors))
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert max(counts) < 10


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([[]] * 200_001, "200,000 lists and objects"),
        ({str(number): 1 for number in range(100_001)}, "100,000 named values"),
        ([1] * 1_500_002, "1,500,000 values"),
        ([*([1] * 1_500_001), '"\\",'], "1,500,000 values"),
    ],
    ids=["lists", "names", "values", "values and a text"],
)
def test_body_with_too_many_values_is_refused(server, prompt, what):
    answer = server.post("/v1/completions", {**COMPLETION, "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"the body has more than {what}: send less at once"


@pytest.mark.parametrize("part", ["[{", ":", ",", '[{:,"', "[{:,\\", '[{:,\\"', '\\\\"[{:,'])
def test_signs_in_a_text_are_no_values(part):
    """The body has enough of each sign to be refused, if its text did not have them."""
    text = part * 1_500_001
    body = json.dumps({**COMPLETION, "prompt": text}).encode()
    parsed = body_route._parsed(body, CompletionRequest)
    assert parsed.prompt == text


def nested(depth):
    """Return a schema that is nested so deep."""
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("depth", [100, 200, 330, 450, 900])
def test_schema_that_is_nested_deeply_is_refused_or_used(server, depth):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(depth)}}
    tool = {"type": "function", "function": {"name": "run", "parameters": nested(depth)}}
    bodies = [{**CHAT, "response_format": form}, {**CHAT, "tools": [tool]}, {**CHAT, "tools": [nested(depth)]}]
    call = {"type": "function", "function": {"name": "run", "arguments": json.dumps(nested(depth))}}
    bodies.append({**CHAT, "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
    for body in bodies:
        answer = server.post("/v1/chat/completions", {**body, "max_tokens": 4})
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "letters", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "letters", "prompt": "a", "\\ud800": 1}',
        b'{"model": "letters", "prompt": "a", "max_tokens": %s}' % (b"9" * 5000),
        b'{"model": "letters", "prompt": "a", "max_tokens": 1e400}',
        b'{"model": "letters", "prompt": [%s]}' % (b"9" * 100),
        b'{"model": "letters", "prompt": "a", "temperature": NaN}',
        b'{"model": "letters", "prompt": "a", "logit_bias": {"5": Infinity}}',
        b'{"model": "letters", "prompt": "a", "logit_bias": {"99999": 1}}',
        b'{"model": "letters", "prompt": "a", "stop": ["", "a"]}',
        b'{"model": "letters", "prompt": "a\\u0000b"}',
    ],
)
def test_strange_values_are_refused(server, body):
    with server.http() as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]
    assert "Traceback" not in answer.text


def test_body_of_a_form_is_refused(server):
    """A web page may send a form to any server without asking it."""
    with server.http() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = client.post(
                "/v1/completions", content=b'{"model":"letters","prompt":"a"}', headers={"Content-Type": kind}
            )
            assert answer.status_code == 400
            assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_unknown_paths_and_methods_are_errors_in_the_same_form(server):
    with server.http() as client:
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/", 405)):
            answer = client.request(method, path)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_unforeseen_error_is_told_without_its_content(server, monkeypatch, capfd):
    def fail(*_):
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr(server.models["letters"].model, "settings", fail)
    answer = server.post("/v1/completions", COMPLETION, headers={"X-Request-Id": "abc-1"})
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert message == "the server failed: its log has the reason under the request id abc-1; please report it"


def test_client_raises_the_error_of_its_kind(server):
    with pytest.raises(BadRequestError, match="top_p must be more than 0") as raised:
        server.client().completions.create(model="letters", prompt="a", top_p=3)
    assert raised.value.param == "top_p"
    with pytest.raises(BadRequestError, match="n=4 gives 4 equal answers"):
        list(server.client().completions.create(model="letters", prompt="a", n=4, stream=True))
