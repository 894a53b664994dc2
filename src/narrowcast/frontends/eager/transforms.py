"""Rules that do not hold inside of torch.func's transforms: these take composite ops (linear, conv2d) apart, so that
regions see what they call.
"""

from __future__ import annotations

from functools import partial

from narrowcast.core.policy import Rule
from narrowcast.runtime.regions.ruling import ruling_regions
from narrowcast.runtime.regions.stack import Prepared
from narrowcast.runtime.sites.python_stack import find_site, warn_at
from narrowcast.runtime.torch_bridge import find_registered
from narrowcast.runtime.torch_surface.dispatch import composite_kernel, told_of_transforms
from narrowcast.runtime.torch_surface.patches import once


@once
def watch_transforms() -> None:
    """Have transforms tell which rules of the regions around them do not hold inside."""
    told_of_transforms(tell_lost)


def tell_lost() -> None:
    """Warn of a rule that does not hold where a transform runs: as one begins in a region, or a region in one."""
    for region in ruling_regions().values():
        prepared, policy = region.prepared, region.prepared.policy
        lost = policy.remembered(("in transforms", prepared.facts), partial(_first_lost, prepared))
        if lost is not None:
            text = f"narrowcast: policy {policy.name}: the rule {lost} does not hold inside of torch.func's transforms "
            text += "(vmap, grad, jvp and others): they take the op apart before a region sees it. Write a rule about "
            text += "what it calls (aten.addmm, aten.matmul and aten.mm of a linear layer)"
            warn_at(text, find_site(with_names=False))


def _first_lost(prepared: Prepared) -> Rule | None:
    """Return the first rule of a user's about a composite op that it changes; None without one."""
    for name in sorted(prepared.changed):
        op = find_registered(name)
        rules = prepared.policy.table.candidates(name).whole
        if op is not None and rules and not rules[0].is_builtin and composite_kernel(op) is not None:
            return rules[0]
    return None
