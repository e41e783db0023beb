"""What has been read stays read: whatever goes on from it is what the whole gives."""

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

KINDS = {"gqa": Toy(encoder=False, seed=5), "pair": Toy(encoder=False, seed=9, attention="scatter-pair", layers=2)}
WAYS = {
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


def same(one, other):
    """Two results, and their alternatives."""
    for a, b in zip((one, *one.alternatives), (other, *other.alternatives), strict=True):
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4)
        assert a.score == pytest.approx(b.score, abs=1e-4)
        assert [len(places) for places in a.top_logprobs] == [len(places) for places in b.top_logprobs]


def ids_of(text):
    return letters().encode(text).ids


@pytest.mark.parametrize("way", list(WAYS))
def test_what_follows_a_prefix_is_what_follows_the_whole(model, way):
    options = {"max_new_tokens": 12, **WAYS[way]}
    prefix = model.cache_prefix("hello")
    assert prefix.ids.tolist() == [START_ID, *ids_of("hello")]
    for word in ("world", "a", "helloworld"):
        whole = model.generate("hello" + word, **options)
        same(model.generate(word, prefix=prefix, **options), whole)
        same(model.generate(ids_of(word), prefix=prefix, **options), whole)
        same(model.generate({"tgt": word}, prefix=prefix, **options), whole)


@pytest.mark.parametrize("way", ["greedy", "beams", "ngrams", "prefix"])
def test_a_batch_after_a_prefix(model, way):
    options = {"max_new_tokens": 9, **WAYS[way]}
    words = ["world", "a", "mississippi", "zz", "transformer", "onnx", "b"]
    prefix = model.cache_prefix("hello")
    results = model.generate_batch(words, batch_size=2, prefix=prefix, **options)
    for word, result in zip(words, results, strict=True):
        same(result, model.generate("hello" + word, **options))


def test_a_stream_after_a_prefix(model):
    prefix = model.cache_prefix("hello")
    pieces = list(model.stream("you", max_new_tokens=9, prefix=prefix))
    assert len(pieces) > 1
    assert "".join(pieces) == model.generate("helloyou", max_new_tokens=9).text


def test_a_prefix_of_ids_and_one_that_ends_in_the_middle(model):
    whole = [7, 5, 9, 9, 4, 3]
    expected = model.generate(whole, max_new_tokens=8)
    for cut in range(1, len(whole)):
        same(model.generate(whole[cut:], max_new_tokens=8, prefix=model.cache_prefix(whole[:cut])), expected)


def test_hidden_states_after_a_prefix(tmp_path):
    toy = Toy(encoder=False, extras=True, seed=3)
    model = Model.load(toy.write(tmp_path / "toy.onnx"), "cpu", threads=1)
    whole = model.generate("helloab", hidden_states=True, max_new_tokens=6)
    result = model.generate("ab", hidden_states=True, max_new_tokens=6, prefix=model.cache_prefix("hello"))
    assert result.hidden_states["last"].shape == (len(result.token_ids), 16)
    np.testing.assert_allclose(result.hidden_states["last"], whole.hidden_states["last"], atol=1e-4)


def test_threads_share_a_prefix(model):
    prefix, seen = model.cache_prefix("hello"), {}

    def work(word):
        seen[word] = model.generate(word, prefix=prefix, max_new_tokens=10).token_ids

    words = ["you", "me", "them", "it"] * 3
    side_by_side(work, words)
    assert seen == {word: model.generate("hello" + word, max_new_tokens=10).token_ids for word in words}


def test_the_memory_of_a_prefix(model):
    prefix = model.cache_prefix("hello")
    held = model.memory()["held"]
    assert held > 0
    model.generate("you", prefix=prefix, max_new_tokens=4)
    assert model.memory()["held"] == held
    prefix.release()
    assert model.memory()["held"] == 0
    for call in (model.generate, lambda *a, **k: next(model.generate_batch([*a], **k))):
        with pytest.raises(UnsupportedCallError, match="the prefix has been released, and nothing can follow it"):
            call("you", prefix=prefix)
    forgotten = model.cache_prefix("hello")
    assert model.memory()["held"] == held
    del forgotten
    gc.collect()
    assert model.memory()["held"] == 0


def test_a_prefix_that_is_released_while_it_is_used(model):
    prefix = model.cache_prefix("hello")
    results = model.generate_batch(["a", "b"], prefix=prefix, batch_size=1, max_new_tokens=3)
    next(results)
    prefix.release()
    with pytest.raises(UnsupportedCallError, match="has been released"):
        next(results)


def test_prefixes_that_cannot_be(model, tmp_path):
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
    assert model.memory()["held"] == 0


def surrounded(before, after):
    """A tokenizer that puts special tokens around a text."""
    tokenizer = letters()
    around = f"{before} $A {after}".strip()
    tokenizer.post_processor = processors.TemplateProcessing(
        around, special_tokens=[(token, LETTERS.index(token)) for token in around.split() if token != "$A"]
    )
    return tokenizer.to_str()


