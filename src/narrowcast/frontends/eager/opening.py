"""How a region is opened: its arguments checked, and what enters it, made once for a policy and the same arguments.

Regions are written where they are used, so that each call of a model makes one: that costs as little as torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from narrowcast.core.decide import Region
from narrowcast.core.policy import DEVICE_TYPES, Kind, Policy
from narrowcast.errors import NarrowcastError, RegionError
from narrowcast.formats import Format
from narrowcast.frontends.eager.caching import follow_mutators
from narrowcast.frontends.eager.registered import in_trial, install
from narrowcast.frontends.eager.transforms import watch_transforms
from narrowcast.runtime.devices.abilities import fitted
from narrowcast.runtime.regions.native_state import Carried, NativeState, carried_by
from narrowcast.runtime.regions.pinned import watch_module_calls
from narrowcast.runtime.regions.ruling import carry_into_recomputation
from narrowcast.runtime.regions.stack import CHECKED, Prepared
from narrowcast.runtime.sites.sightings import sightings_of
from narrowcast.runtime.torch_bridge import (
    DTYPES,
    FORMATS,
    LOW,
    default_dtype,
    find_op,
    op_facts,
    op_id,
    ops_of,
    to_dtype,
)
from narrowcast.runtime.torch_surface.dispatch import OpOverload
from narrowcast.runtime.torch_surface.state import caches, is_enabled

Asked = tuple[str, torch.dtype | str | Format | None, bool, bool | str | None, int | None]
"""Arguments of `autocast`: device type, dtype, whether it is enabled, the weight cache, and its limit in bytes."""


@dataclass(slots=True, eq=False)
class Opening:
    """What regions of one policy and the same arguments share.

    asked: with the low format filled in. state: what is set in torch; it switches off what this machine lacks.
    carried: how Dynamo sees the policy. key: names such regions in graphs. is_changed: whether any op takes
    another path than under native.
    is_checked_inside: whether a region around it whose weight cache is checked has this one's checked, too.
    counts: whether a rule is about the n-th call of an op.
    is_ready: whether these ops ask the region already: from the first time that one is entered.
    """

    asked: Asked
    prepared: Prepared
    state: NativeState
    carried: Carried
    key: str
    is_changed: bool
    is_checked_inside: bool
    counts: bool
    is_ready: bool = False

    def make_ready(self) -> None:
        """Have the ops that the policy changes, and checkpoint's recomputation, ask the region; trials undo it."""
        if self.is_changed:
            install(self.prepared.ops, self.prepared.changed, self.state[0])
            carry_into_recomputation()
            watch_transforms()
        self.is_ready = not in_trial()

    def checked_as(self, policy: Policy, around: Prepared) -> Opening:
        """Return this opening with the weight cache of a region around it."""
        prepared = prepared_for(policy, self.prepared.facts, around.grade, around.cache_limit_bytes)
        return replace(self, prepared=replace(prepared, graphs=self.prepared.graphs), is_ready=False)


def find_opening(policy: Policy, asked: Asked) -> Opening:
    """Return the opening of regions with these arguments of `autocast`. Raises RegionError, UnknownOpError."""
    device_type, dtype, enabled, _, _ = asked
    try:
        key = (
            asked,
            torch.get_autocast_dtype(device_type) if dtype is None else None,
            torch.is_autocast_cache_enabled(),
        )
        known: Opening | None = policy.memory.get(key)
    except (TypeError, RuntimeError):  # no device type, or nothing that could be an argument
        return _make_opening(policy, asked)
    exporting = torch.compiler.is_exporting()  # which switches the weight cache off meanwhile
    if known is not None and not exporting:
        return known
    opening = _make_opening(policy, asked)
    if opening.prepared.facts.enabled is enabled and not exporting and not policy.has_open_patterns:
        policy.memory[key] = opening  # but where torch switches the region off, it says so each time
    return opening


def _make_opening(policy: Policy, asked: Asked) -> Opening:
    """Check the arguments of `autocast`, and prepare what entering such a region takes. RegionError, UnknownOpError."""
    given, dtype, enabled, cache_enabled, limit_bytes = asked
    device_type = _device_type(given)
    if policy.has_backward_rules:
        rule = next(r for r in policy.rules if r.direction != "forward")
        raise RegionError(
            asked=f"a region with a rule about the backward, {rule}",
            found="eager autograd runs after the region, and asks no policy",
            where=(rule.origin,) if rule.origin else (),
            advice="Give the policy to narrowcast.compile, or call backward() inside a region of its own.",
        )
    if policy.has_module_rules or policy.counts_calls:
        watch_module_calls()
    fast = _checked_dtype(policy, device_type, dtype)
    if cache_enabled is None and policy.effective_cache == "off":
        cache_enabled = False
    checked = _checked_cache(cache_enabled, limit_bytes)
    cached = True if checked else bool(cache_enabled) if cache_enabled is not None else None
    if fast is torch.float32 and not policy.is_native:
        # torch would warn and switch itself off; here it is meant.
        native = torch.autocast(device_type, None, enabled, cached)
        native.fast_dtype = fast
    else:
        native = torch.autocast(device_type, fast, enabled, cached)
    grade = checked or ("native" if caches(native) else "off")
    facts = Region(device_type, FORMATS[fast], is_enabled(native), caches(native))
    follow_mutators()
    asked = (device_type, fast, enabled, cache_enabled, limit_bytes)
    return opening_of(policy, prepared_for(policy, facts, grade, limit_bytes), asked)


