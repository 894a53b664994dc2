"""Whether a value is what exact arithmetic gives, or was rounded onto it by who made it: they are run again in fp32.

A logarithm of zero, a quotient by zero, an arc cosine beyond one: in the call itself no format fixes it. But its
argument may be a square that left fp16's range, or a cosine rounded past one. So the last calls that gave something in
a low format are written down, without keeping a tensor alive. When something is found, those that its arguments come
from are run again, some of them as a rule with action `full` would have them, from what is still there.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.decide import Plan
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.observation.trial import rerun
from narrowcast.observation.trial.finiteness import came_in, inputs_of, is_floating
from narrowcast.runtime.torch_bridge import OpFacts, tensors_in
from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef, storage_key, storage_of, tree_map

Maker = tuple[str, Any]
"""The op and the module of a call that gave something in a low format."""
_MAKERS = 4
"""How many makers of one value are tried, the nearest first."""
_STEPS = 4096
"""How many calls are remembered."""
_ALIKE = 0.05
"""How far what a choice of makers gives may be from what all of them give."""


class _Unknown(Exception):
    """What a call read is no longer there, and cannot be made again."""


@dataclass(slots=True, eq=False)
class _HeldTensor:
    """A tensor that is not kept alive: where it lies, and how. The reference keeps its storage's number from being used
    again. Never changed; frozen, it would cost more to make than all that it holds.
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
            return _HeldTensor(0, None, tensor.dtype, tensor.device, tensor.shape, (), 0)
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
        """The same view of what was made again; as_made: of what it was a view."""
        if base.shape != as_made.shape or base.stride() != as_made.stride:
            raise _Unknown
        if (self.shape, self.stride, self.offset) == (as_made.shape, as_made.stride, as_made.offset):
            return base
        return base.as_strided(self.shape, self.stride, self.offset - as_made.offset + int(base.storage_offset()))


@dataclass(slots=True, eq=False)
class _PassedStep:
    """A call whose tensors are not kept. passes: whether its result shows how arguments were rounded; sums do not."""

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
    """An argument that is a tensor; None for any other, and for a parameter that is gone."""
    if isinstance(value, weakref.ref):
        tensor = value()
        return None if tensor is None else _HeldTensor.of(tensor)
    return value if isinstance(value, _HeldTensor) else None


