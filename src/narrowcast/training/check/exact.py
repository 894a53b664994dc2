"""Computes sums in low formats again without rounding, and reports weights and averages that should have changed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.ops import named
from narrowcast.core.policy import NOWHERE, Site
from narrowcast.observation.restore.process import written
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage, where_it_lies
from narrowcast.output.words import counted
from narrowcast.runtime.torch_bridge import FORMATS, LOW, OpFacts, part_of, tensors_in
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.training.check.gradients import Found, Gradients
from narrowcast.training.check.kept import KeptMemory

AVERAGE, UPDATES = "an average in a low format", "updates lost in rounding"
LOST_OF_WEIGHTS, _LOST_OF_AVERAGES = 0.01, 0.25
"""The share of the elements that should change and do not, from which on it is reported. The first steps of an
optimizer are its largest: where one in a hundred weights loses its update then, most lose theirs later.
"""
_FEW = 8
"""Of a loss of up to this many elements nothing is said."""
_FAR = 0.25
"""The relative distance of a term from an average from which on it has to change that."""
_HELD = 0.8
"""The share of what was rounded away that another tensor has to hold, so that it is no loss."""


@dataclass(slots=True, eq=False)
class _ExactValue:
    """A value in memory as it would be without rounding. reads: the values, before the step, of memory in a low format
    that it was computed from; of a number, those that a step has left for the next. terms: the other numbers that it
    was computed from. through: the low format that it went through on its way from fp32 to fp32; wide: the values of
    memory in fp32 that it was computed from by then. is_copy: of what was there, in the same format.
    """

    memory: Any
    lies: tuple[Any, ...]
    dtype: torch.dtype
    exact: torch.Tensor
    site: Site
    reads: dict[int, torch.Tensor] = field(default_factory=dict)
    terms: list[float] = field(default_factory=list)
    of_gradients: bool = False
    is_random: bool = False
    through: torch.dtype | None = None
    is_copy: bool = False
    wide: dict[int, torch.Tensor] = field(default_factory=dict)

    def now(self) -> torch.Tensor | None:
        """Return the current value in fp32; None if its memory was freed."""
        storage = dispatch.storage_of(self.memory)
        if storage is None or not storage.nbytes():
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.lies).float()


@dataclass(slots=True, eq=False)
class _Parts:
    """Values of parts of one memory, in order: from their first to their last elements they do not overlap."""

    values: list[_ExactValue] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)

    def get(self, lies: tuple[Any, ...]) -> _ExactValue | None:
        """Return the first value that lies there, in part at least."""
        _, _, first, end = self._range(lies)
        return self.values[first] if first < end else None

    def put(self, lies: tuple[Any, ...], value: _ExactValue | None = None) -> None:
        """Replace what lies there, in part at least, with a value, or nothing."""
        low, high, first, end = self._range(lies)
        self.values[first:end] = [] if value is None else [value]
        self.firsts[first:end] = [] if value is None else [low]
        self.lasts[first:end] = [] if value is None else [high]

    def _range(self, lies: tuple[Any, ...]) -> tuple[int, int, int, int]:
        """Return the first and last element of a tensor, and which of the values it overlaps with."""
        low, shape, strides = lies
        high = low + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        return low, high, bisect_left(self.lasts, low), bisect_right(self.firsts, high)


@dataclass(slots=True, eq=False)
class Begun:
    """An op that is about to run, with its arguments in fp32."""

    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: list[torch.Tensor]
    value: _ExactValue


@dataclass(slots=True, eq=False)
class Lost:
    """How many elements should have changed, and are no nearer to their new values. is_broken: some are not finite, and
    should be. is_held: another tensor holds what was rounded away. is_wide: its memory is in fp32.
    """

    key: int
    dtype: torch.dtype
    site: Site
    is_weight: bool
    wanted: int
    lost: int
    is_broken: bool = False
    is_held: bool = False
    is_wide: bool = False


class Exact:
    """Computes sums outside of forwards and backwards again in fp32, and returns what was lost to rounding.

    Judged by which values changed, by any op: stochastic rounding is not followed, and what an optimizer holds of what
    was rounded away (Kahan's compensation, a copy in fp32) is no loss. is_careful: an optimizer does so, or weights are
    rounded by the program itself, before they are written.
    """

    def __init__(self, was_there: Callable[[torch.Tensor], bool], gradients: Gradients) -> None:
        self._was_there, self._gradients = was_there, gradients
        self._values: ByStorage[_Parts] = ByStorage()
        self._left: ByStorage[_Parts] = ByStorage()  # by the step before
        self._overwritten: set[int] = set()  # in this step, in fp32, by weights in a low format
        self.is_careful = False

    def begin(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], site: Callable[[], Site], steps: bool
    ) -> Begun | None:
        """Return an op that is about to run, if it is to be computed again in fp32. steps: an optimizer runs it."""
        name = dispatch.op_name(facts.op).removesuffix("_")
        args, kwargs = dispatch.tree_map(_part, (args, kwargs))
        if facts.op is dispatch.COPY and where_it_lies(args[0]) == where_it_lies(args[1]):
            return None  # with which `average[:4] += value` ends
        tensors = [t for t in tensors_in(args, kwargs) if t.is_floating_point()]
        targets = written(facts, args, kwargs)
        known = [value for t in tensors if (value := self._value(t)) is not None]
        is_arithmetic = name in named("gradients.arithmetic")
        follows = is_arithmetic and all(has_storage(t) and t.dtype is not torch.float64 for t in tensors)
        if not follows or not all(t.is_floating_point() for t in targets):
            self.forget(targets)
            return None
        to_low = facts.op is dispatch.TO_COPY and kwargs.get("dtype") in LOW
        narrows = to_low and any(t.dtype not in LOW for t in tensors)  # none is floating where numbers are converted
        if not known and not (narrows or any(t.dtype in LOW for t in tensors)):
            return None
        with quietly():
            value = _ExactValue(None, (), torch.float32, torch.empty(0, device="cpu"), site(), of_gradients=steps)
            is_copy = name.removeprefix("_foreach_") == "copy"
            value.is_copy = name == "clone" and tensors[0].dtype in LOW and self._was_there(tensors[0])
            sources = tensors_in(args[1]) if is_copy else tensors
            for tensor in sources:
                self._read(tensor, value)
            if narrows and not self._gradients.is_one(tensors[0]):
                value.through = kwargs["dtype"]
                if self._is_kept(tensors[0]):
                    value.wide[dispatch.storage_key(tensors[0])] = tensors[0].detach().float()
            value.through = value.through if is_copy or not targets else None  # what fp32 adds to fp32 is not lost
            for source, target in zip(sources, targets, strict=False) if is_copy else ():
                if value.through is not None and target.dtype not in LOW:
                    self._comes_back(target, value)
                if source.dtype in LOW and self._was_there(source):
                    if target.dtype in LOW:
                        value.reads = {}  # what was lost was lost there
                    else:
                        self._overwritten.add(dispatch.storage_key(target))
            wide = lambda t: self._wide(t) if isinstance(t, torch.Tensor) and t.is_floating_point() else t  # noqa: E731
            wide_args, wide_kwargs = dispatch.tree_map(wide, (args, kwargs))
            if facts.op is dispatch.TO_COPY:
                wide_kwargs = {**wide_kwargs, "dtype": torch.float32}
            return Begun(facts, wide_args, wide_kwargs, targets, value)

    def _comes_back(self, target: torch.Tensor, value: _ExactValue) -> None:
        """Compare what went through a low format with the memory in fp32 to which it is written, if it was computed of
        that, or of what is unknown. A copy of others is no loss.
        """
        key = dispatch.storage_key(target)
        is_unknown = not (value.reads or value.wide) and self._is_kept(target)
        before = target.detach().float() if is_unknown else value.wide.get(key)
        value.reads, value.wide = {} if before is None else {key: before}, {}

    def end(self, begun: Begun, result: Any) -> None:
        """Run an op a second time, in fp32, and record its results."""
        results = begun.targets or tensors_in(dispatch.tree_map(_part, result))
        with quietly():
            try:
                wide = begun.facts.op(*begun.args, **begun.kwargs)
            except (RuntimeError, NotImplementedError):  # no such kernel in fp32: of other devices, of several formats
                wide = None
            exact = written(begun.facts, begun.args, begun.kwargs) if begun.targets else tensors_in(wide)
            if (wide is None and not begun.targets) or len(exact) != len(results):
                exact = []
            self.forget(results)
            for tensor, value in zip(results, exact, strict=False):
                if has_storage(tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64:
                    self._put(tensor, value, begun.value)

    def forget(self, targets: list[torch.Tensor]) -> None:
        """Forget the values of tensors that are written to by an op that is not computed again."""
        for tensor in targets:
            if (known := self._values.get(tensor)) is not None:
                known.put(_lies(tensor))

    def _value(self, tensor: torch.Tensor) -> _ExactValue | None:
        """Return the value of the memory that a tensor lies in, or of a part of it."""
        known = self._values.get(tensor)
        return None if known is None else known.get(_lies(tensor))

    def drawn(self, result: Any) -> None:
        """Note that an op has drawn random numbers: sums with them are rounded stochastically, and not judged."""
        for tensor in tensors_in(result):
            if has_storage(tensor) and tensor.is_floating_point():
                drawn = tensor.detach().float()
                self._put(tensor, drawn, _ExactValue(None, (), tensor.dtype, drawn, NOWHERE, is_random=True))

    def end_of_step(self, kept_by_optimizers: Iterable[torch.Tensor], trained: set[int]) -> list[Lost]:
        """Return what the step has lost to rounding; the next one begins with the current values. trained: the storage
        keys of weights that have gradients of backwards.
        """
        losses = []
        with quietly():
            held = [t for t in kept_by_optimizers if has_storage(t) and t.is_floating_point()]
            held = [t for t in held if dispatch.storage_key(t) not in self._overwritten]
            states = {dispatch.storage_key(t) for t in held} | self._gradients.lie_in()
            living = (value for parts in self._values.living() for value in parts.values)
            values = [(v, now) for v in living if (now := v.now()) is not None]
            others = [t.float() for t in held]
            others += [now for value, now in values if value.memory.cdata not in self._overwritten]
            for value, now in values:
                key = value.memory.cdata
                if value.dtype in LOW and key in trained and now.numel() > 1:
                    self.is_careful |= bool(torch.equal(value.exact, now))
                is_low = value.dtype in LOW or (value.through is not None and key in value.reads)
                if is_low and value.reads and not (value.is_random or value.is_copy or key in states):
                    same = [other for other in others if other.numel() == now.numel()]
                    lost = _lost(value, now, same)
                    if lost is not None:
                        self.is_careful |= lost.is_held
                        losses.append(lost)
        self._left, self._values, self._overwritten = self._values, ByStorage(), set()
        return losses

    def _read(self, tensor: torch.Tensor, into: _ExactValue) -> None:
        value, key = self._value(tensor), dispatch.storage_key(tensor)
        is_gradient = self._gradients.is_one(tensor)
        into.of_gradients |= is_gradient
        if value is not None:
            into.reads |= value.reads
            into.terms += value.terms
            into.of_gradients |= value.of_gradients
            into.is_random |= value.is_random
            into.through = into.through or value.through
            into.wide |= value.wide
        elif tensor.dtype in LOW and not is_gradient and self._is_kept(tensor):
            into.reads[key] = tensor.detach().float()
        elif tensor.numel() == 1:
            into.terms.append(float(tensor))

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor persists from step to step."""
        return self._left.get(tensor) is not None or (tensor.numel() > 1 and self._was_there(tensor))

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._value(tensor)
        if value is not None and value.lies == _lies(tensor):
            return value.exact.clone()
        if value is not None and tensor.numel() == value.exact.numel() == 1:
            return value.exact.reshape(tensor.shape).clone()
        return tensor.detach().to(torch.float32, copy=True)

    def _put(self, tensor: torch.Tensor, exact: torch.Tensor, like: _ExactValue) -> None:
        value = replace(
            like, memory=dispatch.StorageWeakRef(tensor.untyped_storage()), lies=_lies(tensor), dtype=tensor.dtype,
            exact=exact, reads=dict(like.reads), terms=[*like.terms], wide=dict(like.wide),
        )  # fmt: skip
        self._values.setdefault(tensor, _Parts).put(value.lies, value)


def _part(value: Any) -> Any:
    """Return this rank's part of a DTensor: element-wise sums are computed in each part."""
    return part_of(value) if isinstance(value, torch.Tensor) else value


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _lost(value: _ExactValue, now: torch.Tensor, others: list[torch.Tensor]) -> Lost | None:
    """Return how many elements are no nearer to their values after the step than before; None if none can be compared.

    A sum that is rounded once is never further than before; a product and a sum (`average.mul_(d).add_(x)`) may be.
    """
    if not bool(torch.isfinite(value.exact).all()):
        return None
    if not bool(torch.isfinite(now).all()):
        is_new = all(bool(torch.isfinite(before).all()) for before in value.reads.values())
        return Lost(value.memory.cdata, value.dtype, value.site, value.of_gradients, 0, 0, is_broken=is_new)
    chosen, through = None, None if value.dtype in LOW else value.through
    for key, before in value.reads.items():
        if before.shape != now.shape or not _is_far(value.terms, before):
            continue
        wanted = value.exact != before
        stays = wanted & (now == before)
        if not value.of_gradients:  # weights may be rounded at random, or with what was rounded away before
            stays |= wanted & ((now - value.exact).abs() > (value.exact - before).abs())
        number, lost = int(wanted.sum()), int(stays.sum())
        is_held = bool(lost) and any(_holds(other.reshape(now.shape), value.exact, now, stays) for other in others)
        lost = 0 if is_held else lost
        if key == value.memory.cdata or lost > (chosen.lost if chosen is not None else 0):
            chosen = Lost(
                value.memory.cdata, through or value.dtype, value.site, value.of_gradients, number, lost,
                is_held=is_held, is_wide=through is not None,
            )  # fmt: skip
    return chosen


def _is_far(terms: list[float], before: torch.Tensor) -> bool:
    """Return whether a number is far from a term that it should follow: near it, it need not change. True of others."""
    return before.numel() > 1 or any(abs(term - float(before)) > _FAR * abs(float(before)) for term in terms)


def _holds(other: torch.Tensor, exact: torch.Tensor, now: torch.Tensor, stays: torch.Tensor) -> bool:
    """Return whether another tensor holds what was rounded away, with either sign, or the exact sum."""
    wide, rest = exact[stays], (exact - now)[stays]
    room = 0.1 * rest.abs() + torch.finfo(torch.float32).eps * wide.abs()
    shares = (((other[stays] - held).abs() <= room).float().mean() for held in (rest, -rest, wide))
    return any(float(share) >= _HELD for share in shares)


def told(lost: list[Lost], names: dict[int, str], trained: set[int]) -> list[Found]:
    """Return findings about what a step has lost, of all weights and of averages at each line, where it exceeds a
    limit. names: of weights, by storage key; trained: the storage keys of weights that have gradients of backwards.
    """
    rows: dict[Any, list[Lost]] = {}
    for one in lost:
        one.is_weight = one.key in trained or (one.is_weight and one.key in names)
        rows.setdefault("weights" if one.is_weight else one.site.at, []).append(one)
    findings = []
    for group in rows.values():
        wanted, stay = sum(one.wanted for one in group), sum(one.lost for one in group)
        most = max(group, key=lambda one: one.lost)
        broken = next((one for one in group if one.is_broken and one.is_weight), None)
        if broken is not None:
            findings.append((
                "an update that is not finite",
                f"{names.get(broken.key, 'a weight')} in {FORMATS[broken.dtype]} is infinite or NaN after this update, "
                "and would be finite without rounding: what it is divided by, or squared, is beyond the format",
                "Keep the weights in fp32, model.float(), and run the forward in a region, nc.autocast(device, dtype).",
                broken.site,
            ))  # fmt: skip
        least = max(_FEW, wanted * LOST_OF_WEIGHTS) if most.is_weight else wanted * _LOST_OF_AVERAGES
        if not stay or (stay <= least and stay < wanted):
            continue
        where = f" (most of them in {names[most.key]})" if most.key in names else ""
        or_stray = "" if most.is_weight else ", or move the wrong way or too far"
        passing = f"that go through {FORMATS[most.dtype]} and" if most.is_wide else f"in {FORMATS[most.dtype]} that"
        what = (
            f"{stay / wanted:.0%} of {wanted} elements {passing} a step should move stay where they were{or_stray}"
            f"{where}: what is added is less than half a unit of the {'weight' if most.is_weight else 'average'}"
        )
        if most.is_wide:
            advice = "Compute it in fp32: leave out the conversion before it is written."
        elif most.is_weight:
            advice = "Keep the weights in fp32, model.float(), and open a region, nc.autocast(device, dtype); "
            advice += "or keep what completes them: nc.store(model, optimizer, {'master': 'remainder'})."
        else:
            advice = "Keep the average in fp32 (copy.deepcopy(model).float(), average.float()), and add value.float()."
        findings.append((UPDATES if most.is_weight else AVERAGE, what, advice, most.site))
    return findings


def no_longer_finite(kept: KeptMemory, site: Site) -> Found | None:
    """Return a finding about weights that a step, perhaps by hand, has made NaN or infinite, or that are NaN from the
    start. site: of the step.
    """
    names = kept.no_longer_finite()
    if not names:
        names = kept.never_numbers()
        return None if not names else (
            "weights that are not finite",
            f"{names[0]} holds NaN before the first step (in all {counted(len(names), 'weight')} of the model): the "
            "loop has diverged, and nothing that it does now can be judged",
            "Begin with weights that are finite. nc.watch() around the steps from there on names the first call.",
            site,
        )  # fmt: skip
    return (
        "an update that is not finite",
        f"{names[0]} holds NaN or infinity after the step (in all {counted(len(names), 'weight')}), and held numbers "
        "before",
        "nc.watch() around the step names the call that makes the first.",
        site,
    )
