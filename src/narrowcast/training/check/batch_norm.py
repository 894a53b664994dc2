"""Looks at the running statistics of batch norm, which add a little at each step."""

from __future__ import annotations

from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.runtime.torch_bridge import FORMATS, LOW
from narrowcast.runtime.torch_surface.dispatch import schema_of
from narrowcast.training.check.gradients import Found


def low_statistics(call: SeenCall) -> Found | None:
    """Whether a call adds to statistics that are in a low format. Nothing is added to those of a frozen one."""
    if "batch_norm" not in call.facts.id:
        return None
    names = [argument.name for argument in schema_of(call.facts.op).arguments]
    flag = next((names.index(name) for name in ("training", "train") if name in names), None)
    if flag is None or not (call.args[flag] if flag < len(call.args) else call.kwargs.get(names[flag])):
        return None
    for name, tensor in tensors_by_name(call.facts, call.args, call.kwargs):
        if name in ("running_mean", "running_var") and tensor.dtype in LOW:
            return (
                "batch norm statistics in a low format",
                f"{name} of {call.id.module_path or 'the module'} is {FORMATS[tensor.dtype]}: what each step adds to "
                "it is soon lost in rounding",
                "Keep the module in fp32 (module.float()): a region gives it what it needs.",
                call.site,
            )
    return None
