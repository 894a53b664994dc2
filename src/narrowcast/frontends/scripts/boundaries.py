"""The boundaries of modules' calls in scripts: where what goes in and what comes out may be cast.

A module's call is inlined, and with it goes the difference between a value outside and the same value inside. So before
that, each tensor that goes in or comes out passes through an `aten::alias` that says which argument or result it is.
Rules about `module.call`, and pins, are decided on these; they go when the graph is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.decide import Plan, Region
from narrowcast.core.module_calls import ModuleCall, policy_inside
from narrowcast.core.policy import Kind, Site
from narrowcast.errors import RegionError, ScriptError
from narrowcast.frontends.scripts.callers import is_forward, mark_whole
from narrowcast.frontends.scripts.calls import holds_tensors, is_tensor
from narrowcast.frontends.scripts.places import shown_from
from narrowcast.frontends.scripts.region_facts import Node, Value, hold_policy
from narrowcast.frontends.scripts.scopes import ANYWHERE, PASSAGE, Scanner, Scope, Scopes, passage, policy_of
from narrowcast.runtime.regions.pinned import Pin, pin_of
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS
from narrowcast.runtime.torch_surface import jit
from narrowcast.runtime.torch_surface.jit import compiled_method, find_type, method_names

# -- passages are made before calls are inlined ------------------------------------------------------------------------


@dataclass(slots=True)
class Modules:
    """What is known of a script's modules by the names of their types: the arguments of `forward`, and pins."""

    arguments: dict[str, list[str]] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)

    @staticmethod
    def of(script: Any, module: torch.nn.Module | None = None) -> Modules:
        """Return the modules of a script module. module: what it was made of, if that is known."""
        modules = Modules()
        for part in script.modules():
            forward = next(filter(is_forward, method_names(part)), None)
            if forward is not None:
                names = [a.name for a in compiled_method(part, forward).schema.arguments][1:]
                modules.arguments[find_type(part)] = names
        if module is not None:
            originals = dict(module.named_modules(remove_duplicate=False))
            for path, part in script.named_modules(remove_duplicate=False):
                pin = pin_of(originals.get(path))
                if pin is not None:
                    modules.pins[find_type(part)] = pin
        return modules

    def bound(self, graph: Any, call: Node) -> tuple[dict[str, Any], Node, Node]:
        """Let the tensors of a module's call pass through its boundary."""
        name = call.inputsAt(0).type().qualified_name()
        if name not in self.arguments:
            return {}, call, call
        firsts = []
        for position, argument in enumerate(self.arguments[name], 1):
            value = call.inputsAt(position)
            if is_tensor(value):
                firsts.append(_create(graph, value, {"argument": argument}).insertBefore(call))
                call.replaceInput(position, firsts[-1].output())
        nodes, parts = _passages_out(graph, call.output())
        last = call
        for node in nodes:
            node.insertAfter(last)
            last = node
        if nodes:
            call.output().replaceAllUsesAfterNodeWith(last, last.output())
        noted = _noted(parts, list(call.inputs())[1:], self.arguments[name], self.pins.get(name))
        return noted, (firsts or [call])[0], last


def bound_whole(graph: Any, names: list[str], pin: Pin | None, is_method: bool) -> None:
    """Let the tensor inputs and outputs of a whole graph pass through its boundary, in place."""
    inputs = list(graph.inputs())[is_method:]
    start = next(iter(graph.nodes()), None)
    if start is None:  # it gives what it takes
        graph.setInsertPoint(graph.block())
        start = graph.insertConstant(False).node()
    passages = []
    for value, name in zip(inputs, names, strict=True):
        if is_tensor(value):
            passage = _create(graph, value, {"argument": name})
            value.replaceAllUsesWith(passage.output())
            passage.replaceInput(0, value)
            passage.insertBefore(start)
            passages.append(passage)
    (result,) = graph.outputs()
    nodes, parts = _passages_out(graph, result)
    for node in nodes:
        graph.appendNode(node)
    if nodes:
        graph.return_node().replaceInput(0, nodes[-1].output())
    mark_whole(graph, _noted(parts, inputs, names, pin), (passages or [start])[0])


