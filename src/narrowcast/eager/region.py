"""`autocast`: a drop-in for torch.autocast that takes a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from narrowcast.costs.abilities import fitted
from narrowcast.decide import Region
from narrowcast.eager.caching import follow_mutators
from narrowcast.eager.registered import install
from narrowcast.eager.steps import run_inside
from narrowcast.errors import NarrowcastError, RegionError
from narrowcast.formats import Format
from narrowcast.policy import DEVICE_TYPES, Kind, Policy, as_policy
from narrowcast.regions.failures import note_failure
from narrowcast.regions.identity import Identity
from narrowcast.regions.marks import allow_marks, enter_marked, exit_marked, find_marked, hold, mark, note_exported
from narrowcast.regions.native_state import NativeState, enter_native, leave_native
from narrowcast.regions.recomputation import carry_into_recomputation
from narrowcast.regions.sightings import sightings_of
from narrowcast.regions.state import CHECKED, OpenRegion, Prepared, innermost, open_anywhere, stack
from narrowcast.regions.watchers import region_watchers, tell_entered, tell_left
from narrowcast.torch_bridge import FORMATS, default_dtype, find_op, op_facts, op_id, ops_of, to_dtype
from narrowcast.torch_surface.dispatch import OpOverload
from narrowcast.torch_surface.dynamo import constant_for_dynamo, never_trace
from narrowcast.torch_surface.state import caches, is_enabled

F = TypeVar("F", bound=Callable[..., Any])


class autocast:  # noqa: N801 (a drop-in keeps the name)
    """A region in which ops compute in the formats that a policy gives them; same arguments as torch.autocast.

    device_type: cpu, cuda, xpu, mps, mtia or maia, as in `tensor.device.type`.
    dtype:       the low format, torch.bfloat16 or torch.float16; None takes the policy's, or the device type's default.
                 A policy other than native may also run a region in torch.float32, which torch ignores on most devices.
    enabled:     False switches autocasting off inside.
    cache_enabled: whether a weight is cast once per outermost region; None takes what torch has set, or the policy's.
                 torch's own kernels then keep the casts, and forget them when an optimizer steps or a state_dict is
                 loaded. "checked" has ours keep them, which see every in-place change of a weight, at some cost per
                 call; "checksum" also finds changes that go through `weight.data`, and raises CacheError.
    cache_limit_bytes: how much the weight cache may hold; "checked" and "checksum" can keep to it.
    policy:      a Policy, the name of a built-in one (`native`, `safe`, `ipex`) or the path of a TOML file; None is
                 native.
    inner:       what rules in `torch.autocast` blocks inside, as frameworks open them: "native", torch's own lists;
                 "policy", this policy, in the block's own format; None is what the policy says, or native. Blocks that
                 are switched off stay off.

    Under `native` this is torch.autocast. Under another policy only the ops for which the policy differs take another
    path. Usable as a context manager, re-entrant, and as a decorator of functions.

    Raises RegionError for a device type, dtype or policy that cannot be, UnknownOpError for a rule about an op that
    does not exist.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | str | Format | None = None,
        enabled: bool = True,
        cache_enabled: bool | str | None = None,
        *,
        policy: Policy | str | Path | None = None,
        cache_limit_bytes: int | None = None,
        inner: str | None = None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            wanted = policy.digest if isinstance(policy, Policy) else policy if policy is None else str(policy)
            self._key = _marked_key(device_type, dtype, enabled, cache_enabled, wanted, cache_limit_bytes, inner)
            return
        self.policy = as_policy(policy) if inner is None else as_policy(policy).with_inner(inner)
        if self.policy.has_backward_rules:
            rule = next(r for r in self.policy.rules if r.direction != "forward")
            raise RegionError(
                asked=f"a region with a rule about the backward, {rule}",
                found="eager autograd runs after the region, and asks no policy",
                where=(rule.origin,) if rule.origin else (),
                advice="Give the policy to narrowcast.compile, or call backward() inside a region of its own.",
            )
        if self.policy.has_module_rules:
            from narrowcast.eager.module_calls import watch_module_calls  # which is made of regions

            watch_module_calls()
        self.device = device_type
        fast = _checked_dtype(self.policy, device_type, dtype)
        if cache_enabled is None and self.policy.effective_cache == "off":
            cache_enabled = False
        checked = _checked_cache(cache_enabled, cache_limit_bytes)
        self._cache, self._cache_limit_bytes = cache_enabled, cache_limit_bytes
        cache_enabled = True if checked else bool(cache_enabled) if cache_enabled is not None else None
        if fast is torch.float32 and not self.policy.is_native:
            # torch would warn and switch itself off; here it is meant.
            native = torch.autocast(device_type, None, enabled, cache_enabled)
            native.fast_dtype = fast
        else:
            native = torch.autocast(device_type, fast, enabled, cache_enabled)
        self.fast_dtype: torch.dtype = fast
        self._enabled = is_enabled(native)
        grade = checked or ("native" if caches(native) else "off")
        facts = Region(device_type, FORMATS[fast], self._enabled, caches(native))
        self.prepared: Prepared = _prepared(self.policy, facts, grade, cache_limit_bytes)
        follow_mutators()
        self._state: NativeState = (device_type, self._enabled, fast, caches(native))
        self._digest = self.policy.digest
        self._key = f"{facts} {grade} {cache_limit_bytes} {self.policy.digest}"
        mark(self._key, self)
        self._notes: list[Any] = []

    def __enter__(self) -> autocast:
        if torch.compiler.is_dynamo_compiling():
            allow_marks(self._key)
            enter_marked(self._key)
            return self
        if "prepared" not in self.__dict__:  # made while Dynamo traced, which then left the rest to Python
            self.__dict__.update({**vars(find_marked(self._key)), "_notes": []})
        prepared = self.prepared
        outer = stack.innermost
        if outer is not None and self._cache is None and outer.prepared.grade in CHECKED and prepared.grade == "native":
            grade, limit = (
                outer.prepared.grade,
                outer.prepared.cache_limit_bytes,
            )  # what is checked stays checked inside
            checked = _prepared(self.policy, prepared.facts, grade, limit)
            prepared = replace(checked, graphs=prepared.graphs)
        if prepared.differs and self._enabled:
            install(prepared.ops, prepared.changed, self.device)
            carry_into_recomputation()
        before, depth = enter_native(self._state)
        mixes = depth > 1 and prepared.grade == "native" and _is_another_format(prepared.facts, before[2])
        if mixes:
            torch.clear_autocast_cache()
        seen = prepared.for_graphs
        identity = Identity(seen.policy.digest, self.device) if seen.differs else None
        open_anywhere.append(None)
        stack.innermost = OpenRegion(prepared, depth, outer, self, before, identity, mixes)
        if region_watchers:
            tell_entered(self)
        if torch.compiler.is_exporting():
            hold(self._key)
            note = note_exported(self._key, depth)
            note.__enter__()
            self._notes.append(note)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            allow_marks(self._key)
            exit_marked(self._key)
            return
        inner, region, later = None, stack.innermost, None
        while region is not None and region.owner is not self:
            later = region.identity or later
            inner, region = region, region.outer
        if region is None:
            raise RegionError(
                asked="leaving an autocast region",
                found="this one was not entered in this thread or context",
                advice="Leave it where it was entered, or write it as a with statement.",
            )
        if inner is None:
            stack.innermost = region.outer
        else:  # left out of order, as interleaved generators do: those inside it stay open
            inner.outer = region.outer
        open_anywhere.pop()
        if self._notes:
            self._notes.pop().__exit__(exc_type, exc_val, exc_tb)
        if region.identity is not None and later is not None:
            region.identity.hand_over(later)
        elif region.identity is not None:
            region.identity.restore()
        if region_watchers:
            tell_left(self, exc_type is not None)
        if region.before is not None:
            leave_native(region.before)
        if region.mixes:
            torch.clear_autocast_cache()
        if exc_val is not None:
            note_failure(exc_val, self.device, bool(self.prepared.policy.lacks) or not self._enabled)
        elif self.prepared.sightings is not None:
            self.prepared.sightings.tell()

    def __call__(self, func: F) -> F:
        """The function, running inside the region; generators and async functions while their steps run.

        Of a Module, or a class of them, the calls run inside: it is pinned to the region (`nc.unpin` undoes it).
        """
        from narrowcast.eager.pins import pin_to_region  # a pin is made of regions

        if isinstance(func, torch.nn.Module) or (isinstance(func, type) and issubclass(func, torch.nn.Module)):
            return pin_to_region(func, self)
        if not callable(func):
            raise RegionError(
                asked=f"autocast()({type(func).__name__})",
                found="not callable",
                advice="Decorate a function, or write: with nc.autocast(...): ...",
            )
        decorated = run_inside(func, self.again)
        decorated.__dict__.pop("__narrowcast_pinned__", None)  # what is below says so by itself
        decorated.__narrowcast_decorated__ = self  # type: ignore[attr-defined]  # scripts compile what is below
        return decorated  # type: ignore[return-value]

    def again(self) -> autocast:
        """The region to enter: this one, or its like where Dynamo traces, which takes only what is made there."""
        if torch.compiler.is_dynamo_compiling():
            return autocast(
                self.device, self.fast_dtype, self._enabled, self._cache, policy=self._digest,
                cache_limit_bytes=self._cache_limit_bytes,
            )  # fmt: skip
        return self

    def with_eager_policy(self, policy: Policy) -> autocast:
        """A region like this one in which eager code runs under `policy`; graphs that are captured inside keep this
        region's.
        """
        made = autocast(
            self.device, self.fast_dtype, self._enabled, self._cache, policy=policy,
            cache_limit_bytes=self._cache_limit_bytes,
        )  # fmt: skip
        made.prepared = replace(made.prepared, graphs=self.prepared)
        return made

    def __reduce__(self) -> Any:
        limit = self._cache_limit_bytes
        return _rebuilt, (self.device, self.fast_dtype, self._enabled, self._cache, self.policy, limit)

    def __repr__(self) -> str:
        cache = "" if self.prepared.grade == "native" else f", cache={self.prepared.grade}"
        return f"autocast({self.device!r}, {self.fast_dtype}, enabled={self._enabled}, policy={self.policy}{cache})"


