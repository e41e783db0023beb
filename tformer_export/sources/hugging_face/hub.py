"""A model of the Hugging Face hub, downloaded to the cache of huggingface_hub.

The user's own settings hold: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only files that `folder` reads are
downloaded: configurations, tokenizers and weights. Python code is not.
"""

from __future__ import annotations

import re
from pathlib import Path

from tformer_runtime.base.errors import SourceError
from tformer_runtime.base.extras import import_optional

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCAL = (".pt", ".pt2", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".json")  # no model's name ends like this
_TEXTS = ("*.json", "*.jinja", "*.model", "*.spm", "*.tiktoken", "*.codes", "*vocab*", "*merges*", "*bpe*", "dict.txt")
_SAFETENSORS = ("model.safetensors", "model-*.safetensors", "*/model.safetensors", "adapter_model.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin")
_NOT_READ = ("*.py", "onnx/*", "openvino/*", "original/*")  # code, and the same weights for other engines


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form of a hub id, org/name."""
    return _ID.fullmatch(text) is not None and not text.endswith(_LOCAL)


def model_name(folder: Path) -> str:
    """Return the name of the model in a folder. In the hub's cache the folder itself has the name of a commit."""
    path = folder.resolve()
    repo = path.parent.parent.name
    return repo.rsplit("--", 1)[-1] if path.parent.name == "snapshots" and repo.startswith("models--") else path.name


def download(repo: str, revision: str | None = None) -> Path:
    """Return the folder of a model in the cache, after its missing files are downloaded.

    revision: a branch, tag or commit; by default main.

    Weights are downloaded in safetensors, and as pickles only for a folder that has none in safetensors.

    Raises SourceError if the hub has no such model or revision, does not let the user read it, or cannot be reached;
    MissingExtraError without transformers or huggingface_hub.
    """
    purpose = f"there is no file or folder {repo}, and a model of the hub needs transformers"
    for package in ("transformers", "huggingface_hub"):  # before weights are downloaded that nothing could read
        import_optional(package, purpose, "hf")
    folder = _snapshot(repo, revision, (*_TEXTS, *_SAFETENSORS))
    parts = (folder, *(path for path in folder.iterdir() if path.is_dir()))
    without = [part for part in parts if (part / "config.json").exists() and not any(part.glob("*.safetensors"))]
    pickles = [(part / name).relative_to(folder).as_posix() for part in without for name in _PICKLES]
    return _snapshot(repo, revision, ("config.json", *pickles)) if pickles else folder


def _snapshot(repo: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """Download the files that match one of the patterns."""
    from huggingface_hub import errors, snapshot_download

    page = f"https://huggingface.co/{repo}"
    login = "set HF_TOKEN or run `hf auth login`"
    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(files), ignore_patterns=list(_NOT_READ))
        )
    except errors.GatedRepoError as error:
        reason = f"{repo} is gated on the Hugging Face hub: accept its conditions at {page}, then {login}"
        raise SourceError(reason) from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"there is no file or folder {repo}, and the Hugging Face hub has no model of that name that you may read: "
            f"correct the name, or, for a private model, {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(
            f"{repo} has no revision {revision} on the Hugging Face hub: name one of its branches, tags or commits"
        ) from error
    except errors.IncompleteSnapshotError as error:
        raise SourceError(
            f"the cache holds only a part of {repo}, and the Hugging Face hub cannot be reached: "
            "download the model again with a network and without HF_HUB_OFFLINE"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        cause = _cause(error)
        raise SourceError(
            f"there is no file or folder {repo}, the cache of the Hugging Face hub does not hold it"
            f"{f' in revision {revision}' if revision else ''}, and {cause}"
        ) from error
    except Exception as error:  # of huggingface_hub, its HTTP client and the disk
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{repo} could not be downloaded from the Hugging Face hub: {reason}") from error


def _cause(error: Exception) -> str:
    """Say why the hub was not asked, or gave no answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: download the model once without it"
    reason = next(iter(str(error.__cause__).splitlines()), "")
    return f"the hub cannot be reached ({reason}): check the network, or give a local folder"
