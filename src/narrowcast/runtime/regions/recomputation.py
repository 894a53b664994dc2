"""Our region in the recomputation of torch.utils.checkpoint, which knows only torch's own autocast state.

At the forward, checkpoint asks one function for the state to restore, and keeps what it got until it recomputes. That
function is wrapped once: what it returns inside a region of ours carries the region. At the recomputation it is found
on the Python stack, whether the backward was called inside the region or after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils.checkpoint

from narrowcast.runtime.regions.stack import OpenRegion, innermost
from narrowcast.runtime.sites.numbering import PerRecomputation, counted_here
from narrowcast.runtime.sites.python_stack import NO_AROUND, Around
from narrowcast.runtime.torch_bridge import DTYPES
from narrowcast.runtime.torch_surface.autograd import current_graph_task
from narrowcast.runtime.torch_surface.dispatch import count_dispatch_modes
from narrowcast.runtime.torch_surface.modules import CHECKPOINT_STATE, carried_state, find_recomputation
from narrowcast.runtime.torch_surface.patches import stay
from narrowcast.runtime.torch_surface.probes import require
from narrowcast.runtime.weights.cache import WeightCache


class _CarriedArguments(dict[str, Any]):
    """torch's keyword arguments for the cpu region, with ours beside them, and where the checkpoint was called."""

    region: OpenRegion
    around: Around
    counted: PerRecomputation[dict[str, int]]
    casts: PerRecomputation[WeightCache]


def carry_into_recomputation() -> None:
    """Wrap checkpoint's function, once."""
    require("checkpoints ask for autocast's state")
    why = "the forward that a checkpoint recomputes runs in the region that it ran in"
    stay(torch.utils.checkpoint, CHECKPOINT_STATE, _with_region, why)


def _with_region(original: Any) -> Any:
    def with_region(*args: Any, **kwargs: Any) -> Any:
        device, cpu = original(*args, **kwargs)
        region = innermost()
        if region is not None and region.is_innermost:
            cpu = _CarriedArguments(cpu)
            cpu.region = region
            asks = region.prepared.differs or count_dispatch_modes() > 0  # rules of the policy, or an observer
            cpu.around = Around.now() if asks else NO_AROUND
            cpu.counted, cpu.casts = counted_here(), PerRecomputation(WeightCache)
        return device, cpu

    return with_region


def carried_region(device_type: str) -> OpenRegion | None:
    """The region of the forward that is being recomputed on this stack, if it was ours and its state is in force.

    Its weight cache is not taken along: the casts in it belong to a graph that may be gone.
    """
    if current_graph_task() == -1:  # no backward is running
        return None
    frame = find_recomputation()
    carrier = carried_state(frame) if frame is not None else None
    if frame is None or not isinstance(carrier, _CarriedArguments):
        return None
    return _of_device(carrier.region, device_type, carrier.casts.found_in(frame))


def _of_device(region: OpenRegion | None, device_type: str, casts: WeightCache) -> OpenRegion | None:
    while region is not None and region.prepared.facts.device_type != device_type:
        region = region.outer
    if region is None or region.before is None:
        return None
    in_force = torch.is_autocast_enabled(device_type) == region.prepared.facts.enabled
    same_format = torch.get_autocast_dtype(device_type) is DTYPES[region.prepared.facts.low]
    return replace(region, kept=casts) if in_force and same_format else None