def _noted(parts: dict[str, bool], inputs: list[Value], names: list[str], pin: Pin | None) -> dict[str, Any]:
    """Return what a call's mark notes: the parts of its result, its pin, and the arguments that may hold tensors, and
    are none: no passage is made for these.
    """
    pairs = zip(inputs, names, strict=True)
    noted = {"call": parts, "containers": [n for v, n in pairs if holds_tensors(v) and not is_tensor(v)]}
    if pin is None:
        return noted
    _in_use[id(pin)] = pin
    return {**noted, "pin": id(pin)}


_in_use: dict[int, Pin] = {}  # graphs name pins by number


def _passages_out(graph: Any, result: Value) -> tuple[list[Node], dict[str, bool]]:
    """Return the nodes through which a result passes, not yet inserted, the last one with the output; and the parts
    that rules may name, `""` for the whole: whether a cast reaches all tensors in it.
    """
    if is_tensor(result):
        return [_create(graph, result, {"result": ""})], {"": True}
    parts = {"": _is_reached(result.type())}
    if result.type().kind() != "TupleType":
        return [], parts
    names = jit.field_names(result.type())
    known = [" ".join((str(n), *names[n : n + 1])) for n in range(len(result.type().elements()))]
    for both, kind in zip(known, result.type().elements(), strict=True):
        parts.update(dict.fromkeys(both.split(), _is_reached(kind)))
    nodes = _passages_of(graph, result, known)
    return nodes if any(passage(node) for node in nodes) else [], parts


def _is_reached(kind: Any) -> bool:
    """Return whether a cast reaches every tensor in a value of this type."""
    if kind.kind() == "TupleType":
        return all(map(_is_reached, kind.elements()))
    return kind.kind() == "TensorType" or "Tensor" not in kind.annotation_str


def _passages_of(graph: Any, value: Value, known: list[str]) -> list[Node]:
    """Return the nodes that take a tuple apart, let its tensors pass as the known parts, and make it again."""
    kinds = value.type().elements()
    unpacked = graph.create("prim::TupleUnpack", [value], len(kinds))
    nodes, values = [unpacked], []
    for element, kind, part in zip(list(unpacked.outputs()), kinds, known, strict=True):
        element.setType(kind)
        made = []
        if is_tensor(element):
            made = [_create(graph, element, {"result": part})]
        elif kind.kind() == "TupleType":
            made = _passages_of(graph, element, [part] * len(kind.elements()))
        nodes += made
        values.append(made[-1].output() if made else element)
    packed = graph.create("prim::TupleConstruct", values, 1)
    packed.output().setType(value.type())
    return [*nodes, packed]


def _create(graph: Any, value: Value, facts: Mapping[str, str]) -> Node:
    passage_node = graph.create("aten::alias", [value], 1)
    passage_node.s_(PASSAGE, json.dumps(facts))
    passage_node.output().setType(value.type())
    return passage_node


# -- and read when they are --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Frame:
    """A call that is being read, and has a boundary. around: the regions that decide about it. came: its inputs."""

    around: Scopes
    came: list[tuple[str, Value]] = field(default_factory=list)


