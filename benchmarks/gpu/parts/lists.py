"""The kernels that this torch registers for the device against the policy native; torch's own autocast test lists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from context import Context, Skip, is_lost
from same import mirror
from sweeping import is_repeatable, same_results, stand_in_for_expecttest

import narrowcast as nc
from narrowcast.runtime.torch_bridge import find_op

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from read_torch import autocast_kernels


def run(context: Context) -> None:
    """The lists by name first: in this process no kernel of ours was registered yet."""
    device = context.device
    registered = set(autocast_kernels(device))
    listed = {rule.op for rule in nc.Policy.native(device).rules}
    missing = sorted(registered - listed)
    absent = sorted(op for op in listed if find_op(op) is None)  # ops that this torch does not have at all
    gone = sorted(listed - registered - set(absent))
    context.check("every registered kernel has a rule", f"no rule names {', '.join(missing)}" if missing else "")
    context.check("every rule has a kernel", f"torch registers none for {', '.join(gone)}" if gone else "")
    context.data |= {
        "registered": len(registered),
        "listed": len(listed),
        "missing": missing,
        "gone": gone,
        "absent": absent,
    }
    for low in (torch.float16, torch.bfloat16):
        _entries(context, low)


def _entries(context: Context, low: torch.dtype) -> None:
    """Each entry of torch's autocast test lists, on real tensors: ours as native."""
    stand_in_for_expecttest()
    try:
        from torch.testing._internal import autocast_test_lists
    except ImportError as error:
        raise Skip(f"torch's test lists cannot be imported: {error}") from error
    lists = "AutocastCPUTestLists" if context.device == "cpu" else "AutocastTestLists"
    made = getattr(autocast_test_lists, lists)(torch.device(context.device))
    regions = {
        "ours": lambda: nc.autocast(context.device, low),
        "by our kernels": lambda: nc.autocast(context.device, low, policy=mirror(context.device)),
    }
    count = 0
    for family, name, call in _cases(made):
        wanted = _result(call, torch.autocast(context.device, low))
        count += 1
        for label, region in regions.items():
            wrong = same_results(wanted, _result(call, region()))
            if wrong and is_repeatable(lambda call=call: _result(call, torch.autocast(context.device, low)), wanted):
                context.check(f"{family} {name}, {low}, {label}", wrong)
    context.check(f"{count} entries of torch's autocast test lists, {low}", "" if count else "none was found")


def _result(call: Callable[[], object], region: Any) -> object:
    torch.manual_seed(0)
    try:
        with region:
            return call()
    except Exception as error:
        if is_lost(error):
            raise
        return error


def _cases(lists: object) -> Iterator[tuple[str, str, Callable[[], object]]]:
    for family, entries in vars(lists).items():
        if not isinstance(entries, (list, tuple)):
            continue
        for name, args, *more in entries:
            kwargs = next((m for m in more if isinstance(m, dict)), {})
            if family.startswith("methods"):
                yield family, name, lambda n=name, a=args: getattr(a[0], n)(*a[1:])
                continue
            home = {"nn": torch._C._nn, "linalg": torch.linalg}.get(family.partition("_")[0], torch)
            home = torch.nn.functional if family == "banned" else home
            function = getattr(home, name, None) or getattr(torch.nn.functional, name, None)
            if function is not None:
                yield family, name, lambda f=function, a=args, k=kwargs: f(*a, **k)
