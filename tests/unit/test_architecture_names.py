"""The compiler names no architecture: it reads the structure of a model from its graph and its config.

Names of architectures are looked for in modules, functions, classes, arguments, attributes, variables and strings, but
not in docstrings. They are those of transformers' model types and model classes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPILER = Path(__file__).parents[2] / "tformer_export"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel|MTModel|PreTrainedModel|Model)$")  # the end of a model class's name
WORDS_OF_OTHER_MEANING = {  # architectures with the name of something else → its meaning in the compiler
    "beam": "a hypothesis of beam search",
    "bit": "a digit of a stored number",
    "clip": "to limit a number to a range",
    "encoderdecoder": "is_encoder_decoder is an attribute of all transformers configs",
    "speechtotext": "a task",
}
FILE_NAMES = {"sentence_bert_config.json"}  # of sentence-transformers, for encoders of any architecture


def split_words(name: str) -> list[str]:
    """Split snake_case and CamelCase into words in lower case. Digits are words of their own."""
    return [word.lower() for word in WORD.findall(name)]


@functools.cache
def architectures() -> dict[str, int]:
    """Return the names of architectures without spaces and signs, and the number of words of each."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = [*CONFIG_MAPPING_NAMES]
    for mapping_name, mapping in vars(modeling_auto).items():
        if mapping_name.startswith("MODEL_") and mapping_name.endswith("_MAPPING_NAMES"):
            classes = [name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)]
            names += [HEAD.sub("", name) for name in classes]
    words = [split_words(name) for name in names]
    return {"".join(parts): len(parts) for parts in words if parts}


def find_architectures(text: str) -> set[str]:
    """Return the architectures that an identifier or a string names."""
    words = split_words(text)
    max_words = max(architectures().values())
    phrases = {
        "".join(words[start:end])
        for start in range(len(words))
        for end in range(start + 1, min(len(words), start + max_words) + 1)
    }
    return phrases & architectures().keys() - WORDS_OF_OTHER_MEANING.keys()


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Yield the identifiers of a module and its strings, without docstrings and names of files."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "asname", "arg", "module", "value"):
            text = getattr(node, field, None)
            if isinstance(text, str) and id(node) not in docstrings and text not in FILE_NAMES:
                yield text


def test_compiler_names_no_architecture():
    found = {}
    for path in COMPILER.rglob("*.py"):
        texts = [*path.relative_to(COMPILER).with_suffix("").parts, *texts_of(ast.parse(path.read_text("utf-8")))]
        if named := {text: names for text in texts if (names := find_architectures(text))}:
            found[str(path)] = named
    assert found == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rewrite_llama_cache", {"llama"}),
        ("BertHandler", {"bert"}),
        ("is_BERTLike", {"bert"}),
        ("GPT2Block", {"gpt2"}),
        ("gpt_neox_rotary", {"gptneox"}),
        ("T5Stack", {"t5"}),
        ("model.layers of a Qwen2 model", {"qwen2"}),
        ("num_beam_groups", set()),
        ("is_encoder_decoder", set()),
        ("alberta", set()),
    ],
)
def test_architecture_is_found_as_a_part_of_a_name(text, expected):
    assert expected <= find_architectures(text)
    assert bool(find_architectures(text)) is bool(expected)


@pytest.mark.parametrize(
    "code",
    [
        "def rewrite_llama_cache(): ...",
        "class BertHandler: ...",
        "kind == 'bert'",
        "f'{layer} of bert'",
        "module.bert.encoder",
        "def load(bert_config): ...",
        "load(bert=True)",
        "from transformers import BertModel as Model",
        "from transformers.models.bert import utils",
        "llama_cache = []",
        "def load(**llama): ...",
    ],
)
def test_planted_architecture_is_found(code):
    assert any(find_architectures(text) for text in texts_of(ast.parse(code)))


def test_docstrings_may_name_architectures():
    code = '"""Like BERT."""\nclass A:\n    """Like BERT."""\n    def f(self):\n        """Like BERT."""'
    assert not any(find_architectures(text) for text in texts_of(ast.parse(code)))
