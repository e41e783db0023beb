"""Constrained generation: any choice among the allowed tokens leads to a text that satisfies the constraint."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.concurrent_calls import side_by_side
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from examples.training import words
from examples.training.g2p import target_tokenizer
from tformer_runtime.base.errors import MissingExtraError, OptionError
from tformer_runtime.decoding.rules.constraints import Grammar, Guide

TEXT = [
    "the cat sat on the mat, and the other cat ate it.",
    "She said: yes! no? maybe; (1 + 2) * 34 / 567 - 89 = 0.5",
    '{"name": "Ann", "age": 12, "tags": ["a", "b"], "ok": true, "no": false, "nil": null}',
    "grün café naïve — über “quoted” it's don't I'm a_b [c] <d> \\ @ # % ^ & ~ ` |",
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789",
]
END = "</s>"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([" and the cat", "é"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer as Llama has it: a text begins with ▁, which decoding removes."""
    pieces = ["▁", "▁▁", "t", "h", "e", "a", "▁t", "▁th", "▁the", "th", "he", "▁a", "é", "1", '"', "▁c", "at"]
    merges = [("▁", "▁"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("t", "h"), ("h", "e"), ("▁", "a"), ("a", "t")]
    names = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "c", "▁c"]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", END])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=180, special_tokens=["<unk>", END], show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=["[UNK]", END], show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def letters() -> Tokenizer:
    """Return a tokenizer of single characters."""
    vocabulary = {END: 0} | {c: i for i, c in enumerate(sorted(set("".join(TEXT)) - {"Z"}), start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def phonemes() -> Tokenizer:
    return Tokenizer.from_str(target_tokenizer())


SUBWORDS = [byte_level, byte_fallback, unigram, metaspace, word_piece, letters]
COMPLETE = [byte_level, byte_fallback]


class Model:
    """A tokenizer, and a vocabulary that may have another size."""

    def __init__(self, tokenizer: Tokenizer, more: int = 5) -> None:
        self.tokenizer, self.json = tokenizer, tokenizer.to_str()
        self.size = tokenizer.get_vocab_size() + more
        self.end = next(i for name in (END, "<eos>", "<end>") if (i := tokenizer.token_to_id(name)) is not None)

    def grammar(self, kind: str, definition: object) -> Grammar:
        return Grammar.compile(kind, definition, self.json, self.size, (self.end,))  # type: ignore[arg-type]

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def allowed(self, guide: Guide) -> list[int]:
        scores = np.zeros(self.size, np.float32)
        guide.mask(scores)
        assert set(np.unique(scores)) <= {0, -np.inf}
        return np.flatnonzero(scores == 0).tolist()

    def walk(self, guide: Guide, seed: int, max_tokens: int = 300) -> list[int]:
        """Choose at random to the end. After some steps closing tokens are preferred, so that the text ends."""
        rng, closing = np.random.default_rng(seed), self.closing()
        ids: list[int] = []
        for step in range(max_tokens):
            scores = rng.normal(size=self.size).astype(np.float32)
            scores += closing * (step > 20)
            guide.mask(scores)
            token = int(scores.argmax())
            assert scores[token] > -np.inf
            if token == self.end:
                return ids
            guide.accept(token)
            ids.append(token)
        raise AssertionError(f"no end: {self.decode(ids)!r}")

    @cache  # noqa: B019
    def closing(self) -> np.ndarray:
        scores = np.zeros(self.size, np.float32)
        for i in range(self.tokenizer.get_vocab_size()):
            text = self.decode([i]).strip().removeprefix("##")
            scores[i] = 9 * (text in list('"[}]),:')) or 6 * (len(text) == 1) + 2 * (text == "Z")
            scores[i] += 9 * (self.tokenizer.id_to_token(i) in ("Ġ", "▁", " "))
        scores[self.end] = 99
        return scores

    def texts(self, guide: Guide, ids: tuple[int, ...] = ()) -> Iterator[str]:
        """Return the texts of all sequences that a guide admits."""
        for token in self.allowed(guide):
            if token == self.end:
                yield self.decode(list(ids))
            else:
                child = guide.copy()
                child.accept(token)
                yield from self.texts(child, (*ids, token))

    def takes(self, grammar: Grammar, ids: list[int]) -> bool:
        """Return whether a sequence of ids may be generated and end."""
        guide = grammar.start()
        for token in ids:
            if token not in self.allowed(guide):
                return False
            guide.accept(token)
        return self.end in self.allowed(guide)


@cache
def model(make: Callable[[], Tokenizer]) -> Model:
    return Model(make())


CHOICES = ["the cat", "the mat", "cat", "the", "the other", "sat on it.", "don't", "a", "at", "ate"]
seeds = st.integers(0, 2**32 - 1)


def test_tokenizer_of_the_words_model_admits_the_choices():
    """Its scores are a Unigram model that names its unknown piece by number alone."""
    tokenizer = Tokenizer.from_str(words.tokenizer())
    m = Model(tokenizer, more=0)
    grammar = m.grammar("choices", ["cat", "rat", "speech"])
    assert set(m.texts(grammar.start())) == {"cat", "rat", "speech"}


@pytest.mark.parametrize("make", SUBWORDS)
def test_admitted_texts_equal_the_choices(make):
    m = model(make)
    choices = [c for c in CHOICES if c != "don't"] if make is word_piece else CHOICES  # decoding writes "don ' t"
    grammar = m.grammar("choices", choices[:6])
    assert set(m.texts(grammar.start())) == set(choices[:6])
    grammar = m.grammar("choices", choices)
    for choice in choices:
        assert m.takes(grammar, m.tokenizer.encode(choice, add_special_tokens=False).ids), choice
    assert not m.takes(grammar, m.tokenizer.encode("the ca", add_special_tokens=False).ids)


@pytest.mark.parametrize("choices", [["T R AE N S", "T R", "TH", "T"], ["", "AH"], ["D", "DH IY"]])
def test_words_joined_by_spaces_admit_the_choices(choices):
    m = model(phonemes)
    assert sorted(m.texts(m.grammar("choices", choices).start())) == sorted(choices)
    one = m.grammar("choices", ["TH"]).start()
    assert [m.decode([i]) for i in m.allowed(one)] == ["TH"]  # and not "T", its beginning
    either = m.grammar("regex", "T (Q|R)|S [Q]+|SH").start()
    assert {m.decode([i]) for i in m.allowed(either)} == {"T", "SH"}  # the vocabulary has no Q to continue with


def test_vocabulary_larger_than_an_automaton_is_refused():
    names = {END: 0} | {f"{a}{b}": i + 1 for i, (a, b) in enumerate((a, b) for a in "abcdefghij" for b in range(60))}
    tokenizer = Tokenizer(models.WordLevel(names))
    tokenizer.add_special_tokens([END])
    m = Model(tokenizer)
    for seed in range(5):
        text = m.decode(m.walk(m.grammar("regex", r"[a-c ]{1,2}\d+( [d-f]\d){0,3}").start(), seed))
        assert re.fullmatch(r"[a-c ]{1,2}\d+( [d-f]\d){0,3}", text)
    assert set(m.texts(m.grammar("choices", ["a1 b2", "a1", "a11"]).start())) == {"a1 b2", "a1", "a11"}


REGEXES = [
    r"[a-c]{2,5}( [a-e]+)*",
    r"(the|cat|a)( (the|cat|at|é))*\.?",
    r"\w+ \d+",
    r"^\S+(\s\w+)?$",
    r" ?[^\W\d]{1,4}",
    r".{0,12}",
    r"a(é|ü|—|b)|[\w-]*Z",
    r"\"(\\.|[^\"\\])*\"",
    r"(?i:the) (?P<rest>c\/?.t)",
    r"",
]


@pytest.mark.parametrize("make", SUBWORDS)
@given(regex=st.sampled_from(REGEXES), seed=seeds)
@settings(max_examples=60)
def test_generated_text_matches_the_regex(make, regex, seed):
    m = model(make)
    ids = m.walk(m.grammar("regex", regex).start(), seed)
    assert re.fullmatch(regex, m.decode(ids)), m.decode(ids)


@given(
    regex=st.sampled_from([r"T( R)*( [A-Z]{2}\d?)+", r"(T|TH|DH|S|SH)( .*)?", r"(\w+ )*\w+", r".*", r"(T R)?"]),
    seed=seeds,
)
@settings(max_examples=60)
def test_regex_over_a_vocabulary_of_words(regex, seed):
    m = model(phonemes)
    assert re.fullmatch(regex, m.decode(m.walk(m.grammar("regex", regex).start(), seed)))


@pytest.mark.parametrize("make", SUBWORDS)
@given(seed=seeds)
@settings(max_examples=40)
def test_end_token_is_allowed_only_after_a_complete_text(make, seed):
    m = model(make)
    regex = r"(the|cat|a|t)( (the|cat|at|a))*"
    guide, rng, ids = m.grammar("regex", regex).start(), np.random.default_rng(seed), []
    for _ in range(12):
        allowed = m.allowed(guide)
        assert (m.end in allowed) == bool(re.fullmatch(regex, m.decode(ids)))
        assert guide.must_end == (allowed == [m.end])
        token = int(rng.choice([i for i in allowed if i != m.end]))
        guide.accept(token)
        ids.append(token)
        assert token < m.tokenizer.get_vocab_size()


@pytest.mark.parametrize("make", SUBWORDS)
def test_token_is_allowed_if_the_text_can_be_completed(make):
    """A token is allowed exactly if further tokens complete the text, by `decode` itself."""
    m = model(make)
    regex = re.compile(r"(a|t|at|the)( (a|t|the))?")
    grammar = m.grammar("regex", regex.pattern)
    texts = {t + u for t in ("a", "t", "at", "the") for u in ("", " a", " t", " the")}
    every = [i for i in range(m.tokenizer.get_vocab_size()) if i not in m.tokenizer.get_added_tokens_decoder()]
    for prefix in ([], *([i] for i in m.allowed(grammar.start()) if i != m.end)):
        guide = grammar.start()
        for token in prefix:
            guide.accept(token)
        possible = {
            i for i in every if (t := m.decode([*prefix, i])) and any(w.startswith(t) for w in texts) and i != m.end
        }
        said = m.decode(prefix)
        possible = {i for i in possible if m.decode([*prefix, i]) != said}
        silent = {i for i in m.allowed(guide) if m.decode([*prefix, i]) == said} - {m.end}
        assert set(m.allowed(guide)) - silent - {m.end} == possible
        assert not silent or not prefix  # a space before the text, which decoding removes


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_copies_are_independent(make):
    m = model(make)
    grammar = m.grammar("regex", r"(the|cat)( (the|cat))*")
    parent = grammar.start()
    parent.accept(m.tokenizer.encode("the").ids[0])
    before = m.allowed(parent)
    children = [parent.copy() for _ in before]
    for child, token in zip(children, before, strict=True):
        child.accept(token)
    assert m.allowed(parent) == before
    assert len({tuple(m.allowed(child)) for child in children}) > 1
    assert m.allowed(grammar.start()) == m.allowed(m.grammar("regex", r"(the|cat)( (the|cat))*").start())


@given(seed=seeds, width=st.integers(2, 4))
@settings(max_examples=30)
def test_each_beam_ends_with_one_of_the_choices(seed, width):
    """Rows are copied and dropped as in a beam search."""
    m, rng = model(unigram), np.random.default_rng(seed)
    beams = [(m.grammar("choices", CHOICES).start(), [], 0.0)]
    done = set()
    while beams:
        candidates = []
        for guide, ids, score in beams:
            scores = rng.normal(size=m.size).astype(np.float32)
            guide.mask(scores)
            candidates += [(score + scores[i], guide, [*ids, int(i)]) for i in np.flatnonzero(scores > -np.inf)]
        candidates.sort(key=lambda c: -c[0])
        done |= {m.decode(ids[:-1]) for _, _, ids in candidates[:width] if ids[-1] == m.end}
        beams = []
        for score, guide, ids in [c for c in candidates if c[2][-1] != m.end][:width]:
            child = guide.copy()
            child.accept(ids[-1])
            beams.append((child, ids, score))
    assert done <= set(CHOICES)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "née"]}, "maxItems": 3},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def check(value: object) -> None:
    assert isinstance(value, dict)
    assert {"name", "age"} <= set(value) <= {"name", "age", "tags", "ok"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 120
    assert len(value.get("tags", [])) <= 3
    assert set(value.get("tags", [])) <= {"a", "b", "née"}
    assert value.get("ok") in (True, False, None)


@pytest.mark.parametrize("make", [make for make in SUBWORDS if make is not word_piece])
@given(seed=seeds)
@settings(max_examples=20)
def test_generated_text_matches_the_json_schema(make, seed):
    m = model(make)
    check(json.loads(m.decode(m.walk(m.grammar("json_schema", SCHEMA).start(), seed))))
    assert m.grammar("json_schema", json.dumps(SCHEMA, ensure_ascii=False)) is m.grammar("json_schema", SCHEMA)


@pytest.mark.parametrize(
    ("schema", "integers"),
    [
        ({"const": 2**62}, {2**62}),
        ({"enum": [-(2**60), 2**63 - 1]}, {-(2**60), 2**63 - 1}),
        ({"type": "integer", "minimum": 2**53 - 2, "maximum": 2**53}, {2**53 - 2, 2**53 - 1, 2**53}),
        ({"type": "integer", "minimum": 2**62, "maximum": 2**62 + 1024}, set(range(2**62, 2**62 + 1025))),
        ({"type": "integer", "minimum": 2**62, "maximum": 2**64 - 1}, range(2**62, 2**64)),
        ({"properties": {"minimum": {"const": 7}, "default": {"const": 7}}, "default": 2**53 + 1}, None),
        ({"properties": {"enum": {"type": "string", "const": "Zürich"}}}, None),
    ],
)
@given(seed=seeds)
@settings(max_examples=10)
def test_integers_of_a_schema_are_generated_exactly(schema, integers, seed):
    m = model(byte_level)
    value = json.loads(m.decode(m.walk(m.grammar("json_schema", schema).start(), seed)))
    assert integers is None or value in integers


BIG = 2**53 + 1  # float64 has no such number


@pytest.mark.parametrize(
    "schema",
    [
        {"const": BIG},
        {"enum": ["a", 1234567890123456789]},
        {"const": {"ids": [1, {"a": BIG}]}},
        {"const": -(2**63)},  # llguidance overflows its stack
        {"type": "integer", "const": -(2.0**63)},
        {"type": "integer", "minimum": -(2**64), "maximum": -(2**63)},
        {"type": "integer", "minimum": 10**20, "maximum": 10**20 + 3},
        {"type": "integer", "minimum": BIG, "maximum": BIG},
        {"type": "integer", "exclusiveMaximum": 2**63 - 1},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer", "exclusiveMinimum": BIG}]}},
        {"$defs": {"enum": {"const": BIG}}, "type": "array", "items": {"$ref": "#/$defs/enum"}},
        {"const": 10**400},
        {"const": -(2**63), "description": "%json"},
        {"$ref": "#/default", "default": {"const": -(2**63)}},
        {"$ref": "#/$defs", "$defs": {"type": "integer", "const": -(2**63)}},
        {"$ref": "#/examples/0", "examples": [{"enum": [BIG]}]},
        {"$ref": "#/properties/const/a", "properties": {"const": {"a": {"type": "integer", "minimum": BIG}}}},
    ],
)
def test_number_that_would_be_rounded_is_refused(schema):
    with pytest.raises(OptionError, match="cannot be kept"):
        model(byte_level).grammar("json_schema", schema)
    text = json.dumps(schema)
    for grammar in (f'start: "a" | %json {text}', f"start: /%json x/ | %json{text} | %json {{}}"):
        with pytest.raises(OptionError, match="cannot be kept"):
            model(byte_level).grammar("grammar", grammar)


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 1e17},
        {"maximum": -9.99e17},
        {"exclusiveMinimum": 12345678912345.125},
        {"minimum": 1e18, "maximum": 9e18},
        {"exclusiveMinimum": -9e18, "exclusiveMaximum": -1e18},
        {"minimum": 1e-10, "maximum": 1e-9},
    ],
    ids=str,
)
@given(seed=seeds)
@settings(max_examples=10)
def test_generated_number_is_within_its_bounds(bounds, seed):
    m, schema = model(byte_level), {"type": "number", **bounds}
    jsonschema.validate(json.loads(m.decode(m.walk(m.grammar("json_schema", schema).start(), seed))), schema)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"minimum": 1e19}, r"1e\+19 as its minimum, which cannot be kept: bounds .* must lie between −2⁶³ and 2⁶³"),
        ({"exclusiveMaximum": -1e30}, r"-1e\+30 as its exclusiveMaximum, which cannot be kept: bounds .* between"),
        ({"maximum": 1e19}, "bounds of its numbers are too large: set a minimum and a maximum, both between −2⁶³"),
        ({"minimum": 1e18}, "bounds of its numbers are too large: set a minimum and a maximum, both between −2⁶³"),
    ],
)
def test_bounds_that_are_too_large_are_told(bounds, words):
    with pytest.raises(OptionError, match=words):
        model(byte_level).grammar("json_schema", {"type": "number", **bounds})