def enter_call(scopes: Scopes, site: Site, facts: Mapping[str, Any], scanner: Scanner, mark: Node) -> Any:
    """Return the frame of a call in these regions, and the regions inside; None if no rule is about it."""
    pin = _in_use.get(facts.get("pin", 0))
    before = scopes
    if pin is not None and pin.region is not None:
        scopes = _in_region(scopes, pin.region, scanner)
    around = {d: replace(s, cached=False) for d, s in scopes.items() if s.enabled is not False}
    around = {d: s for d, s in around.items() if policy_of(s).has_module_rules}
    if pin is not None and pin.policy.has_module_rules:
        around = _with_pin(around, pin)
    rules = {d: [rule for rule in policy_of(s).rules if rule.is_module_call] for d, s in around.items()}
    around = {d: s for d, s in around.items() if any(rule.matches_site(site) for rule in rules[d])}
    calls = {device: _call(scope, site) for device, scope in around.items()}
    plans = {device: call.plan() for device, call in calls.items()}
    if not around:
        return None if scopes is before else (Frame({}), scopes)
    for name in facts.get("containers", ()):
        if any(call.plan(name).formats != (None,) for call in calls.values()):
            asked = f"argument {name!r} of {site.module_path or 'a pinned function'} in another format"
            found = "it may be None, or it holds tensors, and a script casts only what is always a tensor"
            advice = f'Leave it as it is: keep=("{name}",), or action = "follow".'
            raise ScriptError(asked, found, shown_from(mark), advice)
    _check_results(facts["call"], [r.part for plan in plans.values() for r in plan.results], site, mark)
    return Frame(around), _inside(scopes, calls, plans, scanner)


def _check_results(known: Mapping[str, bool], wanted: list[str], site: Site, mark: Node) -> None:
    """Raise an error if a part of a module's result that is to be cast is not there, or is no tensor."""
    called = site.module_path or "the module"
    for part in wanted:
        if known.get(part, False):
            continue
        if part in known or known == {"": False}:
            asked = f"the results of {called} in another format"
            found = "they are in a container that a script takes apart only when it runs"
            raise ScriptError(asked, found, shown_from(mark), "Return a tensor or a tuple of tensors.")
        parts = ", ".join(f"result.{name}" for name in known if name) or "it returns one tensor"
        asked, found = f"result.{part} of {called} in another format", f"no such part: {parts}"
        raise RegionError(asked, found, shown_from(mark), "Name one of its parts, or the whole (result).")


def _in_region(scopes: Scopes, region: Any, scanner: Scanner) -> Scopes:
    facts = region.prepared.facts
    session = next(iter(scopes.values())).session if scopes else scanner.new_session()
    low, digest = DTYPES[facts.low], region.policy.digest
    return {**scopes, facts.device_type: Scope(facts.device_type, facts.enabled, low, digest, facts.cache, session)}


def _with_pin(around: Scopes, pin: Pin) -> Scopes:
    """Return the regions that decide about a pinned call: rules of theirs hold as well, and the pin's are stronger."""
    if not around:
        return {ANYWHERE: Scope(ANYWHERE, True, torch.bfloat16, pin.policy.digest, False)}
    return {d: replace(s, policy=hold_policy(policy_of(s).with_rules(pin.policy.rules))) for d, s in around.items()}


def _call(scope: Scope, site: Site) -> ModuleCall:
    low = scope.low if isinstance(scope.low, torch.dtype) else torch.get_autocast_dtype(scope.device_type)
    return ModuleCall(policy_of(scope), Region(scope.device_type, FORMATS[low]), site)


def _inside(scopes: Scopes, calls: Mapping[str, ModuleCall], plans: Mapping[str, Plan], scanner: Scanner) -> Scopes:
    inside = dict(scopes)
    for device, call in calls.items():
        rule, inside_call = plans[device].rule, call.inside(plans[device])
        if inside_call.goes_on or (rule is not None and rule.action.kind is Kind.LOWER):  # in the region's own format
            continue
        for ruled in (list(scopes) or ["cpu"]) if device == ANYWHERE else [device]:
            if inside_call.low is not None:
                low = DTYPES[inside_call.low]
                session = next(iter(inside.values())).session if inside else scanner.new_session()
                around = scopes.get(ruled) or Scope(ruled, True, low, "", True, session)
                policy = policy_of(around)
                digest = around.policy if policy_inside(policy) is policy else ""
                inside[ruled] = replace(around, enabled=True, low=low, policy=digest)
            elif ruled in scopes:
                inside[ruled] = replace(scopes[ruled], enabled=False)
    return inside
