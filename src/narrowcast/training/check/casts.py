"""Inspects casts besides a region's own: of wrappers (FSDP2's MixedPrecisionPolicy), of what reduces gradients over
processes, and those that a region caches of weights that are written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowcast.core.policy import Site
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.output.words import counted
from narrowcast.runtime.torch_bridge import FORMATS, LOW, OpFacts, tensors_in
from narrowcast.runtime.torch_surface.autograd import current_autograd_node, gives_gradients
from narrowcast.runtime.torch_surface.dispatch import storage_key
from narrowcast.runtime.torch_surface.modules import formats_of_wrapper, hooks_of_wrapper, reduces_gradients
from narrowcast.training.check.gradients import Found

_DOES = {
    "param_dtype": "weights reach every call in it",
    "output_dtype": "what a module returns is cast to it",
    "reduce_dtype": "gradients are summed across processes in it",
}


def cast_again(again: Sequence[tuple[int, list[Site]]], names: Callable[[], dict[int, str]]) -> Found:
    """Return a finding about weights, by storage key, that are cast at several lines before an optimizer steps."""
    key, sites = max(again, key=lambda item: len(item[1]))
    return (
        "weights cast again",
        f"{counted(len(again), 'weight', 'are')} cast more than once before the optimizer steps, "
        f"{names().get(key, 'a weight')} {len(sites)} times",
        "One region around all forwards of a step, with its weight cache on, casts each weight once; switch it off for "
        "backwards in it: nc.autocast(device, enabled=False). Nothing is wrong: this only costs time.",
        sites[1],
    )


def casts_beside(model: torch.nn.Module, site: Site) -> Found | None:
    """Return a finding if a model's wrappers cast besides the region that it is called in."""
    formats = {name: d for module in model.modules() for name, d in formats_of_wrapper(module).items() if d in LOW}
    if not formats:
        return None
    what = ", ".join(f"{name}={FORMATS[dtype]} ({_DOES[name]})" for name, dtype in formats.items())
    is_reduced = "reduce_dtype" in formats
    without = "fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
    return (
        "FSDP2 casts beside the region", f"the MixedPrecisionPolicy of fully_shard has {what}",
        f"Let one of both cast: {without if is_reduced else 'fully_shard(model)'} in the region, or no region.", site,
    )  # fmt: skip


class Reduced:
    """Inspects the formats in which DistributedDataParallel and FSDP2 reduce gradients, with any registered hook."""

    def __init__(self) -> None:
        self._hooks: dict[str, None] = {}
        self._site: Site | None = None

    def met(self, model: torch.nn.Module, site: Site) -> None:
        """Note that a model is called, and which hooks reduce its gradients if it is wrapped."""
        reducing = [module for module in model.modules() if reduces_gradients(module)]
        trained = [parameter for module in reducing for parameter in module.parameters() if parameter.requires_grad]
        if trained and not any(parameter.dtype in LOW for parameter in trained):
            self._site = site
            self._hooks |= {name: None for module in reducing for name in hooks_of_wrapper(module)}

    def sends(self, facts: OpFacts, args: tuple[Any, ...]) -> Found | None:
        """Return a finding if an op of a backward is about to reduce fp32 gradients over processes in a low format."""
        if self._site is None or facts.op.namespace != "c10d" or not gives_gradients(current_autograd_node()):
            return None
        low = next((t for t in tensors_in(args) if t.dtype in LOW or (self._hooks and t.itemsize == 1)), None)
        if low is None:
            return None
        who = ", ".join(self._hooks) or "a hook of the reducer's own"
        return (
            "gradients reduced in a low format",
            f"{who} sums gradients in fp32 across processes in {str(low.dtype).removeprefix('torch.')}",
            "Register no such hook: without one gradients are added up in their own format.", self._site,
        )  # fmt: skip


class Stale:
    """Casts of weights that regions cache, compared with their weights when they are read again."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[SeenCall, Any, Any]] = {}
        self._written: dict[int, Site] = {}

    def forget(self) -> None:
        """Forget the casts."""
        self._casts.clear()

    def cast(self, seen: SeenCall, weight: torch.Tensor, result: torch.Tensor) -> None:
        """Record the cast of a weight for a call."""
        self._casts[id(weight)] = seen, weakref.ref(weight), weakref.ref(result)

    def written(self, targets: list[torch.Tensor], site: Site) -> None:
        """Note that the user writes to tensors in a region."""
        self._written |= {storage_key(tensor): site for tensor in targets}

    def read(self, call: SeenCall) -> Found | None:
        """Return a finding if a call of a region has read a cached cast that differs from its weight."""
        for name, weight in tensors_by_name(call.facts, call.args, call.kwargs):
            seen, of, result = self._casts.get(id(weight), (None, None, None))
            if of is None or of() is not weight or seen is call or not has_storage(weight) or not weight.requires_grad:
                continue  # no region keeps casts of frozen ones
            cast = result() if result is not None else None
            if cast is None or torch.equal(weight.detach().to(cast.dtype), cast.detach()):
                continue
            del self._casts[id(weight)]
            return (
                "weights written in an open region",
                f"{call.id} reads its {name} as it was before it was written to: the region has kept the cast to "
                f"{FORMATS[cast.dtype]}",
                "Write weights where no region is open: close it before this line, and open another for the next "
                "forward: with nc.autocast(device, dtype).",
                self._written.get(storage_key(weight), call.site),
            )
        return None
