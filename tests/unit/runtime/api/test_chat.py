"""Cached prefixes and chats: results equal generation from the whole prompt, and chat templates equal transformers'."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.concurrent_calls import side_by_side
from support.toy_models import END_ID, LETTERS, START_ID, Toy, letters, with_manifest
from tokenizers import Tokenizer, decoders, models, processors

from tformer_runtime import InputError, MemoryBudgetError, MissingExtraError, Model, OptionError, UnsupportedCallError

KINDS = {
    "gqa": Toy(encoder=False, seed=5),
    "pair": Toy(encoder=False, seed=9, attention="scatter-pair", layers=2),
    "carries": Toy(encoder=False, seed=5, carries=True),
}
OPTION_SETS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"temperature": 1.2, "seed": 3, "num_return_sequences": 2},
    "penalty": {"repetition_penalty": 1.8},
    "ngrams": {"no_repeat_ngram_size": 2},
    "beams-ngrams": {"num_beams": 2, "no_repeat_ngram_size": 2, "bad_words_ids": [[4, 5], [6, 7, 8]]},
    "prefix": {"forced_prefix": "ab", "top_logprobs": 2},
    "regex": {"regex": "[a-f]{3,9}"},
}


@pytest.fixture(scope="module", params=list(KINDS))
def model(request, tmp_path_factory):
    return Model.load(KINDS[request.param].write(tmp_path_factory.mktemp("chat") / "toy.onnx"), "cpu", threads=1)


def assert_same(actual, expected):
    """Assert that two results and their alternatives are equal up to rounding."""
    for a, b in zip((actual, *actual.alternatives), (expected, *expected.alternatives), strict=True):
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4)
        assert a.score == pytest.approx(b.score, abs=1e-4)
        assert [len(top) for top in a.top_logprobs] == [len(top) for top in b.top_logprobs]


def ids_of(text):
    return letters().encode(text).ids


@pytest.mark.parametrize("option_set", list(OPTION_SETS))
def test_generation_after_a_prefix_matches_the_whole_prompt(model, option_set):
    options = {"max_new_tokens": 12, **OPTION_SETS[option_set]}
    prefix = model.cache_prefix("hello")
    assert prefix.ids.tolist() == [START_ID, *ids_of("hello")]
    for word in ("world", "a", "helloworld"):
        whole = model.generate("hello" + word, **options)
        assert_same(model.generate(word, prefix=prefix, **options), whole)
        assert_same(model.generate(ids_of(word), prefix=prefix, **options), whole)
        assert_same(model.generate({"tgt": word}, prefix=prefix, **options), whole)


@pytest.mark.parametrize("option_set", ["greedy", "beams", "ngrams", "prefix"])
def test_batch_after_a_prefix_matches_the_whole_prompts(model, option_set):
    options = {"max_new_tokens": 9, **OPTION_SETS[option_set]}
    words = ["world", "a", "mississippi", "zz", "transformer", "onnx", "b"]
    prefix = model.cache_prefix("hello")
    results = model.generate_batch(words, batch_size=2, prefix=prefix, **options)
    for word, result in zip(words, results, strict=True):
        assert_same(result, model.generate("hello" + word, **options))


def test_stream_after_a_prefix_matches_the_whole_prompt(model):
    prefix = model.cache_prefix("hello")
    pieces = list(model.stream("you", max_new_tokens=9, prefix=prefix))
    assert len(pieces) > 1
    assert "".join(pieces) == model.generate("helloyou", max_new_tokens=9).text


def test_prefix_of_ids_may_end_at_any_position(model):
    whole = [7, 5, 9, 9, 4, 3]
    expected = model.generate(whole, max_new_tokens=8)
    for cut in range(1, len(whole)):
        assert_same(model.generate(whole[cut:], max_new_tokens=8, prefix=model.cache_prefix(whole[:cut])), expected)


def test_hidden_states_after_a_prefix_match_the_whole_prompt(tmp_path):
    toy = Toy(encoder=False, extras=True, seed=3)
    model = Model.load(toy.write(tmp_path / "toy.onnx"), "cpu", threads=1)
    whole = model.generate("helloab", hidden_states=True, max_new_tokens=6)
    result = model.generate("ab", hidden_states=True, max_new_tokens=6, prefix=model.cache_prefix("hello"))
    assert result.hidden_states["last"].shape == (len(result.token_ids), 16)
    np.testing.assert_allclose(result.hidden_states["last"], whole.hidden_states["last"], atol=1e-4)


def test_threads_share_one_prefix(model):
    prefix, actual = model.cache_prefix("hello"), {}

    def work(word):
        actual[word] = model.generate(word, prefix=prefix, max_new_tokens=10).token_ids

    words = ["you", "me", "them", "it"] * 3
    side_by_side(work, words)
    assert actual == {word: model.generate("hello" + word, max_new_tokens=10).token_ids for word in words}


def test_memory_of_a_prefix_is_freed_by_release_or_deletion(model):
    prefix = model.cache_prefix("hello")
    prefix_bytes = model.memory()["used_bytes"]
    assert prefix_bytes > 0
    model.generate("you", prefix=prefix, max_new_tokens=4)
    assert model.memory()["used_bytes"] == prefix_bytes
    prefix.release()
    assert model.memory()["used_bytes"] == 0
    for call in (model.generate, lambda *a, **k: next(model.generate_batch([*a], **k))):
        with pytest.raises(UnsupportedCallError, match="the prefix has been released and cannot be continued"):
            call("you", prefix=prefix)
    deleted = model.cache_prefix("hello")
    assert model.memory()["used_bytes"] == prefix_bytes
    del deleted
    gc.collect()
    assert model.memory()["used_bytes"] == 0


def test_prefix_released_during_a_batch_ends_the_batch(model):
    prefix = model.cache_prefix("hello")
    results = model.generate_batch(["a", "b"], prefix=prefix, batch_size=1, max_new_tokens=3)
    next(results)
    prefix.release()
    with pytest.raises(UnsupportedCallError, match="has been released"):
        next(results)


def test_invalid_prefixes_are_refused(model, tmp_path):
    with pytest.raises(InputError, match="65 tokens are more than the 64"):
        model.cache_prefix("a" * 64)
    with pytest.raises(InputError, match="the input is empty"):
        model.generate("", prefix=model.cache_prefix("a"))
    with pytest.raises(InputError, match="the input, with the 61 before it, is 64 tokens long and the model holds 64"):
        model.generate("abc", prefix=model.cache_prefix("a" * 60))
    assert len(model.generate("ab", prefix=model.cache_prefix("a" * 60)).token_ids) == 1
    other = Model.load(Toy(encoder=False).write(tmp_path / "other.onnx"), "cpu")
    with pytest.raises(InputError, match="the prefix was read by another model"):
        other.generate("a", prefix=model.cache_prefix("a"))
    encoder = Model.load(Toy().write(tmp_path / "encoder.onnx"), "cpu")
    for call, name in ((lambda: encoder.cache_prefix("a"), "prefix"), (encoder.chat, "chat")):
        with pytest.raises(UnsupportedCallError, match=f"in an encoder, all at once: it cannot {name}"):
            call()
    assert model.memory()["used_bytes"] == 0


def definition_with_special_tokens(before, after):
    """Return the definition of a tokenizer that adds special tokens before and after a text."""
    tokenizer = letters()
    template = f"{before} $A {after}".strip()
    tokenizer.post_processor = processors.TemplateProcessing(
        template, special_tokens=[(token, LETTERS.index(token)) for token in template.split() if token != "$A"]
    )
    return tokenizer.to_str()


@pytest.mark.parametrize(("before", "after"), [("<s>", ""), ("", "</s>"), ("<s>", "</s>")])
def test_special_tokens_are_added_once(tmp_path, before, after):
    toy = Toy(encoder=False, seed=5, start=())
    definition = definition_with_special_tokens(before, after)
    path = with_manifest(toy.write(tmp_path / "a.onnx"), tmp_path / "b.onnx", tokenizers=(definition,))
    model = Model.load(path, "cpu")
    first = [LETTERS.index(before)] if before else []
    last = [LETTERS.index(after)] if after else []
    prefix = model.cache_prefix("hello")
    assert prefix.ids.tolist() == first + ids_of("hello")
    assert_same(
        model.generate("you", prefix=prefix, max_new_tokens=5),
        model.generate(first + ids_of("helloyou") + last, max_new_tokens=5),
    )
    chat = model.chat()
    expected: list[int] = []
    for word in ("hello", "you"):
        expected += (first if word == "hello" else []) + ids_of(word) + last
        result = chat.send(word, max_new_tokens=5)
        assert_same(result, model.generate(expected, max_new_tokens=5))
        expected += result.token_ids


# Conversations without a template

MESSAGES = st.one_of(st.text("abcxyz", min_size=1, max_size=8), st.lists(st.integers(3, 28), min_size=1, max_size=5))
ACTIONS = st.lists(st.one_of(MESSAGES, st.integers(0, 2)), min_size=1, max_size=7)


@settings(max_examples=25)
@given(actions=ACTIONS, option_set=st.sampled_from(list(OPTION_SETS)))
def test_turn_matches_generation_from_the_whole_conversation(model, actions, option_set):
    """actions: messages, and numbers of turns to rewind."""
    chat, turns, options = model.chat(), [[]], {"max_new_tokens": 6, **OPTION_SETS[option_set]}
    for action in actions:
        if isinstance(action, int):
            num_turns = min(action, len(turns) - 1)
            chat.rewind(num_turns)
            turns = turns[: len(turns) - num_turns]
            continue
        before = turns[-1] or ([START_ID] if isinstance(action, str) else [])
        whole = before + (ids_of(action) if isinstance(action, str) else action)
        if len(whole) + 8 >= 64:
            break
        result = chat.send(action, **options)
        assert_same(result, model.generate(whole, **options))
        turns.append([*whole, *result.token_ids])
        assert chat.turns[-1].ids.tolist() == turns[-1]
        assert len(chat.turns) == len(turns) - 1
    chat.release()
    assert model.memory()["used_bytes"] == 0


def test_turn_continues_with_the_ids_of_ended_and_stopped_answers(model):
    chat = model.chat()
    ended = chat.send("hello", begin_suppress_tokens=[END_ID], logit_bias={END_ID: 50.0})
    assert ended.finish_reason == "end"
    assert len(ended.token_ids) == 2
    stop = model.generate(chat.turns[-1].ids.tolist() + ids_of("you"), max_new_tokens=6, suppress_tokens=[END_ID]).text[
        2:4
    ]
    stopped = chat.send("you", stop_strings=stop, suppress_tokens=[END_ID], max_new_tokens=6)
    assert stopped.finish_reason == "stop"
    assert stop not in stopped.text
    whole = [START_ID, *ids_of("hello"), *ended.token_ids, *ids_of("you"), *stopped.token_ids, *ids_of("me")]
    assert_same(chat.send("me", max_new_tokens=5), model.generate(whole, max_new_tokens=5))


def test_rewind_removes_turns(model):
    chat, other = model.chat(), model.chat()
    for each in (chat, other):
        each.send("hello", max_new_tokens=4)
    chat.send("wrong", max_new_tokens=7)
    chat.send("worse", max_new_tokens=7)
    chat.rewind(2)
    for word in ("right", "r"):
        assert_same(chat.send(word, max_new_tokens=7), other.send(word, max_new_tokens=7))
    chat.rewind(3)
    assert_same(chat.send("again", max_new_tokens=5), model.generate("again", max_new_tokens=5))
    for turns in (2, -1):
        with pytest.raises(OptionError, match=f"there are 1 turns, and {turns} cannot be taken back"):
            chat.rewind(turns)


def test_too_long_conversation_is_refused(model):
    chat = model.chat()
    chat.send("a" * 50, max_new_tokens=5, suppress_tokens=[END_ID])
    with pytest.raises(InputError, match="the conversation is 64 tokens long and the model holds 64: rewind it, or"):
        chat.send("b" * 8)
    result = chat.send("b" * 6, suppress_tokens=[END_ID])
    assert len(result.token_ids) == 2
    chat.rewind()
    assert len(chat.send("b", suppress_tokens=[END_ID]).token_ids) == 7


def test_failed_turn_leaves_the_conversation_unchanged(model):
    def fail(ids, logits):
        raise ZeroDivisionError

    chat, other = model.chat(), model.chat()
    for each in (chat, other):
        each.send("hello", max_new_tokens=4)
    failures = [
        (InputError, "é", {}),
        (InputError, "", {}),
        (InputError, [99], {}),
        (InputError, {"text": "a"}, {}),
        (OptionError, "you", {"beem_size": 2}),
        (OptionError, "you", {"num_return_sequences": 2}),
        (OptionError, "you", {"suppress_tokens": [99]}),
        (OptionError, "you", {"suppress_tokens": range(29)}),
        (ZeroDivisionError, "you", {"logits_processor": fail}),
    ]
    for error, message, options in failures:
        with pytest.raises(error):
            chat.send(message, **options)
    assert len(chat.turns) == 1
    for word in ("you", "me"):
        assert_same(chat.send(word, max_new_tokens=4), other.send(word, max_new_tokens=4))


def test_turn_that_exceeds_the_memory_limit_is_refused(model):
    limited = Model(model.engine, max_memory=30_000)
    chat = limited.chat()
    first = chat.send("hello", max_new_tokens=4)
    with pytest.raises(MemoryBudgetError, match=r"may need [\d,]+ bytes of cache, but max_memory allows 30,000"):
        chat.send("you", num_beams=5, max_new_tokens=40)
    assert_same(
        chat.send("you", max_new_tokens=4),
        model.generate([START_ID, *ids_of("hello"), *first.token_ids, *ids_of("you")], max_new_tokens=4),
    )
    chat.release()
    assert limited.memory()["used_bytes"] == 0
    with pytest.raises(UnsupportedCallError, match="has been released"):
        chat.send("you")


def test_system_message_requires_a_template(model):
    with pytest.raises(OptionError, match="no chat template for a system message: begin the first message with it"):
        model.chat(system="be brief")


# Conversations with a template

ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PLAIN = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system is defined %}
            {{- '<|system|>' + system }}
        {%- endif %}
        {{- '<|user|>' + message['content'] | trim }}
    {%- else %}
        {{- '<|assistant|>' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
RICH = """\
{%- if tools is not none or documents is not none %}<|system|>{% endif %}
{%- set ns = namespace(count=0, last='') %}
{%- macro shown(role, content) %}<|{{ role }}|>{{ content }}{% endmacro %}
{%- for message in messages %}
    {%- if message.content | length > 30 %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'assistant' %}
{%- generation %}{{ shown(message.role, message.content) }}{{ eos_token }}{% endgeneration %}
    {%- else %}
{{- shown(message.role, message.content) }}
    {%- endif %}
    {%- if ns.count > 8 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if strftime_now('%Y') | int > 2000 and {'b': '<é>'} | tojson == '{"b": "<é>"}' %}<|assistant|>{% endif %}
