"""`autocast`: a drop-in for torch.autocast that takes a policy."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeVar

import torch

from narrowcast.decide import Region
from narrowcast.eager.identity import Identity
from narrowcast.eager.kernels import install
from narrowcast.eager.recomputation import carry_into_recomputation
from narrowcast.eager.state import Decided, OpenRegion, innermost, set_innermost
from narrowcast.errors import NarrowcastError, RegionError
from narrowcast.formats import Format, fp32
from narrowcast.policy import DEVICE_TYPES, Policy, as_policy
from narrowcast.torch_bridge import FORMATS, OpOverload, autocast_nesting, find_op, op_facts, op_id, ops_of, to_dtype

F = TypeVar("F", bound=Callable[..., Any])


class autocast:  # noqa: N801 (a drop-in keeps the name)
    """A region in which ops compute in the formats that a policy gives them; same arguments as torch.autocast.

    device_type: cpu, cuda, xpu, mps, mtia or maia, as in `tensor.device.type`.
    dtype:       the low format, torch.bfloat16 or torch.float16; None takes the device type's default. A policy other
                 than native may also run a region in torch.float32, which torch ignores on most devices.
    enabled:     False switches autocasting off inside.
    cache_enabled: whether a weight is cast once per outermost region; None takes what torch has set, or the policy's.
    policy:      a Policy, the name of a built-in one (`native`, `safe`) or the path of a TOML file; None is native.

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
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
    ) -> None:
        self.policy = as_policy(policy)
        self.device = device_type
        self._native = _native_autocast(device_type, dtype, enabled, cache_enabled, self.policy)
        self.fast_dtype: torch.dtype = self._native.fast_dtype
        self._prepared: Prepared | None = None
        if device_type in DEVICE_TYPES and self.fast_dtype in FORMATS:
            facts = Region(device_type, FORMATS[self.fast_dtype], self._native._enabled, self._native._cache_enabled)
            # A library loaded later may register more ops that an open pattern names.
            prepare = _prepare.__wrapped__ if self.policy.has_open_patterns else _prepare
            self._prepared = prepare(self.policy, facts)

    def __enter__(self) -> autocast:
        prepared = self._prepared
        if prepared is not None and prepared.ops and self._native._enabled:
            install(prepared.ops, prepared.changed, self.device)
            carry_into_recomputation()
        outer = innermost()
        native = copy.copy(self._native)  # torch keeps what to restore in the instance; a copy makes ours re-entrant
        native.__enter__()
        depth = autocast_nesting()
        region = OpenRegion(
            facts=prepared.facts if prepared else Region(self.device, fp32, enabled=False),
            policy=prepared.policy if prepared else self.policy,
            depth=depth,
            outer=outer,
            changed=prepared.changed if prepared else frozenset(),
            plans=prepared.plans if prepared else {},
            owner=self,
            native=native,
            identity=Identity(prepared.policy.digest, self.device) if prepared and prepared.ops else None,
        )
        if outer is not None and outer.depth < depth:
            region.casts = outer.casts
        set_innermost(region)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        region = innermost()
        while region is not None and region.owner is not self:
            region = region.outer
        if region is None:
            raise RegionError(
                asked="leaving an autocast region",
                found="this one was not entered in this thread or context",
                advice="Leave it where it was entered, or write it as a with statement.",
            )
        set_innermost(region.outer)
        if region.identity is not None:
            region.identity.restore()
        if region.native is not None:
            region.native.__exit__(exc_type, exc_val, exc_tb)

    def __call__(self, func: F) -> F:
        """The function, running inside the region."""
        if not callable(func):
            raise RegionError(
                asked=f"autocast()({type(func).__name__})",
                found="not callable",
                advice="Decorate a function, or write: with nc.autocast(...): ...",
            )
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise RegionError(
                asked=f"autocast as decorator of {func.__qualname__}",
                found="a generator or async function, whose body runs after the region would have been left",
                advice="Open the region inside the function: with nc.autocast(...): ...",
            )

        @functools.wraps(func)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return decorated  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"autocast({self.device!r}, {self.fast_dtype}, enabled={self._native._enabled}, policy={self.policy})"


def _native_autocast(
    device_type: str, dtype: torch.dtype | str | Format | None, enabled: bool, cache: bool | None, policy: Policy
) -> torch.autocast:
    """torch's own region with these arguments; RegionError for what torch would accept and then ignore, or crash on."""
    if not _has_autocast(device_type):
        raise RegionError(
            asked=f"autocast on device type {device_type!r}",
            found="PyTorch has no autocast for it",
            advice=f"Give one of {', '.join(DEVICE_TYPES)}; of a tensor x, that is x.device.type.",
        )
    is_native = policy.is_native
    if device_type not in DEVICE_TYPES and not is_native:
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
        raise RegionError(
            asked=f"autocast with dtype={fast}",
            found="8-bit formats need scales that autocasting does not keep" if fast in FORMATS and fast.itemsize == 1
            else "not a format to compute in at lower precision",
            advice='Give torch.bfloat16 or torch.float16; a rule may give one op another: action = "to(e4m3fn)".',
        )  # fmt: skip
    if cache is None and policy.cache == "off":
        cache = False
    if fast is torch.float32 and not is_native:  # torch would warn and switch itself off; these policies mean it
        native = torch.autocast(device_type, None, enabled, cache)
        native.fast_dtype = fast
        return native
    return torch.autocast(device_type, fast, enabled, cache)


def _has_autocast(device_type: str) -> bool:
    try:
        return torch.device(device_type).type == device_type and torch.amp.is_autocast_available(device_type)
    except (RuntimeError, TypeError):  # no device type at all
        return False


@dataclass(frozen=True, slots=True)
class Prepared:
    """What entering a region needs and what alike regions share: made once per policy and region."""

    facts: Region
    policy: Policy
    ops: tuple[OpOverload, ...]
    changed: frozenset[str]
    plans: dict[object, Decided]


@lru_cache(maxsize=256)
def _prepare(policy: Policy, facts: Region) -> Prepared:
    resolved = policy.resolve(facts.device_type)
    ops = changed_ops(resolved, facts.device_type)
    return Prepared(facts, resolved, ops, frozenset(op_id(op) for op in ops), {})


def changed_ops(policy: Policy, device_type: str) -> tuple[OpOverload, ...]:
    """The overloads about which a resolved policy says something else than native does on this device type."""
    native = Policy.native(device_type)
    known = set(native.rules)
    ops = {op: None for rule in native.rules if (op := find_op(rule.op)) is not None}
    for rule in policy.rules:
        if rule not in known:
            ops.update(dict.fromkeys(ops_of(rule)))
    changed = []
    for op in ops:
        facts = op_facts(op)
        ours = policy.table.candidates(facts.id, facts.computes)
        if ours != native.table.candidates(facts.id, facts.computes):
            changed.append(op)
    return tuple(changed)
