"""Whether tensors are finite, asked with one sum each; and which infinities are intentional."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.core.ops import named
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import Named, tensors_by_name
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.runtime.torch_bridge import FORMATS, tensors_in
from narrowcast.runtime.torch_surface.dispatch import holds_others, op_name, tree_leaves, version_of

_KEPT = ("logsumexp", "log_alpha")
"""Arguments of a backward that are results which the fact `finite.keep` is about."""
Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


def is_floating(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has floating values that can be inspected."""
    return tensor.dtype in FORMATS and has_storage(tensor)


def inputs_of(call: SeenCall) -> Named:
    """Return the floating arguments of a call by name; of those that it writes to, the copies that `before` kept. What
    a forward kept for this backward is left out where it is left out of the forward's results.
    """
    given = tensors_by_name(call.facts, call.args, call.kwargs)
    return [(name, t) for name, t in given if is_floating(t) and name not in _KEPT]


def came_in(call: SeenCall) -> list[torch.Tensor]:
    """Return the floating arguments themselves, also those that the call writes to."""
    inputs: list[torch.Tensor] | None = call.notes.get("came")
    return [t for _, t in inputs_of(call)] if inputs is None else inputs


def reads(call: SeenCall, argument: str) -> bool:
    """Return whether the call reads what an argument held, and does not just write to it."""
    _, name, overload = call.facts.id.split(".")
    if _draws(call, argument):
        return False
    if not (overload == "out" or overload.endswith("_out") or name.removesuffix("_") in named("finite.written_unread")):
        return True
    return argument.partition(".")[0] not in call.facts.written


def _draws(call: SeenCall, argument: str) -> bool:
    """Return whether it draws into that argument, if it draws at all: nothing else reads what is in there."""
    return argument == "noise" and op_name(call.facts.op).removesuffix("_") in named("finite.draws_noise")


def parts_inside(call: SeenCall) -> Named:
    """Return the tensors that arguments of some classes hold: what a collective outputs, sharded ones; and the numbers
    that complex ones hold.
    """
    given = tensors_by_name(call.facts, call.args, call.kwargs)
    floating: Named = [(name, part) for name, t in given for part in numbers_of_complex([t])]
    waiting: Named = [(name, t) for name, t in given if holds_others(type(t))]
    while waiting:
        name, tensor = waiting.pop()
        inside = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        parts: Named = [(name, getattr(tensor, each)) for each in inside]
        waiting += [(name, part) for name, part in parts if holds_others(type(part))]
        floating += [(name, part) for name, part in parts if is_floating(part)]
    return floating