"""
TEMPLATES = {"plain": PLAIN, "strict": STRICT, "rich": RICH}


def pair_tokenizer():
    """Return a tokenizer of letters and pairs of letters, and its vocabulary size.

    A model may generate two letters that the tokenizer encodes as a pair, so ids of a text are not unique.
    """
    letter_pairs = ["ab", "an", "er", "in", "he", "xy", "ca", "ba", "bb"]
    names = [*LETTERS, *letter_pairs, *ROLES]
    merges = [(pair[0], pair[1]) for pair in letter_pairs]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*LETTERS[:3], *ROLES])
    return tokenizer, len(names)


def model_and_tokenizer(tmp_path, template, **changes):
    """Return a model with a chat template, and transformers' tokenizer with the same template."""
    tokenizer, size = pair_tokenizer()
    toy = Toy(encoder=False, vocabulary=size, seed=4, max_length=96, start=(), sharpness=1.5)
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    manifest = {"tokenizers": (tokenizer.to_str(),), "chat_template": template, "chat_tokens": special_tokens}
    path = with_manifest(toy.write(tmp_path / "plain.onnx"), tmp_path / "chat.onnx", **(manifest | changes))
    transformers_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)
    transformers_tokenizer.chat_template = template
    return Model.load(path, "cpu", threads=1), transformers_tokenizer