def _rebuilt(
    device_type: str, dtype: torch.dtype, enabled: bool, cache: bool | str | None, policy: Policy, limit: int | None
) -> autocast:
    """A region like the one that was pickled or copied."""
    return autocast(device_type, dtype, enabled, cache, policy=policy, cache_limit_bytes=limit)


def _marked_key(
    device_type: str, dtype: Any, enabled: bool, cache: bool | str | None, policy: str | None, limit: int | None,
    inner: str | None,
) -> str:  # fmt: skip
    """The key of a region that compiled code opens; run while Dynamo traces, with what was written there."""
    region = autocast(device_type, dtype, enabled, cache, policy=policy, cache_limit_bytes=limit, inner=inner)
    hold(region._key)  # nobody else does
    return region._key


constant_for_dynamo(_marked_key)


def _checked_dtype(policy: Policy, device_type: str, dtype: torch.dtype | str | Format | None) -> torch.dtype:
    """The low dtype, or RegionError for what torch would accept and then ignore, or crash on."""
    if dtype is None and device_type in DEVICE_TYPES:
        dtype = default_dtype(policy, device_type)
    if dtype in _LOW and device_type in DEVICE_TYPES:
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
        raise RegionError(error.asked, error.found, advice=error.advice) from None
    if fast not in FORMATS or FORMATS[fast].bits < 16 or fast is torch.float64:
        small = fast in FORMATS and FORMATS[fast].bits < 16
        raise RegionError(
            asked=f"autocast with dtype={fast}",
            found="8-bit formats need scales that autocasting does not keep"
            if small
            else "not a format to compute in at lower precision",
            advice='Give torch.bfloat16 or torch.float16; a rule may give one op another: action = "to(e4m3fn)".',
        )
    return fast


