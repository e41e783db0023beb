"""Files of a source, which may come from a stranger: regular files of a bounded size, inside their folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from tformer_runtime.base.errors import SourceError
from tformer_runtime.base.special_files import special_kind

MAX_JSON = 1 << 28  # bytes: the largest tokenizers take some 30 MB
OTHER_WEIGHTS = "transformers_weights"  # of a config, which may name another file or index


def refuse_special_files(path: Path) -> None:
    """Raise SourceError if a path, or an entry of a folder, is a named pipe, a device or a socket: it may never end."""
    entries: Iterable[Path] = (path, *path.iterdir()) if path.is_dir() else (path,)
    for entry in entries:
        if (kind := special_kind(entry)) is not None:
            raise SourceError(f"{entry} is {kind}: a model is read from regular files")


def inside(folder: Path, name: Any, named_by: str) -> Path:
    """Return folder / name. Raises SourceError for a name that leads out of the folder.

    named_by: the file that holds the name. Links are followed: the owner of the file system made them.
    """
    text = str(name)
    path = PurePath(text)
    if path.is_absolute() or PureWindowsPath(text).anchor or ".." in path.parts or "\0" in text:
        raise SourceError(f"{folder / named_by} names {text!r}, which is outside of its folder")
    return folder / path


def refuse_outside_weights(folder: Path) -> None:
    """Raise SourceError if the config or an index of weights names a file outside of the folder, or is damaged."""
    config = read_json(folder / "config.json", missing={})
    if isinstance(config, dict) and config.get(OTHER_WEIGHTS) is not None:
        inside(folder, config[OTHER_WEIGHTS], "config.json")
    for index in sorted(str(path.relative_to(folder)) for path in folder.rglob("*.index.json")):
        content = read_json(folder / index)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict):
            raise SourceError(f"{folder / index} holds no weight_map, the file of each weight")
        for name in dict.fromkeys(map(str, names.values())):
            inside(folder, name, index)


def read_json(path: Path, missing: Any = None) -> Any:
    """Read a JSON file. missing: the value for a file that does not exist; None to refuse it.

    Raises SourceError for a file that is missing, special, too large, damaged or nested too deeply.
    """
    refuse_special_files(path)
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise SourceError(f"{path} has {size:,} bytes, and at most {MAX_JSON:,} are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise SourceError(f"there is no {path}") from error
    except RecursionError as error:
        raise SourceError(f"{path} cannot be read: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
