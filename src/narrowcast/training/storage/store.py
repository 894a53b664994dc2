"""`nc.store`: weights, masters, gradients and moments of training kept in the formats that a policy declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from weakref import finalize, ref

import torch

from narrowcast.core.policy import Policy
from narrowcast.core.policy.storage import BF16, FP32, NEAREST, Storage
from narrowcast.errors import RunError
from narrowcast.output.words import and_more
from narrowcast.runtime.sites.python_stack import warn_here
from narrowcast.runtime.torch_bridge import is_sharded_tensor, part_of, with_part
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.dynamo import never_trace
from narrowcast.runtime.torch_surface.grad_scaling import innermost, keep_scale_outside, take_scale
from narrowcast.runtime.torch_surface.modules import (
    hooked_step,
    step_for_schedules,
    told_of_optimizer_steps,
)
from narrowcast.runtime.weights.stored import STORED, note_stored, stored_by
from narrowcast.training.storage.declared import declared_by, notes_on, slots_of
from narrowcast.training.storage.lending import Lending
from narrowcast.training.storage.passes import MOMENTS, Formula, Passes, formula_of, numbers_of
from narrowcast.training.storage.replicas import Replicas
from narrowcast.training.storage.resumed import KEY, Resumed
from narrowcast.training.storage.rounding import PLAIN, sum_of_bits
from narrowcast.training.storage.slots import StoredParameter, convert, fits_blocks, place


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

    restored_with_owner = True

    def __init__(
        self, optimizer: Any, name: str, storage: Storage, slots: list[StoredParameter],
        notes: Sequence[str] = (), replicas: Replicas | None = None,
    ) -> None:  # fmt: skip
        self.name, self.storage, self.optimizer, self.slots = name, storage, optimizer, slots
        self.update, self._replicas = 0, replicas or Replicas()
        self.of_parameter = {slot.parameter: slot for slot in slots}
        self._passes = Passes(sum(slot.weight.numel() for slot in slots), len(slots))
        self.notes = self._passes.notes
        self.notes += notes
        self._lost: list[float] = []
        self._unread: list[list[torch.Tensor]] = []  # how many elements moved, how many stayed, ... by step
        self._written: list[StoredParameter] = []
        self._has_told = False
        self._lending = Lending(optimizer, self.of_parameter)
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
        self._stack = ExitStack()
        self._hear_of_state(self._stack)
        own = type(optimizer).state_dict if isinstance(optimizer, torch.optim.Optimizer) else None
        if own not in (None, torch.optim.Optimizer.state_dict) and KEY not in optimizer.state_dict():
            text = "what is kept besides the weights: save state_dict() of this, too."
            self.notes.append(f"{type(optimizer).__name__}.state_dict() has no {KEY!r}, {text}")
        self._stack.callback(self._replicas.remove)
        self._stack.enter_context(told_of_optimizer_steps(partial(_refuse_others, ref(self)), before=True))
        finalize(self, self._stack.close)
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
        sizes, groups = dict.fromkeys(("weight", "master", "gradient", "moments"), (0, 0)), self._groups()
        for slot in self.slots:
            count, before = slot.weight.numel(), slot.before.itemsize
            gradient = slot.dtype_of_gradient.itemsize if slot.parameter.requires_grad else 0
            moments = self._moments_of(slot, groups)
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
            raise RunError("undo()", "it is undone already", advice="Call nc.store with a new optimizer to store it.")
        self._is_on = False
        with quietly():
            for slot in self.slots:
                note_stored(slot.parameter, None)
                slot.rest = None if slot.what_changed() else slot.rest  # of another shape, it completes nothing
                wide, states = slot.wide(), slot.widened(dict(self.optimizer.state.get(slot.parameter, {})))
                if not is_sharded_tensor(slot.parameter):
                    dtype = torch.float32 if slot.rest is not None else slot.before
                    convert(slot.parameter, wide.to(dtype).clone(), dtype)
                else:
                    slot.parameter.grad_dtype = slot.parameter.dtype if slot.parameter.is_leaf else None
                slot.rest = None
                for key, value in states.items():
                    own = value.to(slot.parameter.dtype) if slot.is_moment(value) else value
                    self.optimizer.state[slot.parameter][key] = own
        self._stack.close()
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
            closure = self._lending.once(loss)
        self._check_parameters("a step", "Call undo() before add_param_group, and nc.store with a new one after it.")
        with quietly():
            for slot in self.slots if self._replicas.make_equal(self.slots) else ():
                self._note_bits(slot)
            groups = self._groups()
            own = list(self._own_slots(groups))
            stepped = {id(slot) for slot, *_ in own}
            lent = [slot for slot in self.slots if id(slot) not in stepped and slot.parameter in groups]
            self.update += 1
            try:
                told = []
                positional = [] if closure is None and not others else [closure, *others]
                self._lending.step(lent, positional, named, lambda *stepped: told.extend(self._store(*stepped)))
                told += self._pass(own)
            except BaseException:
                self.update -= 1
                raise
            finally:
                self._tell_written()
            self._use_gradients()
        self._unread.append(told)
        self._lost = self.lost if len(self._unread) > _UNREAD else self._lost
        return loss

    def _own_slots(self, groups: Mapping[torch.Tensor, int]) -> Iterator[_OwnStep]:
        """Yield the parameters that are stepped in a pass, with the formula, the number of their step, and what it
        asks. groups: the numbers of those that parameters are in now.
        """
        formulas = [formula_of(self.optimizer, group) for group in self.optimizer.param_groups]
        for slot in self.slots:
            if slot.parameter not in groups:
                continue
            number, gradient = groups[slot.parameter], slot.parameter.grad
            formula = formulas[number]
            is_plain = slot.way == PLAIN and slot.kept.moments == FP32 and slot.dtype_of_gradient is torch.float32
            is_of_others = gradient is None or gradient.is_sparse or slot.dtype_of_moments is None
            if formula is None or is_plain or is_of_others:
                continue
            state = self.optimizer.state.get(slot.parameter, {})
            for name in ("grad", *self._names_of(formula)):
                one = gradient if name == "grad" else state.get(name)
                if one is not None and part_of(one).shape != slot.weight.shape:
                    found = f"its {name} has shape {tuple(part_of(one).shape)}, the weight {tuple(slot.weight.shape)}"
                    raise RunError(f"a step of {slot.name}", found, advice="Give it one of the weight's shape.")
            step = int(state.get("step", 0)) if formula.is_adam else int(state.get("momentum_buffer") is not None)
            yield slot, formula, step + 1, numbers_of(formula, self.optimizer.param_groups[number], step + 1)

    def _pass(self, own: list[_OwnStep]) -> list[torch.Tensor]:
        """Step parameters in passes over what is stored."""
        told: list[torch.Tensor] = []
        for slot, formula, step, numbers in own:
            state = self.optimizer.state[slot.parameter]
            names = self._names_of(formula)
            for name in names:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(slot.parameter.detach(), dtype=slot.dtype_of_moments)
            if formula.is_adam:
                state["step"] = torch.full((), float(step), dtype=torch.float32, device="cpu")
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
                self._note_written(slot, found[0])
            elif found:
                self._note_written(slot, found[0] != self._sums.get(slot.name, found[0]))
                self._sums[slot.name] = found[1]
        return told

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
                self._note_written(slot, (other & ~before.flatten().isnan()).sum())
            if slot.name in self._sums:
                self._note_written(slot, sum_of_bits(before) != self._sums[slot.name])
            slot.put(after, keyed)
            self._note_bits(slot)
        if stepped is not slot.parameter:
            torch.autograd.graph.increment_version(slot.parameter)
        own[slot.parameter] = slot.narrowed(own[slot.parameter], keyed)
        return told

    def _note_written(self, slot: StoredParameter, count: torch.Tensor) -> None:
        """Note that somebody else wrote to a weight. count: to how many elements, or whether to some."""
        if not self._has_told and int(count):
            self._written.append(slot)

    def _tell_written(self) -> None:
        """Tell once that somebody else wrote to weights."""
        if self._written:
            first, *others = self._written
            text = f"{first.name}{and_more(len(others), 'weight')} changed since the last step, not by the optimizer"
            self.notes.append(f"{text}: what completes them follows.")
            self._has_told = True
            self._written.clear()
            warn_here(f"nc.store: {self.notes[-1]}")

    def _names_of(self, formula: Formula) -> tuple[str, ...]:
        return MOMENTS[type(self.optimizer)] if formula.is_adam or formula.momentum else ()

    def _moments_of(self, slot: StoredParameter, groups: Mapping[torch.Tensor, int]) -> list[float]:
        """Return the bytes of an element of each of the states in the weight's shape, as they are or will be."""
        states = [v for v in self.optimizer.state.get(slot.parameter, {}).values() if isinstance(v, torch.Tensor)]
        found: list[Any] = [part_of(one) for one in states if one.dim() and one.shape == slot.parameter.shape]
        if found or not slot.parameter.requires_grad:
            blocks: list[list[Any]] = [[one.codes, one.scale] if hasattr(one, "codes") else [one] for one in found]
            return [sum(part.nbytes for part in parts) / max(1, slot.weight.numel()) for parts in blocks]
        number = groups.get(slot.parameter)
        formula = None if number is None else formula_of(self.optimizer, self.optimizer.param_groups[number])
        size = {FP32: 4.0, BF16: 2.0}.get(slot.kept.moments, 1.0 + 4 / 256 if fits_blocks(slot.weight) else 4.0)
        return [size] * len(self._names_of(formula)) if formula is not None else []


_OwnStep = tuple[StoredParameter, Formula, int, list[float]]
_UNREAD = 64
"""Steps whose counts of lost updates may stay on a device, unread: reading waits for it."""


def _step_of(optimizer: Any, *given: Any, **named: Any) -> Any:
    """Step an optimizer whose parameters are stored; in the place of its own method."""
    stored = stored_of(optimizer)
    if stored is None:
        return type(optimizer).step(optimizer, *given, **named)
    return stored._run(optimizer, *given, **named)


def _refuse_others(own: Callable[[], Stored | None], optimizer: Any) -> None:
    """Raise RunError for an optimizer that is about to step what another one's `Stored` keeps."""
    stored = own()
    if stored is None or optimizer is stored.optimizer:
        return
    firsts = (group["params"][0] for group in optimizer.param_groups if group["params"])
    slot = next((stored.of_parameter[one] for one in firsts if one in stored.of_parameter), None)
    if slot is not None:
        found = f"{slot.name} is stored, of another {type(stored.optimizer).__name__}"
        raise RunError(f"a step of {type(optimizer).__name__}", found, advice="Give nc.store the one that steps it.")


never_trace(_step_of)
