"""Every error that tformer raises on purpose, as one tree.

TformerError                what a caller catches; the command lines print its one sentence and exit with 1
├── InputError              an input that the model cannot take: empty, too long, outside the vocabulary
│   └── OutOfMemoryError    one for which there is not the memory, on the host or the device
├── OptionError             an option with an unknown name or an impossible value
├── ModelFileError          a file that is not a model of ours, is damaged, or is newer than this runtime
├── DeviceError             a device that was asked for and cannot be had
├── MemoryBudgetError       a request that needs more memory than max_memory allows
├── DeadlineError           a request that was not finished by its deadline
├── UnsupportedCallError    a call that this model does not offer
├── MissingExtraError       an optional dependency that is not installed
├── OutputError             an output that exists already or cannot be written
├── SourceError             (export) a source that cannot be loaded
├── UnsupportedModelError   (export) a model that cannot be decoded incrementally; says where and why
└── ParityError             (export) a file that does not compute what its source computes
"""

from __future__ import annotations


class TformerError(Exception):
    """Base of every error that tformer raises on purpose. Its text is one sentence for the user."""


class InputError(TformerError):
    """An input that the model cannot take."""


class OutOfMemoryError(InputError):
    """An input for which there is not the memory, on the host or the device."""


class OptionError(TformerError):
    """An option with an unknown name or an impossible value."""


class ModelFileError(TformerError):
    """A file that is not a model of ours, is damaged, or is newer than this runtime."""


class DeviceError(TformerError):
    """A device that was asked for and cannot be had."""


class MemoryBudgetError(TformerError):
    """A request that needs more memory than max_memory allows; the text gives the figure."""


class DeadlineError(TformerError):
    """A request that was not finished by its deadline."""


class UnsupportedCallError(TformerError):
    """A call that this model does not offer."""


class MissingExtraError(TformerError):
    """An optional dependency that is not installed; the text names the install command."""


class OutputError(TformerError):
    """An output that exists already or cannot be written."""


class SourceError(TformerError):
    """A source that cannot be loaded for export."""


class UnsupportedModelError(TformerError):
    """A model that cannot be decoded incrementally; the text names the operation and the source line."""


class ParityError(TformerError):
    """A file that does not compute what its source computes."""


def numbered(error: TformerError, number: int) -> TformerError:
    """What was wrong with an input, as it is told where there may be several. number: of the input, from 1."""
    return type(error)(f"input {number}: {error}")
