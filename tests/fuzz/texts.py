"""Targets: tokenizers, chat templates, constraints, requests, and lines of a command."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from click.testing import CliRunner
from support.text_models import unigram_pieces, wordpiece_vocabulary
from support.toy_models import letters
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as kinds

from fuzz import models
from fuzz.files import write
from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.target import Target, WrongOutcomeError
from tformer_runtime import Model
from tformer_runtime.base.errors import TformerError
from tformer_runtime.cli.main import main
from tformer_runtime.preprocess.chat_template import compile_template, conversation
from tformer_runtime.preprocess.text_reader import TextReader
from tformer_runtime.preprocess.tokenizer import Codec, Detokenizer
from tformer_runtime.preprocess.vocabulary import vocabulary_of

TEXTS = ("", "abc", "the film was not good!", "é👩‍🚀\0 \ufeff", "  two  spaces\n", "\u0300\u0301", "a" * 400)
TOKENIZER_KEYS = (
    "unk_token",
    "unk_id",
    "byte_fallback",
    "dropout",
    "fuse_unk",
    "ignore_merges",
    "normalizer",
    "pre_tokenizer",
    "decoder",
    "post_processor",
    "truncation",
    "padding",
)
TEMPLATE_WORDS = (
    "{{",
    "}}",
    "{%",
    "%}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if ",
    "{% endif %}",
    "messages",
    "|tojson",
    "|join",
    "loop.index",
    "raise_exception('x')",
    "strftime_now('%Y')",
    "range(9)",
    "{% set ns = namespace(a=1) %}",
    "{% break %}",
    "{% generation %}",
    "{% endgeneration %}",
    ".__class__",
    "['content']",
    "|length",
    "|list",
    "|sort",
    "//0",
    "*9",
    "**9",
    "~",
    "{% macro f(x) %}",
    "{% endmacro %}",
    "f()",
    "|indent(3)",
    "|replace('a','b')",
    "|format",
    "%c",
    "cycler",
    "lipsum()",
    "|batch(0)",
    "|slice(0)",
    "|round",
    "|xmlattr",
    "|random",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% block b %}",
)
REGEX_WORDS = (
    "[a-z]",
    "\\d",
    "(",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{1,3}",
    "{3}",
    "{99}",
    "[^a]",
    "\\p{L}",
    "(?i)",
    "(?=a)",
    ".",
    "^",
    "$",
    "\\b",
    "&",
    "~",
)
GRAMMAR_WORDS = (
    "start: ",
    "a: ",
    "\n",
    '"a"',
    "/[a-z]+/",
    "|",
    "*",
    "%ignore",
    "%import common.INT",
    "%json {}",
    "A: ",
    "[lazy]",
    "~1..3",
    "<[1-9]>",
    "<eos>",
)
SCHEMA_KEYS = (
    "type",
    "properties",
    "items",
    "enum",
    "anyOf",
    "allOf",
    "oneOf",
    "$ref",
    "$defs",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "multipleOf",
    "minItems",
    "maxItems",
    "const",
    "format",
    "required",
    "additionalProperties",
    "not",
)


@functools.cache
def seed_tokenizers() -> list[bytes]:
    wordpiece = Tokenizer(kinds.WordPiece(wordpiece_vocabulary(), unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer()
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    wordpiece.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    bpe = models.byte_tokenizer()
    unigram = Tokenizer(kinds.Unigram(unigram_pieces(), unk_id=3))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fallback = Tokenizer(
        kinds.BPE(
            {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "a": 257, "b": 258, "ab": 259, "▁": 260},
            [("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    fallback.normalizer = normalizers.Replace(" ", "▁")
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return [each.to_str().encode() for each in (letters(), wordpiece, bpe, unigram, fallback)]


def run_tokenizer(data: bytes) -> None:
    """Encode, decode, cut and constrain with a tokenizer. A decoded stream is the text of all ids."""
    definition = data.decode("utf-8", "surrogateescape")
    codec, reader = Codec(definition), TextReader(definition)
    errors = []
    for text in TEXTS:
        try:
            ids = codec.encode(text, add_special_tokens=True)
            stream = Detokenizer(codec)
            streamed = "".join([*map(stream.push, ids), stream.finish()])
            if streamed != codec.decode(ids):
                raise WrongOutcomeError(f"the stream {streamed!r} is not {codec.decode(ids)!r}")
        except TformerError as error:
            errors.append(error)
        reads: list[Callable[[], object]] = [
            functools.partial(reader.read, (text, "abc"), 7),
            functools.partial(reader.windows, text, 6, 2),
            functools.partial(reader.read, text),
        ]
        for read in reads:
            try:
                read()
            except TformerError as error:
                errors.append(error)
    codec.decode([0, 1, 2, 3, 10**6, 2**32 - 1])
    assert isinstance(reader.unknown, int | None)
    try:
        vocabulary_of(definition, codec.size, (2,))
    except TformerError as error:
        errors.append(error)
    if errors:
        raise errors[0]


def seed_templates() -> list[bytes]:
    chatml = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    parts = (
        "{%- for m in messages -%}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text | tojson }}{% endfor %}{% endif %}{%- endfor -%}"
    )
    macro = (
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% set ns.n = ns.n + 1 %}{{ f(ns.n) }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": [{"type": "text", "text": "d"}]}]
    return [
        json.dumps({"template": text, "messages": messages, "system": "s"}).encode() for text in (chatml, parts, macro)
    ]


def run_template(data: bytes) -> None:
    document = _document(data)
    template, messages, system = (document.get(name) for name in ("template", "messages", "system"))
    if isinstance(template, str):
        fill_in = compile_template(template, {"eos_token": "</s>", "bos_token": "<s>"})
        text = fill_in(conversation(messages, system))
        models.loaded(models.byte_writer()).generate(text[:30], max_new_tokens=1)


def _document(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a case; an empty one for bytes that are none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def seed_constraints() -> list[bytes]:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, "x"]}},
        "required": ["a"],
    }
    documents: list[dict[str, Any]] = [
        {"regex": "[a-c]{1,4}(x|yz)?"},
        {"regex": "a(b|c)*d"},
        {"choices": ["abc", "abd", "x"]},
        {"grammar": 'start: a | "x"\na: /[a-d]+/ "e"'},
        {"json_schema": schema},
        {"json_schema": json.dumps({"type": "integer"})},
        {
            "json_schema": {
                "anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/s"}],
                "$defs": {"s": {"type": "array", "items": {"type": "null"}}},
            }
        },
    ]
    return [json.dumps(each).encode() for each in documents]


def mutate_constraint(data: bytes, rng: Random) -> bytes:
    words = GRAMMAR_WORDS if b"grammar" in data else REGEX_WORDS
    return mutate_json(data, rng, words, SCHEMA_KEYS if b"schema" in data else ())


def run_constraint(data: bytes) -> None:
    """Generate under a constraint, with letters and with a vocabulary of bytes."""
    options = {
        name: value for name, value in _document(data).items() if name in ("regex", "json_schema", "grammar", "choices")
    }
    for path in (models.writer(), models.byte_writer()):
        models.loaded(path).generate("ab", max_new_tokens=6, **options)


def seed_requests() -> list[bytes]:
    documents: list[dict[str, Any]] = [
        {"input": "abc", "max_new_tokens": 3},
        {
            "input": [3, 4, 5],
            "max_new_tokens": 3,
            "num_beams": 3,
            "num_return_sequences": 2,
            "length_penalty": 0.5,
            "early_stopping": True,
        },
        {
            "input": "abc",
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "seed": 3,
            "max_new_tokens": 4,
            "num_return_sequences": 2,
            "min_p": 0.1,
        },
        {
            "input": "abc",
            "forced_prefix": "ab",
            "stop_strings": ["x", "yz"],
            "max_new_tokens": 4,
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
        },
        {
            "input": "abc",
            "logit_bias": {"3": 2.0},
            "bad_words_ids": [[4], [5, 6]],
            "suppress_tokens": [7],
            "min_new_tokens": 2,
            "max_new_tokens": 3,
        },
        {
            "input": {"src": [3, 4]},
            "top_logprobs": 2,
            "max_new_tokens": 2,
            "forced_bos_token_id": 5,
            "patience": 1.5,
            "num_beams": 2,
        },
        {"input": "abc", "target": "abd"},
        {"input": ["abc", "de"], "batch": True, "prompt_lookup": True, "max_new_tokens": 5},
        {"input": "abc", "predict": True},
    ]
    return [json.dumps(each).encode() for each in documents]


def run_request(data: bytes) -> None:
    """Ask a model: a program's input and options."""
    document = _document(data)
    value = document.pop("input", None)
    model: Model = models.loaded(models.translator())
    options = {name: each for name, each in document.items() if name not in ("batch", "target", "predict")}
    limited = {"max_new_tokens": 3} | options
    if "target" in document:
        model.score(value, document["target"])
    elif "predict" in document:
        embedder = models.loaded(models.embedder())
        for result in embedder.predict([value], **options):
            assert result is not None
    elif "batch" in document and isinstance(value, list):
        list(model.generate_batch(value, **limited))
    else:
        result = model.generate(value, **limited)
        if not np.isfinite(result.token_logprobs).all():
            raise WrongOutcomeError(f"the log-probabilities {result.token_logprobs}")


