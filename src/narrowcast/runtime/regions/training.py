"""A region in a low format that its policy does not train in says so where gradients are recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from narrowcast.runtime.regions.stack import OpenRegion
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.sites.warned import warn_at


def watch_gradients(region: OpenRegion, tensors: Iterable[torch.Tensor | None]) -> None:
    """RegionWarning, at most once while the region is open, if gradients flow to these tensors, which a call lowers."""
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors):
        return
    region.has_warned = True
    policy, low = region.prepared.policy, region.prepared.facts.low
    warn_at(
        f"narrowcast: gradients are recorded in a region in {low}, and the policy {policy.name} is for training in "
        f"{' or '.join(policy.training)} alone. Train with dtype={policy.training[0]!r}, or run inference under "
        "torch.no_grad()",
        find_site(with_names=False),
    )