@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_chat_prompt_matches_transformers_chat_template(tmp_path, name, system):
    model, tokenizer = model_and_tokenizer(tmp_path, TEMPLATES[name])
    system = system and system.replace(" ", "")
    chat = model.chat(system=system)
    messages = [{"role": "system", "content": system}] if system else []
    num_ambiguous = 0  # answers whose ids are not the encoding of their text
    for word in ("hello", "cabana", "inner", "bb"):
        messages.append({"role": "user", "content": word})
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        result = chat.send(word, max_new_tokens=8)
        assert chat.turns[-1].ids.tolist() == [*expected, *result.token_ids]
        assert_same(result, model.generate(expected, max_new_tokens=8))
        messages.append({"role": "assistant", "content": result.text})
        num_ambiguous += tokenizer.encode(result.text, add_special_tokens=False) != list(result.token_ids)
    assert num_ambiguous
    chat.rewind(2)
    messages = [*messages[:-4], {"role": "user", "content": "again"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert_same(chat.send("again", max_new_tokens=8), model.generate(expected, max_new_tokens=8))


TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}<|system|>{{ tool.function.name }}{{ tool.function.parameters.title }}<|end|>"
    "{% endfor %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.word }}{% endfor %}"
    "<|end|>{% endfor %}<|assistant|>"
)