def seed_commands() -> list[bytes]:
    documents: list[dict[str, Any]] = [
        {"model": "translator", "arguments": ["--max-new-tokens", "3"], "stdin": "abc\nde\n"},
        {
            "model": "translator",
            "arguments": ["--json", "--ids", "--max-new-tokens", "2", "--num-beams", "2"],
            "stdin": "3 4 5\n6\n",
        },
        {
            "model": "translator",
            "arguments": ["abc", "--temperature", "0.5", "--seed", "3", "--max-new-tokens", "3"],
            "stdin": "",
        },
        {
            "model": "translator",
            "arguments": ["--forced-prefix", "ab", "--stop", "x", "--max-new-tokens", "4", "--stream", "abc"],
            "stdin": "",
        },
        {"model": "embedder", "arguments": ["--json", "--truncate"], "stdin": "abc\nde\n"},
        {"model": "forecaster", "arguments": ["--horizon", "3", "-"], "stdin": "low,high\n1,2\n3,4\n5,6\n"},
        {"model": "writer", "arguments": ["--choice", "abc", "--choice", "x", "ab"], "stdin": ""},
        {"model": "translator", "arguments": ["--info"], "stdin": ""},
    ]
    return [json.dumps(each).encode() for each in documents]


COMMAND_WORDS = (
    "--json",
    "--ids",
    "--num-beams",
    "--top-p",
    "--stream",
    "--regex",
    "--horizon",
    "--truncate",
    "--batch-size",
    "--workers",
    "--min-new-tokens",
    "--logit-bias",
    "--max-memory",
    "--input-file",
    "--quiet",
    "\t",
    "\n",
    "\r",
    " ",
    "-",
)


