"""Which regions each node of a TorchScript graph runs in.

A region in a script is an object: made by `prim::CreateObject`, given attributes, entered and left by `prim::Enter` and
`prim::Exit`. Instances that were made earlier, entered twice or chosen by a condition are objects like any others. What
is the same for every object that may be entered is known; the rest is read off the object when the script runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.ledger import HidingBlock
from narrowcast.core.policy import NOWHERE, Policy, Site
from narrowcast.errors import ScriptError
from narrowcast.frontends.scripts import region_facts
from narrowcast.frontends.scripts.callers import cross, is_caller_mark, site_in
from narrowcast.frontends.scripts.places import shown_at
from narrowcast.frontends.scripts.region_facts import Node, Value, constant, region_class, the_same, told_policy
from narrowcast.runtime.devices.abilities import fitted
from narrowcast.runtime.torch_bridge import check_ops, to_dtype
from narrowcast.runtime.torch_surface.jit import BOOL, INT

ANYWHERE = "any"
"""The device type of what holds on every device: a pin."""
PASSAGE = "narrowcast_boundary"
"""The attribute of the nodes through which tensors pass that go into a module's call, or come out (boundaries.py)."""


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """A region that is entered: what is known of it, and the script's values for what is not.

    enabled: True, False, or a value of type bool. low: a dtype, or a value of type int. policy: a digest; empty for
    torch's own. hiding: what keeps a region around it from ruling, itself or a block around it.
    """

    device_type: str
    enabled: bool | Value
    low: torch.dtype | Value
    policy: str = ""
    cached: bool = True
    session: int = 0
    hiding: HidingBlock | None = None

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the facts that only the running script knows."""
        facts = [("enabled", not isinstance(self.enabled, bool)), ("low", not isinstance(self.low, torch.dtype))]
        return tuple(name for name, is_open in facts if is_open)


def value_of(graph: Any, fact: Any) -> Value:
    """Return a fact of a region as a value of the script, which it may be already, where the graph is written to."""
    if isinstance(fact, torch.dtype):
        fact = region_facts.number_of(fact)
    return graph.insertConstant(fact) if isinstance(fact, bool | int) else fact


Scopes = dict[str, Scope]  # the regions that hold, by device type
Enter = Callable[[Scopes, Site, Mapping[str, Any], "Scanner", Node], Any]
"""From the regions around a module's call, its place, what its mark says, and the mark, to the call's frame and the
regions inside; None if nothing is said about it."""


@dataclass(slots=True)
class Item:
    """A node, the regions that it runs in, who calls what it stands in, and the contents of its blocks.

    grad_mode: False under no_grad. call: the call of a module that it stands in, 0 for the graph's own. number: which
    call of its op it is in that, from 1; 0 where that is not known before it runs (convert.py).
    """

    node: Node
    scopes: Scopes
    caller: Site = NOWHERE
    blocks: list[Section] = field(default_factory=list)
    grad_mode: bool = True
    call: int = 0
    number: int = 1
    came: tuple[tuple[str, Value], ...] = ()  # where it is the result of a module's call: the arguments


@dataclass(slots=True)
class Section:
    """A block, or a whole graph: its nodes in order, and the sessions whose outermost regions are entered in it."""

    block: Any
    items: list[Item]
    sessions: list[int] = field(default_factory=list)

    def walk(self) -> Iterator[Item]:
        """Yield every item, and after it those of its blocks."""
        for item in self.items:
            yield item
            for inner in item.blocks:
                yield from inner.walk()


class Scanner:
    """Finds the regions of a graph. Enter and exit nodes go; `as` names represent the objects then."""

    def __init__(self, graph: Any, around: Scopes, caller: Site, enter: Enter) -> None:
        """enter: into a module's call, whose boundary may change the regions."""
        self.graph = graph
        self.enter = enter
        self.around = around
        self.caller = caller
        self.sessions = max((s.session for s in around.values()), default=0)
        self.sessions_of: dict[int, int] = {}  # of the objects that were entered
        self.inside: list[Section] = []  # the blocks that are being read, the innermost last
        self.homes: dict[int, list[Section]] = {}  # of each session: the blocks around all parts of it
        self.made_cached: dict[int, bool] = {}  # of region objects: whether casts are kept where they are made
        self.edges: list[Node] = []
        self.ruled: list[tuple[Node, Node, tuple[str, ...]]] = []  # first and last node of parts that regions rule
        self.passages: list[Node] = []
        self.grad_mode: bool | None = True  # where the walk is; None where only the running script knows
        self.grad_modes: list[bool | None] = []  # around the no_grad blocks that are open
        self.asked: dict[int, bool | None] = {}  # values that hold the grad mode
        self.uncached: dict[Scope, Scope] = {}
        self.calls: list[int] = [0]  # the calls of modules that are being read, the innermost last
        self.seen_calls = 0

    def scan(self) -> Section:
        """Return the graph with the regions of each node. Raise ScriptError for a region that is not known enough."""
        section = self._section(self.graph.block(), [self.around], self.caller)
        for session, home in self.homes.items():
            home[-1].sessions.append(session)
        for node in self.edges:
            if node.kind() == "prim::Enter" and node.outputsSize():
                node.output().replaceAllUsesWith(node.inputsAt(0))
        return section

    def finish(self) -> None:
        """Take the edges of regions, and the objects that nothing reads then, out of the graph."""
        for node in self.edges:
            node.destroy()
        for node in self.passages:
            close_passage(node)
        region_facts.remove_unused_objects(self.graph)

    def _section(self, block: Any, stack: list[Scopes], caller: Site) -> Section:
        section = Section(block, [])
        self.inside.append(section)
        callers, frames, entered = [caller], list[Any](), list[Node]()
        depth = len(stack)
        for node in list(block.nodes()):
            kind = node.kind()
            if kind in ("prim::Enter", "prim::Exit") and region_class(node.inputsAt(0)) is not None:
                if kind == "prim::Enter":
                    stack.append(self._entered(node, stack, callers[-1]))
                    entered.append(node)
                else:
                    self._left(entered.pop(), node, stack)
                self.edges.append(node)
                continue
            if is_caller_mark(node):
                self._cross(node, callers, frames, stack, entered)
                self.edges.append(node)
                continue
            passed = passage(node)
            if passed is not None:
                if frames and frames[-1] is not None and frames[-1].around:
                    self.passages.append(node)
                    section.items.append(Item(node, frames[-1].around, callers[-1]))  # the regions around it decide
                    if "argument" in passed:
                        frames[-1].came.append((passed["argument"], node.inputsAt(0)))
                    else:
                        section.items[-1].came = tuple(frames[-1].came)
                else:
                    close_passage(node)
                continue
            if _is_machinery(node):
                if node.kind() == "prim::CreateObject":
                    self.made_cached[node.output().unique()] = next((s.cached for s in stack[-1].values()), True)
                continue
            self._follow_grad_mode(node)
            if node.kind() == region_facts.DEFAULT_LOW:
                self._take_low(node, stack[-1])
            scopes = stack[-1] if self.grad_mode is not None else self._uncached(stack[-1])
            item = Item(node, scopes, callers[-1], grad_mode=self.grad_mode is not False, call=self.calls[-1])
            item.blocks = self._inner(node, stack[-1], callers[-1])
            section.items.append(item)
        while len(stack) > depth and block.findAllNodes("prim::RaiseException"):  # what follows that is gone
            self._left(entered.pop(), block.returnNode(), stack)
        if len(stack) != depth:
            found, where = "it is left in another block than it was entered in", shown_at(block.returnNode())
            raise ScriptError("a region in a script", found, where, "Write it as a with statement.")
        self.inside.pop()
        return section

    def _inner(self, node: Node, scopes: Scopes, caller: Site) -> list[Section]:
        """Return the blocks of a node. The grad mode after it is that at the ends of them all, or unknown."""
        blocks = list(node.blocks())
        if not blocks:
            return []
        if node.kind() == "prim::Loop" and any(block.findAllNodes("aten::set_grad_enabled") for block in blocks):
            self.grad_mode = None
        before, ends, sections = self.grad_mode, set(), []
        for block in blocks:
            self.grad_mode = before
            sections.append(self._section(block, [scopes], caller))
            ends.add(self.grad_mode)
        self.grad_mode = ends.pop() if len(ends) == 1 else None
        return sections

    def _follow_grad_mode(self, node: Node) -> None:
        kind = node.kind()
        if kind == "aten::is_grad_enabled":
            self.asked[node.output().unique()] = self.grad_mode
        elif kind == "aten::set_grad_enabled":
            self.grad_mode = self.asked.get(node.input().unique(), constant(node.input()))
        elif kind == "prim::Enter" and _is_no_grad(node.inputsAt(0)):
            self.grad_modes.append(self.grad_mode)
            self.grad_mode = False
        elif kind == "prim::Exit" and _is_no_grad(node.inputsAt(0)):
            self.grad_mode = self.grad_modes.pop()

    def _uncached(self, scopes: Scopes) -> Scopes:
        """Return the same regions where it is unknown whether a cast carries a gradient: it is made for each use."""
        for scope in scopes.values():
            self.uncached.setdefault(scope, replace(scope, cached=False))
        return {device: self.uncached[scope] for device, scope in scopes.items()}

    def _left(self, first: Node, last: Node, stack: list[Scopes]) -> None:
        """Leave what was entered last: it ruled device types that nothing around it does."""
        inside, around = stack.pop(), stack[-1]
        new = tuple(device for device in inside if device not in around)
        if new:
            self.ruled.append((first, last, new))

    def _cross(
        self, mark: Node, callers: list[Site], frames: list[Any], stack: list[Scopes], entered: list[Node]
    ) -> None:
        """Go over a mark: into a call, whose boundary may change the regions, or out of one."""
        facts = cross(callers, mark)
        if facts is None:
            self.calls.pop()
            if frames.pop() is not None:
                self._left(entered.pop(), mark, stack)
            return
        self.seen_calls += "called" in facts
        self.calls.append(self.seen_calls if "called" in facts else self.calls[-1])
        framed = self.enter(stack[-1], callers[-1], facts, self, mark) if "call" in facts else None
        frames.append(None if framed is None else framed[0])
        if framed is not None:
            stack.append(framed[1])
            entered.append(mark)

    def new_session(self) -> int:
        """Return the session of a region that is entered where there is none, in the block that is being read."""
        self.sessions += 1
        self.homes[self.sessions] = list(self.inside)
        return self.sessions

    def _entered(self, node: Node, stack: list[Scopes], caller: Site) -> Scopes:
        """Return what holds inside a region: its device's facts are the new region's, others' stay."""
        before, instance = stack[-1], node.inputsAt(0)
        makers = region_facts.makers_of(instance, set())
        device = region_facts.device_of(makers, instance, node)
        session = self._session(node, before)
        around = before.get(device)
        named = the_same(makers, region_facts.POLICY, missing="")
        if named is None:
            found, where = "its policy depends on a condition", shown_at(instance.node())
            advice = "Write one with statement for each policy, chosen by an if."
            raise ScriptError("a region in a script", found, where, advice)
        ruling = None if named or around is None else told_policy(around.policy)
        holds_on = ruling is not None and ruling.effective_inner == "policy"  # in torch's own regions inside it, too
        policy = around.policy if holds_on and around is not None else named
        chosen = told_policy(policy)
        enabled, low = self._fact(node, makers, "_enabled"), self._fact(node, makers, "fast_dtype")
        asked_cache = the_same(makers, "cached", missing=-1)
        caches = chosen is None or chosen.effective_cache != "off"
        if asked_cache in (-1, None):  # as it was where it was made
            cached = caches and all(self.made_cached.get(m[region_facts.MADE].unique(), True) for m in makers or ())
        else:
            cached = bool(asked_cache)
        hiding = self._hiding(around, device, policy, enabled, site_in(caller, instance.node()))
        low = region_facts.low_format(low, instance)
        return {**before, device: Scope(device, enabled, low, policy, cached, session, hiding)}

    def _take_low(self, node: Node, scopes: Scopes) -> None:
        """Set the low format of a region that names none: its policy's, or that of the region in which it is made."""
        around = scopes.get(constant(node.input()))
        low: Any = None if around is None else around.low
        for use in node.output().uses():
            if use.user.kind() == "prim::SetAttr":
                makers = region_facts.makers_of(use.user.inputsAt(0), set())
                chosen = told_policy(the_same(makers, region_facts.POLICY, missing="") or "")
                wanted = None if chosen is None else chosen.effective_low
                low = low if wanted is None else to_dtype(wanted)
        if low is not None:
            self.graph.setInsertPoint(node)
            node.output().replaceAllUsesWith(value_of(self.graph, low))

    def _session(self, node: Node, before: Scopes) -> int:
        """Return the outermost region that this one is in, by number: a new one, unless it is entered in another."""
        if before:
            return next(iter(before.values())).session
        key = node.inputsAt(0).unique()
        if not (node.hasAttribute("name") and key in self.sessions_of):  # else it is still the same with statement
            self.sessions += 1
            self.sessions_of[key] = self.sessions
        session = self.sessions_of[key]
        earlier = self.homes.get(session, self.inside)
        self.homes[session] = [a for a, b in zip(earlier, self.inside, strict=False) if a is b]
        return session

    def _hiding(self, around: Scope | None, device: str, policy: str, enabled: Any, site: Site) -> Any:
        """Return the block by which a region keeps the one around it on its device type from ruling, if it does."""
        if around is None or around.hiding is not None or around.enabled is False:
            return None if around is None else around.hiding
        if enabled is False:
            return HidingBlock("", device, site)
        hidden = None if policy else told_policy(around.policy)
        return None if hidden is None or hidden.is_native else HidingBlock(hidden.name, device, site)

    def _fact(self, node: Node, makers: list[dict[str, Value]] | None, name: str) -> Any:
        """Return a constant, or a value that is at hand where the region is entered."""
        known = the_same(makers, name)
        if known is not None:
            return known
        if makers is not None and len(makers) == 1:
            return makers[0][name]
        read = self.graph.create("prim::GetAttr", [node.inputsAt(0)], 1)
        read.s_("name", name)
        read.output().setType(BOOL if name == "_enabled" else INT)
        read.insertBefore(node)
        return read.output()


