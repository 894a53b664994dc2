"""`autocast`: a drop-in for torch.autocast that takes a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from narrowcast.core.decide import Region
from narrowcast.core.policy import Policy, as_policy
from narrowcast.errors import RegionError
from narrowcast.formats import Format
from narrowcast.frontends.eager.opening import Asked, Opening, find_opening, opening_of
from narrowcast.frontends.eager.steps import run_inside
from narrowcast.frontends.eager.transforms import tell_lost
from narrowcast.runtime.regions.failures import note_failure
from narrowcast.runtime.regions.marks import allow_marks, enter_marked, exit_marked, find_marked, hold, note_exported
from narrowcast.runtime.regions.native_state import Identity, NativeState, enter_native, leave_native
from narrowcast.runtime.regions.pinned import Pin, is_module, set_pin
from narrowcast.runtime.regions.stack import CHECKED, OpenRegion, Prepared, open_anywhere, region_watchers, stack
from narrowcast.runtime.sites.numbering import begin_counting
from narrowcast.runtime.torch_bridge import FORMATS
from narrowcast.runtime.torch_surface.dispatch import in_transform
from narrowcast.runtime.torch_surface.dynamo import constant_for_dynamo, never_trace
from narrowcast.runtime.torch_surface.state import any_autocast

F = TypeVar("F", bound=Callable[..., Any])


class autocast:  # noqa: N801 (a drop-in keeps the name)
    """A region in which ops compute in the formats that a policy gives them; same arguments as torch.autocast.

    device_type: cpu, cuda, xpu, mps, mtia or maia, as in `tensor.device.type`; of a device (`cuda:0`), its type.
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

    policy: Policy
    _made: Opening = None  # type: ignore[assignment]  # where Dynamo traces, a region is a key
    _key: str
    _notes: list[Any] = []  # noqa: RUF012 (replaced, never changed)

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
        chosen = policy if type(policy) is Policy else as_policy(policy)
        if inner is not None:
            chosen = chosen.with_inner(inner)
        self.policy = chosen
        self._made = find_opening(chosen, (device_type, dtype, enabled, cache_enabled, cache_limit_bytes))
        self._key = self._made.key

    def __enter__(self) -> autocast:
        if torch.compiler.is_dynamo_compiling():
            allow_marks(self._key)
            enter_marked(self._key)
            return self
        if self._made is None:  # made while Dynamo traced, which then left the rest to Python
            marked = find_marked(self._key)
            self.policy, self._made = marked.policy, marked._made
        opening, outer = self._made, stack.innermost
        if outer is not None and opening.is_checked_inside and outer.prepared.grade in CHECKED:
            opening = opening.checked_as(self.policy, outer.prepared)  # what is checked stays checked inside
        if not opening.is_ready:
            opening.make_ready()
        prepared = opening.prepared
        if opening.counts and not (outer is not None and outer.prepared.policy.counts_calls):
            begin_counting()
        is_first = bool(opening.carried) and outer is None and not any_autocast()
        before, depth = enter_native(opening.state)
        mixes = depth > 1 and prepared.grade == "native" and _is_another_format(prepared.facts, before, depth)
        if mixes:
            torch.clear_autocast_cache()
        identity = Identity(opening.carried, is_first) if opening.carried else None
        open_anywhere.append(None)
        stack.innermost = OpenRegion(prepared, depth, outer, self, before, identity, mixes)
        for watcher in tuple(region_watchers):
            watcher.entered(self)
        if opening.is_changed and in_transform():
            tell_lost()
        if torch.compiler.is_exporting():
            hold(opening.key, self)
            note = note_exported(opening.key, depth)
            note.__enter__()
            self._notes = [*self._notes, note]
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
            *self._notes, note = self._notes
            note.__exit__(exc_type, exc_val, exc_tb)
        if region.identity is not None and later is not None:
            region.identity.hand_over(later)
        elif region.identity is not None:
            region.identity.restore()
        for watcher in tuple(region_watchers):
            watcher.left(self, exc_type is not None)
        if region.before is not None:
            leave_native(region.before)
        if region.mixes:
            torch.clear_autocast_cache()
        if exc_val is not None:
            low = str(self.prepared.facts.low)
            note_failure(exc_val, self.device, bool(self.prepared.policy.lacks) or not self._enabled, low)
        elif region.prepared.sightings is not None:
            region.prepared.sightings.tell()

    def __call__(self, func: F) -> F:
        """The function, running inside the region; generators and async functions while their steps run.

        Of a Module, or a class of them, the calls run inside: it is pinned to the region (`nc.unpin` undoes it).
        """
        if is_module(func):
            set_pin(func, Pin(Policy("pin", extends=()), self))
            return func
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

    @property
    def device(self) -> str:
        """The device type, as given: `cpu`, `cuda` and so on."""
        return self._made.state[0]

    @property
    def fast_dtype(self) -> torch.dtype:
        """The low format, as torch.autocast names it: the dtype given, or the default that was taken."""
        return self._made.state[2]

    @property
    def prepared(self) -> Prepared:
        """What the region decides by."""
        return self._made.prepared

    @property
    def _enabled(self) -> bool:  # as torch.autocast has it
        return self._made.prepared.facts.enabled

    @property
    def asked(self) -> Asked:
        """The arguments that make a region like this one, besides its policy, as given, but for the dtype."""
        return self._made.asked

    def again(self) -> autocast:
        """Return the region to enter: this one, or its like where Dynamo traces, which takes what is made there."""
        if torch.compiler.is_dynamo_compiling():
            return region_of(self.policy.digest, self.asked)
        return self

    def with_eager_policy(self, policy: Policy) -> autocast:
        """Return a region like this one in which eager code runs under `policy`; graphs captured inside keep this
        region's.
        """
        placed = region_of(policy, self.asked)
        placed._made = opening_of(policy, replace(placed.prepared, graphs=self.prepared), self.asked)
        return placed

    def __reduce__(self) -> Any:
        return region_of, (self.policy, self.asked)

    def __repr__(self) -> str:
        cache = "" if self.prepared.grade == "native" else f", cache={self.prepared.grade}"
        return f"autocast({self.device!r}, {self.fast_dtype}, enabled={self._enabled}, policy={self.policy}{cache})"