def opening_of(policy: Policy, prepared: Prepared, asked: Asked) -> Opening:
    """Return the opening of regions for which this is prepared."""
    facts, seen = prepared.facts, prepared.for_graphs
    *_, cache, limit_bytes = asked
    return Opening(
        asked, prepared,
        state=(facts.device_type, facts.enabled, DTYPES[facts.low], facts.cache),
        carried=carried_by(seen.policy.digest, facts.device_type) if seen.differs else (),
        key=f"{facts} {prepared.grade} {limit_bytes} {policy.digest}",
        is_changed=prepared.differs and facts.enabled,
        is_checked_inside=cache is None and prepared.grade == "native",
        counts=policy.counts_calls and facts.enabled,
    )  # fmt: skip


def _device_type(given: str | torch.device) -> str:
    """Return the device type of what may be a device: torch.autocast takes `cuda:0`, too, for its type."""
    try:
        return torch.device(given).type if isinstance(given, str | torch.device) else given
    except RuntimeError:  # no device
        return str(given)


def _checked_dtype(policy: Policy, device_type: str, dtype: torch.dtype | str | Format | None) -> torch.dtype:
    """Return the low dtype. Raise RegionError for what torch would accept and then ignore, or crash on."""
    if dtype is None and device_type in DEVICE_TYPES:
        dtype = default_dtype(policy, device_type)
    if dtype in LOW and device_type in DEVICE_TYPES:
        return dtype
    if not _has_autocast(device_type):
        raise RegionError(
            asked=f"autocast on device type {device_type!r}",
            found="PyTorch has no autocast for it",
            advice=f"Give one of {', '.join(DEVICE_TYPES)}; of a tensor x, that is x.device.type.",
        )
    if device_type not in DEVICE_TYPES and not policy.is_native:
        raise RegionError(
            asked=f"policy {policy.name} on device type {device_type!r}",
            found="only native is known there",
            advice=f"Give one of {', '.join(DEVICE_TYPES)}, or no policy.",
        )
    try:
        fast = torch.get_autocast_dtype(device_type) if dtype is None else to_dtype(dtype)
    except NarrowcastError as error:
        raise RegionError(error.asked, error.found, advice="Give torch.bfloat16 or torch.float16.") from None
    if fast not in FORMATS or FORMATS[fast].bits < 16 or fast is torch.float64:
        small = fast in FORMATS and FORMATS[fast].bits < 16
        raise RegionError(
            asked=f"autocast with dtype={fast}",
            found="8-bit formats need scales that autocasting does not keep"
            if small
            else "it is not a format of 16 bits, nor fp32",
            advice="Give torch.bfloat16 or torch.float16."
            + (' A rule may give one op another format: action = "to(e4m3fn)".' if small else ""),
        )
    return fast


def _checked_cache(wanted: bool | str | None, limit_bytes: int | None) -> str:
    """Return the grade of our own cache; empty for torch's. Raise RegionError for what neither can be."""
    if isinstance(wanted, str) and wanted not in CHECKED:
        raise RegionError(
            asked=f"cache_enabled={wanted!r}", found="no such cache",
            advice='Give True, False, None, "checked" or "checksum".',
        )  # fmt: skip
    if limit_bytes is not None and (not isinstance(wanted, str) or limit_bytes < 0):
        raise RegionError(
            asked=f"cache_limit_bytes={limit_bytes}",
            found="it is negative" if isinstance(wanted, str) else "torch's own cache cannot be limited",
            advice='Give a number of bytes from 0, with cache_enabled="checked".',
        )
    return wanted if isinstance(wanted, str) else ""


def _has_autocast(device_type: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device_type)
    except (RuntimeError, TypeError):  # no device type at all
        return False


def prepared_for(policy: Policy, facts: Region, grade: str, limit_bytes: int | None) -> Prepared:
    """Return what regions with the same facts share, made once per policy."""
    key = (facts, grade, limit_bytes)
    prepared: Prepared | None = policy.memory.get(key)
    if prepared is None or policy.has_open_patterns:  # a library loaded later may register more ops that these name
        prepared = policy.memory[key] = _prepare(policy, facts, grade, limit_bytes)
    return prepared


def _prepare(policy: Policy, facts: Region, grade: str, limit_bytes: int | None) -> Prepared:
    if facts.device_type not in DEVICE_TYPES:
        return Prepared(facts, policy, grade=grade)
    resolved = fitted(policy, facts.device_type)
    ops = changed_ops(resolved, facts.device_type)
    trains = not facts.enabled or resolved.trains_in(facts.low)
    if grade in CHECKED or not trains:  # whatever casts weights is cast by us
        lowering = [find_op(r.op) for r in resolved.rules if r.action.kind is Kind.LOWER and not r.is_pattern]
        ops = tuple(dict.fromkeys((*ops, *(op for op in lowering if op is not None))))
    return Prepared(
        facts, resolved, ops, frozenset(op_id(op) for op in ops), grade=grade, cache_limit_bytes=limit_bytes,
        trains=trains, sightings=sightings_of(resolved) if facts.enabled else None,
    )  # fmt: skip


def changed_ops(policy: Policy, device_type: str) -> tuple[OpOverload, ...]:
    """Return the overloads that a resolved policy treats otherwise than native does on this device type."""
    native = Policy.native(device_type)
    known = set(native.rules)
    ops = {op: None for rule in native.rules if (op := find_op(rule.op)) is not None}
    for rule in policy.rules:
        if rule not in known:
            ops.update(dict.fromkeys(ops_of(rule)))
    ops.update({op: None for identity in policy.lacking if (op := find_op(identity)) is not None})
    changed = []
    for op in ops:
        facts = op_facts(op)
        ours = policy.table.candidates(facts.id, facts.computes)
        if facts.id in policy.lacking or ours != native.table.candidates(facts.id, facts.computes):
            changed.append(op)
    return tuple(changed)