def passage(node: Node) -> dict[str, str] | None:
    """Return what an alias at a boundary represents: `argument` and its name, or `result` and its part; or None."""
    if node.kind() != "aten::alias" or not node.hasAttribute(PASSAGE):
        return None
    facts: dict[str, str] = json.loads(node.s(PASSAGE))
    return facts


def close_passage(node: Node) -> None:
    """Take a passage out of the graph."""
    node.output().replaceAllUsesWith(node.inputsAt(0))
    node.destroy()


def close_passages(graph: Any) -> None:
    """Take all passages out of a graph whose calls are not inlined."""
    for node in graph.findAllNodes("aten::alias"):
        if passage(node) is not None:
            close_passage(node)


def policy_of(scope: Scope) -> Policy:
    """Return the policy of a region, resolved for its device type. A region names it by digest, name or path."""
    chosen = told_policy(scope.policy)
    if chosen is not None:
        check_ops(chosen)
    return fitted(chosen or Policy.native(scope.device_type), scope.device_type)


def _is_no_grad(value: Value) -> bool:
    kind = value.type()
    return bool(kind.kind() == "ClassType" and str(kind.qualified_name()).endswith("torch.autograd.grad_mode.no_grad"))


def _is_machinery(node: Node) -> bool:
    if node.kind() == "prim::CreateObject":
        return region_class(node.output()) is not None
    return node.kind() == "prim::SetAttr" and region_class(node.inputsAt(0)) is not None