def region_of(policy: Policy | str, asked: Asked) -> autocast:
    """Return the region with these arguments."""
    device_type, dtype, enabled, cache, limit = asked
    return autocast(device_type, dtype, enabled, cache, policy=policy, cache_limit_bytes=limit)


def _marked_key(
    device_type: str, dtype: Any, enabled: bool, cache: bool | str | None, policy: str | None, limit: int | None,
    inner: str | None,
) -> str:  # fmt: skip
    """Return the key of a region that compiled code opens; run while Dynamo traces, with the arguments there."""
    region = autocast(device_type, dtype, enabled, cache, policy=policy, cache_limit_bytes=limit, inner=inner)
    hold(region._key, region)
    return region._key


constant_for_dynamo(_marked_key)


def _is_another_format(facts: Region, before: NativeState, depth: int) -> bool:
    """Return whether a region around may have cast weights to another low format: torch's cache keeps no formats apart.

    One that is off has cast none. Of regions that are not ours, the innermost alone is known.
    """
    if not facts.enabled:
        return False
    around, known = stack.innermost, 1
    last = around.prepared.facts if around is not None else facts
    while around is not None:
        outer = around.prepared.facts
        if outer.enabled and outer.device_type == facts.device_type and outer.low is not facts.low:
            return True
        around, known = around.outer, known + 1
    _, enabled, dtype, _ = before
    low = FORMATS.get(dtype)
    is_ours = not last.enabled and last.low is low
    return low is not facts.low and (enabled or depth - known > (0 if is_ours else 1))


never_trace(autocast.__init__, autocast.__enter__, autocast.__exit__)  # by themselves; inside other code they are marks
