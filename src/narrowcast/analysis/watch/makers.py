"""Whether exact arithmetic yields a value too, or the calls that made it rounded onto it: they are run again in fp32.

A logarithm of zero, a quotient by zero, an arc cosine beyond one: no format of the call itself fixes it. But its
argument may be a square that underflowed in fp16, or a cosine rounded past one. So the last calls with results in a low
format are recorded, without keeping a tensor alive. When such a call is found, those that made its arguments are run
again, some of them as a rule with action `full` would have them, from the tensors that still exist.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.decide import Plan
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.observation.trial import rerun
from narrowcast.observation.trial.finiteness import came_in, count_not_finite, inputs_of, is_floating
from narrowcast.runtime.torch_bridge import OpFacts, tensors_in
from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef, storage_key, storage_of, tree_map

Maker = tuple[str, Any]
"""The op and the module of a call with a result in a low format; of a conversion the op and its line, a Site."""
_MAKERS = 4
"""How many makers of one value are tried, the nearest first."""
_FURTHER = 32
"""How many more are, where these do not help: what sums read, too."""
_STEPS = 4096
"""How many calls are remembered."""
_LEFT = 0.5
"""The share of values that are not finite from which on a choice of makers does not help."""
_ALIKE = 0.05
"""How far the result with some makers in fp32 may be from that with all of them in fp32."""


class _Unknown(Exception):
    """An input of a call no longer exists, and cannot be recomputed."""


@dataclass(slots=True, eq=False)
class _HeldTensor:
    """A tensor that is not kept alive: its storage, and its strides there. The reference keeps the storage's key from
    being used again. Never changed, but not frozen: construction would take too long.
    """

    key: int
    reference: StorageWeakRef | None
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _HeldTensor:
        if not has_storage(tensor):
            shape = torch.Size() if tensor.is_nested else tensor.shape  # of nested tensors torch tells none
            return _HeldTensor(0, None, tensor.dtype, tensor.device, shape, (), 0)
        reference = StorageWeakRef(tensor.untyped_storage())
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _HeldTensor(reference.cdata, reference, tensor.dtype, tensor.device, shape, stride, offset)

    def there(self) -> torch.Tensor | None:
        storage = None if self.reference is None else storage_of(self.reference)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    def seen_in(self, base: torch.Tensor, as_made: _HeldTensor) -> torch.Tensor:
        """Return the same view of a recomputed tensor; as_made: the tensor of which it was a view."""
        if base.shape != as_made.shape or base.stride() != as_made.stride:
            raise _Unknown
        if (self.shape, self.stride, self.offset) == (as_made.shape, as_made.stride, as_made.offset):
            return base
        return base.as_strided(self.shape, self.stride, self.offset - as_made.offset + int(base.storage_offset()))


@dataclass(slots=True, eq=False)
class _PassedStep:
    """A call without its tensors. passes: whether its result shows how arguments were rounded; sums do not."""

    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: Plan | None
    maker: Maker | None
    gave: list[_HeldTensor]
    passes: bool

    def tensors(self) -> Iterator[_HeldTensor]:
        for value in (*self.args, *self.kwargs.values()):
            for each in value if isinstance(value, list) else [value]:
                held = _of_argument(each)
                if held is not None:
                    yield held


def _of_argument(value: Any) -> _HeldTensor | None:
    """Return an argument that is a tensor; None for any other, and for a parameter that was freed."""
    if isinstance(value, weakref.ref):
        tensor = value()
        return None if tensor is None else _HeldTensor.of(tensor)
    return value if isinstance(value, _HeldTensor) else None


class LowMakers:
    """The last calls with results in a low format, or computed from one."""

    def __init__(self) -> None:
        self._steps: deque[_PassedStep] = deque(maxlen=_STEPS)
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, _HeldTensor]] = {}  # by the tensor's id

    def __bool__(self) -> bool:
        return bool(self._steps)

    def forget(self) -> None:
        """Forget all of them."""
        self._steps.clear()
        self._known.clear()

    def note(self, call: SeenCall, maker: Maker | None, results: list[torch.Tensor], passes: bool) -> None:
        """Record a call that has run. maker: its op and module, if it is the call that rounds to a low format."""
        originals = _originals(call) if call.facts.writes else {}
        args, kwargs = self._held(call.args, originals), self._held(call.kwargs, originals)
        self._note(call.facts, args, kwargs, results, call.plan, maker, passes)

    def note_copy(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an op that has run and is no call: a copy, a constant."""
        results = [t for t in tensors_in(result) if is_floating(t)]
        if results:
            self._note(facts, self._held(args, {}), self._held(kwargs, {}), results)

    def _note(
        self, facts: OpFacts, args: Any, kwargs: Any, results: list[torch.Tensor],
        plan: Plan | None = None, maker: Maker | None = None, passes: bool = True,
    ) -> None:  # fmt: skip
        self._steps.append(_PassedStep(facts, args, kwargs, plan, maker, list(map(self._place, results)), passes))

    def _held(self, values: Any, originals: dict[int, torch.Tensor]) -> Any:
        if type(values) is torch.nn.Parameter:  # it lives as long as its module
            return weakref.ref(values)
        if isinstance(values, torch.Tensor):
            return self._place(originals.get(id(values), values) if originals else values)
        if type(values) is dict:
            return {key: self._held(value, originals) for key, value in values.items()}
        return type(values)([self._held(v, originals) for v in values]) if type(values) in (tuple, list) else values

    def _place(self, tensor: torch.Tensor) -> _HeldTensor:
        """Return the record of a tensor, kept: the result of one call is read by the next, weights by many."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor.data_ptr():
            return known[2]
        held = _HeldTensor.of(tensor)
        if held.reference is not None:
            if len(self._known) >= _STEPS:
                self._known.clear()
            self._known[id(tensor)] = weakref.ref(tensor), tensor.data_ptr(), held
        return held

    def of(self, call: SeenCall, tensors: Iterable[torch.Tensor]) -> Rounded:
        """Return the calls that made, in a low format, the values of these arguments of a call."""
        rounded = Rounded(call, list(self._steps))
        before = {storage_key(tensor) for tensor in tensors if has_storage(tensor)}
        wanted = set(before)  # of what was before, what no sum has read since
        for number in reversed(range(len(rounded.steps))):
            step = rounded.steps[number]
            keys = {held.key for held in step.gave}
            if before.isdisjoint(keys):
                continue
            is_near = not wanted.isdisjoint(keys) and len(rounded.makers) < _MAKERS
            read = {held.key for held in step.tensors()}
            before, wanted = before - keys | read, wanted - keys | (read if is_near and step.passes else set())
            if step.maker is not None:
                makers = rounded.makers if is_near else rounded.further
                makers.setdefault(step.maker, []).append(number)
            if len(rounded.further) == _FURTHER or not before:
                break
        rounded.are_all = len(rounded.further) < _FURTHER
        return rounded


@dataclass(slots=True)
class Rounded:
    """The makers of a call's inputs, with the numbers of their steps, the nearest first, and those further before; and
    whether these are all. left: how many values are not finite with the makers in fp32 that `proof` returned.
    """

    call: SeenCall
    steps: list[_PassedStep]
    makers: dict[Maker, list[int]] = field(default_factory=dict)
    further: dict[Maker, list[int]] = field(default_factory=dict)
    are_all: bool = True
    left: int = 0
    _steps_by_key: dict[int, list[int]] = field(default_factory=dict)
    _known: dict[frozenset[int], list[torch.Tensor] | None] = field(default_factory=dict)

    def proof(self) -> tuple[list[Maker], bool]:
        """Return the makers that in fp32 make the call's result finite where it was not: one, if it does about what all
        do; none if no choice helps. And whether that is known: inputs of some may no longer exist.
        """
        self._steps_by_key = {}
        for number, step in enumerate(self.steps):
            for held in step.gave:
                self._steps_by_key.setdefault(held.key, []).append(number)
        near, further = list(self.makers), [maker for maker in self.further if maker not in self.makers]
        some = [near[:n] for n in range(2, len(near) + 1)]
        best, is_known = self._best([[maker] for maker in near] + some)
        if len(best) == 1 or not further:
            return best, is_known
        more = [[*near, *further[:n]] for n in range(1, len(further) + 1)]
        if not self._best(more[-1:])[0]:
            return best, is_known and self.are_all
        return self._best([[maker] for maker in further] + some + more)[0], True

    def _best(self, choices: Sequence[list[Maker]]) -> tuple[list[Maker], bool]:
        """Return the first choice that does about what the last does that helps, which has the most; none if none
        helps. And whether that is known of the last of all.
        """
        helpful: list[tuple[list[Maker], list[torch.Tensor]]] = []
        is_known = False
        for choice in choices:
            results = self._with(choice)
            is_known = results is not None
            if results is not None and self._helps(results):
                helpful.append((choice, results))
        if not helpful:
            return [], is_known
        best, results = next(pair for pair in helpful if _error(pair[1], helpful[-1][1]) <= _ALIKE)
        self.left = count_not_finite(results)
        return best, True

    def _with(self, choice: Iterable[Maker]) -> list[torch.Tensor] | None:
        """Return the call's results in fp32, with these makers in fp32; None if an input no longer exists."""
        numbers = frozenset(n for maker in choice for of in (self.makers, self.further) for n in of.get(maker, ()))
        if numbers not in self._known:
            try:
                self._known[numbers] = self._again(numbers)
            except (_Unknown, RuntimeError, NotImplementedError):
                self._known[numbers] = None
        return self._known[numbers]

    def _helps(self, results: list[torch.Tensor]) -> bool:
        """Return whether clearly fewer values are not finite."""
        are_fewer = count_not_finite(results) <= _LEFT * count_not_finite(self.call.results)
        return are_fewer and rerun.mends(results, self.call.results)

    def _again(self, high: frozenset[int]) -> list[torch.Tensor] | None:
        """Return the call's results in fp32, with some of the steps before it in fp32."""
        known: dict[int, list[torch.Tensor]] = {}
        originals = _originals(self.call)

        def recomputed(tensor: torch.Tensor) -> torch.Tensor:
            held = _HeldTensor.of(originals.get(id(tensor), tensor))
            number = self._maker(held, len(self.steps))
            if number is None or not self._is_changed(number, high):
                return tensor
            return self._recomputed(held, number, high, known)

        args, kwargs = rerun.changed(self.call.args, self.call.kwargs, recomputed)
        return rerun.run_in(replace(self.call, args=args, kwargs=kwargs), torch.float32)

    def _maker(self, held: _HeldTensor, before: int) -> int | None:
        """Return the last step before another that wrote to a tensor's storage."""
        numbers = self._steps_by_key.get(held.key, [])
        index = bisect_left(numbers, before)
        return numbers[index - 1] if index and held.key else None

    def _is_changed(self, number: int, high: frozenset[int]) -> bool:
        """Return whether a step, or one whose result it reads, is in fp32."""
        waiting, seen, first = [number], {number}, min(high)
        while waiting:
            number = waiting.pop()
            if number in high:
                return True
            makers = {self._maker(held, number) for held in self.steps[number].tensors()}
            waiting += [n for n in makers - seen if n is not None and n >= first]
            seen |= set(waiting)
        return False

    def _value(
        self, held: _HeldTensor, before: int, high: frozenset[int], known: dict[int, list[torch.Tensor]]
    ) -> torch.Tensor:
        """Return an input of a step, with others in fp32."""
        numbers = self._steps_by_key.get(held.key, [])
        number = self._maker(held, before)
        is_same = number is None or not self._is_changed(number, high)
        if is_same and bisect_left(numbers, before) == len(numbers):  # no step has written to it since
            there = held.there()
            if there is not None:
                return there
        if number is None:
            raise _Unknown
        return self._recomputed(held, number, high, known)

    def _recomputed(
        self, held: _HeldTensor, number: int, high: frozenset[int], known: dict[int, list[torch.Tensor]]
    ) -> torch.Tensor:
        """Return a recomputed result of a step, or a view of one."""
        results = self.steps[number].gave
        if number not in known:
            known[number] = self._run(number, high, known)
        index = next(i for i, result in enumerate(results) if result.key == held.key)
        return held.seen_in(known[number][index], results[index])

    def _run(self, number: int, high: frozenset[int], known: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        step = self.steps[number]

        def recomputed(value: Any) -> Any:
            held = _of_argument(value)
            if held is not None:
                return self._value(held, number, high, known)
            if isinstance(value, weakref.ref):
                raise _Unknown
            return value

        args, kwargs = tree_map(recomputed, (step.args, step.kwargs))
        call = SeenCall(self.call.who, step.facts, args, kwargs, plan=step.plan)
        if not rerun.can_run_again(call):
            raise _Unknown
        if number in high:
            results = rerun.run_wide(call.facts, call.args, call.kwargs, torch.float32)
        else:
            args, kwargs = rerun.copies_of_written(call.facts, *rerun.planned_arguments(call))
            results = tensors_in(call.facts.op(*args, **kwargs))
        if results is None or len(results) != len(step.gave):
            raise _Unknown
        return results


def _error(results: list[torch.Tensor], best: list[torch.Tensor]) -> float:
    """Return the error of results relative to the norm of the best; infinity if other elements are finite."""
    whole = torch.cat([t.flatten().double() for t in best])
    rest = torch.cat([t.flatten().double() for t in results])
    finite = whole.isfinite()
    if bool((rest.isfinite() != finite).any()):
        return torch.inf
    return float((rest - whole)[finite].norm() / whole[finite].norm().clamp(min=1e-300))


def _originals(call: SeenCall) -> dict[int, torch.Tensor]:
    """Return the tensors that a call writes to, by the ids of the copies that it has of them."""
    pairs = zip(inputs_of(call), came_in(call), strict=True)
    return {id(copy): original for (_, copy), original in pairs if original is not copy}
