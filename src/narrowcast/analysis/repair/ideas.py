"""Rules that may fix a run that raises, or makes NaN: tried first on the call alone, where possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import takewhile

import torch

from narrowcast.analysis.compare.rules import rule_about, rule_about_result
from narrowcast.analysis.repair.checking import Ran
from narrowcast.analysis.repair.looking import LOW, RepairObserver
from narrowcast.analysis.repair.rules import rule_about_module
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ops import named
from narrowcast.core.policy import MODULE_CALL, NOWHERE, Kind, Rule
from narrowcast.errors import RefusedError, first_line
from narrowcast.formats import fp32, parse_format
from narrowcast.frontends.eager import autocast
from narrowcast.observation.trial.finiteness import is_finite, is_floating
from narrowcast.observation.trial.raising import Raising
from narrowcast.observation.trial.trial import tensors_of
from narrowcast.reports.results.findings import CAST, FORMAT, Finding
from narrowcast.runtime.devices.device import random_state_kept
from narrowcast.runtime.sites.python_stack import find_site, innermost_frame
from narrowcast.runtime.torch_bridge import FORMATS, find_op, tensors_in
from narrowcast.runtime.torch_surface.dispatch import tree_map_only

RegionWith = Callable[[Iterable[Rule]], autocast]
"""Returns the region of a repair with these rules added."""


# -- what raises -------------------------------------------------------------------------------------------------------


def rules_for_raised(ran: Ran, region_with: RegionWith, tried: Collection[Rule]) -> list[Rule]:
    """Return rules that let the call that raised run: about its op, the producers of its inputs, or its module."""
    if isinstance(ran.error, RefusedError):  # a rule asks for it
        return []
    reason = first_line(ran.error)
    if ran.in_metric:
        outputs = tensors_of(ran.outcome.output) if ran.outcome is not None else []
        return _rules_about_makers(ran.look, outputs, f"the metric: {reason}", tried)
    raising = ran.look.raising
    if raising.called is not None and not _runs(raising, region_with([])):
        rule = _rule_about_op(raising, region_with, reason, tried)
        if rule is not None:
            return [rule]
        tensors = tensors_in(raising.args, raising.kwargs)
        if _runs(raising, region_with([]), widened=True):
            about_makers = _rules_about_makers(ran.look, tensors, reason, tried)
        else:  # its values may be to blame, rounded where they were made
            about_makers = _rules_about_values(ran.look, tensors, f"what comes of it: {reason}", tried)
        if about_makers:
            return about_makers
    site = raising.site or (NOWHERE if ran.error is None else find_site(frame=innermost_frame(ran.error)))
    rules = [rule_about_module(site.module_path, reason)] if site.module_path else []
    return _new(rules, tried)


def _rule_about_op(raising: Raising, region_with: RegionWith, reason: str, tried: Collection[Rule]) -> Rule | None:
    """Return the first rule about the op under which the call runs, tried by itself."""
    if find_op(raising.op) is None or raising.site is None:
        return None
    several = len(set(raising.formats.split(","))) > 1
    for kind in (Kind.ALIGN, Kind.FULL) if several else (Kind.INSIDE, Kind.FULL):
        rule = rule_about(raising.op, raising.site.module_path, kind, reason)
        if rule not in tried and _runs(raising, region_with([replace(rule, module=None)])):
            return rule
    return None


def _runs(raising: Raising, region: autocast, widened: bool = False) -> bool:
    """Return whether the call runs by itself in a region, and stays finite. widened: its low tensors are fp32."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().float() if widened and _is_low(tensor) else tensor.detach().clone()

    if raising.called is None:
        return False
    args, kwargs = tree_map_only(torch.Tensor, own, (raising.args, raising.kwargs))
    args, kwargs = tree_map_only(torch.Generator, torch.Generator.clone_state, (args, kwargs))
    try:
        with random_state_kept(), torch.no_grad(), region:
            outputs = tensors_of(raising.called(*args, **kwargs))
    except Exception:  # whatever it raises: it does not run
        return False
    return _all_finite(outputs) or not _all_finite(tensors_in(raising.args, raising.kwargs))


def _is_low(tensor: torch.Tensor) -> bool:
    return str(FORMATS.get(tensor.dtype, "")) in LOW


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return all(is_finite(t) for t in tensors if is_floating(t))


def _rules_about_makers(
    look: RepairObserver, tensors: list[torch.Tensor], reason: str, tried: Collection[Rule]
) -> list[Rule]:
    """Return for each low tensor the rule that makes it fp32: about what a module returns, or about an op's output."""
    rules: dict[Rule, None] = {}
    for tensor in filter(_is_low, tensors):
        maker, path = look.maker_of(tensor)
        paths = [] if path is None else [path]
        if path is None and maker is not None and not maker.module_path:
            paths += look.modules_behind(maker)  # a rule about an op outside of modules would hold everywhere
        untried = _new([rule_about_result(MODULE_CALL, each, reason) for each in paths], tried)
        if not untried and maker is not None:
            untried = _new([rule_about_result(maker.op, maker.module_path, reason)], tried)
        rules.update(dict.fromkeys(untried))
    return list(rules)


