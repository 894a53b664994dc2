"""One graph of a script: regions found, read, decided, written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.errors import ScriptError
from narrowcast.frontends.scripts.boundaries import enter_call
from narrowcast.frontends.scripts.callers import keep_norms, norms_kept, path_of, set_names, site_in
from narrowcast.frontends.scripts.calls import decided_as, device_of_regions, facts_of, is_optional_tensor
from narrowcast.frontends.scripts.cast_already import drop_empty, enter_off, leave_off, switch_off
from narrowcast.frontends.scripts.composites import open_composites, tell_closed
from narrowcast.frontends.scripts.places import shown_at
from narrowcast.frontends.scripts.read import ReadScript
from narrowcast.frontends.scripts.region_facts import region_class
from narrowcast.frontends.scripts.scopes import (
    ANYWHERE,
    Item,
    Scanner,
    Scope,
    Scopes,
    Section,
    passage,
    policy_of,
    value_of,
)
from narrowcast.frontends.scripts.write import CastBefore, Kept, Writer
from narrowcast.programs.passes import BEFORE_AUTOGRAD, PassResult, run_passes
from narrowcast.runtime.sites.graph_nodes import MARK, number_of
from narrowcast.runtime.sites.sightings import see_all
from narrowcast.runtime.torch_bridge import id_with_dtype
from narrowcast.runtime.torch_surface import jit
from narrowcast.runtime.torch_surface.state import autocast_off


def inline_calls(graph: Any) -> None:
    """Put the functions and methods that a graph calls into it, in place."""
    with autocast_off():
        jit.inline(graph)
    _read_attributes_once(graph)


def _read_attributes_once(graph: Any) -> None:
    """Read attributes of a module that nothing sets once, at the top: one weight is one value."""
    inputs = list(graph.inputs())
    if not inputs or inputs[0].type().kind() != "ClassType":
        return
    changed = set_names(graph)
    read: dict[tuple[str, ...], Any] = {(): inputs[0]}
    for node in graph.findAllNodes("prim::GetAttr"):
        path = path_of(node)
        if path is None or changed & set(path):
            continue
        reads = [node]  # from the module on
        while len(reads) < len(path):
            reads.insert(0, reads[0].inputsAt(0).node())
        for n, earlier in enumerate(reads):
            if path[: n + 1] not in read:
                read_node = graph.create("prim::GetAttr", [read[path[:n]]], 1)
                read_node.s_("name", path[n])
                read_node.output().setType(earlier.output().type())
                graph.prependNode(read_node)
                if n:
                    read_node.moveAfter(read[path[:n]].node())
                read[path[: n + 1]] = read_node.output()
        node.output().replaceAllUsesWith(read[path])
        node.destroy()


def _know_tensors(graph: Any, attribute: Callable[[Any], Any]) -> None:
    """Read a tensor that several attributes are once, and know a tensor that may be None for one.

    attribute: from a value that is read off the module to what it is now.
    """
    known: dict[int, tuple[Any, Any]] = {}
    for node in [node for node in graph.nodes() if node.kind() == "prim::GetAttr"]:
        value, tensor = node.output(), attribute(node.output())
        if not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) in known:
            value.replaceAllUsesWith(known[id(tensor)][1])
            node.destroy()
            continue
        if is_optional_tensor(value):
            cast = graph.create("prim::unchecked_cast", [value], 1)
            cast.output().setType(jit.TENSOR)
            cast.insertAfter(node)
            value.replaceAllUsesAfterNodeWith(cast, cast.output())
            value = cast.output()
        known[id(tensor)] = tensor, value


def make_graph_explicit(
    graph: Any, around: Scopes, module: Any = None, name: str = "forward", caller: Site = NOWHERE, marked: bool = True,
    observed: bool = False, begins: bool = True, kept: Kept = (),
) -> tuple[ReadScript, PassResult]:  # fmt: skip
    """Give a graph without calls, in place, the casts of its regions and of the one around it; its regions go.

    module: the script module that `self` is. caller: who calls the whole graph. marked: what the regions ruled is
    marked as cast already. observed: it says where it is as it runs. begins: it begins where the call of a module does,
    or of what no module calls. kept: weights that are cast already. Returns what was read, and what the passes made of
    its program.

    Raises ScriptError for what cannot be cast.
    """
    attribute = partial(attribute_of, module=module, changed=set_names(graph))
    _know_tensors(graph, attribute)
    _know_lengths(graph, attribute)
    _simplify(graph)
    scanner = Scanner(graph, around, caller, enter_call)
    section = scanner.scan()
    for of_others in (True, False):
        if not open_composites(graph, section, of_others):
            continue
        graph.setInsertPoint(graph.block())  # it stood before nodes that are gone
        _simplify(graph)
        scanner = Scanner(graph, around, caller, enter_call)
        section = scanner.scan()
    _refuse_unseen(section)
    tell_closed(section)
    _answer(graph, section)
    number_calls(section, {}, begins)
    reading = ReadScript(attribute).read(section, name)
    see_all(reading.program, reading.policies)
    writer = Writer(graph, section, reading, kept)
    first, *later = BEFORE_AUTOGRAD
    outcome = run_passes(reading.program, (first, writer.hoist, *later), reading.policies, id_with_dtype)
    if observed:  # before each call the graph says where it stands; its casts come behind that
        for number, item in reading.items.items():
            graph.setInsertPoint(item.node)
            site = number_of(reading.program.steps[number].site)
            graph.insertNode(graph.create(MARK, [graph.insertConstant(site)], 0))
        graph.setInsertPoint(graph.block())
    forks = [item for item in section.walk() if item.node.kind() == "prim::fork"]
    writer.write(outcome.program)
    _convert_forks(forks, module, writer.cast_before)
    if marked:  # what the regions of the graph, and those around it, ruled is cast already
        for start, last, device_types in scanner.ruled:
            graph.setInsertPoint(start)
            instances = enter_off(graph, _known(device_types))
            graph.setInsertPoint(last)
            leave_off(graph, instances)
        switch_off(graph, _known(scanner.around))
    scanner.finish()
    jit.forget_shapes(graph)
    with norms_kept(graph):
        jit.drop_unused(graph)
        while marked and drop_empty(graph):  # what only a mark held may be dropped, and be all that another one holds
            jit.drop_unused(graph)
    keep_norms(graph)
    keep_until_last_use(graph)
    return reading, outcome


def _simplify(graph: Any) -> None:
    with norms_kept(graph):
        jit.simplify(graph)
    for node in graph.findAllNodes("prim::unchecked_cast"):
        if node.input().type().kind() == node.output().type().kind() == "TensorType":  # a second name of one tensor
            node.output().replaceAllUsesWith(node.input())
            node.destroy()
    for node in graph.findAllNodes("aten::neg"):
        _subtract(graph, node)


def _subtract(graph: Any, negated: Any) -> None:
    """Write `1 - x` as the call that it is in Python; TorchScript has a function of its own for it: `neg(x) + 1`."""
    uses, is_torchs = negated.output().uses(), 'File "<string>"' in repr(negated.sourceRange()).partition("\\n")[0]
    if len(uses) != 1 or not is_torchs:
        return
    added = uses[0].user
    if added.kind() == "aten::add" and added.schema().startswith("aten::add.Scalar("):
        made = graph.create("aten::rsub", [negated.input(), *list(added.inputs())[1:]], 1)
        made.copyMetadata(added)
        made.insertBefore(added)
        made.output().setType(added.output().type())
        added.output().replaceAllUsesWith(made.output())
        added.destroy()
        negated.destroy()


def _known(device_types: Iterable[str]) -> list[str]:
    """Return device types by name; of what holds on every one, those that torch's own pass casts for."""
    return [name for device in device_types for name in (("cuda", "cpu") if device == ANYWHERE else (device,))]


