"""A run observed for its repair: what is not finite, what raises, which calls are low, and what made their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.analysis.compare.reference import KeptCall, kept_of
from narrowcast.analysis.watch.watch_calls import WatchCalls
from narrowcast.core.ledger.identity import FORWARD, CallId
from narrowcast.core.policy import Kind, Policy, Rule
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.observation.trial.finiteness import came_in, is_floating, largest_of
from narrowcast.observation.trial.raising import Raising
from narrowcast.observation.trial.trial import tensors_of
from narrowcast.reports.results.findings import Watching
from narrowcast.runtime.torch_bridge import op_id, tensors_in
from narrowcast.runtime.torch_surface.dispatch import OpOverload
from narrowcast.runtime.torch_surface.dynamo import in_compiled_code

LOW = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A call of the forward. rule: the one that decided it, or None. shapes: of its floating-point inputs. result: the
    shape of its first result. Only of a call in a low format, kept: its formats and plan; sources, returned: the calls
    that made its inputs, and the paths of the modules that returned them.
    """

    computes: str
    rule: Rule | None
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    kept: KeptCall | None = None
    sources: tuple[CallId, ...] = ()
    returned: tuple[str, ...] = ()

    @property
    def low(self) -> str:
        """The low format that it reads; empty if it reads none."""
        return next((name for name in self.computes.split(",") if name in LOW), "")

    @property
    def is_decided(self) -> bool:
        """Whether a rule casts its inputs to a low format; else it follows the formats of its inputs."""
        return bool(self.low) and self.rule is not None and self.rule.action.kind in (Kind.LOWER, Kind.TO)


class RepairObserver(WatchCalls):
    """Watches a run for what is not finite, and keeps what a repair needs to know of its calls.

    low, forward: the forward's calls in low formats, and all. calls: all in order, also those of several models that
    have one identity. largest: on request, the largest magnitude of a call's inputs and results. converted: of
    conversions, the model's own too, the call that made their input. gradients: calls in low formats of a gradient
    taken in the region, which decides them. compiled: the ops that code of torch.compile calls. raising: what raised.
    """

    def __init__(self, policies: tuple[Policy, ...] = (), ranges: bool = False) -> None:
        self.watching = Watching()
        super().__init__(self.watching, "op", lambda finding, n: self.watching.findings.insert(n, finding), policies)
        self.low: dict[CallId, ForwardCall] = {}
        self.forward: dict[CallId, ForwardCall] = {}
        self.calls: list[tuple[CallId, ForwardCall]] = []
        self.largest: dict[CallId, float] = {}
        self.gradients: dict[CallId, ForwardCall] = {}
        self.converted: dict[CallId, CallId] = {}
        self.compiled: set[str] = set()
        self.raising = Raising(self.compiled)
        self._ranges = ranges
        self._makers: ByStorage[CallId] = ByStorage()
        self._returned: ByStorage[str] = ByStorage()
        self._paths: dict[int, str] = {}  # of modules, by id, in the model that is called
        self._depth = 0

    # -- what runs -----------------------------------------------------------------------------------------------------

    def after(self, call: SeenCall) -> None:
        """Note of a call whether it is low, and that it made its results."""
        super().after(call)
        results = [t for t in call.results if is_floating(t)]
        read = came_in(call)
        if call.is_cast:
            self._pass_on_makers(call.id, read, results)
            return
        if call.id.direction == FORWARD:
            if call.facts.id not in self.compiled and in_compiled_code():
                self.compiled.add(call.facts.id)
            shapes = tuple(tuple(t.shape) for t in read)
            result = tuple(results[0].shape) if results else ()
            seen = ForwardCall(call.computes, call.rule, shapes, result)
            if seen.low:
                sources = dict.fromkeys(maker for t in read if (maker := self._makers.get(t)) is not None)
                returned = dict.fromkeys(path for t in read if (path := self._returned.get(t)) is not None)
                kept = kept_of(call, results)
                seen = replace(seen, kept=kept, sources=tuple(sources), returned=tuple(returned))
                self.low[call.id] = seen
            self.forward[call.id] = seen
            self.calls.append((call.id, seen))
            if self._ranges:
                self.largest[call.id] = largest_of((*read, *results))
        elif call.rule is not None and call.results:  # under vmap they lie in no memory of their own
            shapes = tuple(tuple(t.shape) for t in tensors_in(call.args, call.kwargs))
            seen = ForwardCall(call.computes, call.rule, shapes, tuple(call.results[0].shape))
            self.calls.append((call.id, seen))
            if seen.is_decided:
                self.gradients[call.id] = seen
        for tensor in results:
            self._makers.put(tensor, call.id)

    def _pass_on_makers(self, identity: CallId, read: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Record of a conversion's results the call and module that made its source."""
        for tensor in results:
            for source in read:
                maker, path = self.maker_of(source)
                if maker is not None:
                    self._makers.put(tensor, maker)
                    self.converted[identity] = maker
                if path is not None:
                    self._returned.put(tensor, path)

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call; its results are noted as its own, and later as those of the module around it."""
        if not self._depth:
            self.door.run("a model", self._name_modules, module)
        self._depth += 1
        try:
            result = super().called(call, module, args, kwargs)
        finally:
            self._depth -= 1
        self.door.run("a module's results", self._note_returned, module, result)
        return result

    def _name_modules(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            self._paths.setdefault(id(module), name)

    def _note_returned(self, module: torch.nn.Module, result: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            for tensor in filter(is_floating, tensors_of(result)):
                self._returned.put(tensor, path)

    # -- what raises ---------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Note that a call which a policy decides has raised."""
        call = self._local.decided[-1] if self._local.decided else None
        if call is not None:
            self.raising.note(call.id.op, call.facts.op, call.args, call.kwargs)
        super().fail(error)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception:
            if not (self._local.looking or self._local.decided):
                self.raising.note(op_id(func), func, args, kwargs or {})
            raise

    # -- asked afterwards ----------------------------------------------------------------------------------------------

    def is_decided(self, identity: CallId) -> bool:
        """Return whether a rule put a call of the forward into a low format."""
        return identity in self.low and self.low[identity].is_decided

    def decided_behind(self, identity: CallId) -> tuple[CallId, ...]:
        """Return the call itself if a rule put it into a low format, or else those from which its inputs come."""
        return (identity,) if self.is_decided(identity) else self.sources_of(identity)

    def sources_of(self, identity: CallId) -> tuple[CallId, ...]:
        """Return the nearest calls that a rule put into a low format, and from which a call's inputs come."""
        reached = [source for low in self._followed(identity) for source in low.sources]
        return tuple(dict.fromkeys(filter(self.is_decided, reached)))

    def modules_behind(self, identity: CallId) -> tuple[str, ...]:
        """Return the paths of the nearest modules from whose results the inputs of a call come."""
        behind = self._followed(identity, past_modules=False)
        return tuple(dict.fromkeys(path for low in behind for path in low.returned))

    def _followed(self, identity: CallId, past_modules: bool = True) -> Iterator[ForwardCall]:
        """Yield a low call, and those before it that only follow, up to what rules put into a low format."""
        waiting, seen = [identity], {identity}
        while waiting:
            low = self.low.get(waiting.pop(0))
            if low is None:
                continue
            yield low
            for source in () if low.returned and not past_modules else low.sources:
                if source not in seen and not self.is_decided(source):
                    seen.add(source)
                    waiting.append(source)

    def maker_of(self, tensor: torch.Tensor) -> tuple[CallId | None, str | None]:
        """Return the call that made a tensor, and the path of the outermost module that returned it, if one did."""
        return self._makers.get(tensor), self._returned.get(tensor)
