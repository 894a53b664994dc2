"""Parameters of a run: their values before and after steps, the gradients that these used, moments of optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn import Parameter

from narrowcast.observation.observer.door import Door
from narrowcast.observation.observer.module_calls import names_of_parameters
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.observation.statistics.statistics import Statistics
from narrowcast.reports.results.run import UNNAMED, Run
from narrowcast.reports.results.run_records import StepRecord
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import evenly_spaced, values_of
from narrowcast.runtime.torch_surface.autograd import gradient_of
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.modules import optimized_by, told_of_optimizer_steps

_NO_SETTINGS = frozenset(["params", "initial_lr", "foreach", "fused", "capturable", "differentiable"])
"""What a parameter group of an optimizer has besides the numbers that its steps compute with."""

_PLACES = 2
"""How many places of each dimension of a weight tell its version."""


class Parameters:
    """Enters the parameters into a run. They move in the steps of optimizers, and where a program writes to one, or
    into its memory. roots: returns the outermost modules that were called.
    """

    def __init__(self, run: Run, table: Statistics, door: Door, roots: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._run, self._table, self._door, self._roots = run, table, door, roots
        self._optimizers: dict[int, Any] = {}
        self._names: dict[int, str] = {}  # by id, as a step found them: their model may be gone later
        self._before: dict[int, int] = {}  # by id: its value before the first step
        self._first: dict[int, int] = {}  # by id: its gradient in the first step
        self._stepped: dict[int, dict[str, int]] = {}  # by id: what the last step found
        self._by_memory: dict[int, weakref.ref[Parameter]] = {}  # by where it lies, of as many modules
        self._roots_known = 0
        self._written: dict[int, weakref.ref[Parameter]] = {}  # by id: those that the program itself has written to
        self._of_this_step: set[int] = set()
        self._is_in_step = False
        self._versions: list[list[torch.Tensor]] = []  # some elements of each weight, before each call of a module

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what steps of optimizers do in the block."""
        with told_of_optimizer_steps(self._begin, before=True), told_of_optimizer_steps(self._end):
            yield

    def note_version(self, module: torch.nn.Module) -> None:
        """Note some elements of each of a module's weights, without waiting for an accelerator."""
        self._versions.append(
            [evenly_spaced(values_of(p.detach()), _PLACES) for p in module.parameters() if has_storage(p)]
        )

    def about_to_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the parameters among what a call of the program itself is about to write to, and does not fill."""
        moved = [] if self._is_in_step else [p for p in map(self._parameter_of, tensors) if p is not None]
        if not moved:
            return
        if not self._of_this_step or any(id(p) in self._of_this_step for p in moved):
            self._begin_step(moved)
            self._of_this_step = set()
        self._note_values(moved)
        self._of_this_step |= {id(p) for p in moved}
        self._written |= {id(p): weakref.ref(p) for p in moved}

    def _parameter_of(self, tensor: torch.Tensor) -> Parameter | None:
        """Return the parameter that a tensor is, or in whose memory it lies from its beginning."""
        if not has_storage(tensor) or not tensor.data_ptr():
            return None
        if isinstance(tensor, Parameter):
            return tensor if tensor.requires_grad else None
        roots = list(self._roots())
        if len(roots) != self._roots_known:
            every = (p for root in roots for p in root.parameters() if p.requires_grad and has_storage(p))
            self._roots_known, self._by_memory = len(roots), {p.data_ptr(): weakref.ref(p) for p in every}
        reference = self._by_memory.get(tensor.data_ptr())
        found = None if reference is None else reference()
        return found if found is not None and found.data_ptr() == tensor.data_ptr() else None

    def _begin(self, optimizer: Any) -> None:
        """Note the weights that a step is about to change, and the gradients that it uses."""
        with quietly():
            parameters = list(optimized_by(optimizer))
            self._is_in_step = True
            self._door.run("gradients before a step", self._begin_step, parameters)
            self._door.run("weights before a step", self._note_values, parameters)
            self._door.run("the settings of a step", self._note_settings, optimizer)

    def _note_settings(self, optimizer: Any) -> None:
        site, settings = loop_line(), dict[str, dict[str, int]]()
        for group in optimizer.param_groups:
            elements = sum(parameter.numel() for parameter in group["params"])
            for name, value in group.items():
                if name not in _NO_SETTINGS and (text := _setting(value)):
                    known = settings.setdefault(name, {})
                    known[text] = known.get(text, 0) + elements
        step = StepRecord(type(optimizer).__name__, len(self._run.calls), site.file, site.line, settings)
        self._run.optimizer_steps.append(step)

    def _begin_step(self, parameters: Sequence[torch.Tensor]) -> None:
        if not self._run.steps:
            self._run.calls_before_step = len(self._run.calls)
            used = [p for ps in (parameters, *(root.parameters() for root in self._roots())) for p in ps]
            self._first = {id(p): self._table.number(g) for p in used if (g := gradient_of(p)) is not None}
        self._run.steps += 1

    def _note_values(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._before:
                self._before[id(parameter)] = self._table.number(parameter)

    def _end(self, optimizer: Any) -> None:
        """Note the gradients that a step has used, which the program may clear."""
        self._is_in_step = False
        self._optimizers[id(optimizer)] = optimizer
        with quietly():
            self._door.run("the gradients of a step", self._note_used, list(optimized_by(optimizer)))

    def _note_used(self, parameters: list[Any]) -> None:
        if not all(id(parameter) in self._names for parameter in parameters):
            self._names |= names_of_parameters(self._roots())
        self._note_gradients(parameters)

    def _note_gradients(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if (gradient := gradient_of(parameter)) is not None:
                self._note(parameter, gradient=self._table.number(gradient))

    def _note(self, parameter: Any, **numbers: int) -> None:
        before = {"before": self._before[id(parameter)]} if id(parameter) in self._before else {}
        self._stepped[id(parameter)] = {"value": self._table.number(parameter), **numbers, **before}

    def enter(self) -> None:
        """Enter what is known at the end."""
        pairs = enumerate(pairwise(self._versions), 2)
        self._run.weights_changed = [n for n, (a, b) in pairs if not all(map(torch.equal, a, b))]
        roots = list(self._roots())
        self._note_gradients(p for root in roots for p in root.parameters())
        for written in self._written.values():
            parameter = written()
            if parameter is not None and gradient_of(parameter) is None:
                self._note(parameter)
        if self._stepped:  # some have no gradient where others have one, or are frozen
            for parameter in (p for root in roots for p in root.parameters()):
                if id(parameter) not in self._stepped:
                    self._note(parameter)
        names = self._names | (names_of_parameters(roots) if self._stepped or self._optimizers else {})
        for key, numbers in self._stepped.items():
            name = names.setdefault(key, f"{UNNAMED}{len(names)}")  # of no module that was called
            self._run.parameters[name] = numbers
            if key in self._first:
                self._run.first_gradients[name] = self._first[key]
        for optimizer in self._optimizers.values():
            for parameter, state in optimizer.state.items():
                moments = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
                name = names.setdefault(id(parameter), f"{UNNAMED}{len(names)}")
                row = self._run.parameters.setdefault(name, {"value": self._table.number(parameter)})
                row.update({name: self._table.number(value) for name, value in moments.items()})


def _setting(value: Any) -> str:
    """Return a number or a flag of a parameter group as text, of several in parentheses; empty for what is neither."""
    if isinstance(value, tuple | list):
        texts = [_setting(one) for one in value]
        return f"({', '.join(texts)})" if texts and all(texts) else ""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, bool):
        return str(value)
    return f"{value:.9g}" if isinstance(value, float | int) else ""