def _know_lengths(graph: Any, attribute: Callable[[Any], Any]) -> None:
    """Unpack the amounts of paddings that are attributes, as those of convolutions are: their number says which op."""
    for node in graph.findAllNodes("aten::pad"):
        value = node.inputsAt(1)
        known = attribute(value)
        if isinstance(known, list):
            amounts = graph.create("prim::ListUnpack", [value], len(known))
            amounts.insertBefore(node)
            for amount in amounts.outputs():
                amount.setType(jit.INT)
            made = graph.create("prim::ListConstruct", list(amounts.outputs()), 1)
            made.output().setType(value.type())
            made.insertBefore(node)
            node.replaceInput(1, made.output())


def attribute_of(value: Any, module: Any, changed: Set[str] = frozenset()) -> Any:
    """Return what an attribute that a graph reads off its module is now; None if that is unknown.

    changed: the names of attributes that the graph sets.
    """
    node = value.node()
    if node.kind() == "prim::Param":
        return module
    if node.kind() == "prim::unchecked_cast":
        return attribute_of(node.input(), module, changed)
    if node.kind() != "prim::GetAttr" or node.s("name") in changed:
        return None
    owner = attribute_of(node.input(), module, changed)
    return getattr(owner, node.s("name"), None) if owner is not None else None


