"""Options of generation.

option_table     the table: `GenerationOptions`, the options of a caller
option_kinds     the kinds of options
option_checks    checks of single options, and the parsers of their text
settings         `Settings`, the options with every value set, and the rules between options
settings_fields  the fields of `Settings`, made from the table
"""

from tformer_runtime.decoding.options.option_checks import LogitsProcessor
from tformer_runtime.decoding.options.option_table import (
    ADAPTERS,
    OPTIONS,
    OUTPUT,
    Constraint,
    GenerationOptions,
    GenerationOptionSpec,
)
from tformer_runtime.decoding.options.settings import Settings, file_defaults

__all__ = [
    "ADAPTERS",
    "OPTIONS",
    "OUTPUT",
    "Constraint",
    "GenerationOptionSpec",
    "GenerationOptions",
    "LogitsProcessor",
    "Settings",
    "file_defaults",
]
