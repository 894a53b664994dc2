"""The weight caches as users see them: what they hold, and how a user reports changes that no counter shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrowcast.errors import CacheError
from narrowcast.frontends.eager.watch import watchers
from narrowcast.runtime.regions.stack import open_anywhere, stack
from narrowcast.runtime.torch_surface.modules import mutators, optimized_by
from narrowcast.runtime.torch_surface.patches import note_staying, once, stay
from narrowcast.runtime.weights.at_rest import at_rest
from narrowcast.runtime.weights.cache import CacheInfo, mutations, native_cache_size


def cache_info() -> CacheInfo:
    """Return what the weight cache of the outermost region that is open on this thread holds: entries, hits, bytes.

    Casts that torch's own kernels keep (grade `native`) cannot be seen from Python and are not counted.
    """
    region = stack.innermost
    if region is None:
        return CacheInfo()
    held = region.casts
    prepared = region.prepared
    entries, size = held.held(), held.bytes
    if prepared.grade == "native":
        more, more_bytes = native_cache_size()
        entries, size = entries + more, size + more_bytes
    return CacheInfo(prepared.grade, entries, size, held.hits, held.misses, held.limit_bytes)


def invalidate(*changed: torch.Tensor | Module | Iterable[torch.Tensor]) -> None:
    """Say that weights were changed behind their version counters (`weight.data.copy_(...)`): cast them again.

    changed: tensors, modules (all their parameters), or iterables of tensors; everything, if nothing is given. torch's
    own cache can be cleared only as a whole, and is. Low-precision weights that `narrowcast.compile` caches from call
    to call are cast again, too; besides these nothing is cached outside of regions. Raises CacheError for other things.
    """
    weights = [w for item in changed for w in _weights_of(item)]
    if weights or not changed:
        at_rest.forget(*weights)
    region = stack.innermost
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
    if isinstance(item, str):  # names beside weights, as in named_parameters()
        return []
    if not isinstance(item, Iterable):
        raise CacheError(
            asked=f"invalidate({type(item).__name__})", found="it is not a weight, and holds none",
            advice="Give tensors, modules, or iterables of these.",
        )  # fmt: skip
    items = item.values() if isinstance(item, Mapping) else item
    return [weight for inner in items for weight in _weights_of(inner)]


# -- the mutators that everybody uses ----------------------------------------------------------------------------------


@once
def follow_mutators() -> None:
    """Have the casts of weights forgotten by what changes weights while a region of ours is open. Done once.

    Every optimizer's step (GradScaler's, too) through torch's hooks for all optimizers: before it, before each call of
    its closure, and after it. torch has no hooks for the others: loading a state_dict, moving or converting a module,
    averaged models, vectors written into parameters, swapped tensors.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    note_staying("hooks on every optimizer's step", _WHY)
    for owner, name in mutators():
        stay(owner, name, _forgetting, _WHY)
    stay(torch.utils, "swap_tensors", lambda swap: _letting_go(_forgetting(swap)), _WHY)


_WHY = "casts of weights are forgotten by what changes weights"


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forget, and have the closure forget: LBFGS changes weights between its calls."""
    forget_casts()
    if not open_anywhere:
        return None
    if len(args) > 1 and callable(args[1]):
        return (args[0], _forgetting(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _forgetting(kwargs["closure"])}
    return None


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forget casts after a step, since fused optimizers do not count what they write."""
    forget_casts()
    if len(at_rest):
        at_rest.forget(*optimized_by(optimizer))


def _letting_go(swap: Callable[..., Any]) -> Callable[..., Any]:
    """Return a swap before which recordings forget the tensors: no weak reference may be left."""

    @wraps(swap)
    def let_go_and_swap(*tensors: Any) -> Any:
        for watcher in watchers():
            watcher.let_go(tensors)
        at_rest.forget()
        return swap(*tensors)

    return let_go_and_swap


def _forgetting(mutator: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(mutator)
    def and_forget(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return mutator(*args, **kwargs)
        forget_casts()  # before, too: closures read weights, and tensors that we refer to cannot be swapped
        try:
            return mutator(*args, **kwargs)
        finally:
            forget_casts()

    return and_forget


def forget_casts() -> None:
    """Forget the casts of weights of the regions that are open on this thread: they may be out of date."""
    if open_anywhere:
        mutations.count += 1
        torch.clear_autocast_cache()
        region = stack.innermost
        if region is not None:
            region.casts.clear()