def _checked_cache(wanted: bool | str | None, limit_bytes: int | None) -> str:
    """The grade of our own cache; empty for torch's. RegionError for what neither can be."""
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


def _is_another_format(facts: Region, before: torch.dtype) -> bool:
    """Whether a region around has another low format: torch's cache does not tell their casts apart."""
    if not facts.enabled:
        return False
    region = innermost()
    while region is not None:
        around = region.prepared.facts
        if around.device_type == facts.device_type and around.low is not facts.low:
            return True
        region = region.outer
    return FORMATS.get(before) is not facts.low


_LOW = (torch.bfloat16, torch.float16)


def _has_autocast(device_type: str) -> bool:
    try:
        return torch.device(device_type).type == device_type and torch.amp.is_autocast_available(device_type)
    except (RuntimeError, TypeError):  # no device type at all
        return False


def _prepared(policy: Policy, facts: Region, grade: str, limit_bytes: int | None) -> Prepared:
    """What alike regions share, made once per policy."""
    key = (facts, grade, limit_bytes)
    found: Prepared | None = policy.memory.get(key)
    if found is None or policy.has_open_patterns:  # a library loaded later may register more ops that these name
        found = policy.memory[key] = _prepare(policy, facts, grade, limit_bytes)
    return found


def _prepare(policy: Policy, facts: Region, grade: str, limit_bytes: int | None) -> Prepared:
    if facts.device_type not in DEVICE_TYPES:
        return Prepared(facts, policy, (), frozenset(), {}, {}, grade)
    resolved = fitted(policy, facts.device_type)
    ops = changed_ops(resolved, facts.device_type)
    trains = not facts.enabled or resolved.trains_in(facts.low)
    if grade in CHECKED or not trains:  # whatever casts weights is cast by us
        lowering = [find_op(r.op) for r in resolved.rules if r.action.kind is Kind.LOWER and not r.is_pattern]
        ops = tuple(dict.fromkeys((*ops, *(op for op in lowering if op is not None))))
    return Prepared(
        facts, resolved, ops, frozenset(op_id(op) for op in ops), {}, {}, grade, limit_bytes, trains=trains,
        sightings=sightings_of(resolved) if facts.enabled else None,
    )  # fmt: skip


def changed_ops(policy: Policy, device_type: str) -> tuple[OpOverload, ...]:
    """The overloads about which a resolved policy says something else than native does on this device type."""
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


never_trace(autocast.__init__, autocast.__enter__, autocast.__exit__)  # by themselves; inside other code they are marks
