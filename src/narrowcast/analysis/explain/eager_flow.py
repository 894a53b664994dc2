"""What flows between the calls of a run on fake tensors, whose memory is known apart and costs nothing to keep."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.core.ops import multiplications
from narrowcast.core.policy import Policy
from narrowcast.formats import FORMATS as FORMATS_BY_NAME
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.observer.words import format_names
from narrowcast.observation.statistics.arguments import Named, largest_number, others_as_text, tensors_by_name
from narrowcast.output.words import sizes
from narrowcast.reports.results.graphs import OUTSIDE, FlowEdge, FlowStep, GraphFlow
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, tensors_in
from narrowcast.runtime.torch_bridge.calls import gather
from narrowcast.runtime.torch_surface.dispatch import storage_key

_LEARNED = ("weight", "bias", "running_mean", "running_var")


class EagerFlow(Observer):
    """Calls become steps, and what they read edges; casts, copies and views are on the edges. The calls of a module
    that is called several times are one. unchecked: what fake tensors do not show of a call, which raises or not.
    """

    runs_fakes = True

    def __init__(self, policies: tuple[Policy, ...]) -> None:
        super().__init__(policies)
        self.flow = GraphFlow()
        self.unchecked = ""
        self._steps: dict[tuple[str, str, int, str], int] = {}
        self._edges: set[tuple[int, int, str, str, str]] = set()
        self._made: dict[int, tuple[int, str]] = {}
        self._kept: list[torch.UntypedStorage] = []

    @property
    def follows(self) -> bool:
        """Whether copies are reported: they are."""
        return True

    def looks_before(self, facts: OpFacts) -> bool:
        """Return whether a call is inspected before it runs: none is."""
        return False

    def moved(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note that a copy was made by the maker of its source."""
        self._pass_on(args, kwargs, result)

    def after(self, call: SeenCall) -> None:
        """Add a step with its edges."""
        if call.is_cast:
            self._pass_on(call.args, call.kwargs, call.result)
            return
        read = [(name, t) for name, t in tensors_by_name(call.facts, call.args, call.kwargs) if t.dtype in FORMATS]
        results = [t for t in call.results if t.dtype in FORMATS]
        largest = largest_number(call.facts, call.args, call.kwargs)
        if small := [FORMATS[t.dtype] for t in results if largest > FORMATS[t.dtype].max]:
            self.unchecked = f"Fake tensors do not show whether {call.id.op} takes {largest:g} in {small[0]}."
        planned = _planned(call)
        formats = [planned.get(id(tensor), str(FORMATS[tensor.dtype])) for _, tensor in read]
        step = self._step(call, read, formats, results)
        for (name, tensor), dst in zip(read, formats, strict=True):
            self._edge(step, name, tensor, dst)
        for tensor in results:
            self._note(tensor, step, str(FORMATS[tensor.dtype]))

    def _pass_on(self, args: Any, kwargs: Any, result: Any) -> None:
        keys = map(storage_key, tensors_in(args, kwargs))
        known = next((self._made[key] for key in keys if key in self._made), None)
        if known is not None:
            for tensor in tensors_in(result):
                self._note(tensor, *known)

    def _note(self, tensor: torch.Tensor, step: int, format: str) -> None:
        self._made[storage_key(tensor)] = step, format
        self._kept.append(tensor.untyped_storage())

    def _step(self, call: SeenCall, read: Named, formats: list[str], results: list[torch.Tensor]) -> int:
        """Return the step of a call. formats: those in which it reads its inputs."""
        identity, site = call.id, call.site
        key = (identity.module_path, identity.op, identity.number, identity.direction)
        if key in self._steps:
            return self._steps[key]
        inputs = [tensor for _, tensor in read]
        shapes, out_shapes = ([tuple(map(int, t.shape)) for t in tensors] for tensors in (inputs, results))
        transposed = ("transposed", "True") in others_as_text(call.facts, call.args, call.kwargs)
        done = multiplications(identity.op, shapes, out_shapes, transposed)
        others = [t for t in tensors_in(call.args, call.kwargs) if t.dtype not in FORMATS]
        moved = sum(_size(t, dst) for t, dst in zip(inputs, formats, strict=True))
        moved += sum(t.nbytes for t in (*others, *call.results))
        gave = format_names([t.dtype for t in results])
        self._steps[key] = len(self.flow.steps)
        self.flow.steps.append(
            FlowStep(identity.module_path, identity.op, site.file, site.line, identity.number, identity.direction,
                     call.input_formats, call.computes, gave, int(moved), done)
        )  # fmt: skip
        return self._steps[key]

    def _edge(self, end: int, argument: str, tensor: torch.Tensor, dst: str) -> None:
        start, src = self._made.get(storage_key(tensor), (OUTSIDE, str(FORMATS[tensor.dtype])))
        key = (start, end, argument, src, dst)
        if key in self._edges:
            return
        self._edges.add(key)
        is_weight = isinstance(tensor, torch.nn.Parameter) or argument.rpartition(".")[2] in _LEARNED
        kind = "activation" if start != OUTSIDE else "weight" if is_weight else "input"
        moved = _size(tensor, src) + (_size(tensor, dst) if src != dst else 0)
        how = "copied" if src != dst else ""
        self.flow.edges.append(FlowEdge(start, end, argument, src, dst, moved, kind, how, sizes(tensor.shape)))


def _size(tensor: torch.Tensor, format: str) -> int:
    return int(tensor.numel()) * FORMATS_BY_NAME[format].bits // 8


def _planned(call: SeenCall) -> dict[int, str]:
    """Return the formats to which a call's plan casts its tensors, by their ids."""
    given, planned = gather(call.facts, call.args, call.kwargs), () if call.plan is None else call.plan.formats
    pairs = zip(given, planned, strict=True) if len(given) == len(planned) else ()
    return {id(tensor): str(dst) for tensor, dst in pairs if tensor is not None and dst is not None}