def test_prompt_with_tools_matches_transformers_chat_template(tmp_path):
    model, tokenizer = model_and_tokenizer(tmp_path, TOOLS_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "rhyme", "description": "d", "parameters": {"title": "word"}}}]
    messages = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "rhyme", "arguments": {"word": "cab"}}}],
        },
        {"role": "user", "content": "inner"},
    ]
    for functions in (tools, None):
        expected = tokenizer.apply_chat_template(messages, tools=functions, add_generation_prompt=True)["input_ids"]
        assert model.prompt(messages, tools=functions).tolist() == expected
    plain, _ = model_and_tokenizer(tmp_path, PLAIN)
    with pytest.raises(InputError, match="the chat template has no place for tools: leave them out"):
        plain.prompt("hello", tools=tools)
    assert plain.prompt("hello", tools=[]).tolist() == plain.prompt("hello").tolist()


@pytest.mark.parametrize("change", ["send", "stream", "rewind"])
def test_stream_ends_when_the_conversation_changes(change, tmp_path):
    """Otherwise its turn would come after one that it does not know."""
    model, _ = model_and_tokenizer(tmp_path, PLAIN)
    chat = model.chat()
    chat.send("hello", max_new_tokens=4)
    pieces = chat.stream("again", max_new_tokens=8)
    next(pieces)
    if change == "rewind":
        chat.rewind()
    elif change == "send":
        chat.send("other", max_new_tokens=4)
    else:
        list(chat.stream("other", max_new_tokens=4))
    turns = list(chat.turns)
    with pytest.raises(UnsupportedCallError, match="the conversation has changed since this stream began"):
        list(pieces)
    assert chat.turns == turns
    assert list(pieces) == []


