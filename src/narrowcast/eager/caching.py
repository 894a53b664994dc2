"""The weight caches as users see them: what they hold, and how they are told of changes that nobody can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.eager.native_cache import native_cache_size
from narrowcast.errors import CacheError
from narrowcast.regions.state import innermost
from narrowcast.regions.weight_cache import CacheInfo


def cache_info() -> CacheInfo:
    """What the weight cache of the outermost region that is open on this thread holds: entries, hits, bytes.

    Casts that torch's own kernels keep (grade `native`) cannot be seen from Python and are not counted.
    """
    region = innermost()
    if region is None:
        return CacheInfo()
    held = region.casts
    prepared = region.prepared
    entries, size = (len(held.entries), held.bytes)
    if prepared.grade == "native":
        more, more_bytes = native_cache_size()
        entries, size = entries + more, size + more_bytes
    return CacheInfo(prepared.grade, entries, size, held.hits, held.misses, prepared.cache_limit_bytes)


def invalidate(*changed: torch.Tensor | Module | Iterable[torch.Tensor]) -> None:
    """Say that weights were changed behind their version counters (`weight.data.copy_(...)`): cast them anew.

    changed: tensors, modules (all their parameters), or iterables of tensors; everything, if nothing is given. torch's
    own cache can be cleared only as a whole, and is. Outside of regions nothing is cached, and nothing happens.
    Raises CacheError for anything else.
    """
    weights = [w for item in changed for w in _weights_of(item)]
    region = innermost()
    if region is None:
        return
    torch.clear_autocast_cache()
    if not changed:
        region.casts.clear()
    for weight in weights:
        region.casts.forget(weight)


def _weights_of(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, Module):
        return list(item.parameters())
    found = list(item) if isinstance(item, Iterable) else [item]
    for weight in found:
        if not isinstance(weight, torch.Tensor):
            raise CacheError(
                asked=f"invalidate({type(item).__name__})", found=f"{type(weight).__name__} is no weight",
                advice="Give tensors, modules, or iterables of tensors.",
            )  # fmt: skip
    return found


# -- the mutators that everybody uses ----------------------------------------------------------------------------------


@cache
def follow_mutators() -> None:
    """Have torch's own cache cleared by what changes weights in an open region of ours. Done once.

    Every optimizer's step (GradScaler's, too) through torch's hook for all optimizers. torch has none for the others:
    loading a state_dict, moving or converting a module, averaged models, and vectors written into parameters.
    """
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _forget())
    for owner, name in (
        (Module, "load_state_dict"), (Module, "_apply"),
        (torch.optim.swa_utils.AveragedModel, "update_parameters"),
        (torch.nn.utils, "vector_to_parameters"), (torch.utils, "swap_tensors"),
    ):  # fmt: skip
        setattr(owner, name, _forgetting(getattr(owner, name)))


def _forgetting(mutator: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(mutator)
    def and_forget(*args: Any, **kwargs: Any) -> Any:
        try:
            return mutator(*args, **kwargs)
        finally:
            if not torch.compiler.is_dynamo_compiling():
                _forget()

    return and_forget


def _forget() -> None:
    if innermost() is not None:
        torch.clear_autocast_cache()
