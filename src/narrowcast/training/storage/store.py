"""`nc.store`: weights, masters, gradients and moments of training kept in the formats that a policy declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from narrowcast.core.policy import Policy
from narrowcast.core.policy.storage import BF16, FP32, NEAREST, Storage
from narrowcast.errors import RunError
from narrowcast.runtime.sites.python_stack import warn_here
from narrowcast.runtime.torch_bridge import is_sharded_tensor, part_of, with_part
from narrowcast.runtime.torch_surface.dispatch import quietly, version_of
from narrowcast.runtime.torch_surface.dynamo import never_trace
from narrowcast.runtime.torch_surface.grad_scaling import innermost, keep_scale_outside, take_scale
from narrowcast.runtime.torch_surface.modules import (
    hooked_step,
    step_for_schedules,
    step_without_hooks,
)
from narrowcast.runtime.weights.stored import STORED, note_stored, stored_by
from narrowcast.training.storage.declared import declared_by, notes_on, slots_of
from narrowcast.training.storage.passes import MOMENTS, Formula, Passes, formula_of, numbers_of
from narrowcast.training.storage.replicas import Replicas
from narrowcast.training.storage.resumed import Resumed
from narrowcast.training.storage.rounding import PLAIN, sum_of_bits
from narrowcast.training.storage.slots import RESTS, StoredParameter, convert, place


def store(model: torch.nn.Module, optimizer: Any, storage: Policy | str | Path | Mapping[str, Any]) -> Stored:
    """Keep the weights that an optimizer steps, what completes them, their gradients and its states in the formats
    that a policy's `[storage]` section declares, from here on.

    model:     its parameters get their formats in place; with DistributedDataParallel around it they must have them
               already, and with fully_shard, too: call this before the former, `model.to(dtype)` before the latter.
    optimizer: that has not stepped yet, of torch.optim or of that interface, each parameter in one group. AdamW, Adam
               and SGD are stepped in one pass over what is stored, any other in fp32 on copies that it is lent for the
               step. Not LBFGS, nor what computes its loss again within a step.
    storage:   a policy with that section, or the path of its file; or the section as a dict.

    Schedulers, `clip_grad_norm_`, `zero_grad`, gradient scalers, closures and hooks on steps work as before.
    `optimizer.state_dict()` has what is kept besides the weights, under "storage"; `load_state_dict` wants it.

    Returns what holds it: `undo()`, `weights()` in fp32, `sizes()`, `lost`, `state_dict()`. Raises RunError for what
    cannot be stored so, before anything is changed, and PolicyError for a declaration that contradicts itself.
    """
    name, declared = declared_by(storage)
    inner = innermost(optimizer)
    slots, unmatched = slots_of(model, inner, declared)
    return Stored(inner, name, declared, slots, notes_on(model, inner, slots, unmatched), Replicas(model))


def stored_of(optimizer: Any) -> Stored | None:
    """Return what stores the parameters of an optimizer; None if nothing does."""
    found: Stored | None = stored_by(innermost(optimizer))
    return found


def slot_of(optimizer: Any, parameter: torch.Tensor) -> StoredParameter | None:
    """Return how a parameter of an optimizer is stored; None if it is as torch has it."""
    stored = stored_of(optimizer)
    return None if stored is None else stored.of_parameter.get(parameter)


class Stored(Resumed):
    """Parameters that are kept in declared formats between the steps of their optimizer.

    storage: the declaration; update: how many steps were made. notes: what a user should know of it.
    """

    def __init__(
        self, optimizer: Any, name: str, storage: Storage, slots: list[StoredParameter],
        notes: Sequence[str] = (), replicas: Replicas | None = None,
    ) -> None:  # fmt: skip
        self.name, self.storage, self.optimizer, self.slots = name, storage, optimizer, slots
        self.update, self._replicas = 0, replicas or Replicas()
        self.of_parameter = {slot.parameter: slot for slot in slots}
        self._passes = Passes(sum(slot.weight.numel() for slot in slots))
        self.notes = self._passes.notes
        self.notes += notes
        self._lost: list[float] = []
        self._unread: list[list[torch.Tensor]] = []  # how many elements moved, how many stayed, ... by step
        self._changed: set[str] = set()
        self._copies: dict[StoredParameter, torch.nn.Parameter] = {}
        self._sums = {}
        self._used = {}
        self._is_on = True
        with quietly():
            for slot in slots:
                place(slot)
                self._note_bits(slot)
                note_stored(slot.parameter, self)
                made = optimizer.state.get(slot.parameter, {})  # some make it before they step
                made.update(slot.narrowed({k: v.float() if slot.is_moment(v) else v for k, v in made.items()}, None))
        self._handles = [*self._hear_of_state(), self._replicas]
        finalize(self, self._replicas.remove)
        self._takes_scale = keep_scale_outside(optimizer)
        self._run = hooked_step(optimizer, lambda _, *given, **named: self.step(*given, **named))
        self._step_before = vars(optimizer).get("step")
        self._placed = optimizer.step = step_for_schedules(optimizer, _step_of)
        setattr(optimizer, STORED, self)

    # -- what is asked

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all numbers that are stored, in fp32, by the parameters' names: for averages (EMA) and exports."""
        with quietly():
            return {slot.name: with_part(slot.parameter, slot.wide()).clone() for slot in self.slots}

    @property
    def lost(self) -> list[float]:
        """The share of the elements that a step moved whose updates rounding lost, step by step: of weights that are
        rounded to nearest and have no master. 0 where there are none.
        """
        for told in self._unread:
            moved, kept = (sum(map(float, rows)) for rows in (told[0::2], told[1::2]))
            self._lost.append(kept / moved if moved else 0.0)
        self._unread.clear()
        return [*self._lost]

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes on this rank before they were stored and now, by kind: weight, master (or remainder, or
        compensation), gradient, and moments, of which AdamW, Adam and SGD are counted before their first step.
        """
        sizes = dict.fromkeys(("weight", "master", "gradient", "moments"), (0, 0))
        for slot in self.slots:
            count, before = slot.weight.numel(), slot.before.itemsize
            gradient = slot.dtype_of_gradient.itemsize if slot.parameter.requires_grad else 0
            moments = self._moments_of(slot)
            rows = {
                "weight": (before, slot.weight.element_size()),
                "master": (0, 0 if slot.rest is None else slot.rest.element_size()),
                "gradient": (before if gradient else 0, gradient),
                "moments": (len(moments) * before, sum(moments)),
            }
            sizes = {k: (a + rows[k][0] * count, b + int(rows[k][1] * count)) for k, (a, b) in sizes.items()}
        return sizes

    def __repr__(self) -> str:
        sizes = self.sizes()
        before, now = map(sum, zip(*sizes.values(), strict=True))
        count = max(1, sum(slot.weight.numel() for slot in self.slots))
        kinds = ", ".join(f"{kind} {b / count:.3g}" for kind, (_, b) in sizes.items() if b)
        return f"<{self.name}: {now / count:.3g} bytes per parameter ({kinds}), {before / count:.3g} before>"

    def loses_nothing(self, parameter: torch.Tensor) -> bool:
        """Return whether no update of a parameter that it stores is lost in rounding."""
        return self.of_parameter[parameter].way != NEAREST

    def memory(self) -> list[torch.Tensor]:
        """Return the tensors that a step writes to besides weights and the optimizer's states."""
        return [slot.rest for slot in self.slots if slot.rest is not None]

    def undo(self) -> None:
        """Give the optimizer its own step back, and the weights the formats that they had, or fp32 where a master, a
        remainder or a compensation completes them; sharded weights stay as they are. States follow their weights.
        """
        if not self._is_on:
            raise RunError("undo()", "it is undone already", advice="Call nc.store again to store it.")
        self._is_on = False
        with quietly():
            for slot in self.slots:
                note_stored(slot.parameter, None)
                wide, states = slot.wide(), slot.widened(dict(self.optimizer.state.get(slot.parameter, {})))
                if not is_sharded_tensor(slot.parameter):
                    dtype = torch.float32 if slot.rest is not None else slot.before
                    convert(slot.parameter, wide.to(dtype).clone(), dtype)
                else:
                    slot.parameter.grad_dtype = slot.parameter.dtype if slot.parameter.is_leaf else None
                for key, value in states.items():
                    own = value.to(slot.parameter.dtype) if slot.is_moment(value) else value
                    self.optimizer.state[slot.parameter][key] = own
        for handle in self._handles:
            handle.remove()
        if self._takes_scale:
            take_scale(self.optimizer)
        if vars(self.optimizer).get("step") is self._placed:  # else something wraps it, and it passes calls on
            del self.optimizer.step
            if self._step_before is not None:
                self.optimizer.step = self._step_before
        delattr(self.optimizer, STORED)

    # -- a step

    def step(self, *given: Any, **named: Any) -> Any:
        """Step the optimizer, as with these arguments of its own method, without the hooks that it runs."""
        closure, *others = given or (None,)
        closure, loss = named.pop("closure", closure), None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
            closure = _once(loss)
        self._check_parameters("a step", "Call undo() before add_param_group, and nc.store with a new one after it.")
        with quietly():
            for slot in self.slots if self._replicas.make_equal(self.slots) else ():
                self._note_bits(slot)
            own = list(self._own_slots())
            stepped = {id(slot) for slot, _, _ in own}
            lent = [slot for slot in self.slots if id(slot) not in stepped]
            self.update += 1
            try:
                told = self._lend(lent, [] if closure is None and not others else [closure, *others], named)
            except BaseException:
                self.update -= 1
                raise
            told += self._pass(own)
            self._use_gradients()
        self._unread.append(told)
        self._lost = self.lost if len(self._unread) > _UNREAD else self._lost
        return loss

    def _own_slots(self) -> Iterator[tuple[StoredParameter, Formula, int]]:
        """Yield the parameters that are stepped in a pass, with the formula, and the number of their step."""
        formulas = [formula_of(self.optimizer, group) for group in self.optimizer.param_groups]
        for slot in self.slots:
            formula, gradient = formulas[slot.group], slot.parameter.grad
            is_plain = slot.way == PLAIN and slot.kept.moments == FP32 and slot.dtype_of_gradient is torch.float32
            is_of_others = gradient is None or gradient.is_sparse or slot.dtype_of_moments is None
            if formula is None or is_plain or is_of_others:
                continue
            state = self.optimizer.state[slot.parameter]
            if formula.is_adam:
                yield slot, formula, int(state.get("step", 0)) + 1
            else:
                yield slot, formula, 1 + (state.get("momentum_buffer") is not None)

    def _pass(self, own: list[tuple[StoredParameter, Formula, int]]) -> list[torch.Tensor]:
        """Step parameters in passes over what is stored."""
        told: list[torch.Tensor] = []
        for slot, formula, step in own:
            state = self.optimizer.state[slot.parameter]
            names = self._names_of(formula)
            for name in names:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(slot.parameter.detach(), dtype=slot.dtype_of_moments)
            if formula.is_adam:
                state["step"] = torch.full((), float(step), dtype=torch.float32, device="cpu")
            numbers = numbers_of(formula, self.optimizer.param_groups[slot.group], step)
            key = slot.key(self.storage.seed, self.update) if slot.is_random else 0
            places = None if slot.places is None else slot.places.reshape(-1)
            moments = [part_of(state[name]) for name in names]
            gradient: Any = slot.parameter.grad
            tensors = slot.weight, slot.rest, part_of(gradient), moments
            found = self._passes.run(formula, slot.way, *tensors, places, key, numbers)
            torch.autograd.graph.increment_version(slot.parameter)
            if slot.way == NEAREST:
                told += found
            elif slot.way == FP32:
                self._tell_changed(slot, found[0])
            elif found:
                self._tell_changed(slot, found[0] != self._sums.get(slot.name, found[0]))
                self._sums[slot.name] = found[1]
        return told

    def _lend(self, slots: list[StoredParameter], given: list[Any], named: dict[str, Any]) -> list[torch.Tensor]:
        """Let the optimizer step its parameters in fp32, on copies of what is stored, and store what it makes."""
        optimizer, told = self.optimizer, []
        slots = [slot for slot in slots if slot.parameter.requires_grad or slot.parameter.grad is not None]
        if not any(slot.parameter.grad is not None for slot in slots):
            return []
        lent = {slot.parameter: self._copy_of(slot) for slot in slots}
        before = [(group, group["params"]) for group in optimizer.param_groups]
        own = {one: optimizer.state.pop(one) for one in self.of_parameter if one in optimizer.state}
        versions = [version_of(slot.parameter) for slot in slots if slot.parameter is not lent[slot.parameter]]
        try:
            for group, parameters in before:
                group["params"] = [lent[one] for one in parameters if one in lent]
            for slot in slots:
                if slot.parameter in own:
                    optimizer.state[lent[slot.parameter]] = slot.widened(own[slot.parameter])
            step_without_hooks(optimizer)(*given, **named)
            if versions != [version_of(slot.parameter) for slot in slots if slot.parameter is not lent[slot.parameter]]:
                found = f"{type(optimizer).__name__} steps parameters that it holds itself, not those of its groups"
                raise RunError("a step of what is stored", found, advice="Train with weights in fp32.")
            own |= {slot.parameter: optimizer.state.pop(lent[slot.parameter], {}) for slot in slots}
            for slot in slots:
                told += self._store(slot, lent[slot.parameter], own)
        finally:
            for group, parameters in before:
                group["params"] = parameters
            for slot in slots:
                optimizer.state.pop(lent[slot.parameter], None)
            for parameter, state in own.items():
                if state:
                    optimizer.state[parameter] = state
            for copied in self._copies.values():
                copied.grad, copied.data = None, copied.data.new_empty(0)
        return told

    def _copy_of(self, slot: StoredParameter) -> torch.Tensor:
        """Return a parameter in fp32, the same one in each step: an optimizer may know it by its identity."""
        gradient = slot.parameter.grad
        if slot.way == PLAIN and slot.dtype_of_gradient is torch.float32:
            return slot.parameter
        wide = with_part(slot.parameter.detach(), slot.wide())
        if is_sharded_tensor(slot.parameter):
            copied = torch.nn.Parameter(wide, slot.parameter.requires_grad)
        else:
            copied = self._copies.setdefault(slot, torch.nn.Parameter(wide.new_empty(0)))
            copied.data = wide
            copied.requires_grad_(slot.parameter.requires_grad)
        vars(copied).update(vars(slot.parameter))
        copied.grad = None if gradient is None else gradient.float()
        return copied

    def _store(self, slot: StoredParameter, stepped: torch.Tensor, own: dict[Any, Any]) -> list[torch.Tensor]:
        """Store a parameter that was stepped in fp32, and its states; return what rounding lost."""
        told: list[torch.Tensor] = []
        keyed = slot.keyed(self.storage.seed, self.update) if slot.is_random else None
        if slot.way != PLAIN:
            after, before = part_of(stepped.detach()), slot.weight
            if slot.way == NEAREST:
                moved = after != before.float()
                told = [moved.sum(), (moved & (after.to(before.dtype) == before)).sum()]
            if slot.way == FP32 and slot.rest is not None:
                other = before.flatten() != slot.rest.to(before.dtype)
                self._tell_changed(slot, (other & ~before.flatten().isnan()).sum())
            if slot.name in self._sums:
                self._tell_changed(slot, sum_of_bits(before) != self._sums[slot.name])
            slot.put(after, keyed)
            self._note_bits(slot)
        if stepped is not slot.parameter:
            torch.autograd.graph.increment_version(slot.parameter)
        own[slot.parameter] = slot.narrowed(own[slot.parameter], keyed)
        return told

    def _tell_changed(self, slot: StoredParameter, count: torch.Tensor) -> None:
        """Tell, of each weight once, that somebody else wrote to it. count: of elements, or whether there are some."""
        if slot.name not in self._changed and int(count):
            self._changed.add(slot.name)
            what = f"{int(count)} elements of {slot.name}" if slot.way == FP32 else slot.name
            text = f"{what} {'were' if slot.way == FP32 else 'was'} written since the last step, not by the optimizer: "
            self.notes.append(f"{text}its {RESTS[slot.way]} follows.")
            warn_here(f"nc.store: {self.notes[-1]}")

    def _names_of(self, formula: Formula) -> tuple[str, ...]:
        return MOMENTS[type(self.optimizer)] if formula.is_adam or formula.momentum else ()

    def _moments_of(self, slot: StoredParameter) -> list[float]:
        """Return the bytes of an element of each of the states in the weight's shape, as they are or will be."""
        states = [v for v in self.optimizer.state.get(slot.parameter, {}).values() if isinstance(v, torch.Tensor)]
        found = [part_of(one) for one in states if one.dim() and one.shape == slot.parameter.shape]
        if found or not slot.parameter.requires_grad:
            sizes = [getattr(one, "codes", one) for one in found]
            return [one.numel() * one.element_size() / max(1, slot.weight.numel()) for one in sizes]
        formula = formula_of(self.optimizer, self.optimizer.param_groups[slot.group])
        size = {FP32: 4.0, BF16: 2.0}.get(slot.kept.moments, 1.0)
        return [size] * len(self._names_of(formula)) if formula is not None else []


_UNREAD = 64
"""Steps whose counts of lost updates may stay on a device, unread: reading waits for it."""


def _step_of(optimizer: Any, *given: Any, **named: Any) -> Any:
    """Step an optimizer whose parameters are stored; in the place of its own method."""
    stored = stored_of(optimizer)
    if stored is None:
        return type(optimizer).step(optimizer, *given, **named)
    return stored._run(optimizer, *given, **named)


def _once(loss: Any) -> Callable[[], Any]:
    """Return a closure that gives a loss which was computed before, one time."""
    rest = [loss]

    def closure() -> Any:
        if not rest:
            advice = "Train with weights in fp32, or with an optimizer that asks for the loss once."
            raise RunError("a step of what is stored", "the optimizer computes its loss again", advice=advice)
        return rest.pop()

    return closure


never_trace(_step_of)