def test_closed_stream_adds_no_turn(tmp_path):
    model, _ = model_and_tokenizer(tmp_path, PLAIN)
    chat, other = model.chat(), model.chat()
    pieces = chat.stream("hello", max_new_tokens=8)
    next(pieces)
    pieces.close()
    assert chat.turns == []
    expected = other.send("hello", max_new_tokens=8)
    assert "".join(chat.stream("hello", max_new_tokens=8)) == expected.text
    assert_same(chat.turns[0].result, expected)
    assert_same(chat.send("inner", max_new_tokens=8), other.send("inner", max_new_tokens=8))
    with pytest.raises(OptionError, match="num_return_sequences must be 1 for a stream"):
        next(chat.stream("hello", num_return_sequences=2, num_beams=2))


def test_prompt_requires_a_template(tmp_path):
    model, _ = model_and_tokenizer(tmp_path, None)
    with pytest.raises(UnsupportedCallError, match="the file has no chat template: export the model from a folder"):
        model.prompt("hello")


def test_options_apply_to_turns_with_a_template(tmp_path):
    model, tokenizer = model_and_tokenizer(tmp_path, PLAIN)
    chat, messages = model.chat(), []
    turns = [
        {"forced_prefix": "he", "top_logprobs": 1},
        {"num_beams": 3, "num_return_sequences": 3},
        {"stop_strings": ["a", "e"], "temperature": 1.0, "seed": 2},
        {"regex": "(ab|cd)+", "repetition_penalty": 1.3},
    ]
    for options in turns:
        messages.append({"role": "user", "content": "hello"})
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        result = chat.send("hello", max_new_tokens=8, **options)
        assert_same(result, model.generate(expected, max_new_tokens=8, **options))
        messages.append({"role": "assistant", "content": result.text})