def _convert_forks(forks: list[Item], module: Any, cast_before: CastBefore) -> None:
    """Run forked code in the regions that hold where it is forked; weights that go in are cast before that."""
    for item in forks:
        forked, taken = item.node.g("Subgraph"), list(item.node.inputs())
        inline_calls(forked)
        scopes = {device: _passed_on(scope, item.node, forked) for device, scope in item.scopes.items()}
        kept = []
        for scope in item.scopes.values():
            for value, inside in zip(taken, list(forked.inputs()), strict=False):
                cast = cast_before(item.node, value, scope) if value.type().kind() == "TensorType" else None
                if cast is not None:
                    item.node.addInput(cast)
                    kept.append((inside, forked.addInput()))
        make_graph_explicit(forked, scopes, module, "forked", item.caller, kept=kept)
        item.node.g_("Subgraph", forked)


def _passed_on(scope: Scope, fork: Any, forked: Any) -> Scope:
    """Return the region as the forked code sees it: what only the running script knows comes in as an input."""

    def passed(value: Any, kind: Any) -> Any:
        fork.addInput(value)
        parameter = forked.addInput()
        parameter.setType(kind)
        return parameter

    enabled = scope.enabled if isinstance(scope.enabled, bool) else passed(scope.enabled, jit.BOOL)
    low = scope.low if isinstance(scope.low, torch.dtype) else passed(scope.low, jit.INT)
    return replace(scope, enabled=enabled, low=low)


_QUESTIONS = {"aten::is_autocast_enabled": "cuda", "aten::is_autocast_cpu_enabled": "cpu"}


def _answer(graph: Any, section: Section) -> None:
    """Answer code that asks whether autocast is on as its regions do: when the script runs, it is off."""
    for item in section.walk():
        scope = item.scopes.get(_QUESTIONS.get(item.node.kind(), ""))
        if scope is not None:
            graph.setInsertPoint(item.node)
            item.node.output().replaceAllUsesWith(value_of(graph, scope.enabled))


_UNSEEN = {
    "prim::PythonOp": (
        "a call into Python (of an object, or under torch.jit.ignore), which no region of a script reaches",
        "Call it outside of the region.",
    ),
    "prim::CallMethod": (
        "a call of a method that is chosen when the script runs (an interface)",
        "Call it outside of the region, or a module whose class is known.",
    ),
    "prim::CallFunction": (
        "a call of a function that is chosen when the script runs",
        "Call it outside of the region, or the function itself.",
    ),
}


def _refuse_unseen(section: Section) -> None:
    for item in section.walk():
        kind = item.node.kind()
        on = [s for s in item.scopes.values() if s.enabled is not False]
        is_regions = bool(item.node.inputsSize()) and region_class(item.node.inputsAt(0)) is not None
        if on and kind in _UNSEEN and not is_regions:
            found, advice = _UNSEEN[kind]
            raise ScriptError(asked="a script's region", found=found, where=shown_at(item.node), advice=advice)