def test_schema_of_a_grammar_that_is_not_json_is_told():
    for text in ("start: %json {", 'start: %json {"a": "%json {"'):
        with pytest.raises(OptionError, match="after %json in the grammar is not JSON"):
            model(byte_level).grammar("grammar", text)
    with pytest.raises(OptionError, match="nested too deeply"):
        model(byte_level).grammar("grammar", "start: %json " + '{"not":' * 50_000)


@pytest.mark.parametrize(
    ("guidance", "texts"),
    [
        (None, ["{}", "{ }", "{\n}", "{\n  }"]),
        ({"key_separator": ":"}, ["{}", "{ }", "{\n}", "{\n  }"]),
        ({"whitespace_flexible": False}, ["{}"]),
        ({"whitespace_pattern": " {0,2}"}, ["{}", "{ }", "{  }"]),
    ],
)
def test_white_space_of_a_schema_is_bounded(guidance, texts):
    schema = {"type": "object", "additionalProperties": False, **({"x-guidance": guidance} if guidance else {})}
    m = model(byte_level)
    grammar = m.grammar("json_schema", schema)
    for text in ["{}", "{ }", "{  }", "{\n}", "{\n  }", "{\n\n}", "{" + " " * 40 + "}", "{\n" + " " * 40 + "}"]:
        ids = [id for character in text for id in m.tokenizer.encode(character, add_special_tokens=False).ids]
        assert m.takes(grammar, ids) == (text in texts), text