def _rules_about_values(
    look: RepairObserver, tensors: list[torch.Tensor], reason: str, tried: Collection[Rule]
) -> list[Rule]:
    """Return rules about the nearest calls that a rule put into a low format, and from which these tensors come."""
    makers = [maker for tensor in tensors if (maker := look.maker_of(tensor)[0]) is not None]
    behind = dict.fromkeys(call for maker in makers for call in look.decided_behind(maker))
    return _new(dict.fromkeys(_rule_about_call(call, look, reason, tried) for call in behind), tried)


# -- what is not finite ------------------------------------------------------------------------------------------------


def rules_for_not_finite(
    findings: Iterable[Finding], look: RepairObserver, in_fp32: RepairObserver | None, tried: Collection[Rule]
) -> list[Rule]:
    """Return rules that keep in fp32 the calls that made NaN or infinity in a low format, and those that must overflow
    by their ranges in fp32.
    """
    rules = [rule for finding in findings for rule in _rules_for(finding, look, tried)]
    for identity, largest in (in_fp32.largest if in_fp32 is not None else {}).items():
        format = parse_format(look.low[identity].low) if look.is_decided(identity) else fp32
        if format is not fp32 and largest > format.max:
            reason = f"in fp32 its largest magnitude is {largest:.4g}, the maximum of {format} is {format.max:.6g}"
            rules.append(_rule_about_call(identity, look, reason, tried))
    return _new(dict.fromkeys(rules), tried)


def _rules_for(finding: Finding, look: RepairObserver, tried: Collection[Rule]) -> list[Rule]:
    of, reason = finding.forward or finding.id, f"{finding.what} in {finding.formats}: {finding.sentence}"
    if of not in look.forward:  # the model's own conversion: no rule reaches it, but its inputs, and its format's
        maker = look.converted.get(of)
        if maker is None:
            return []
        rules = _new([_rule_about_call(s, look, reason, tried) for s in look.decided_behind(maker)], tried)
        asked = f"{reason}; it asks for the format of this"
        return rules or [rule_about_result(s.op, s.module_path, asked) for s in _before(maker, look)]
    own = _rule_about_call(of, look, reason, tried)
    is_low = any(name in LOW for name in finding.formats.split(",")) or finding.made_by in (CAST, FORMAT)
    if is_low and own not in tried and finding.made_by in (CAST, FORMAT, ""):
        return [own]
    # The op makes it of the output of low calls before it: those may be at fault.
    makers = look.sources_of(of) or _before(of, look)
    about_maker = f"{of} makes {finding.what} of what it gives"
    return [_rule_about_call(s, look, about_maker, tried) for s in makers]


def _rule_about_call(identity: CallId, look: RepairObserver, reason: str, tried: Collection[Rule]) -> Rule:
    """Return the rule about a call: by its number, where its module calls the op several times; about all of them, once
    a rule about another one was tried (the steps of a recurrence).
    """
    alike = [i for i in look.forward if (i.module_path, i.op) == (identity.module_path, identity.op)]
    whole = rule_about(identity.op, identity.module_path, reason=reason)
    if not any(i.number > 1 for i in alike):
        return whole
    numbered = [rule for rule in tried if rule.call is not None and rule.conditions[:-1] == whole.conditions]
    is_repeated = any(rule.call != identity.number for rule in numbered)
    return whole if is_repeated else replace(whole, call=identity.number)


def _before(identity: CallId, look: RepairObserver) -> tuple[CallId, ...]:
    """Return the last low call before one that reads nothing low itself."""
    earlier = takewhile(lambda each: each != identity, look.forward)
    return tuple(filter(look.is_decided, earlier))[-1:]


# -- what is imprecise -------------------------------------------------------------------------------------------------


def rules_about_low(look: RepairObserver) -> list[Rule]:
    """Return rules that keep in fp32 all low compute: what rules lower, and kernels whose inner calls lists lower; of a
    gradient taken in the region everywhere, since autograd calls it in no module.
    """
    closed = named("inside.closed")
    rules = [
        rule_about(identity.op, identity.module_path) for identity in look.forward
        if look.is_decided(identity) or identity.op.split(".")[1] in closed
    ]  # fmt: skip
    return list(dict.fromkeys([*rules, *(rule_about(identity.op, "") for identity in look.gradients)]))


def _new(rules: Iterable[Rule], tried: Collection[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule not in tried]
