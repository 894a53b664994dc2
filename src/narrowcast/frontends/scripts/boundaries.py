"""The boundaries of modules' calls in scripts: where what goes in and what comes out may be cast.

A module's call is inlined, and with it goes the difference between a value outside and the same value inside. So before
that, each tensor that goes in or comes out passes through an `aten::alias` that says which argument or result it is.
Rules about `module.call`, and pins, are decided on these; they go when the graph is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.decide import Plan, Region
from narrowcast.core.module_calls import ModuleCall
from narrowcast.core.policy import Kind, Policy, Site
from narrowcast.errors import ScriptError
from narrowcast.frontends.scripts.callers import is_forward, mark_whole
from narrowcast.frontends.scripts.places import shown_from
from narrowcast.frontends.scripts.scopes import ANYWHERE, Bounds, Scanner, Scope, Scopes, close_passage
from narrowcast.runtime.regions.pinned import Pin, pin_of
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS
from narrowcast.runtime.torch_surface.jit import compiled_method, find_type, method_names

_NOTE = "narrowcast_boundary"
Value = Any
Node = Any


# -- passages are made before calls are inlined ------------------------------------------------------------------------


@dataclass(slots=True)
class Modules:
    """What is known of a script's modules by the names of their types: the arguments of `forward`, and pins."""

    arguments: dict[str, list[str]] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)

    @staticmethod
    def of(script: Any, module: torch.nn.Module | None = None) -> Modules:
        """Of a script module. module: what it was made of, if that is known."""
        found = Modules()
        for part in script.modules():
            forward = next(filter(is_forward, method_names(part)), None)
            if forward is not None:
                names = [a.name for a in compiled_method(part, forward).schema.arguments][1:]
                found.arguments[find_type(part)] = names
        if module is not None:
            originals = dict(module.named_modules(remove_duplicate=False))
            for path, part in script.named_modules(remove_duplicate=False):
                pin = pin_of(originals.get(path))
                if pin is not None:
                    found.pins[find_type(part)] = pin
        return found

    def bound(self, graph: Any, call: Node) -> tuple[dict[str, Any], Node, Node]:
        """Let the tensors of a module's call pass through its boundary."""
        name = call.inputsAt(0).type().qualified_name()
        if name not in self.arguments:
            return {}, call, call
        firsts = _pass_in(graph, call, self.arguments[name])
        last, kind = _pass_out(graph, call)
        noted = {"call": kind, "containers": _containers(list(call.inputs())[1:], self.arguments[name])}
        return {**noted, **_noted(self.pins.get(name))}, (firsts or [call])[0], last


def bound_whole(graph: Any, names: list[str], pin: Pin | None, is_method: bool) -> None:
    """Let the tensors that a whole graph takes and gives pass through its boundary, in place."""
    inputs = list(graph.inputs())[is_method:]
    start = next(iter(graph.nodes()), None)
    if start is None:  # it gives what it takes
        graph.setInsertPoint(graph.block())
        start = graph.insertConstant(False).node()
    made = []
    for value, name in zip(inputs, names, strict=True):
        if _is_tensor(value.type()):
            passage = _create(graph, value, {"argument": name})
            value.replaceAllUsesWith(passage.output())
            passage.replaceInput(0, value)
            passage.insertBefore(start)
            made.append(passage)
    kind = _pass_out_whole(graph)
    noted = {"call": kind, "containers": _containers(inputs, names)}
    mark_whole(graph, {**noted, **_noted(pin)}, (made or [start])[0])


def _containers(inputs: list[Value], names: list[str]) -> list[str]:
    """The arguments that may hold tensors, and are none: no passage is made for these."""
    pairs = zip(inputs, names, strict=True)
    return [n for v, n in pairs if not _is_tensor(v.type()) and "Tensor" in v.type().annotation_str]


def _noted(pin: Pin | None) -> dict[str, Any]:
    if pin is None:
        return {}
    _in_use[id(pin)] = pin
    return {"pin": id(pin)}