SUMS = """
start: sum
sum: product (("+" | "-") product)*
product: value ("*" value)*
value: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
%ignore " "
"""


@pytest.mark.parametrize("make", SUBWORDS)
@given(seed=seeds)
@settings(max_examples=20)
def test_generated_text_matches_the_grammar(make, seed):
    m = model(make)
    text = m.decode(m.walk(m.grammar("grammar", SUMS).start(), seed))
    assert re.fullmatch(r"[-+*() 0-9]+", text)
    assert not re.search(r"\d{5}|\d +\d", text)
    assert isinstance(eval(text.strip()), int)


def test_character_of_several_tokens_is_generated():
    m = model(byte_level)
    grammar = m.grammar("choices", ["語", "誤"])
    assert m.takes(grammar, m.tokenizer.encode("語").ids)
    assert set(m.texts(grammar.start())) == {"語", "誤"}


def test_vocabulary_smaller_than_the_tokenizers():
    m = model(byte_level)
    size = 300
    grammar = Grammar.compile("regex", "[a-z ]{1,9}", m.json, size, (m.end, 10_000))
    scores = np.zeros(size, np.float32)
    grammar.start().mask(scores)
    known = {i for i in range(size) if re.fullmatch("[a-z ]{1,9}", m.decode([i]))}
    assert set(np.flatnonzero(scores == 0)) == known


