"""Every error that tformer raises on purpose, as one tree.

TformerError                base class; the command lines print its one sentence and exit with 1
├── InputError              an input that the model cannot take: empty, too long, outside the vocabulary
│   └── OutOfMemoryError    an input that does not fit into the memory of the host or the device
├── OptionError             an option with an unknown name or an impossible value
├── ModelFileError          a file that is not a tformer model, is damaged, or has another version than this runtime
│   └── ModelChangedError   a file that was changed in place while the model was loaded
├── DeviceError             a requested device that is not available
├── MemoryBudgetError       a request that needs more memory than max_memory allows
├── DeadlineError           a request that was not finished by its deadline
├── UnsupportedCallError    a call that this model does not offer
├── MissingExtraError       an optional dependency that is not installed
├── OutputError             an output that exists already or cannot be written
├── SourceError             (export) a source that cannot be loaded
├── UnsupportedModelError   (export) a model that cannot be decoded incrementally, with the place and the reason
└── ParityError             (export) a file whose results differ from its source model
"""

from __future__ import annotations

import errno
import re

SMALLER_INPUTS = "give shorter inputs, or fewer at once"
MORE_MEMORY = "use a machine with more memory, or raise its limit (ulimit -v, the limit of a container)"
_NO_MEMORY = re.compile(
    r"allocate memory|unable to allocate|tried to allocate|bad.alloc|AllocateRaw|out of memory|failed to map segment"
    r"|can't start new thread",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"(?:allocate|buffer of size) (\d+(?:\.\d+)?)(?: (bytes|[KMGTPE]iB))?", re.IGNORECASE)
MAX_QUOTED_CHARS = 200  # of the text of another library's error, or of an input
MAX_SENTENCE_CHARS = 20_000  # enough for the names of all weights that do not fit; an input may be far longer


class TformerError(Exception):
    """Base of every error that tformer raises on purpose. Its text is one sentence for the user.

    reason: the sentence without the number of the input.
    input_number: the number of the input that caused the error, from 1. None if no input did, or if the call has one
        input only.
    """

    def __init__(self, reason: str, input_number: int | None = None) -> None:
        reason = reason if len(reason) <= MAX_SENTENCE_CHARS else _shortened(reason, MAX_SENTENCE_CHARS)
        super().__init__(reason if input_number is None else f"input {input_number}: {reason}")
        self.reason, self.input_number = reason, input_number


class InputError(TformerError):
    """An input that the model cannot take."""


class OutOfMemoryError(InputError):
    """An input that does not fit into the memory of the host or the device."""


class OptionError(TformerError):
    """An option with an unknown name or an impossible value.

    option: the name in Python of the option that the sentence begins with; None if it is about no option or several.
    """

    def __init__(self, reason: str, input_number: int | None = None, option: str | None = None) -> None:
        super().__init__(reason, input_number)
        self.option = option


class ModelFileError(TformerError):
    """A file that is not a tformer model, is damaged, or has another version than this runtime."""


class ModelChangedError(ModelFileError):
    """A file that was changed in place while the model was loaded: its mapped weights are not those that were verified.

    path: the file.
    """

    def __init__(self, reason: str, input_number: int | None = None, path: str | None = None) -> None:
        super().__init__(reason, input_number)
        self.path = path


class DeviceError(TformerError):
    """A requested device that is not available."""


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
    """A file whose results differ from its source model."""


def with_input_number(error: TformerError, input_number: int) -> TformerError:
    """Return the same error with the number of its input, from 1. For calls with several inputs."""
    if isinstance(error, OptionError):
        return OptionError(error.reason, input_number, error.option)
    if isinstance(error, ModelChangedError):
        return ModelChangedError(error.reason, input_number, error.path)
    return type(error)(error.reason, input_number)


def typed_memory_error(error: BaseException, advice: str = SMALLER_INPUTS) -> BaseException:
    """Return the OutOfMemoryError for an error, or a cause of it, that says that memory is missing; else the error.

    advice: the end of the sentence.
    """
    cause: BaseException | None = None if isinstance(error, TformerError) else error
    seen: set[int] = set()
    while cause is not None and not isinstance(cause, OutOfMemoryError) and id(cause) not in seen:
        seen.add(id(cause))
        if _is_memory_error(cause):
            typed = OutOfMemoryError(f"there is not enough memory{_wanted(str(cause))}: {advice}")
            typed.__cause__ = error
            return typed
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return error


def _is_memory_error(error: BaseException) -> bool:
    """Return whether an error of Python, numpy, torch, onnxruntime or the system says that memory is missing."""
    if isinstance(error, TformerError):
        return False
    is_of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_of_system or _NO_MEMORY.search(str(error)) is not None


def _wanted(text: str) -> str:
    """Return how much memory was asked for, in parentheses, if the error says so."""
    found = _AMOUNT.search(text)
    if found is None:
        return ""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    size, unit = float(found[1]), units.index(found[2]) if found[2] in units else 0
    while size >= 1024 and unit < len(units) - 1:
        size, unit = size / 1024, unit + 1
    return f" ({size:.4g} {units[unit]} more were asked for)"


def error_summary(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    text = next((row.strip() for row in str(error).splitlines() if row.strip()), "")
    return f"{type(error).__name__}: {quotable(text)}" if text else type(error).__name__


def quotable(text: object) -> str:
    """Return a text of an input or of another library, cut to a length that a sentence can hold."""
    text = str(text)
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + " …"


def _shortened(text: str, length: int) -> str:
    """Return a text without its middle. Its end says what to do."""
    return f"{text[: length * 3 // 4]} … {text[-length // 5 :]}"