@pytest.mark.parametrize(("before", "after"), [("<s>", ""), ("", "</s>"), ("<s>", "</s>")])
def test_special_tokens_come_once(tmp_path, before, after):
    toy = Toy(encoder=False, seed=5, start=())
    made = with_manifest(toy.write(tmp_path / "a.onnx"), tmp_path / "b.onnx", tokenizers=(surrounded(before, after),))
    model = Model.load(made, "cpu")
    first = [LETTERS.index(before)] if before else []
    last = [LETTERS.index(after)] if after else []
    prefix = model.cache_prefix("hello")
    assert prefix.ids.tolist() == first + ids_of("hello")
    same(
        model.generate("you", prefix=prefix, max_new_tokens=5),
        model.generate(first + ids_of("helloyou") + last, max_new_tokens=5),
    )
    chat = model.chat()
    expected: list[int] = []
    for word in ("hello", "you"):
        expected += (first if word == "hello" else []) + ids_of(word) + last
        result = chat.send(word, max_new_tokens=5)
        same(result, model.generate(expected, max_new_tokens=5))
        expected += result.token_ids


# -- conversations without a template --------------------------------------------------------------------------------

MESSAGES = st.one_of(st.text("abcxyz", min_size=1, max_size=8), st.lists(st.integers(3, 28), min_size=1, max_size=5))
ACTS = st.lists(st.one_of(MESSAGES, st.integers(0, 2)), min_size=1, max_size=7)


@settings(max_examples=25)
@given(acts=ACTS, way=st.sampled_from(list(WAYS)))
def test_a_turn_is_what_the_whole_conversation_gives(model, acts, way):
    """Messages, and numbers of turns that are taken back."""
    chat, turns, options = model.chat(), [[]], {"max_new_tokens": 6, **WAYS[way]}
    for act in acts:
        if isinstance(act, int):
            act = min(act, len(turns) - 1)
            chat.rewind(act)
            turns = turns[: len(turns) - act]
            continue
        before = turns[-1] or ([START_ID] if isinstance(act, str) else [])
        whole = before + (ids_of(act) if isinstance(act, str) else act)
        if len(whole) + 8 >= 64:
            break
        result = chat.send(act, **options)
        same(result, model.generate(whole, **options))
        turns.append([*whole, *result.token_ids])
        assert chat.turns[-1].ids.tolist() == turns[-1]
        assert len(chat.turns) == len(turns) - 1
    chat.release()
    assert model.memory()["held"] == 0


def test_an_answer_that_ended_or_was_stopped_goes_on_with_its_ids(model):
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
    same(chat.send("me", max_new_tokens=5), model.generate(whole, max_new_tokens=5))


def test_rewinding_is_as_if_the_turns_had_not_been(model):
    chat, other = model.chat(), model.chat()
    for each in (chat, other):
        each.send("hello", max_new_tokens=4)
    chat.send("wrong", max_new_tokens=7)
    chat.send("worse", max_new_tokens=7)
    chat.rewind(2)
    for word in ("right", "r"):
        same(chat.send(word, max_new_tokens=7), other.send(word, max_new_tokens=7))
    chat.rewind(3)
    same(chat.send("anew", max_new_tokens=5), model.generate("anew", max_new_tokens=5))
    for turns in (2, -1):
        with pytest.raises(OptionError, match=f"there are 1 turns, and {turns} cannot be taken back"):
            chat.rewind(turns)


def test_a_conversation_that_is_too_long(model):
    chat = model.chat()
    chat.send("a" * 50, max_new_tokens=5, suppress_tokens=[END_ID])
    with pytest.raises(InputError, match="the conversation is 64 tokens long and the model holds 64: rewind it, or"):
        chat.send("b" * 8)
    result = chat.send("b" * 6, suppress_tokens=[END_ID])
    assert len(result.token_ids) == 2
    chat.rewind()
    assert len(chat.send("b", suppress_tokens=[END_ID]).token_ids) == 7


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(model):
    def spoil(ids, logits):
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
        (ZeroDivisionError, "you", {"logits_processor": spoil}),
    ]
    for kind, message, options in failures:
        with pytest.raises(kind):
            chat.send(message, **options)
    assert len(chat.turns) == 1
    for word in ("you", "me"):
        same(chat.send(word, max_new_tokens=4), other.send(word, max_new_tokens=4))


def test_a_turn_for_which_there_is_no_memory(model):
    limited = Model(model.engine, max_memory=30_000)
    chat = limited.chat()
    first = chat.send("hello", max_new_tokens=4)
    with pytest.raises(MemoryBudgetError, match=r"may need [\d,]+ bytes of cache and max_memory allows 30,000"):
        chat.send("you", num_beams=5, max_new_tokens=40)
    same(
        chat.send("you", max_new_tokens=4),
        model.generate([START_ID, *ids_of("hello"), *first.token_ids, *ids_of("you")], max_new_tokens=4),
    )
    chat.release()
    assert limited.memory()["held"] == 0
    with pytest.raises(UnsupportedCallError, match="has been released"):
        chat.send("you")