def test_end_token_is_not_part_of_the_text():
    m = model(byte_level)
    stop = m.tokenizer.token_to_id("!")
    guide = Grammar.compile("regex", "a+!?b?", m.json, m.size, (m.end, stop)).start()
    assert stop not in m.allowed(guide)
    guide.accept(m.tokenizer.token_to_id("a"))
    assert {stop, m.end} <= set(m.allowed(guide))


def test_row_with_a_forbidden_token_allows_nothing():
    m = model(byte_level)
    guide = m.grammar("choices", ["cat"]).start()
    guide.accept(m.tokenizer.token_to_id("x"))
    assert guide.must_end
    assert m.allowed(guide) == [m.end] == m.allowed(guide.copy())
    ended = m.grammar("regex", "a*").start()
    ended.accept(m.end)
    assert ended.must_end


def test_threads_share_one_grammar():
    m, grammar, actual = model(byte_level), model(byte_level).grammar("json_schema", SCHEMA), []

    def work(seed: int) -> None:
        for i in range(5):
            actual.append(json.loads(m.decode(m.walk(grammar.start(), seed * 100 + i))))

    m.closing()
    side_by_side(work, range(4))
    assert len(actual) == 20
    for value in actual:
        check(value)


@pytest.mark.parametrize(
    ("kind", "definition", "says"),
    [
        ("regex", "a(b", r"missing \), unterminated subpattern at position 1"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"a\bc", "lookarounds not supported"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "a*+b", "possessive"),
        ("regex", "(?ix)a b", "verbose"),
        ("regex", "[a&&b]", "set intersection at position 2"),
        ("regex", 3, "must be given as text, not 3"),
        ("regex", "\ud800", "half a character"),
        ("grammar", "start: foo", "line 1, column 8: unknown name"),
        ("grammar", "start foo", "line 1, column 7"),
        ("json_schema", '{"type": ', "not JSON: .*line 1 column"),
        ("json_schema", {"type": "foo"}, "foo"),
        ("json_schema", {"type": "string", "not": {"minLength": 3}}, "not"),
        ("json_schema", {"oneOf": [{"type": "object"}, {}]}, "Use anyOf"),
        ("json_schema", {"a": {1, 2}}, "not JSON"),
        ("choices", [], "at least one"),
        ("choices", "abc", "a list of strings"),
        ("choices", ["a", 1], "not 1"),
        ("xml", "a", '"regex", "json_schema", "grammar" or "choices"'),
    ],
)
def test_invalid_definition_is_refused(kind, definition, says):
    with pytest.raises(OptionError, match=says) as caught:
        model(byte_level).grammar(kind, definition)
    assert "\n" not in str(caught.value)