# -- a fault of torch 2.13's interpreter, fixed where a graph has it ---------------------------------------------------
#
# A tensor that a branch or the body of a loop makes, that a loop inside reads, and that is given out or put into a list
# after that, is dropped by the loop inside: "Expected Tensor but got None". The optimizer hides it from some runs with
# gradients; ours are run without it. The op in between gives the very tensor that it takes: a weight stays one.


def keep_until_last_use(graph: Any) -> None:
    """Keep tensors that loops read until their last use, in place: behind the loop they have another name."""
    if not graph.findAllNodes("prim::Loop"):
        return
    for node in list(graph.nodes()):
        for block in node.blocks():
            _keep_in(graph, block)


def _keep_in(graph: Any, block: Any) -> set[str]:
    """Keep tensors in a block; return the names of what loops in it read."""
    values: dict[str, Any] = {}
    in_loops: set[str] = set()
    for node in list(block.nodes()):
        read: set[str] = set()
        for inner in node.blocks():
            read |= _keep_in(graph, inner) | (_reads(inner) if node.kind() == "prim::Loop" else set())
        for name in sorted(read & values.keys()):
            other = graph.create("aten::resolve_conj", [values[name]], 1)
            other.output().setType(values[name].type())
            other.insertAfter(node)
            values[name].replaceAllUsesAfterNodeWith(other, other.output())
            if not other.output().uses():
                other.destroy()
        in_loops |= read
        values.update((v.debugName(), v) for v in node.outputs() if isinstance(v.type(), jit.TensorType))
    return in_loops


def _reads(block: Any) -> set[str]:
    names = {value.debugName() for value in block.outputs()}
    for node in block.nodes():
        names.update(value.debugName() for value in node.inputs())
        for inner in node.blocks():
            names |= _reads(inner)
    return names


# -- which call of its op a node is, inside one call of a module: counted in the order in which nodes run --------------


Counts = dict[tuple[int, str], int]  # by the call of a module, and op
_LOST = -1


def number_calls(section: Section, counts: Counts, begins: bool) -> None:
    """Number the calls that regions rule. begins: whether the graph begins where the call of its module does."""
    for item in section.items:
        if item.node.kind() == "prim::If":
            ends = [dict(counts) for _ in item.blocks]
            for inner, end in zip(item.blocks, ends, strict=True):
                number_calls(inner, end, begins)
            _lose_what_differs(counts, ends, item.call)
        elif item.node.kind() == "prim::Loop":
            (body,) = item.blocks
            once = dict(counts)
            number_calls(body, once, begins)
            _lose_what_differs(counts, [dict(counts), once], item.call)
            number_calls(body, dict(counts), begins)
        else:
            for inner in item.blocks:
                number_calls(inner, counts, begins)
            _number(item, counts, begins)


def _lose_what_differs(counts: Counts, ends: list[Counts], call: int) -> None:
    """Join counts behind blocks that run or do not: kept if equal at all ends. Calls that began inside are over."""
    for key in dict.fromkeys(key for end in ends for key in end if key[0] == call):
        numbers = {end.get(key, 0) for end in ends}
        counts[key] = numbers.pop() if len(numbers) == 1 else _LOST


def _number(item: Item, counts: Counts, begins: bool) -> None:
    facts = facts_of(item.node)
    rules = [scope for scope in item.scopes.values() if scope.enabled is not False]
    if facts is None or not rules or passage(item.node) is not None:
        return
    site = partial(site_in, item.caller, item.node)
    key = (item.call, decided_as(item.node, facts, device_of_regions(rules), map(policy_of, rules), site))
    before = counts.get(key, 0)
    is_known = before != _LOST and (begins or item.call) and all(scope.enabled is True for scope in rules)
    counts[key] = before + 1 if is_known else _LOST
    item.number = counts[key] if is_known else 0
