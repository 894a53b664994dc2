"""What a recording warns of: the things about autocasting that people ask in forums, each with the user's line."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrowcast.formats import fp32
from narrowcast.ledger import Advice, Ledger
from narrowcast.policy import DEVICE_TYPES, Kind, Place, Policy
from narrowcast.regions.place import find_place
from narrowcast.regions.state import ruled_device_types
from narrowcast.torch_bridge import FORMATS, OpFacts

_LOW = (torch.bfloat16, torch.float16)


class Adviser:
    """Sees what a recording sees, and notes advice in its ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._thread = threading.get_ident()
        self._tasks: set[int] = set()
        self._stepping = False
        self._converted: dict[torch.dtype, Advice] = {}
        self._low_results: dict[int, tuple[weakref.ref[torch.Tensor], str, Place]] = {}
        self._open: list[tuple[Any, Place, int, int]] = []

    def add(self, kind: str, what: str, todo: str, place: Place) -> Advice:
        """Note one piece of advice, once per line."""
        found = Advice(kind, what, todo, place.module_path, place.file, place.line)
        self.ledger.advice[found] = self.ledger.advice.get(found, 0) + 1
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Optimizers' steps, and regions of any kind, as they are entered and left on any thread."""
        steps = (
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._step(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._stepped()),
        )
        native: Any = torch.autocast
        enter, leave = native.__enter__, native.__exit__

        def entered(region: Any) -> Any:
            result = enter(region)
            if threading.get_ident() == self._thread:
                casts = len(self.ledger.casts)
                calls = sum(t.calls for t in self.ledger.calls.values())
                self._open.append((region, find_place(with_names=False), casts, calls))
            return result

        def left(region: Any, *raised: Any) -> Any:
            if self._open and threading.get_ident() == self._thread:
                self._left(region, bool(raised and raised[0]))
            return leave(region, *raised)

        native.__enter__, native.__exit__ = entered, left
        try:
            yield
        finally:
            native.__enter__, native.__exit__ = enter, leave
            for step in steps:
                step.remove()

    def _left(self, region: Any, raised: bool) -> None:
        found = next((n for n in reversed(range(len(self._open))) if self._open[n][0] is region), None)
        if found is None:
            return
        _, place, casts, calls = self._open.pop(found)
        now = sum(t.calls for t in self.ledger.calls.values())
        if raised or not region._enabled or now == calls or len(self.ledger.casts) > casts:
            return
        self.add(
            "no casts",
            f"the region on {region.device} casts nothing: {now - calls} calls ran in it, and none was to be cast",
            "Is it for the device that the tensors are on? Are they in a low format already? Then leave it away.",
            place,
        )

    def _stepped(self) -> None:
        self._stepping = False

    def _step(self, optimizer: Any) -> None:
        self._stepping = True
        on = ruled_device_types()
        if on:
            self.add(
                "optimizer step in a region",
                f"{type(optimizer).__name__}.step() runs with autocasting on",
                "Close the region after the loss: weights are updated in their own format, and cast anew after that.",
                find_place(with_names=False),
            )

    def backward(self, is_on: bool) -> None:
        """An op runs in the backward; asked once per backward."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        self._tasks.add(task)
        if is_on:
            here = find_place(with_names=False)
            if not here.file:  # autograd's own thread: the one that waits has the line
                here = find_place(with_names=False, frame=sys._current_frames().get(self._thread))
            self.add(
                "backward in a region",
                "backward() runs with autocasting on: its ops are cast as if they were the forward's",
                "Close the region after the loss. Autograd has the formats of the forward in any case.",
                here,
            )

    def decided(self, facts: OpFacts, place: Place, tensors: list[torch.Tensor]) -> None:
        """A call in a region reads these tensors."""
        for tensor in tensors:
            if tensor.dtype in _LOW and isinstance(tensor, torch.nn.Parameter):
                known = self._converted.get(tensor.dtype)
                if known is not None:
                    self.ledger.advice[known] += 1
                    return
                self._converted[tensor.dtype] = self.add(
                    "weights in a low format",
                    f"{facts.id} reads a weight that is {FORMATS[tensor.dtype]} already: the model was converted "
                    "(half(), bfloat16(), to(dtype)) and runs in a region, too",
                    "Do one of both: keep the weights in fp32 in a region, or convert the model and open none.",
                    place,
                )
                return

    def gave(self, facts: OpFacts, place: Place, results: list[torch.Tensor]) -> None:
        """A call in a region gave these."""
        for tensor in results:
            if tensor.dtype in _LOW:
                self._low_results[id(tensor)] = (weakref.ref(tensor), facts.id, place)

    def skipped(self, facts: OpFacts, tensors: list[torch.Tensor]) -> None:
        """An op that writes runs in a region: autocast passes it by."""
        name = facts.op._opname
        base = name if facts.op._overloadname.endswith("out") else name.removesuffix("_")
        kind = _listed().get(base)
        if self._stepping or kind is Kind.PROMOTE:
            return
        if kind is not None and (base != name or facts.op._overloadname.endswith("out")):
            formats = ", ".join(dict.fromkeys(str(FORMATS[t.dtype]) for t in tensors if t.dtype in FORMATS))
            self.add(
                "skipped by autocast",
                f"{facts.id} writes to its argument, and autocast passes such forms by: it runs in {formats}",
                f"Write the form that returns a new tensor (aten.{base}), which is cast ({kind.value}).",
                find_place(with_names=False),
            )

    def outside(self, facts: OpFacts, tensors: list[torch.Tensor]) -> None:
        """An op runs where autocasting is off."""
        low = next((found for t in tensors if (found := self._of_region(t)) is not None), None)
        if low is None:
            return
        meets = any(t.dtype is torch.float32 and t.dim() for t in tensors)
        base = facts.op._opname.strip("_").removesuffix("_forward")
        precise = _listed().get(base) in (Kind.FULL, Kind.FULL_SET_DTYPE, Kind.FULL_APPEND_DTYPE)
        if not (meets or precise):
            return
        dtype, op, place = low
        where = f"{place.file}:{place.line}"
        self.add(
            "left the region in a low format",
            f"{facts.id} outside of the region reads the {FORMATS[dtype]} result of {op} ({where})"
            + (f" beside {fp32}" if meets else ", which a region would compute in fp32"),
            "Cast the result where the region ends, x.float(), or move this op into the region.",
            find_place(with_names=False),
        )

    def _of_region(self, tensor: torch.Tensor) -> tuple[torch.dtype, str, Place] | None:
        found = self._low_results.get(id(tensor))
        if found is None or found[0]() is not tensor:
            return None
        return tensor.dtype, found[1], found[2]


@cache
def _listed() -> dict[str, Kind]:
    """The ops on native lists by name, and what is done to them, on any device type."""
    found: dict[str, Kind] = {}
    for device_type in DEVICE_TYPES:
        for rule in Policy.native(device_type).rules:
            found.setdefault(rule.op.split(".")[1], rule.action.kind)
    return found