class LowMakers:
    """The last calls that gave something in a low format, or out of one."""

    def __init__(self) -> None:
        self._steps: deque[_PassedStep] = deque(maxlen=_STEPS)
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, _HeldTensor]] = {}  # by the tensor's id

    def __bool__(self) -> bool:
        return bool(self._steps)

    def note(self, call: SeenCall, maker: Maker | None, results: list[torch.Tensor], passes: bool) -> None:
        """A call has run. maker: who it is, if what it gave is in a low format by its own doing."""
        originals = _originals(call) if call.facts.writes else {}
        args, kwargs = self._held(call.args, originals), self._held(call.kwargs, originals)
        self._note(call.facts, args, kwargs, results, call.plan, maker, passes)

    def note_copy(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An op has run that is no call: a copy, a constant."""
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
        """Where a tensor lies: what one call gave, the next reads, and weights are read by many."""
        found = self._known.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1] == tensor.data_ptr():
            return found[2]
        held = _HeldTensor.of(tensor)
        if held.reference is not None:
            if len(self._known) >= _STEPS:
                self._known.clear()
            self._known[id(tensor)] = weakref.ref(tensor), tensor.data_ptr(), held
        return held

    def of(self, call: SeenCall, tensors: Iterable[torch.Tensor]) -> Rounded:
        """Who made, in a low format, what these arguments of a call hold."""
        found = Rounded(call, list(self._steps))
        wanted = {storage_key(tensor) for tensor in tensors if has_storage(tensor)}
        for number in reversed(range(len(found.steps))):
            step = found.steps[number]
            made = {held.key for held in step.gave}
            if wanted.isdisjoint(made):
                continue
            wanted -= made
            if step.passes:
                wanted |= {held.key for held in step.tensors()}
            if step.maker is not None:
                found.makers.setdefault(step.maker, []).append(number)
            if len(found.makers) == _MAKERS or not wanted:
                break
        return found


@dataclass(slots=True)
class Rounded:
    """Who made what a call read: the makers with the numbers of their steps, the nearest first. left: how many values
    are not finite with the makers in fp32 that were found.
    """

    call: SeenCall
    steps: list[_PassedStep]
    makers: dict[Maker, list[int]] = field(default_factory=dict)
    left: int = 0
    _made: dict[int, list[int]] = field(default_factory=dict)

    def proof(self) -> tuple[list[Maker], bool]:
        """The makers with which in fp32 the call's result is finite where it was not: one, if one gives about what all
        do. None if no choice does; and whether that was seen of all, as long as what they read is there.
        """
        self._made = {}
        for number, step in enumerate(self.steps):
            for held in step.gave:
                self._made.setdefault(held.key, []).append(number)
        makers = list(self.makers)
        choices = [[maker] for maker in makers] + [makers[:n] for n in range(2, len(makers) + 1)]
        found: list[tuple[list[Maker], list[torch.Tensor]]] = []
        for choice in choices:
            try:
                results = self._again({number for maker in choice for number in self.makers[maker]})
            except (_Unknown, RuntimeError, NotImplementedError):
                continue
            if results is not None and rerun.mends(results, self.call.results):
                found.append((choice, results))
            elif len(choice) == len(makers):  # with all of them it is the same: nothing else would help
                return [], True
        if not found:
            return [], False
        best, results = next(pair for pair in found if _error(pair[1], found[-1][1]) <= _ALIKE)
        self.left = sum(int((~t.isfinite()).sum()) for t in results)
        return best, True

    def _again(self, high: set[int]) -> list[torch.Tensor] | None:
        """What the call gives in fp32, with some of the steps before it in fp32."""
        known: dict[int, list[torch.Tensor]] = {}
        originals = _originals(self.call)

        def made(tensor: torch.Tensor) -> torch.Tensor:
            held = _HeldTensor.of(originals.get(id(tensor), tensor))
            number = self._maker(held, len(self.steps))
            if number is None or not self._is_changed(number, high):
                return tensor
            return self._made_again(held, number, high, known)

        args, kwargs = rerun.changed(self.call.args, self.call.kwargs, made)
        return rerun.run_in(replace(self.call, args=args, kwargs=kwargs), torch.float32)

    def _maker(self, held: _HeldTensor, before: int) -> int | None:
        """The last step before another that gave what lies there."""
        numbers = self._made.get(held.key, [])
        index = bisect_left(numbers, before)
        return numbers[index - 1] if index and held.key else None

    def _is_changed(self, number: int, high: set[int]) -> bool:
        """Whether a step, or one whose result it reads, is in fp32."""
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
        self, held: _HeldTensor, before: int, high: set[int], known: dict[int, list[torch.Tensor]]
    ) -> torch.Tensor:
        """What a step read, if others were in fp32."""
        numbers = self._made.get(held.key, [])
        number = self._maker(held, before)
        is_same = number is None or not self._is_changed(number, high)
        if is_same and bisect_left(numbers, before) == len(numbers):  # nobody has written to it since
            there = held.there()
            if there is not None:
                return there
        if number is None:
            raise _Unknown
        return self._made_again(held, number, high, known)

    def _made_again(
        self, held: _HeldTensor, number: int, high: set[int], known: dict[int, list[torch.Tensor]]
    ) -> torch.Tensor:
        """A result of a step, or a view of one."""
        gave = self.steps[number].gave
        if number not in known:
            known[number] = self._run(number, high, known)
        index = next(i for i, given in enumerate(gave) if given.key == held.key)
        return held.seen_in(known[number][index], gave[index])

    def _run(self, number: int, high: set[int], known: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        step = self.steps[number]

        def made(value: Any) -> Any:
            held = _of_argument(value)
            if held is not None:
                return self._value(held, number, high, known)
            if isinstance(value, weakref.ref):
                raise _Unknown
            return value

        args, kwargs = tree_map(made, (step.args, step.kwargs))
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
    """How far results are from the best, of their norm; what is finite in one alone is far."""
    whole = torch.cat([t.flatten().double() for t in best])
    rest = torch.cat([t.flatten().double() for t in results])
    finite = whole.isfinite()
    if bool((rest.isfinite() != finite).any()):
        return torch.inf
    return float((rest - whole)[finite].norm() / whole[finite].norm().clamp(min=1e-300))


def _originals(call: SeenCall) -> dict[int, torch.Tensor]:
    """The tensors of which a call that writes to them has copies."""
    pairs = zip(inputs_of(call), came_in(call), strict=True)
    return {id(copy): original for (_, copy), original in pairs if original is not copy}