def test_exception_of_a_template_is_an_input_error(tmp_path):
    template = STRICT.replace("'roles must alternate'", "message['content']").replace("!=", "==")
    chat = model_and_tokenizer(tmp_path, template)[0].chat()
    with pytest.raises(InputError, match="the chat template refuses: hello"):
        chat.send("hello")
    for message in ([5, 6], None, {"tgt": "a"}):
        with pytest.raises(InputError, match="a chat template takes text"):
            chat.send(message)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "cannot be read: Unexpected end of template"),
        ("{{ messages | unheard }}", "cannot be read: No filter named 'unheard'"),
        ("{{ messages[0].content.wrong.worse }}", "cannot be filled in: 'str object' has no attribute 'wrong'"),
        ("{{ messages[0].content + 3 }}", "cannot be filled in: can only concatenate str"),
        ("{{ messages.append(3) }}", "cannot be filled in: access to attribute 'append' of 'list' object is unsafe."),
        ("{{ ''.__class__.__mro__ }}", "cannot be filled in: access to attribute '__class__' of 'str' object is unsa"),
        ("{{ 1 / 0 }}", "cannot be filled in: division by zero"),
        ("", "the input is empty"),
    ],
)
def test_invalid_templates_are_refused(tmp_path, template, message):
    model, _ = model_and_tokenizer(tmp_path, template or "{# nothing #}")
    with pytest.raises(InputError, match=message):
        model.chat().send("hello")


def test_missing_jinja2_error_names_the_extra(tmp_path, monkeypatch):
    model, _ = model_and_tokenizer(tmp_path, PLAIN)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"chat templates need jinja2: pip install 'tformer\[chat\]'"):
        model.chat()


def test_template_requires_a_tokenizer(tmp_path):
    model, _ = model_and_tokenizer(tmp_path, PLAIN, tokenizers=(), tokenizer_of={})
    with pytest.raises(InputError, match="the file has no tokenizer for tgt: give ids"):
        model.chat().send("hello")
