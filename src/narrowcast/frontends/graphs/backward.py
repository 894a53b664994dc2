"""Under which autocast the backward of a compiled graph runs: the choice, how it is traced, and the check at run time.

The choices of `torch._functorch.config.backward_pass_autocast`, and one more:

- `as_eager`: what eager code does for a backward that is called outside of regions. Ops of the backward run as their
  inputs are. If it turns out at run time that a region is on, that is an error, because eager would have cast there.
- `off`: the same, chosen on purpose.
- `same_as_forward`: as if `backward()` were called inside the regions around the compiled call.
- a list of keyword sets of torch.autocast: as if it were called inside those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.errors import BackwardError, RegionError
from narrowcast.runtime.regions.native_state import CARRIERS
from narrowcast.runtime.torch_surface import state
from narrowcast.runtime.torch_surface.dynamo import functorch_config, never_trace

AS_EAGER, OFF, SAME, LISTED = "as_eager", "off", "same_as_forward", "listed"
State = tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The choice: its kind, and for a list the keyword sets, each as sorted pairs."""

    kind: str
    regions: tuple[tuple[tuple[str, Any], ...], ...] = ()

    @property
    def runs_as_inputs(self) -> bool:
        """Whether ops of the backward run as their inputs are."""
        return self.kind in (AS_EAGER, OFF)

    @contextmanager
    def tracing(self, graph: GraphModule) -> Iterator[State]:
        """Trace a graph and its backward inside. Yields the state that the backward is compiled for.

        Forward calls are explicit, so autocast is off for them; for the backward it is what was chosen.
        """
        if self.runs_as_inputs:
            with state.autocast_off(), functorch_config.patch(backward_pass_autocast="off"):
                yield ()
            return
        with ExitStack() as stack:
            if self.kind == LISTED:
                stack.enter_context(state.autocast_off())
                for pairs in self.regions:
                    stack.enter_context(torch.autocast(**dict(pairs)))
            expected = autocast_state()
            stack.enter_context(functorch_config.patch(backward_pass_autocast="same_as_forward"))
            stack.enter_context(_shielded(graph, [device for device, _ in expected]))
            yield expected

    def watch(self, results: Any, expected: State) -> None:
        """Have the backward of these results check, when it runs, that autocast is as it was compiled for."""
        seen: set[int] = set()
        for result in results if isinstance(results, (tuple, list)) else (results,):
            node = result.grad_fn if isinstance(result, torch.Tensor) else None
            if node is not None and id(node) not in seen:
                seen.add(id(node))
                node.register_prehook(partial(_check, expected, self))


def parse_backward(wanted: str | Sequence[Mapping[str, Any]]) -> Backward:
    """Return the choice that a user wrote. Raise RegionError for anything else."""
    if isinstance(wanted, str):
        if wanted in (AS_EAGER, OFF, SAME):
            return Backward(wanted)
    elif isinstance(wanted, Sequence) and all(isinstance(region, Mapping) for region in wanted):
        regions: list[dict[str, Any]] = [dict(region) for region in wanted if isinstance(region, Mapping)]
        for region in regions:
            try:
                torch.autocast(**region)
            except (TypeError, RuntimeError) as error:
                advice = "Write what torch.autocast takes."
                raise RegionError(f"backward=[{region}]", str(error), advice=advice) from None
        return Backward(LISTED, tuple(tuple(sorted(region.items())) for region in regions))
    advice = "Write 'as_eager', 'off', 'same_as_forward', or a list of keyword sets of torch.autocast."
    raise RegionError(f"backward={wanted!r}", "not a choice", advice=advice)


def autocast_state() -> State:
    """Return the device types on which autocast is on, with their low formats: what decides how a backward runs."""
    on = filter(torch.is_autocast_enabled, state.autocast_device_types())
    return tuple((device, torch.get_autocast_dtype(device)) for device in on)


@contextmanager
def _shielded(graph: GraphModule, devices: list[str]) -> Iterator[None]:
    """Switch autocast off inside the graph, so that what is around it reaches the backward only.

    Not by torch's own list of keyword sets: a dtype in it cannot be part of the key of AOTAutograd's cache.
    """
    code = graph.graph
    first = next(n for n in code.nodes if n.op != "placeholder")
    added = []
    for device in devices:
        low = torch.get_autocast_dtype(device)
        with code.inserting_before(first):
            enter = code.call_function(state.ENTER_AUTOCAST, (device, low, False, False))
        with code.inserting_before(code.output_node()):
            leave = code.call_function(state.EXIT_AUTOCAST, (enter,))
        added += [leave, enter]
    graph.recompile()
    try:
        yield
    finally:
        for node in added:
            code.erase_node(node)
        graph.recompile()


def _check(expected: State, choice: Backward, gradients: Any) -> None:
    if not expected and not state.any_autocast():
        return
    now = autocast_state()
    if now != expected:
        another = ", of another policy" if now and _own(now) == _own(expected) else ""
        asked = f"a backward compiled for {_text(expected)} (backward={choice.kind!r})"
        advice = "Compile with backward='same_as_forward' for one that is called inside the forward's region, as "
        advice += "torch.autograd.grad in a model is (forces of an energy); or call backward() where it was compiled "
        advice += "for; or give a list of keyword sets of torch.autocast."
        raise BackwardError(asked, f"it was called under {_text(now)}{another}", advice=advice)


never_trace(_check)  # where Dynamo meets the backward in the code that it traces


def _text(state: State) -> str:
    """Return the state in words; without device types that are not here, whose state carries a policy's identity."""
    return " and ".join(f"autocast({device!r}, {dtype})" for device, dtype in _own(state)) or "no autocast"


def _own(state: State) -> State:
    return tuple((device, dtype) for device, dtype in state if device not in CARRIERS)