def run_command(data: bytes) -> None:
    """Run tformer-run. Its status is 0, 1 with one sentence, or 2 with click's."""
    document = _document(data)
    arguments, stdin = document.get("arguments"), document.get("stdin")
    if not isinstance(arguments, list) or not isinstance(stdin, str):
        return
    forbidden = ("--output-file", "--cross-attentions", "--attentions", "--device", "--threads", "--verbose")
    texts = [text for text in map(str, arguments) if not text.startswith(forbidden) and "/dev/" not in text]
    path = {"writer": models.writer, "embedder": models.embedder, "forecaster": models.forecaster}.get(
        str(document.get("model")), models.translator
    )()
    result = CliRunner().invoke(main, [str(path), *texts], input=stdin.encode("utf-8", "surrogatepass"))
    failed = result.exception is not None and not isinstance(result.exception, SystemExit)
    if failed or "not foreseen" in result.stderr or "Traceback" in result.stderr or result.exit_code not in (0, 1, 2):
        raise WrongOutcomeError(f"status {result.exit_code}: {result.stderr[-2000:]}") from result.exception
    if (
        result.exit_code == 1
        and len([line for line in result.stderr.splitlines() if line.startswith("tformer-run: ")]) != 1
    ):
        raise WrongOutcomeError(f"not one sentence: {result.stderr[-2000:]!r}")


def seed_lines() -> list[bytes]:
    return [b"abc\nde\n", "\ufeffabc\r\nd\r\n".encode(), b"x\ty\n"]


def run_lines(data: bytes) -> None:
    """Read a file of lines."""
    run_command(
        json.dumps(
            {
                "model": "translator",
                "arguments": ["--max-new-tokens", "1", "--input-file", str(write("lines.txt", data))],
                "stdin": "",
            }
        ).encode()
    )


TEXTS_TARGETS = [
    Target("tokenizer", seed_tokenizers, lambda data, rng: mutate_json(data, rng, keys=TOKENIZER_KEYS), run_tokenizer),
    Target("chat-template", seed_templates, lambda data, rng: mutate_json(data, rng, TEMPLATE_WORDS), run_template),
    Target("constraint", seed_constraints, mutate_constraint, run_constraint),
    Target("request", seed_requests, mutate_json, run_request),
    Target("command", seed_commands, lambda data, rng: mutate_json(data, rng, COMMAND_WORDS), run_command),
    Target(
        "lines",
        seed_lines,
        lambda data, rng: mutate_bytes(data, rng, (b"\r", b"\n", b"abc", b"\xff", b"\xed\xa0\x80", b"\0")),
        run_lines,
    ),
]