_in_use: dict[int, Pin] = {}  # graphs name pins by number
_combined: dict[str, Policy] = {}  # policies with a pin's rules on top: regions name them by digest


def _pass_in(graph: Any, call: Node, names: list[str]) -> list[Node]:
    made = []
    for position, name in enumerate(names, 1):
        value = call.inputsAt(position)
        if _is_tensor(value.type()):
            passage = _create(graph, value, {"argument": name})
            passage.insertBefore(call)
            call.replaceInput(position, passage.output())
            made.append(passage)
    return made


def _pass_out(graph: Any, call: Node) -> tuple[Node, str]:
    """The last node of the call, and the kind of its result."""
    result = call.output()
    if _is_tensor(result.type()):
        made = _create(graph, result, {"result": ""})
        made.insertAfter(call)
        result.replaceAllUsesAfterNodeWith(made, made.output())
        return made, "tensor"
    if not _is_tuple_of_tensors(result.type()):
        return call, "container"
    unpacked, passages, packed = _taken_apart(graph, result)
    last = call
    for node in (unpacked, *passages, packed):
        node.insertAfter(last)
        last = node
    result.replaceAllUsesAfterNodeWith(packed, packed.output())
    return packed, "tuple"


def _pass_out_whole(graph: Any) -> str:
    (result,) = graph.outputs()
    if _is_tensor(result.type()):
        made = graph.appendNode(_create(graph, result, {"result": ""}))
    elif _is_tuple_of_tensors(result.type()):
        unpacked, passages, packed = _taken_apart(graph, result)
        for node in (unpacked, *passages, packed):
            made = graph.appendNode(node)
    else:
        return "container"
    graph.return_node().replaceInput(0, made.output())
    return "tensor" if _is_tensor(result.type()) else "tuple"


def _taken_apart(graph: Any, result: Value) -> tuple[Node, list[Node], Node]:
    kinds = result.type().elements()
    unpacked = graph.create("prim::TupleUnpack", [result], len(kinds))
    passages, parts = [], []
    for n, (part, kind) in enumerate(zip(list(unpacked.outputs()), kinds, strict=True)):
        part.setType(kind)
        if _is_tensor(kind):
            passages.append(_create(graph, part, {"result": str(n)}))
            part = passages[-1].output()
        parts.append(part)
    packed = graph.create("prim::TupleConstruct", parts, 1)
    packed.output().setType(result.type())
    return unpacked, passages, packed


def _is_tuple_of_tensors(kind: Any) -> bool:
    return bool(kind.kind() == "TupleType" and any(_is_tensor(t) for t in kind.elements()))


def _is_tensor(kind: Any) -> bool:
    return bool(kind.kind() == "TensorType")


def _create(graph: Any, value: Value, facts: Mapping[str, str]) -> Node:
    made = graph.create("aten::alias", [value], 1)
    made.s_(_NOTE, json.dumps(facts))
    made.output().setType(value.type())
    return made


def passage(node: Node) -> dict[str, str] | None:
    """What an alias stands for: `argument` and its name, or `result` and its part; None for any other node."""
    if node.kind() != "aten::alias" or not node.hasAttribute(_NOTE):
        return None
    facts: dict[str, str] = json.loads(node.s(_NOTE))
    return facts


def close_passages(graph: Any) -> None:
    """Take them out of a graph whose calls are not inlined."""
    for node in graph.findAllNodes("aten::alias"):
        if passage(node) is not None:
            close_passage(node)


# -- and read when they are --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Frame:
    """A call that is being read, and has a boundary. around: the regions that decide about it. came: its arguments."""

    around: Scopes
    came: list[tuple[str, Value]] = field(default_factory=list)


