"""The options of generation as `tformer-run` takes them, and the command that takes those of every task.

Whether a value is possible is for `GenerationOptions` to say. Text that stands for no value is given to it as it is, to
be refused there, and `as_written` puts its sentences into the words of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import GenerationOptions
from tformer_runtime.tasks import TASKS
from tformer_runtime.tasks.settings import Flag, value_of


def _early(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _all_ids(texts: tuple[str, ...]) -> list[int]:
    return _ids(",".join(texts))


def _sequences(texts: tuple[str, ...]) -> list[list[int]]:
    return [_ids(text) for text in texts]


def _biases(texts: tuple[str, ...]) -> list[tuple[int, float]]:
    pairs = [text.split("=") for text in texts]
    return [(int(id), float(number)) for id, number in pairs]


def _text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{text[1:]!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{text[1:]!r} is not UTF-8") from error


GROUPS: dict[str, dict[str, Flag]] = {
    "Where a text begins and ends": {
        "max_new_tokens": Flag("--max-new-tokens", "N", "At most so many tokens, the end token included.", int),
        "min_new_tokens": Flag("--min-new-tokens", "N", "At least so many tokens before the end token.", int),
        "stop_strings": Flag("--stop-strings", "TEXT", "The text ends before this; repeatable.", list, repeated=True),
        "forced_prefix": Flag("--forced-prefix", "TEXT", "Results begin with this text, or with --ids these ids.", str),
        "forced_bos_token_id": Flag("--forced-bos-token-id", "ID", "Results begin with this id (a language).", int),
    },
    "Beam search": {
        "num_beams": Flag("--num-beams", "N", "Hypotheses kept at each step; 1 is greedy.", int),
        "num_return_sequences": Flag("--num-return-sequences", "N", "Results for each input, one a line.", int),
        "length_penalty": Flag("--length-penalty", "X", "Scores are divided by length ** X.", float),
        "early_stopping": Flag("--early-stopping", "true|false|never", "Whether enough complete ones end it.", _early),
        "patience": Flag("--patience", "X", "Enough are beam size times X.", float),
        "num_beam_groups": Flag("--num-beam-groups", "N", "As many searches, which share the beams.", int),
        "diversity_penalty": Flag("--diversity-penalty", "X", "Taken from what groups before chose.", float),
    },
    "Sampling": {
        "temperature": Flag("--temperature", "X", "Sample, logits divided by this; 0 is greedy.", float),
        "top_k": Flag("--top-k", "N", "Sample from the N likeliest tokens.", int),
        "top_p": Flag("--top-p", "X", "Sample from the likeliest that sum to X.", float),
        "min_p": Flag("--min-p", "X", "Sample from those at least X times as likely as the likeliest.", float),
        "seed": Flag("--seed", "N", "The same seed draws the same tokens for an input.", int),
    },
    "What may come": {
        "suppress_tokens": Flag("--suppress-tokens", "IDS", "Ids that never come: 5,9.", _all_ids, repeated=True),
        "begin_suppress_tokens": Flag("--begin-suppress-tokens", "IDS", "Never the first.", _all_ids, repeated=True),
        "bad_words_ids": Flag(
            "--bad-words-ids", "IDS", "Never these ids in this order; may be repeated.", _sequences, repeated=True
        ),
        "logit_bias": Flag(
            "--logit-bias", "ID=X", "X is added to the logit of an id; may be repeated.", _biases, repeated=True
        ),
        "repetition_penalty": Flag("--repetition-penalty", "X", "Positive logits of ids so far, over X.", float),
        "presence_penalty": Flag("--presence-penalty", "X", "Taken from the logit of each id that has come.", float),
        "frequency_penalty": Flag("--frequency-penalty", "X", "The same, as many times as it has come.", float),
        "no_repeat_ngram_size": Flag("--no-repeat-ngram-size", "N", "No sequence of N ids twice.", int),
    },
    "Constraints, of which one may be set": {
        "regex": Flag("--regex", "PATTERN", "Results match this regular expression as a whole.", str),
        "json_schema": Flag("--json-schema", "JSON|@FILE", "Results are JSON of this schema.", _text_or_file),
        "grammar": Flag("--grammar", "LARK|@FILE", "Results belong to this grammar.", _text_or_file),
        "choices": Flag("--choice", "TEXT", "Results are one of these; repeat it for each.", list, repeated=True),
    },
    "Speculation": {
        "draft": Flag("--draft", "FILE.onnx|prompt", "Guess tokens by a smaller model, or from what was read.", str),
        "num_draft_tokens": Flag("--num-draft-tokens", "N", "At most so many guesses at once.", int),
    },
    "Beside the text": {
        "top_logprobs": Flag("--top-logprobs", "N", "Add the N likeliest tokens at each place to --json.", int),
    },
}  # fmt: skip
OPTIONS = {name: option for options in GROUPS.values() for name, option in options.items()}
_OTHERS = {name: flag.flag for task in TASKS for flags in task.every_flag().values() for name, flag in flags.items()}


class Command(click.Command):
    """A command that takes the options of several kinds of files, and shows them under their headings."""

    def __init__(self, *args: Any, kinds: Sequence[Any], **settings: Any) -> None:
        """kinds: classes with `every_flag`; options that several have are one."""
        super().__init__(*args, **settings)
        self.headings: dict[str, dict[str, Flag]] = {}
        for kind in kinds:
            for heading, flags in kind.every_flag().items():
                self.headings.setdefault(heading, {}).update(flags)
        self.flags = {name: flag for flags in self.headings.values() for name, flag in flags.items()}
        for name, flag in self.flags.items():
            if flag.switch:
                self.params.append(click.Option([flag.flag, name], is_flag=True, default=None))
            else:
                self.params.append(click.Option([flag.flag, name], multiple=flag.repeated, type=str))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = (p for p in self.get_params(ctx) if p.name not in self.flags and isinstance(p, click.Option))
        with formatter.section("Options"):
            formatter.write_dl([record for p in own if (record := p.get_help_record(ctx))])
        for heading, flags in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{flag.flag} {flag.metavar}".strip(), flag.help) for flag in flags.values()])


def generation_options(texts: Mapping[str, Any], ids: bool, **others: Any) -> GenerationOptions:
    """What was asked for, as options. ids: a prefix is ids. OptionError for what cannot be."""
    given = {name: _value(name, text, ids) for name, text in texts.items() if text not in (None, ())}
    return GenerationOptions(**given, **others)


def _value(name: str, text: Any, ids: bool) -> Any:
    if name == "forced_prefix" and ids:
        words = text.split()
        return [int(word) for word in words] if all(word.isdecimal() for word in words) else words
    try:
        return value_of(OPTIONS[name], text)
    except OptionError as error:
        raise OptionError(f"{OPTIONS[name].flag}: {error}") from error


def as_written(sentence: str) -> str:
    """A sentence on options as they are called in Python, with the names that they have on the command line.

    What it quotes, and what it says of a model file's own defaults, stays as it is.
    """
    flags = {name: option.flag for name, option in OPTIONS.items()} | _OTHERS
    names = "|".join(sorted(flags, key=len, reverse=True))

    def written(found: re.Match[str]) -> str:
        name = found["name"]
        if not name or ("_" not in name and found["article"]):  # words of the language too
            return found[0]
        return (found["article"] or "") + flags[name] + (" " if found["value"] else "")

    pattern = rf"""'[^']*'|"[^"]*"|(?P<article>\b(?:an?|the)\ )?(?<!:\ )(?<![\w-])(?P<name>{names})\b(?P<value>=)?"""
    return re.sub(pattern, written, sentence)
