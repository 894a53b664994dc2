"""What a checkpoint has to hold of a training that is stored, as tensors by parameters' names; and how it goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from narrowcast.core.policy.storage import FP32, KAHAN, REMAINDER, Storage
from narrowcast.errors import RunError
from narrowcast.runtime.torch_bridge import LOW, is_sharded_tensor, part_of, with_part
from narrowcast.runtime.torch_surface.dispatch import quietly, version_of
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.storage.as_tensors import (
    ASKED,
    blocks_of,
    check_bytes,
    check_number,
    check_tensor,
    is_no_tensor,
    leaves,
    made_of,
    states_in,
    uncast,
    under,
    with_leaves,
)
from narrowcast.training.storage.files import SAVED, read
from narrowcast.training.storage.passes import MOMENTS
from narrowcast.training.storage.rounding import PLAIN, joined, sum_of_bits
from narrowcast.training.storage.slots import RESTS, StoredParameter

KEY = "storage"
"""Under which an optimizer's state_dict has what is kept besides weights."""
PLAIN_TORCH = "torch"
"""What a state_dict of an optimizer is converted from that stored nothing."""
_NAME_BYTES = 64


class Resumed:
    """The part of `Stored` that is saved and loaded."""

    name: str
    storage: Storage
    optimizer: Any
    slots: list[StoredParameter]
    of_parameter: dict[torch.Tensor, StoredParameter]
    update: int
    _sums: dict[str, torch.Tensor]
    _loading: tuple[Mapping[str, Any], Mapping[int, Any]] | None = None
    _convert_from: str | None = None
    _used: dict[str, tuple[Callable[[], Any], int]]
    _is_on: bool

    def state_dict(self, gradients: bool | None = None) -> dict[str, torch.Tensor]:
        """Return all that training needs besides the model's own state_dict, as tensors in a flat dict, for torch.save,
        torch.distributed.checkpoint and safetensors alike: masters, remainders and compensations in their weights'
        shapes, the optimizer's states exactly, numbers of its groups, the count of updates, and a digest.

        gradients: also those that no step has used, in the middle of an accumulation; None: where there are some.
        """
        with quietly():
            return {**self._own(gradients), **dict(self._states()), **dict(self._numbers())}

    def load_state_dict(
        self, saved: Mapping[str, Any] | str | Path, convert_from: str | None = None, key: str | None = None
    ) -> None:
        """Restore what `state_dict` of this or of the optimizer returned. Load the model's weights before.

        saved: that dict; or a file of torch.save or safetensors, or a folder of torch.distributed.checkpoint, that it
               was saved to, alone or under a name.
        convert_from: by what it was stored, if that is not the declaration here, as the error names it ("torch" where
               nothing was): masters are made of its exact numbers, and states rounded as is declared here.
        key: under which name it was saved there, if there are several.

        Raises RunError for what was stored by another declaration, for shapes and parameters that are not those here,
        before anything is changed.
        """
        found = read(Path(saved), key, self.slots) if isinstance(saved, str | Path) else saved
        if not isinstance(found, Mapping):
            raise RunError(f"load_state_dict({type(saved).__name__})", "it is no dict and no path", advice=SAVED)
        if not self._is_on:
            raise RunError("load_state_dict()", "undo() was called", advice="Call nc.store with a new optimizer.")
        self._convert_from = convert_from
        try:
            if "param_groups" in found:
                self.optimizer.load_state_dict(dict(found))
                return
            self._check(found)
            with quietly(), torch.no_grad():
                self._put(found)
                self._put_states(found)
        finally:
            self._convert_from = None

    def _check_parameters(self, asked: str, advice: str) -> None:
        """Raise RunError unless the optimizer's parameters are those that are stored, in their formats."""
        for one in optimized_by(self.optimizer):
            if one not in self.of_parameter:
                raise RunError(asked, f"a parameter of shape {tuple(one.shape)} was added later", advice=advice)
        for slot in self.slots:
            changed = slot.what_changed()
            if changed:
                advice = "Call undo() before a model is converted, moved or resized, and nc.store after that."
                raise RunError(asked, f"{slot.name} {changed}", advice=advice)

    def _note_bits(self, slot: StoredParameter) -> None:
        """Note the bits of a weight whose rest cannot tell whether somebody wrote to it."""
        if slot.way in (REMAINDER, KAHAN):
            self._sums[slot.name] = sum_of_bits(slot.weight)

    def _use_gradients(self) -> None:
        """Note that a step has used the gradients that are there."""
        there = ((slot.name, slot.parameter.grad) for slot in self.slots)
        self._used = {name: (ref(one), version_of(one)) for name, one in there if one is not None}

    def _is_new(self, slot: StoredParameter) -> bool:
        """Return whether there is a gradient that no step has used."""
        gradient, (used, version) = slot.parameter.grad, self._used.get(slot.name, (lambda: None, 0))
        return gradient is not None and (used() is not gradient or version != version_of(gradient))

    @property
    def full_name(self) -> str:
        """How a declaration is named in checkpoints: by its policy, and by what it says."""
        return f"{self.name} {self.storage.digest[:8]}"

    # -- saved

    def _own(self, gradients: bool | None = None) -> dict[str, torch.Tensor]:
        """Return what is kept besides weights and the optimizer's states."""
        text = self.full_name.encode()[-_NAME_BYTES:].ljust(_NAME_BYTES)
        own = {
            "digest": torch.frombuffer(bytearray.fromhex(self.storage.digest), dtype=torch.uint8),
            "parameters": torch.frombuffer(bytearray(self._parameters()), dtype=torch.uint8),
            "name": torch.frombuffer(bytearray(text), dtype=torch.uint8),
            "update": torch.full((), self.update, dtype=torch.int64, device="cpu"),
            "states": torch.full((), self._count_states(), dtype=torch.int64, device="cpu"),
        }
        pending = [slot for slot in self.slots if slot.parameter.grad is not None]
        if gradients is None:
            pending = [slot for slot in pending if self._is_new(slot)]
        count = 0 if gradients is False else len(pending)
        own["gradients"] = torch.full((), count, dtype=torch.int64, device="cpu")
        for slot in self.slots:
            rest = slot.rest_in_shape()
            if rest is not None:
                own[f"{slot.name}/{RESTS[slot.way]}"] = with_part(slot.parameter.detach(), rest.clone())
            if slot.way in (REMAINDER, KAHAN) and not is_sharded_tensor(slot.parameter):
                own[f"{slot.name}/bits"] = sum_of_bits(slot.weight).cpu()
        for slot in pending if gradients is not False else ():
            gradient: Any = slot.parameter.grad
            own |= {f"{slot.name}/gradient{part}": one for part, one in blocks_of(gradient.detach()).items()}
        return own

    def _groups(self) -> dict[torch.Tensor, int]:
        """Return the number of the group that each parameter is in now."""
        return {one: n for n, group in enumerate(self.optimizer.param_groups) for one in group["params"]}

    def _parameters(self) -> bytes:
        """Return a digest of the optimizer's class, and of the names, shapes and groups of the parameters."""
        groups = self._groups()
        rows = sorted(f"{slot.name} {tuple(slot.shape)} {groups.get(slot.parameter)}" for slot in self.slots)
        rows.append(type(self.optimizer).__name__)
        return hashlib.sha256("\n".join(rows).encode()).digest()

    def _count_states(self) -> int:
        return sum(len(self.optimizer.state.get(slot.parameter, {})) for slot in self.slots)

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        if any(one not in self.of_parameter for one in self.optimizer.state):
            raise is_no_tensor("a state that belongs to no parameter")
        for slot in self.slots:
            for key, value in self.optimizer.state.get(slot.parameter, {}).items():
                blocks = blocks_of(value)
                if not blocks or not isinstance(key, str) or "/" in key:
                    raise is_no_tensor(f"state {key!r} of {slot.name}, {type(value).__name__}")
                for part, one in blocks.items():
                    yield f"{slot.name}/state/{key}{part}", one

    def _numbers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                for part, one in leaves(value) if key != "params" else ():
                    yield f"groups/{number}/{key}{part}", torch.full((), one, dtype=torch.float64, device="cpu")

    # -- loaded

    def _hear_of_state(self, stack: ExitStack) -> None:
        """Add what is kept to the optimizer's own state_dict, and take it from there, until a stack is closed."""
        optimizer = self.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            return

        def add(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            with quietly():
                return {**saved, KEY: self._own()}

        stack.callback(optimizer.register_state_dict_post_hook(add).remove)
        if self._is_loaded_by_torch():
            stack.callback(optimizer.register_load_state_dict_pre_hook(lambda _, saved: self._take(saved)).remove)
            stack.callback(optimizer.register_load_state_dict_post_hook(lambda _: self._put_loaded()).remove)
            return

        def load(saved: dict[str, Any]) -> None:
            self._take(saved)
            type(optimizer).load_state_dict(optimizer, saved)
            self._put_loaded()

        vars(optimizer)["load_state_dict"] = load  # which need not run the hooks
        stack.callback(vars(optimizer).pop, "load_state_dict", None)

    def _is_loaded_by_torch(self) -> bool:
        return type(self.optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict

    def _take(self, saved: Mapping[str, Any]) -> None:
        own = saved.get(KEY)
        own, states = (own if isinstance(own, Mapping) else {}), saved["state"]
        numbered = {number: state for number, state in states.items() if isinstance(number, int)}
        self._check(own, sum(map(len, numbered.values())))
        slots = self._in_order()
        for number, state in numbered.items():
            if number >= len(slots):
                found = f"it has a state of parameter {number}, of {len(slots)}"
                raise RunError(ASKED, found, advice="Load it into the model that it was saved of.")
            self._check_states(slots[number], state, is_same="digest" in own and self._convert_from is None)
        self._loading = own, dict(states)

    def _put_loaded(self) -> None:
        if self._loading is None:
            return
        (own, states), self._loading = self._loading, None
        with quietly(), torch.no_grad():
            self._put(own)
            for number, slot in enumerate(self._in_order()):
                mine, saved = self.optimizer.state.get(slot.parameter, {}), states.get(number, {})
                mine = mine if number in states else {}
                self._put_state(slot, {key: uncast(slot, value, saved.get(key)) for key, value in mine.items()})

    def _in_order(self) -> list[StoredParameter]:
        return [self.of_parameter[one] for one in optimized_by(self.optimizer)]

    def _check(self, saved: Mapping[str, Any], count: int | None = None) -> None:
        """Raise RunError unless what was saved can be restored. count: of states beside it; None, they are in it."""
        digest = check_bytes(saved, "digest", 32).hex() if "digest" in saved else ""
        was = check_bytes(saved, "name", _NAME_BYTES).decode(errors="ignore").strip() if digest else PLAIN_TORCH
        self._check_parameters(ASKED, "Make model and optimizer, call nc.store, then load.")
        if not digest and count is None:
            advice = "Give what stored.state_dict() or optimizer.state_dict() returned."
            raise RunError(ASKED, "it was saved by neither", advice=advice)
        if self._convert_from not in (None, was, was.rpartition(" ")[0]):
            raise RunError(ASKED, f"it was stored as {was!r}", advice=f"Write convert_from={was!r}.")
        if digest != self.storage.digest and self._convert_from is None:
            found = f"it was stored as {was!r}, by another declaration than {self.full_name!r}"
            advice = f"Store with that one; or convert: stored.load_state_dict(saved, convert_from={was!r})."
            advice += " What torch.distributed.checkpoint.state_dict returns has no masters." * (not digest)
            raise RunError(ASKED, found, advice=advice)
        if digest:
            self._check_whole(saved, count)
        inside = states_in(saved)
        for slot in self.slots:
            self._check_slot(saved, slot, is_same=digest == self.storage.digest)
            self._check_states(slot, inside.get(slot.name, {}), is_same=digest == self.storage.digest)

    def _check_whole(self, saved: Mapping[str, Any], count: int | None) -> None:
        """Raise RunError unless all that belongs together is there, and is of these parameters."""
        numbers = [name for name in saved if name.startswith("groups/")]
        numbers = numbers if numbers or count is not None else ["groups/0/lr"]
        for name in ("update", "states", "gradients", *numbers):
            check_number(saved, name)
        if check_bytes(saved, "parameters", 32) != self._parameters():
            for slot in self.slots:
                for kind in RESTS.values():
                    if f"{slot.name}/{kind}" in saved:
                        check_tensor(f"{kind} of {slot.name}", saved[f"{slot.name}/{kind}"], slot)
            found = "it is of another optimizer, or of parameters of other names, shapes or groups"
            raise RunError(ASKED, found, advice="Load it into the model and optimizer that it was saved of.")
        here = sum(len({key.partition("/")[0] for key in parts}) for parts in states_in(saved).values())
        found_states, states = here if count is None else count, int(saved["states"])
        found_states = states if count is not None and not self._is_loaded_by_torch() else found_states
        gradients = sum(name.endswith(("/gradient", "/gradient/values")) for name in saved)
        if found_states != states or int(saved["gradients"]) != gradients:
            found = f"{states} states and {int(saved['gradients'])} gradients of an accumulation were saved, "
            found += f"{found_states} and {gradients} are here"
            raise RunError(ASKED, found, advice="Give the file or folder itself, or the dict as it was saved.")

    def _check_slot(self, saved: Mapping[str, Any], slot: StoredParameter, is_same: bool) -> None:
        """Raise RunError unless what was saved of a parameter completes it. is_same: by the declaration here."""
        kinds = [kind for kind in RESTS.values() if f"{slot.name}/{kind}" in saved]
        wanted = [] if slot.rest is None else [RESTS[slot.way]]
        if is_same and kinds != wanted:
            found = f"{slot.name} has {''.join(kinds) or 'nothing'} beside it, not {''.join(wanted) or 'nothing'}"
            raise RunError(ASKED, found, advice="Save all of it; make the model in the format that it had.")
        if slot.dtype is torch.float16 and ({"remainder", "compensation"} & {*kinds}) and kinds != wanted:
            raise RunError(ASKED, f"{slot.name} in fp16 cannot hold its bf16", advice="Convert into bf16 or fp32.")
        for kind in kinds:
            dtype = {"master": torch.float32, "remainder": torch.int16}.get(kind, slot.dtype if is_same else None)
            check_tensor(f"{kind} of {slot.name}", saved[f"{slot.name}/{kind}"], slot, dtype)
        if f"{slot.name}/gradient" in saved:
            check_tensor(f"gradient of {slot.name}", saved[f"{slot.name}/gradient"], slot)

    def _check_states(self, slot: StoredParameter, states: Mapping[str, Any], is_same: bool) -> None:
        """Raise RunError unless an optimizer's states of a parameter can be its."""
        dtype = slot.dtype_of_moments if is_same and type(self.optimizer) in MOMENTS else None
        for key, value in states.items():
            what = f"{key} of {slot.name}"
            if key == "step" and isinstance(value, torch.Tensor | int | float):
                step = torch.as_tensor(value, device=None if isinstance(value, torch.Tensor) else "cpu")
                check_number({what: step if step.dtype not in LOW and float(step.sum()) >= 0 else None}, what)
            elif isinstance(value, torch.Tensor) and key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                check_tensor(what, value, slot, None if hasattr(value, "codes") else dtype)
            elif isinstance(value, torch.Tensor) and value.is_meta:
                check_tensor(what, value, slot)

    def _put(self, saved: Mapping[str, Any]) -> None:
        for slot in self.slots:
            kind = next((kind for kind in RESTS.values() if f"{slot.name}/{kind}" in saved), None)
            rest = None if kind is None else part_of(saved[f"{slot.name}/{kind}"]).to(slot.weight.device)
            was_written = slot.name in self._sums and bool(sum_of_bits(slot.weight) != self._sums[slot.name])
            if kind == RESTS.get(slot.way) and rest is not None:
                slot.set_rest(rest)
            elif rest is not None or (was_written and self._convert_from is not None):
                way = next((way for way, name in RESTS.items() if name == kind), "")
                low = slot.weight if slot.way != PLAIN else slot.weight.bfloat16()
                wide = rest if way == FP32 and rest is not None else joined(way, low, rest)
                slot.weight.copy_(wide) if slot.way == PLAIN else slot.put(wide, None)
            self._note_bits(slot)
            if f"{slot.name}/bits" in saved and slot.name in self._sums and kind == RESTS[slot.way]:
                self._sums[slot.name] = saved[f"{slot.name}/bits"].to(slot.weight.device)  # weights may be loaded later
            gradient = under(saved, f"{slot.name}/gradient", whole=True)
            if gradient:
                slot.parameter.grad = made_of(gradient, slot).to(slot.dtype_of_gradient)
            elif "gradients" in saved and self._is_new(slot):
                slot.parameter.grad = None  # of a step that what was saved has not begun
        self.update = int(saved["update"]) if "update" in saved else 0

    def _put_states(self, saved: Mapping[str, Any]) -> None:
        inside, numbers = states_in(saved), under(saved, "groups/")
        for slot in self.slots:
            parts = inside.get(slot.name, {})
            keys = dict.fromkeys(key.partition("/")[0] for key in parts)
            self._put_state(slot, {key: made_of(under(parts, key, whole=True), slot) for key in keys})
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in list(group.items()):
                if key != "params":
                    group[key] = with_leaves(value, under(numbers, f"{number}/{key}", whole=True))

    def _put_state(self, slot: StoredParameter, state: dict[str, Any]) -> None:
        """Give a parameter its states, in the formats that they were saved in, or here are converted to."""
        if self._convert_from is not None:
            wide = {key: value.float() if slot.is_moment(value) else value for key, value in state.items()}
            state = slot.narrowed(wide, None)
        self.optimizer.state.pop(slot.parameter, None)
        if state:
            self.optimizer.state[slot.parameter] = state
