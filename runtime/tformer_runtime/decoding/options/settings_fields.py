"""The fields of `Settings`, with the types of checked values.

`make options` writes this file from the table in `option_table.py`.
"""

from __future__ import annotations

import msgspec

from tformer_runtime.decoding.options.option_checks import EarlyStopping, HasEngine, LogitsProcessor


class SettingsFields(msgspec.Struct, frozen=True):
    """One field for each option. The defaults are those of the table."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    forced_prefix: str | tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    patience: float = 1.0
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logits_processor: LogitsProcessor | None = None
    shortlist: bool = True
    regex: str | None = None
    json_schema: str | None = None
    grammar: str | None = None
    choices: tuple[str, ...] | None = None
    prompt_lookup: bool = False
    draft_model: HasEngine | None = None
    num_draft_tokens: int = 10
    adapter: str | None = None
    top_logprobs: int = 0
    cross_attentions: bool = False
    hidden_states: bool = False
