"""Functions of torch as plain operations on plain tensors, so that modes can watch them and traces hold them.

`flex_attention` runs through torch's compiler, which refuses to run below a mode, and `CausalBias` is a subclass of
Tensor, which torch cannot make below one. What they compute are masks and attention. An embedding with `max_norm`
writes into its weights: it scales the rows that it reads, each of which always gets the same numbers.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias, CausalVariant

RENORM_EPSILON = 1e-7  # torch's own, of embedding_renorm_
_lock = threading.RLock()


class PlainTorch:
    """Runs what torch would compile as it is written, and the functions of this module as plain operations.

    It holds for the whole process until the last of those that entered has left. Results of other threads are the same.
    """

    users = 0
    patches = ExitStack()

    def __enter__(self) -> None:
        with _lock:
            if not PlainTorch.users:
                PlainTorch.patches.enter_context(torch.compiler.set_stance("force_eager"))
                PlainTorch.patches.enter_context(_functions_patched())
            PlainTorch.users += 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            PlainTorch.users -= 1
            if not PlainTorch.users:
                PlainTorch.patches.close()


@contextmanager
def _functions_patched() -> Iterator[None]:
    bias: Any = CausalBias
    patches: list[tuple[Any, str, Any]] = [
        (flex, "flex_attention_hop", _flex_attention),
        (F, "embedding", _without_writes(F.embedding)),
        (F, "embedding_bag", _without_writes(F.embedding_bag)),
    ]
    originals = [getattr(owner, name) for owner, name, _ in patches]
    for owner, name, function in patches:
        setattr(owner, name, function)
    bias.__new__ = _causal_mask
    try:
        yield
    finally:
        for (owner, name, _), original in zip(patches, originals, strict=True):
            setattr(owner, name, original)
        del bias.__new__  # the class has torch.Tensor's again


def _without_writes(embedding: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return an embedding that reads scaled rows where torch's own scales the rows in place."""
    signature = inspect.signature(embedding)

    @functools.wraps(embedding)
    def look_up(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        names = call.arguments
        if names["max_norm"] is not None:
            norms = torch.linalg.vector_norm(names["weight"], names["norm_type"], dim=1, keepdim=True)
            scaled = names["weight"] * (names["max_norm"] / (norms + RENORM_EPSILON))
            names["weight"] = torch.where(norms > names["max_norm"], scaled, names["weight"])
            names["max_norm"] = None
        return embedding(*call.args, **call.kwargs)

    return look_up


def _causal_mask(cls: type, variant: CausalVariant, num_queries: int, num_keys: int) -> torch.Tensor:
    diagonal = num_keys - num_queries if variant is CausalVariant.LOWER_RIGHT else 0
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(diagonal)


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, None, None]:
    """Return attention with a function of scores and a function of places that says which keys are seen.

    The functions get the places of batch, head, query and key as tensors that broadcast against the scores.

    https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
    """
    if kernel_options.get("OUTPUT_LOGSUMEXP") or kernel_options.get("OUTPUT_MAX"):
        raise NotImplementedError("only the result of flex_attention can be exported, without return_lse or return_aux")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    sizes = (*query.shape[:3], key.shape[2])
    places = [
        torch.arange(size).reshape([-1 if other == axis else 1 for other in range(4)])
        for axis, size in enumerate(sizes)
    ]
    mask_mod = block_mask[-1]
    keep = None if mask_mod is flex.noop_mask else mask_mod(*places, *mask_mod_other_buffers)
    if score_mod is flex._identity:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keep, scale=scale), None, None
    scores = score_mod(query @ key.transpose(-2, -1) * scale, *places, *score_mod_other_buffers)
    if keep is not None:
        scores = torch.where(keep, scores, -torch.inf)
    return scores.softmax(-1) @ value, None, None
