"""Looks at weights that are written to in an open region, whose cast is read again after that."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from narrowcast.core.policy import Site
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.runtime.torch_bridge import FORMATS
from narrowcast.runtime.torch_surface.dispatch import storage_key
from narrowcast.training.check.gradients import Found


class Stale:
    """Casts of weights that regions keep, compared with their weights when they are read again."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[SeenCall, Any, Any]] = {}
        self._written: dict[int, Site] = {}

    def cast(self, seen: SeenCall, weight: torch.Tensor, result: torch.Tensor) -> None:
        """A call has its weight cast."""
        self._casts[id(weight)] = seen, weakref.ref(weight), weakref.ref(result)

    def written(self, targets: list[torch.Tensor], site: Site) -> None:
        """The user writes to something in a region."""
        self._written |= {storage_key(tensor): site for tensor in targets}

    def read(self, call: SeenCall) -> Found | None:
        """A call of a region has run: whether it has read a cast that its weight no longer agrees with."""
        for name, weight in tensors_by_name(call.facts, call.args, call.kwargs):
            seen, of, result = self._casts.get(id(weight), (None, None, None))
            if of is None or of() is not weight or seen is call or not has_storage(weight):
                continue
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