def test_a_system_message_needs_a_template(model):
    with pytest.raises(OptionError, match="no chat template for a system message: begin the first message with it"):
        model.chat(system="be brief")


# -- with a template -------------------------------------------------------------------------------------------------

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


def spelling():
    """Letters, and pairs of letters that a text is read as, though they may be generated one by one."""
    pairs = ["ab", "an", "er", "in", "he", "xy", "ca", "ba", "bb"]
    names = [*LETTERS, *pairs, *ROLES]
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*LETTERS[:3], *ROLES])
    return tokenizer, len(names)


def conversing(tmp_path, template, **changes):
    """A model with a chat template, and transformers' tokenizer with the same."""
    tokenizer, size = spelling()
    toy = Toy(encoder=False, vocabulary=size, seed=4, max_length=96, start=(), sharpness=1.5)
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    manifest = {"tokenizers": (tokenizer.to_str(),), "chat_template": template, "chat_tokens": named, **changes}
    path = with_manifest(toy.write(tmp_path / "plain.onnx"), tmp_path / "chat.onnx", **manifest)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    theirs.chat_template = template
    return Model.load(path, "cpu", threads=1), theirs


@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_conversation_is_put_into_the_template_as_transformers_does(tmp_path, name, system):
    model, theirs = conversing(tmp_path, TEMPLATES[name])
    system = system and system.replace(" ", "")
    chat = model.chat(system=system)
    messages = [{"role": "system", "content": system}] if system else []
    respelt = 0
    for word in ("hello", "cabana", "inner", "bb"):
        messages.append({"role": "user", "content": word})
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        result = chat.send(word, max_new_tokens=8)
        assert chat.turns[-1].ids.tolist() == [*expected, *result.token_ids]
        same(result, model.generate(expected, max_new_tokens=8))
        messages.append({"role": "assistant", "content": result.text})
        respelt += theirs.encode(result.text, add_special_tokens=False) != list(result.token_ids)
    assert respelt
    chat.rewind(2)
    messages = [*messages[:-4], {"role": "user", "content": "anew"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    same(chat.send("anew", max_new_tokens=8), model.generate(expected, max_new_tokens=8))


def test_a_stream_that_is_left_is_no_turn(tmp_path):
    model, _ = conversing(tmp_path, PLAIN)
    chat, other = model.chat(), model.chat()
    pieces = chat.stream("hello", max_new_tokens=8)
    next(pieces)
    pieces.close()
    assert chat.turns == []
    expected = other.send("hello", max_new_tokens=8)
    assert "".join(chat.stream("hello", max_new_tokens=8)) == expected.text
    same(chat.turns[0].result, expected)
    same(chat.send("inner", max_new_tokens=8), other.send("inner", max_new_tokens=8))
    with pytest.raises(OptionError, match="num_return_sequences must be 1 for a stream"):
        next(chat.stream("hello", num_return_sequences=2, num_beams=2))


def test_a_prompt_needs_a_template(tmp_path):
    model, _ = conversing(tmp_path, None)
    with pytest.raises(UnsupportedCallError, match="the file has no chat template: export the model from a folder"):
        model.prompt("hello")


def test_options_of_a_turn_in_a_template(tmp_path):
    model, theirs = conversing(tmp_path, PLAIN)
    chat, messages = model.chat(), []
    turns = [
        {"forced_prefix": "he", "top_logprobs": 1},
        {"num_beams": 3, "num_return_sequences": 3},
        {"stop_strings": ["a", "e"], "temperature": 1.0, "seed": 2},
        {"regex": "(ab|cd)+", "repetition_penalty": 1.3},
    ]
    for options in turns:
        messages.append({"role": "user", "content": "hello"})
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        result = chat.send("hello", max_new_tokens=8, **options)
        same(result, model.generate(expected, max_new_tokens=8, **options))
        messages.append({"role": "assistant", "content": result.text})


def test_what_a_template_refuses_is_said(tmp_path):
    template = STRICT.replace("'roles must alternate'", "message['content']").replace("!=", "==")
    chat = conversing(tmp_path, template)[0].chat()
    with pytest.raises(InputError, match="the chat template refuses: hello"):
        chat.send("hello")
    for other in ([5, 6], None, {"tgt": "a"}):
        with pytest.raises(InputError, match="a chat template takes text"):
            chat.send(other)


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
def test_templates_that_cannot_be_used(tmp_path, template, message):
    model, _ = conversing(tmp_path, template or "{# nothing #}")
    with pytest.raises(InputError, match=message):
        model.chat().send("hello")


def test_a_template_needs_jinja2(tmp_path, monkeypatch):
    model, _ = conversing(tmp_path, PLAIN)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"chat templates need jinja2: pip install 'tformer\[chat\]'"):
        model.chat()


def test_a_template_in_a_file_without_a_tokenizer(tmp_path):
    model, _ = conversing(tmp_path, PLAIN, tokenizers=(), tokenizer_of={})
    with pytest.raises(InputError, match="the file has no tokenizer for tgt: give ids"):
        model.chat().send("hello")