def numbers_of_complex(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the real and imaginary parts of each complex tensor, where they lie."""
    found = [t.detach() for t in tensors if t.is_complex() and has_storage(t)]
    return [torch.view_as_real(t.conj() if t.is_conj() else t) for t in found]


def inspected(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that are floating, and the numbers of those that are complex."""
    found = list(tensors)
    return [t for t in found if is_floating(t)] + numbers_of_complex(found)


def returned(call: SeenCall) -> list[torch.Tensor]:
    """Return the floating tensors that a call returned, without what is for its backward alone: of padding that is
    memory which nobody wrote to.
    """
    results = [t for t in call.results if is_floating(t)]
    return results[:1] if op_name(call.facts.op) in named("finite.keep") else results


def gave(call: SeenCall) -> list[torch.Tensor]:
    """Return the floating tensors that a call returned, or wrote to, without what is for its backward alone."""
    if gives_memory(call):
        return []
    results = returned(call)
    if not call.facts.overwrites:
        return results
    there = {id(t) for t in results}
    written = call.facts.written
    names = [name for name, t in tensors_by_name(call.facts, call.args, call.kwargs) if is_floating(t)]
    pairs = zip(names, came_in(call), strict=True)
    overwritten = [(name, t) for name, t in pairs if name.partition(".")[0] in written and id(t) not in there]
    return results + [t for name, t in overwritten if not _draws(call, name)]


def gives_memory(call: SeenCall) -> bool:
    """Return whether it only assigns a tensor other memory."""
    return op_name(call.facts.op) in named("finite.gives_memory")


def fills(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is all of the memory it lies in."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def is_whole_number(tensor: torch.Tensor) -> bool:
    """Return whether it holds signed integers, as infinities may be cast to."""
    return tensor.dtype in _INTEGERS and has_storage(tensor)


def is_number(tensor: torch.Tensor) -> bool:
    """Return whether no whole number in it is as large as infinities are cast to, and each complex one is finite."""
    is_large = is_whole_number(tensor) and out_of_range(tensor)
    return not is_large and all(is_finite(part) for part in numbers_of_complex([tensor]))


def out_of_range(tensor: torch.Tensor) -> bool:
    """Return whether integers are as large as casts make them of an infinity, also with small numbers added."""
    half = torch.iinfo(tensor.dtype).max // 2
    return bool(((tensor > half) | (tensor < -half)).any())


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True, slots=True)
class ReadFlags:
    """What flags were, by number. totals: a sum of each tensor, or the largest magnitude in it, of those in magnitudes.
    memory: alike for what lay in one memory, unwritten.
    """

    totals: list[float]
    memory: list[int]
    magnitudes: frozenset[int] = frozenset()

    def is_finite(self, number: int) -> bool:
        """Return whether all elements were finite."""
        return math.isfinite(self.totals[number])

    def has_nan(self, numbers: list[int]) -> bool:
        """Return whether there was NaN, or infinities of both signs, in one of these."""
        return any(math.isnan(self.totals[number]) for number in numbers)


class Flags:
    """For each tensor as it is now one number: whether it is finite; read of accelerators when it is asked for."""

    def __init__(self) -> None:
        self._known: ByStorage[dict[Key, int]] = ByStorage()
        self._values: list[float | torch.Tensor] = []
        self._first: list[int] = []
        self._magnitudes: set[int] = set()

    def number(self, tensor: torch.Tensor, total: float | None = None) -> int:
        """Return the tensor's number. total: what `total_of` returns, where that is known."""
        version = version_of(tensor)
        key = (version, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)
        numbers = self._known.setdefault(tensor, dict)
        number = numbers.get(key)
        if number is None:
            numbers[key] = number = len(self._values)
            self._first.append(min((n for k, n in numbers.items() if k[0] == version), default=number))
            self._values.append(total_of(tensor) if total is None else total)
            if are_magnitudes(tensor.dtype):
                self._magnitudes.add(number)
        return number

    def written(self, tensor: torch.Tensor) -> None:
        """Note that the tensor was written to."""
        self._known.drop(tensor)

    def is_finite(self, number: int) -> bool:
        """Return the flag, read now."""
        value = self._values[number] = float(self._values[number])
        return math.isfinite(value)

    def largest(self, number: int, tensor: torch.Tensor) -> float:
        """Return a bound of the tensor's magnitudes, infinite where none is known. number: the tensor's own."""
        total = float(self._values[number])
        if are_magnitudes(tensor.dtype):
            return total
        return math.sqrt(total) if total and are_squares(tensor) and math.isfinite(total) else math.inf

    def read(self) -> ReadFlags:
        """Return all flags, in one transfer for each device; those that were read are forgotten."""
        waiting = iter(read_together([value for value in self._values if isinstance(value, torch.Tensor)]))
        totals = [next(waiting) if isinstance(value, torch.Tensor) else value for value in self._values]
        flags = ReadFlags(totals, self._first, frozenset(self._magnitudes))
        self._values, self._first, self._magnitudes, self._known = [], [], set(), ByStorage()
        return flags


def read_together(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of small tensors that are alike, in one transfer for each device."""
    values: dict[int, Any] = {}
    for device in {t.device for t in tensors}:
        numbers = [n for n, t in enumerate(tensors) if t.device == device]
        values.update(zip(numbers, torch.stack([tensors[n] for n in numbers]).tolist(), strict=True))
    return [values[n] for n in range(len(tensors))]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite, read now."""
    return math.isfinite(total_of(tensor))


def are_magnitudes(dtype: torch.dtype) -> bool:
    """Return whether `total_of` gives the largest magnitude: of fp16, whose range is small; that costs no more."""
    return dtype is torch.float16


def are_squares(tensor: torch.Tensor) -> bool:
    """Return whether `total_of` gives the sum of the squares."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def total_of(tensor: torch.Tensor) -> float | torch.Tensor:
    """Return a number that is finite if all elements are: of fp16 the largest magnitude; else a sum in at least fp32,
    which may be infinite where the elements are not: that is checked on the cpu.

    There fp32 is multiplied by itself: BLAS takes less time for that than torch for a sum, the more so for what lies
    in no cache and is shared among threads.
    """
    x = tensor.detach() if tensor.requires_grad else tensor
    if not x.numel():
        return 0.0
    if are_squares(x):
        flat = x.view(-1)
        total = torch.dot(flat, flat)
    elif are_magnitudes(x.dtype) and x.is_cpu:
        low, high = torch.aminmax(x)
        return max(-float(low), float(high))
    elif are_magnitudes(x.dtype):
        total = torch.linalg.vector_norm(x, math.inf)
    else:
        total = (x if FORMATS[x.dtype].bits >= 16 else x.float()).sum()
    if not x.is_cpu:
        return total.float()
    value: float = total.item()
    if math.isfinite(value):
        return value
    return 0.0 if bool(torch.isfinite(x if x.element_size() > 1 else x.float()).all()) else value  # 2.11: not of fp8


def stays_finite(call: SeenCall, largest: Sequence[float]) -> bool:
    """Return whether the results of a call are finite by the bounds of its arguments, in a format as wide. largest:
    those of `came_in`. No sum or product of some of them is above the product of all, each with 1 added.
    """
    tensors = tensors_in(call.args, call.kwargs)
    if op_name(call.facts.op).removesuffix("_") not in named("finite.bounded") or len(tensors) != len(largest):
        return False
    numbers = [abs(v) for v in (*call.args, *call.kwargs.values()) if isinstance(v, int | float)]
    return math.prod(1 + v for v in (*largest, *numbers)) < min(FORMATS[t.dtype].max for t in tensors) / 2


def count_not_finite(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many values are infinite or NaN."""
    return sum(int((~t.isfinite()).sum()) for t in tensors if is_floating(t))


def largest_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest finite magnitude."""
    finite = [t[t.isfinite()].abs() for t in tensors if t.is_floating_point()]
    return max((float(t.max()) for t in finite if t.numel()), default=0.0)


def only_passed_on(inputs: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Return whether, element by element, all that is not finite was so in the inputs."""
    for result in results:
        bad = torch.zeros_like(result, dtype=torch.bool)
        try:
            for tensor in inputs:
                bad |= ~tensor.isfinite()
        except RuntimeError:  # another shape: not element by element
            return False
        if bool((~result.isfinite() & ~bad).any()):
            return False
    return True


# -- infinities that are meant -----------------------------------------------------------------------------------------


def intended(call: SeenCall, results: list[torch.Tensor]) -> str:
    """Return why infinite results are intentional. NaN, as of 0 times an infinite number, is not."""
    has_nan = any(bool(t.isnan().any()) for t in results)
    return "" if has_nan else numbers_not_finite(call) or _mask_like(call, results)


def numbers_not_finite(call: SeenCall) -> str:
    """Return why an infinite result is intentional: an infinite number was passed, as masks are filled with one."""
    numbers = [v for v in tree_leaves((call.args, call.kwargs)) if isinstance(v, float)]
    return "filled in as a number" if any(math.isinf(v) for v in numbers) else ""


def _mask_like(call: SeenCall, results: list[torch.Tensor]) -> str:
    """Return why an infinite result is intentional: it is all -inf where an argument has its format's lowest value."""
    if any(bool((t == math.inf).any()) for t in results):
        return ""
    for name, tensor in inputs_of(call):
        if tensor.numel() and is_lowest(float(tensor.detach().min()), tensor):
            return f"a mask of the lowest value of {FORMATS[tensor.dtype]} ({name})"
    return ""


def is_lowest(value: float, tensor: torch.Tensor) -> bool:
    """Return whether a value is, within a hundredth, the lowest of the tensor's format: what masks are filled with."""
    return value <= -0.99 * FORMATS[tensor.dtype].max
