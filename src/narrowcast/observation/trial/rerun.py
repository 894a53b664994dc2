"""A call that was seen, run again by itself: as planned, or with its tensors in other formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from narrowcast.core.ops import ATTENTION, is_named, op_kind
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import draws_numbers, tensors_by_name
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.observation.trial.finiteness import gives_memory
from narrowcast.runtime.torch_bridge import DTYPES, OpFacts, Slot, map_tensors, tensors_in, written_tensors
from narrowcast.runtime.torch_bridge.calls import gather
from narrowcast.runtime.torch_surface.dispatch import (
    attention_by_definition,
    holds_others,
    schema_of,
    storage_key,
)

Change = Callable[[torch.Tensor], torch.Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def can_run_again(call: SeenCall) -> bool:
    """Return whether the same call can be made, and returns the same again: no random numbers are drawn, no memory is
    assigned, and no tensor is made of others, whose class alone knows what is to be done with it.
    """
    if draws_numbers(call.facts, call.args, call.kwargs):
        return False
    return not gives_memory(call) and not any(map(is_of_others, tensors_in(call.args, call.kwargs)))


def is_of_others(tensor: torch.Tensor) -> bool:
    """Return whether it is of a class that is made of other tensors: it must not be touched where no class is asked."""
    return holds_others(type(tensor))


def planned_arguments(call: SeenCall) -> Arguments:
    """Return the arguments as the op reads them: cast as planned."""
    dtypes = planned_dtypes(call)
    return in_dtypes(call.facts, call.args, call.kwargs, dtypes) if dtypes else (call.args, call.kwargs)


def planned_dtypes(call: SeenCall) -> list[torch.dtype | None]:
    """Return what each tensor of a call is cast to, in their order; None leaves it."""
    if call.plan is None or not any(call.plan.formats):
        return []
    given = zip(gather(call.facts, call.args, call.kwargs), call.plan.formats, strict=True)
    return [None if dst is None else DTYPES[dst] for tensor, dst in given if isinstance(tensor, torch.Tensor)]


def in_dtypes(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: list[torch.dtype | None]
) -> Arguments:
    """Return the arguments with each tensor, in the order of slots, in its dtype; None leaves it."""
    left = iter(dtypes)  # what is no tensor (None in a list of indices) has no dtype either

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        dtype = next(left, None)
        return tensor if dtype is None else tensor.to(dtype)

    return _by_slot(facts.slots, args, kwargs, cast)


def _by_slot(slots: Iterable[Slot], args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
    """Return the arguments with the tensors in these slots changed, lists element by element."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for slot in slots:
        if slot.position < len(args):
            new_args[slot.position] = map_tensors(change, args[slot.position])
        elif slot.name in kwargs:
            new_kwargs[slot.name] = map_tensors(change, kwargs[slot.name])
    return tuple(new_args), new_kwargs


def changed(args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Arguments:
    """Return the arguments with each floating tensor changed."""
    arguments: Arguments = map_tensors(lambda t: change(t) if t.is_floating_point() else t, (args, kwargs))
    return arguments


def run_in(call: SeenCall, dtype: torch.dtype) -> list[torch.Tensor] | None:
    """Return the results of the call with every floating tensor (as planned, rounded as it is) in one dtype; None if
    the op has no such kernel.
    """
    return run_wide(call.facts, *planned_arguments(call), dtype)


def run_wide(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, change: Change | None = None
) -> list[torch.Tensor] | None:
    """Return the results of an op with every floating tensor in one dtype; None if it has no such kernel. change: what
    is done to each tensor then. Of attention on an accelerator, whose kernels have no wide formats, the output alone.
    """

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().to(dtype)
        return wide if change is None else change(wide)

    args, kwargs = copies_of_written(facts, *changed(args, kwargs, widened))
    args = tuple(dtype if isinstance(v, torch.dtype) and v.is_floating_point else v for v in args)
    kwargs = {k: dtype if isinstance(v, torch.dtype) and v.is_floating_point else v for k, v in kwargs.items()}
    try:
        is_low = is_named(facts.id, "inside.without_wide_formats")
        given = _attention(facts, args, kwargs) if is_low else facts.op(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return None
    return tensors_in(args[0] if given is None else given)  # lists that are written to are not given back


def _attention(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return what attention is by definition, of the arguments of one of its kernels."""
    schema = schema_of(facts.op).arguments
    given: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    output: torch.Tensor = attention_by_definition(
        query, key, value, given.get("attn_bias"), given["dropout_p"], given["is_causal"], scale=given["scale"],
        enable_gqa=query.shape[-3] != key.shape[-3],
    )[0]  # fmt: skip
    return output


def zero_blind_rows(call: SeenCall) -> bool:
    """Set to zero what attention has returned for queries from which a mask hides every key; return whether that was
    something else. No value is defined there: torch's own kernels give zeros, cuDNN's the mean of all values.
    """
    if op_kind(call.facts.id).family != ATTENTION:
        return False
    named = dict(tensors_by_name(call.facts, call.args, call.kwargs))
    mask = named.get("attn_mask", named.get("attn_bias"))
    if mask is None:
        return False
    blind = (~mask if mask.dtype is torch.bool else mask == -torch.inf).all(-1, keepdim=True)
    output = call.results[0].data  # as .data: autograd's graph goes on
    is_other = bool((blind & (output != 0)).any())
    if is_other:
        output.masked_fill_(blind, 0.0)
    return is_other


def mends(wide: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Return whether something is finite in a wide format that is not in the results."""
    pairs = [(w, r) for w, r in zip(wide, results, strict=False) if w.is_floating_point() and w.shape == r.shape]
    return any(bool((w.isfinite() & ~r.isfinite()).any()) for w, r in pairs)


def copies_of_written(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments, with copies of those that the op writes to, or that share their memory, and that can be
    copied.
    """
    written = written_tensors(facts, args, kwargs)
    if not written:
        return args, kwargs
    ids, memory = set(map(id, written)), {storage_key(t) for t in written if has_storage(t)}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        is_touched = id(tensor) in ids or (has_storage(tensor) and storage_key(tensor) in memory)
        return tensor.detach().clone() if is_touched and not is_of_others(tensor) else tensor

    return _by_slot(facts.slots, args, kwargs, copied)
