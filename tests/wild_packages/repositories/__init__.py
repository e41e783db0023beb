"""Models of public repositories, by the name of the entry. A checkout of each lies in FOLDER/OWNER/NAME."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

from wild_packages.entry import Entry

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
ENTRIES: dict[str, Entry] = {entry.name: entry for module in _MODULES for entry in module.ENTRIES}


def import_from(entry: Entry, repositories: Path) -> None:
    """Let this process import the modules of an entry's repository, which is cloned if the folder does not have it."""
    checkout = repositories / entry.package
    if not checkout.is_dir():
        subprocess.run(["git", "clone", "--quiet", f"https://github.com/{entry.package}", checkout], check=True)
        subprocess.run(["git", "-C", checkout, "checkout", "--quiet", entry.commit], check=True)
    for requirement in entry.requires:
        target = repositories / requirement
        if not target.is_dir():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", target, requirement], check=True)
        sys.path.insert(0, str(target))
    sys.path[:0] = [str(checkout / folder) for folder in entry.folder.split()]
    for name in entry.unused:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