def test_text_outside_the_vocabulary_is_refused():
    with pytest.raises(OptionError, match="the choice 'a語' needs '語'"):
        model(unigram).grammar("choices", ["a", "a語"])
    with pytest.raises(OptionError, match="holds 'Q', which is not a word"):
        model(phonemes).grammar("choices", ["T Q"])
    with pytest.raises(OptionError, match="matches nothing"):
        model(unigram).grammar("regex", "語+")
    with pytest.raises(OptionError, match="JSON needs '語'"):
        model(unigram).grammar("json_schema", {"properties": {"語": {}}})
    with pytest.raises(
        OptionError, match=r"JSON needs '\"'.* alone"
    ):  # decoding of word pieces puts spaces around quotes
        model(word_piece).grammar("json_schema", SCHEMA)
    with pytest.raises(OptionError, match="takes a regex or choices, not a json_schema"):
        model(phonemes).grammar("json_schema", SCHEMA)
    guide = model(letters).grammar("grammar", 'start: "a" ("語" | "誤")').start()
    guide.accept(model(letters).tokenizer.token_to_id("a"))
    with pytest.raises(OptionError, match="cannot spell to its end"):
        model(letters).allowed(guide)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 2, 0)]),
    ],
)
def test_tokenizer_with_a_context_dependent_decoder_is_refused(decoder):
    tokenizer = letters()
    tokenizer.decoder = decoder
    with pytest.raises(OptionError, match="this tokenizer cannot be constrained"):
        Model(tokenizer).grammar("regex", "a+")


