"""What modules of one program return, and what its calls choose, kept; and put in place of another program's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ops import is_named
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.noise import Noise
from narrowcast.runtime.torch_bridge import OpFacts, tensors_in
from narrowcast.runtime.torch_surface.dispatch import quietly, tree_flatten, tree_map_only, tree_unflatten
from narrowcast.runtime.torch_surface.modules import without_wrapper

OF_NOISE = 4
"""What is as many times further apart than calls that are off by a unit in the last place make it may be rounding, in
batches of other shapes; what is further apart is not.
"""
ModuleCall = tuple[str, int]
"""A call of a module: its path, and which one of this module, from 1."""
Results = dict[ModuleCall, list[torch.Tensor]]
"""The floating tensors that calls of modules returned."""


@dataclass(slots=True)
class Kept:
    """What was kept of a run. order: the calls of its modules, as they ended. shapes: of the floating tensors that each
    returned. results: these tensors, of the calls that were asked for. choices: the integers that calls returned which
    choose by value (`topk`, `argmax`), and at which line. before: how many calls of modules had ended before each call.
    """

    order: list[ModuleCall] = field(default_factory=list)
    shapes: dict[ModuleCall, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    results: Results = field(default_factory=dict)
    choices: dict[CallId, torch.Tensor] = field(default_factory=dict)
    places: dict[CallId, str] = field(default_factory=dict)
    before: dict[CallId, int] = field(default_factory=dict)

    def around(self, call: CallId, results: Results) -> tuple[Results, Results]:
        """Return those of these results that ended before a call, and with them those up to its module's; nothing of a
        call that was not seen, or whose module's results are not among these.
        """
        return self._around(self.before.get(call), call.module_path, results)

    def around_module(self, path: str, results: Results) -> tuple[Results, Results]:
        """Return the same of the first call inside of a module."""
        starts = (n for call, n in self.before.items() if path and f"{call.module_path}.".startswith(f"{path}."))
        return self._around(next(starts, None), path, results)

    def _around(self, start: int | None, path: str, results: Results) -> tuple[Results, Results]:
        ends = (n for n, key in enumerate(self.order) if start is not None and n >= start)
        end = next((n for n in ends if self.order[n][0] in containers(path) and self.order[n] in results), None)
        if start is None or end is None:
            return {}, {}
        before, after = ([key for key in self.order[:n] if key in results] for n in (start, end + 1))
        return {key: results[key] for key in before}, {key: results[key] for key in after}


def containers(path: str) -> list[str]:
    """Return the paths of a module and of those that it is in, itself first, the root last."""
    ends = [n for n, letter in enumerate(path) if letter == "."]
    return [path, *(path[:n] for n in reversed(ends)), *([""] if path else [])]


class Exchange(Observer):
    """Keeps the results of the calls of a model, or replaces them.

    wanted: the calls of modules whose tensors are kept. results, choices: what replaces them, in the formats of
    those. numbers_calls: keep which calls of modules had ended before each call. moves: every
    result of a module is off by up to a unit in the last place of its format.
    """

    sees_inside = True

    def __init__(
        self,
        model: torch.nn.Module,
        wanted: Collection[ModuleCall] = (),
        results: Results | None = None,
        choices: Mapping[CallId, torch.Tensor] | None = None,
        numbers_calls: bool = False,
        moves: Noise | None = None,
    ) -> None:
        super().__init__()
        self._moves = moves
        self._numbers_calls = numbers_calls
        self.kept = Kept()
        self._paths = {id(module): without_wrapper(name) for name, module in model.named_modules()}
        self._wanted, self._results, self._choices = wanted, results or {}, choices or {}
        self._numbers: dict[str, int] = {}

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call; keep what it returns, or exchange it."""
        path = self._paths.get(id(module))
        if path is None:
            return super().called(call, module, args, kwargs)
        number = self._numbers[path] = self._numbers.get(path, 0) + 1
        result = super().called(call, module, args, kwargs)
        with quietly():
            return self._exchanged((path, number), result)

    def _exchanged(self, key: ModuleCall, result: Any) -> Any:
        leaves, spec = tree_flatten(result)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and is_floating(leaf)]
        self.kept.order.append(key)
        self.kept.shapes[key] = tuple(tuple(leaves[n].shape) for n in places)
        if key in self._wanted:
            self.kept.results[key] = [leaves[n].detach().clone() for n in places]
        if key not in self._results:
            return result
        for n, tensor in zip(places, self._results[key], strict=False):
            leaves[n] = tensor.to(leaves[n], copy=True)  # which a forward may write to
        return tree_unflatten(leaves, spec)

    def looks_before(self, facts: OpFacts) -> bool:
        """Return False: nothing is inspected before a call."""
        return False

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Return what a call chose, or what it is to choose: of `topk` and its like the values at these places."""
        if self._moves is not None and not seen.is_cast:
            with quietly():
                return tree_map_only(torch.Tensor, partial(_moved, self._moves), result)
        if self._numbers_calls:
            self.kept.before.setdefault(seen.id, len(self.kept.order))
        if not is_named(facts.id, "chooses.by_value"):
            return result
        found = tensors_in(result)
        indices = [t for t in found if t.dtype == torch.int64]
        if len(indices) != 1 or not found:
            return result
        with quietly():
            self.kept.choices[seen.id] = indices[0].detach().clone()
            self.kept.places[seen.id] = f"{seen.site.file}:{seen.site.line}"
            chosen = self._choices.get(seen.id)
            if chosen is None or chosen.shape != indices[0].shape:
                return result
            return _with_choice(args, found, result, chosen)


def _moved(noise: Noise, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with rounding, but for whole numbers, which are counts."""
    if not is_floating(tensor) or torch.equal(tensor, tensor.round()):
        return tensor
    return noise.moved(tensor, torch.finfo(tensor.dtype).eps)


def _with_choice(args: tuple[Any, ...], found: list[torch.Tensor], result: Any, chosen: torch.Tensor) -> Any:
    """Return the result of a call that chooses these indices."""
    if len(found) == 1:
        return chosen.clone()
    values = _values_at(args[0], chosen)
    return result if values is None else (values, chosen.clone())


def _values_at(source: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor at these indices of the one dimension that differs, or of the last one."""
    if chosen.dim() == source.dim():
        others = [n for n in range(source.dim()) if source.shape[n] != chosen.shape[n]]
        return source.gather(others[0] if others else -1, chosen) if len(others) < 2 else None
    if source.dim() == chosen.dim() + 1 and source.shape[:-1] == chosen.shape:
        return source.gather(-1, chosen[..., None])[..., 0]
    return None
