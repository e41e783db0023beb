"""OpenAI's Python client: answers equal those of `Model` for each request alone, whatever else the server computes."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import openai
import pytest
from support.servers import token_id_of

WORDS = ["hello", "a", "transformer", "ab", "zebra", "mississippi", "q", "onnx"]
# Fields of the API, and the options of the runtime that mean the same.
FIELDS = [
    ({"max_tokens": 12}, {"max_new_tokens": 12}),
    ({"max_tokens": 20, "stop": "e"}, {"max_new_tokens": 20, "stop_strings": "e"}),
    ({"max_tokens": 15, "temperature": 1.3, "seed": 4}, {"max_new_tokens": 15, "temperature": 1.3, "seed": 4}),
    ({"max_tokens": 15, "temperature": 0.0, "seed": 4}, {"max_new_tokens": 15, "temperature": 0.0, "seed": 4}),
    (
        {"max_tokens": 15, "temperature": 2.0, "top_p": 0.9, "seed": 1, "n": 3},
        {"max_new_tokens": 15, "temperature": 2.0, "top_p": 0.9, "seed": 1, "num_return_sequences": 3},
    ),
    (
        {"max_tokens": 20, "presence_penalty": 0.5, "frequency_penalty": 1.5},
        {"max_new_tokens": 20, "presence_penalty": 0.5, "frequency_penalty": 1.5},
    ),
    ({"max_tokens": 9, "logit_bias": {"5": 100.0}, "stop": ["zz", "q"]},
     {"max_new_tokens": 9, "logit_bias": {5: 100.0}, "stop_strings": ["zz", "q"]}),
    (
        {"max_tokens": 9, "extra_body": {"top_k": 3, "repetition_penalty": 1.5}, "seed": 2},
        {"max_new_tokens": 9, "top_k": 3, "repetition_penalty": 1.5, "seed": 2, "temperature": 1.0},
    ),
]  # fmt: skip
FIELDS[-1][0]["temperature"] = 1.0


def plan(count):
    """Return (model, word, fields, options) of some requests."""
    return [
        (("pronounce", "letters")[i % 2], WORDS[i % len(WORDS)], *FIELDS[(i * 3 + i // 8) % len(FIELDS)])
        for i in range(count)
    ]


def texts_of(result):
    return [
        (one.text, {"end": "stop"}.get(one.finish_reason, one.finish_reason)) for one in (result, *result.alternatives)
    ]


async def streamed(stream):
    """Return the texts of a stream of completions, with the reasons of their ends."""
    texts, ends = {}, {}
    async for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return [(texts[i], ends[i]) for i in range(len(texts))]


def test_concurrent_completions_equal_the_results_of_the_model(server, references):
    requests = plan(48)
    expected = [texts_of(references[name].generate(word, **options)) for name, word, _, options in requests]

    async def complete(client, number, name, word, fields):
        if number % 3 == 0:
            return await streamed(await client.completions.create(model=name, prompt=word, stream=True, **fields))
        answer = await client.completions.create(model=name, prompt=word, **fields)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [(choice.text, choice.finish_reason) for choice in answer.choices]

    async def run():
        async with server.async_client() as client:
            return await asyncio.gather(
                *(complete(client, i, name, word, fields) for i, (name, word, fields, _) in enumerate(requests))
            )

    assert asyncio.run(run()) == expected
    for name in ("pronounce", "letters"):
        assert server.models[name].model.memory()["used_bytes"] == 0


def test_models_are_listed(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == ["pronounce", "letters", "chat"]
    assert client.models.retrieve("chat").id == "chat"
    with pytest.raises(
        openai.NotFoundError, match="there is no model 'other': this server has pronounce, letters, chat"
    ):
        client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions_equal_those_of_the_model(server, references, stream):
    expected = references["letters"].generate("hello", max_new_tokens=12, top_logprobs=3)
    answer = server.client().completions.create(
        model="letters", prompt="hello", max_tokens=12, logprobs=3, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    tokens = [token for choice in choices for token in choice.logprobs.tokens if choice.logprobs]
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    top = [pairs for choice in choices for pairs in choice.logprobs.top_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert "".join(tokens) == "".join(choice.text for choice in choices) == expected.text
    assert offsets == list(range(len(expected.text)))
    np.testing.assert_allclose(logprobs, expected.token_logprobs[: len(tokens)], atol=1e-4)
    codec = references["letters"].inputs.output_codec
    for pairs, others in zip(top, expected.top_logprobs, strict=False):
        assert list(pairs) == [codec.decode([id_]) or codec.token(id_) for id_, _ in others]
        np.testing.assert_allclose(list(pairs.values()), [value for _, value in others], atol=1e-4)


def test_several_prompts_have_their_own_answers(server, references):
    client = server.client()
    options = {"temperature": 1.5, "seed": 3, "max_new_tokens": 6}
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "n": 2}
    ids = [[5, 6, 7], [8, 9]]
    for prompts in (WORDS[:3], ids):
        answer = client.completions.create(model="letters", prompt=prompts, **fields)
        results = [references["letters"].generate(p, num_return_sequences=2, **options) for p in prompts]
        assert [choice.text for choice in answer.choices] == [text for r in results for text, _ in texts_of(r)]
        assert answer.usage.completion_tokens == sum(
            len(one.token_ids) for r in results for one in (r, *r.alternatives)
        )
    alone = client.completions.create(model="letters", prompt=ids[0], max_tokens=6)
    assert alone.choices[0].text == references["letters"].generate(ids[0], max_new_tokens=6).text
    assert alone.usage.prompt_tokens == 3


# Chats

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the oil"},
    {"role": "assistant", "content": "it is"},
    {"role": "user", "content": [{"type": "text", "text": "why é"}]},
]
TALK_AS_TEXT = [*TALK[:3], {"role": "user", "content": "why é"}]


def chat_result(references, messages=TALK_AS_TEXT, tools=None, **options):
    model = references["chat"]
    return model.generate(model.prompt(messages, tools=tools), **options)


def test_chat_equals_the_model_with_its_template(server, references):
    options = {"max_new_tokens": 24, "temperature": 1.0, "seed": 11, "num_return_sequences": 2}
    expected = chat_result(references, **options)
    fields = {"max_completion_tokens": 24, "temperature": 1.0, "seed": 11, "n": 2}
    answer = server.client().chat.completions.create(model="chat", messages=TALK, **fields)
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == texts_of(expected)
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage.prompt_tokens == len(references["chat"].prompt(TALK_AS_TEXT))
    assert answer.usage.completion_tokens == sum(len(r.token_ids) for r in (expected, *expected.alternatives))


def test_streamed_chat_has_roles_texts_and_a_last_event_with_usage(server, references):
    expected = chat_result(references, max_new_tokens=24, temperature=1.0, seed=11, num_return_sequences=2)
    fields = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "n": 2, "stream_options": {"include_usage": True}}

    async def run():
        async with server.async_client() as client:
            stream = await client.chat.completions.create(model="chat", messages=TALK, stream=True, **fields)
            return [chunk async for chunk in stream]

    *chunks, last = asyncio.run(run())
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(r.token_ids) for r in (expected, *expected.alternatives))
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    for number, (text, finish) in enumerate(texts_of(expected)):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == text
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [own[-1].finish_reason] == [finish]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chats_equal_those_of_the_model(server, references, stream):
    expected = chat_result(references, max_new_tokens=16, top_logprobs=2)
    answer = server.client().chat.completions.create(
        model="chat", messages=TALK, max_tokens=16, logprobs=True, top_logprobs=2, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    count = len(expected.token_ids) - (expected.finish_reason == "end")
    np.testing.assert_allclose([t.logprob for t in tokens], expected.token_logprobs[:count], atol=1e-4)
    for token, others in zip(tokens, expected.top_logprobs, strict=False):
        np.testing.assert_allclose([t.logprob for t in token.top_logprobs], [value for _, value in others], atol=1e-4)
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    assert b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace") == text


SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}, "count": {"type": "integer", "minimum": 1, "maximum": 40}},
    "required": ["word", "count"],
    "additionalProperties": False,
}


def check_schema(text):
    value = json.loads(text)
    assert set(value) == {"word", "count"}
    assert value["word"] in ("yes", "no")
    assert isinstance(value["count"], int)
    assert 1 <= value["count"] <= 40


@pytest.mark.parametrize("seed", range(3))
def test_answer_with_a_json_schema_follows_it(server, references, seed):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    fields = {"temperature": 1.5, "seed": seed, "response_format": form}
    client = server.client()
    answer = client.chat.completions.create(model="chat", messages=TALK, **fields).choices[0]
    check_schema(answer.message.content)
    assert answer.message.content == chat_result(references, temperature=1.5, seed=seed, json_schema=SCHEMA).text
    plain = client.completions.create(
        model="chat", prompt="a", temperature=1.5, seed=seed, extra_body={"response_format": form}
    )
    check_schema(plain.choices[0].text)


def test_json_object_is_an_object(server):
    answer = server.client().chat.completions.create(
        model="chat",
        messages=TALK,
        response_format={"type": "json_object"},
        temperature=0,
        logit_bias={"100": -100},
        max_tokens=400,
    )
    choice = answer.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


# Tools

ARGUMENTS = {
    "type": "object",
    "properties": {"how": {"$ref": "#/$defs/kind"}},
    "required": ["how"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["fast", "slow"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "run", "description": "run", "parameters": ARGUMENTS}},
    {
        "type": "function",
        "function": {"name": "walk", "parameters": {**ARGUMENTS, "$defs": {"kind": {"const": "far"}}}},
    },
    {"type": "function", "function": {"name": "stop"}},
]
POSSIBLE = {"run": [{"how": "fast"}, {"how": "slow"}], "walk": [{"how": "far"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_required_call_follows_the_parameters_of_its_function(server, stream):
    client, called = server.client(), set()
    for seed in range(4):
        letter = "rw"[seed % 2]  # of run or of walk
        answer = client.chat.completions.create(
            model="chat", messages=TALK, tools=TOOLS[:2], tool_choice="required", temperature=2, seed=seed,
            logit_bias={str(token_id_of(letter)): 100}, stream=stream,
        )  # fmt: skip
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            calls = [call for choice in choices for call in choice.delta.tool_calls or []]
            assert not any(choice.delta.content for choice in choices)
            finish = choices[-1].finish_reason
        else:
            calls, finish = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
            assert answer.choices[0].message.content is None
        (call,) = calls
        assert finish == "tool_calls"
        assert json.loads(call.function.arguments) in POSSIBLE[call.function.name]
        called.add(call.function.name)
    assert called == set(POSSIBLE)


def test_named_function_is_called(server):
    for name in ("run", "walk"):
        answer = server.client().chat.completions.create(
            model="chat",
            messages=TALK,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": name}},
            temperature=2,
            seed=1,
        )
        assert answer.choices[0].message.tool_calls[0].function.name == name


@pytest.mark.parametrize("stream", [False, True])
def test_automatic_choice_is_a_text_or_a_call(server, stream):
    """A bias for the brace makes the model begin a call, and one against it makes it write a text."""
    brace = token_id_of("{")
    for bias, calls_expected in ((100.0, True), (-100.0, False)):
        answer = server.client().chat.completions.create(
            model="chat", messages=TALK, tools=TOOLS[:2], temperature=1, seed=5, max_tokens=60,
            logit_bias={str(brace): bias}, stream=stream,
        )  # fmt: skip
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            calls = [call for choice in choices for call in choice.delta.tool_calls or []]
            text = "".join(choice.delta.content or "" for choice in choices)
        else:
            calls, text = answer.choices[0].message.tool_calls or [], answer.choices[0].message.content or ""
        assert bool(calls) == calls_expected
        assert bool(text) != calls_expected
        for call in calls:
            assert json.loads(call.function.arguments) in POSSIBLE[call.function.name]


def test_result_of_a_call_goes_back_to_the_model(server, references):
    client = server.client()
    first = client.chat.completions.create(
        model="chat", messages=TALK, tools=TOOLS[:1], tool_choice="required", temperature=2, seed=0
    )
    message = first.choices[0].message
    call = message.tool_calls[0]
    talk = [*TALK, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    answer = client.chat.completions.create(
        model="chat", messages=talk, tools=TOOLS[:1], tool_choice="none", max_tokens=9
    )
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    expected = [
        *TALK_AS_TEXT,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": call.id, "function": function}]},
        {"role": "tool", "content": "done"},
    ]
    result = chat_result(references, expected, TOOLS[:1], max_new_tokens=9)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == texts_of(result)[0]


def test_harmless_fields_change_nothing(server, references):
    expected = chat_result(references, max_new_tokens=8).text
    answer = server.client().chat.completions.create(
        model="chat", messages=TALK, max_tokens=8, user="someone", metadata={"a": "b"}, store=False,
        service_tier="auto", parallel_tool_calls=True, modalities=["text"], safety_identifier="s", prompt_cache_key="k",
    )  # fmt: skip
    assert answer.choices[0].message.content == expected