def test_unknown_token_is_never_allowed():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, END: 2}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    m = Model(tokenizer)
    assert m.allowed(m.grammar("regex", ".+").start()) == [1]


def test_missing_llguidance_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tformer\[constrain\]'"):
        model(letters).grammar("regex", "never asked for before")


def nested(levels: int) -> str:
    return '{"type":"array","items":' * levels + '{"type":"string"}' + "}" * levels


HOSTILE = {
    "nested repetitions": ("regex", "((a{1,100}){1,100}){1,100}"),
    "states that double": ("regex", "(a|b)*a(a|b){25}"),
    "parentheses": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "many texts": ("choices", ["x" * 1000 + str(i) for i in range(2000)]),
    "deep schema": ("json_schema", nested(400)),
    "schema deeper than Python's stack": ("json_schema", nested(50_000)),
    "schema that holds itself": ("json_schema", {"$ref": "#"}),
    "wide schema": ("json_schema", {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
    "wider schema": ("json_schema", {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
    "long array": ("json_schema", {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
    "many alternatives": (
        "json_schema",
        {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"} for j in range(20)}} for i in range(300)]},
    ),
    "ambiguous rules": ("grammar", 'start: s\ns: s s | "a" | s s s\n'),
    "rules that double": (
        "grammar",
        "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(300)) + 'r300: "a"',
    ),
    "rules in a circle": ("grammar", "start: a\na: b\nb: a\n"),
    "deep rule": ("grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_definitions_end_in_a_sentence_or_work(name):
    kind, definition = HOSTILE[name]
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    sentence = "it works"
    try:
        guide = Grammar.compile(kind, definition, tokenizer.to_str(), size, (tokenizer.token_to_id(END),)).start()
        for _ in range(20):
            scores = np.zeros(size, np.float32)
            guide.mask(scores)
            guide.accept(int(np.flatnonzero(np.isfinite(scores))[0]))
    except OptionError as error:
        sentence = str(error)
    assert len(sentence.splitlines()) == 1


def test_endless_required_text_ends_in_a_sentence():
    """After a only Z may follow, for ever, and the vocabulary has no Z."""
    m = model(letters)
    guide = m.grammar("grammar", 'start: /aZ+/ "Z"').start()
    with pytest.raises(OptionError, match=f"no token begins '{'Z' * 40}'"):
        m.walk(guide, 0)
