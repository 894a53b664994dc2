"""A region of ours that a `torch.autocast` block inside it hides: frameworks open theirs, and the innermost rules."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from narrowcast.core.ledger import TO_RULE_INSIDE
from narrowcast.core.policy import Site
from narrowcast.runtime.regions.ruling import shadowed_region
from narrowcast.runtime.sites.warned import warn_at
from narrowcast.runtime.torch_surface.autograd import current_graph_task

_told: WeakSet[object] = WeakSet()
"""Regions of which it was said: a plugin's is entered for each step of a training run."""


def tell_hidden(op: str, device_type: str, find_site: Callable[[], Site]) -> None:
    """RegionWarning, once for each region that was made, if its policy changes this op, and is hidden."""
    region = shadowed_region(device_type)
    if region is None or op not in region.prepared.changed or current_graph_task() != -1 or region.owner in _told:
        return
    _told.add(region.owner)
    warn_at(
        f"narrowcast: a torch.autocast block inside your region hides policy {region.prepared.policy.name}: {op} runs "
        f"as torch decides. {TO_RULE_INSIDE}; narrowcast.record says where the block is opened",
        find_site(),
    )


def hidden_policy(device_type: str) -> str:
    """The name of the policy that a region of torch's, just entered, keeps from ruling; empty if it keeps none."""
    hidden = shadowed_region(device_type)
    return hidden.prepared.policy.name if hidden is not None and hidden.prepared.differs else ""