@dataclass(slots=True)
class ModuleBounds(Bounds):
    """The boundaries that policies and pins give. policy_of: from a region to its policy."""

    policy_of: Callable[[Scope], Policy]

    def passage(self, node: Node) -> Mapping[str, str] | None:
        """What an alias stands for."""
        return passage(node)

    def enter(self, scopes: Scopes, site: Site, facts: Mapping[str, Any], scanner: Scanner, mark: Node) -> Any:
        """The frame of a call in these regions, and the regions inside; None if nothing is said about it."""
        pin = _in_use.get(facts.get("pin", 0))
        before = scopes
        if pin is not None and pin.region is not None:
            scopes = self._in_region(scopes, pin.region, scanner)
        around = {d: replace(s, cached=False) for d, s in scopes.items() if s.enabled is not False}
        around = {d: s for d, s in around.items() if self.policy_of(s).has_module_rules}
        if pin is not None and pin.policy.has_module_rules:
            around = self._with_pin(around, pin)
        around = {d: s for d, s in around.items() if self._has_rules(s, site)}
        calls = {device: self._call(scope, site) for device, scope in around.items()}
        plans = {device: call.plan() for device, call in calls.items()}
        if not around:
            return None if scopes is before else (Frame({}), scopes)
        for name in facts.get("containers", ()):
            if any(call.plan(name).formats != (None,) for call in calls.values()):
                raise ScriptError(
                    asked=f"argument {name!r} of {site.module_path or 'a pinned function'} in another format",
                    found="it may be None, or it holds tensors, and a script casts only what is always a tensor",
                    where=shown_from(mark), advice=f'Leave it as it is: keep=("{name}",), or action = "follow".',
                )  # fmt: skip
        if facts["call"] == "container" and any(plan.results for plan in plans.values()):
            raise ScriptError(
                asked=f"the results of {site.module_path or 'the module'} in another format",
                found="they are in a container that a script takes apart only when it runs",
                where=shown_from(mark), advice="Return a tensor or a tuple of tensors.",
            )  # fmt: skip
        return Frame(around), self._inside(scopes, calls, plans, scanner)

    def _in_region(self, scopes: Scopes, region: Any, scanner: Scanner) -> Scopes:
        facts = region.prepared.facts
        session = next(iter(scopes.values())).session if scopes else scanner.new_session()
        low, digest = DTYPES[facts.low], region.policy.digest
        return {**scopes, facts.device_type: Scope(facts.device_type, facts.enabled, low, digest, facts.cache, session)}

    def _with_pin(self, around: Scopes, pin: Pin) -> Scopes:
        """The regions that decide about a pinned call: rules of theirs hold as well, and the pin's are stronger."""
        if not around:
            return {ANYWHERE: Scope(ANYWHERE, True, torch.bfloat16, pin.policy.digest, False)}
        found = {}
        for device, scope in around.items():
            both = self.policy_of(scope).with_rules(pin.policy.rules)
            _combined[both.digest] = both
            found[device] = replace(scope, policy=both.digest)
        return found

    def _has_rules(self, scope: Scope, site: Site) -> bool:
        rules = self.policy_of(scope).rules
        return any(rule.is_module_call and rule.matches_site(site) for rule in rules)

    def _call(self, scope: Scope, site: Site) -> ModuleCall:
        low = scope.low if isinstance(scope.low, torch.dtype) else torch.get_autocast_dtype(scope.device_type)
        return ModuleCall(self.policy_of(scope), Region(scope.device_type, FORMATS[low]), site)

    def _inside(
        self, scopes: Scopes, calls: Mapping[str, ModuleCall], plans: Mapping[str, Plan], scanner: Scanner
    ) -> Scopes:
        inside = dict(scopes)
        for device, call in calls.items():
            rule, found = plans[device].rule, call.inside(plans[device])
            if found.goes_on or (rule is not None and rule.action.kind is Kind.LOWER):  # in the region's own format
                continue
            for ruled in (list(scopes) or ["cpu"]) if device == ANYWHERE else [device]:
                if found.low is not None:
                    low = DTYPES[found.low]
                    session = next(iter(inside.values())).session if inside else scanner.new_session()
                    around = scopes.get(ruled) or Scope(ruled, True, low, "", True, session)
                    inside[ruled] = replace(around, enabled=True, low=low)
                elif ruled in scopes:
                    inside[ruled] = replace(scopes[ruled], enabled=False)
        return inside
