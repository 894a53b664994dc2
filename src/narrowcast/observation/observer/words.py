"""Words for what a recording saw: formats of tensors, the rule that decided."""

from __future__ import annotations

import torch

from narrowcast.core.decide import Plan
from narrowcast.core.policy import Rule
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS, Slot


def deciding_rule(plan: Plan | None) -> Rule | None:
    """Return the rule that decided about a call, or else about one of its arguments."""
    return None if plan is None else plan.rule or next((rule for _, rule in plan.argument_rules), None)


def format_names(dtypes: list[torch.dtype]) -> str:
    """Return the formats among these dtypes, each once, in order: `fp32,bf16`."""
    names: dict[str, None] = {}
    for dtype in dtypes:
        known = FORMATS.get(dtype)
        if known is not None:
            names[known.name] = None
    return ",".join(names)


def planned_names(plan: Plan, tensors: list[tuple[Slot, torch.Tensor | None]]) -> str:
    """Return the formats in which the op reads its floating tensors."""
    if plan.set_dtype or plan.append_dtype:
        return "fp32"
    given = zip(tensors, plan.formats, strict=True)
    return format_names([t.dtype if dst is None else DTYPES[dst] for (_, t), dst in given if t is not None])
