"""Which regions each node of a TorchScript graph runs in.

A region in a script is an object: made by `prim::CreateObject`, given attributes, entered and left by `prim::Enter` and
`prim::Exit`. Instances that were made earlier, entered twice or chosen by a condition are objects like any others. What
is the same for every object that may be entered is known; the rest is read off the object when the script runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.errors import ScriptError
from narrowcast.policy import DEVICE_TYPES, NOWHERE, Place
from narrowcast.torch_surface.jit import BOOL, INT, NONE
from narrowcast.torchscript.callers import cross, is_caller_mark
from narrowcast.torchscript.source import AGAIN_MARK, ENTER_MARK, EXIT_MARK, shown_at

AUTOCAST = "torch.amp.autocast_mode.autocast"
_CLASSES = (AUTOCAST, "torch.cpu.amp.autocast_mode.autocast", "torch.cuda.amp.autocast_mode.autocast")
POLICY = "narrowcast_policy"
"""The attribute of region objects that names a policy, by digest; torch's own have none."""

ANYWHERE = "any"
"""The device type of what holds on every device: a pin."""

Value = Any  # torch._C.Value
Node = Any  # torch._C.Node


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """A region that is entered: what is known of it, and the script's values for what is not.

    enabled: True, False, or a value of type bool. low: a dtype, or a value of type int. policy: a digest; empty for
    torch's own.
    """

    device_type: str
    enabled: bool | Value
    low: torch.dtype | Value
    policy: str = ""
    cached: bool = True
    session: int = 0

    @property
    def open(self) -> tuple[str, ...]:
        """Names of the facts that only the running script knows."""
        found = [("enabled", not isinstance(self.enabled, bool)), ("low", not isinstance(self.low, torch.dtype))]
        return tuple(name for name, is_open in found if is_open)


Scopes = dict[str, Scope]  # the regions that hold, by device type


@dataclass(slots=True)
class Item:
    """A node, the regions that it runs in, who calls what it stands in, and the contents of its blocks."""

    node: Node
    scopes: Scopes
    caller: Place = NOWHERE
    blocks: list[Section] = field(default_factory=list)
    came: tuple[tuple[str, Value], ...] = ()  # where it is the result of a module's call: the arguments


@dataclass(slots=True)
class Section:
    """A block, or a whole graph: its nodes in order, and the sessions whose outermost regions are entered in it."""

    block: Any
    items: list[Item]
    sessions: list[int] = field(default_factory=list)


class Bounds:
    """What a scanner asks about the boundaries of modules' calls; this one knows of none (boundaries.py has them)."""

    def passage(self, node: Node) -> Mapping[str, str] | None:
        """What an alias stands for, if it is one of a boundary's."""
        return None

    def enter(self, scopes: Scopes, place: Place, facts: Mapping[str, Any], scanner: Scanner, mark: Node) -> Any:
        """The call's frame, and the regions inside; None if nothing is said about it."""


class Scanner:
    """Finds the regions of a graph. Enter and exit nodes go; `as` names stand for the objects then."""

    def __init__(
        self,
        graph: Any,
        around: Scopes,
        caller: Place = NOWHERE,
        caches: Callable[[str], bool] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """caches: whether a policy, by digest, name or path, leaves the weight cache on. bounds: of modules' calls."""
        self.bounds = bounds or Bounds()
        self.graph = graph
        self.caches = caches or (lambda policy: True)
        self.around = around
        self.caller = caller
        self.sessions = max((s.session for s in around.values()), default=0)
        self.sessions_of: dict[int, int] = {}  # of the objects that were entered
        self.inside: list[Section] = []  # the blocks that are being read, the innermost last
        self.homes: dict[int, list[Section]] = {}  # of each session: the blocks around all parts of it
        self.edges: list[Node] = []
        self.passages: list[Node] = []

    def scan(self) -> Section:
        """The graph with the regions of each node. ScriptError for a region that cannot be known well enough."""
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
            _close(node)
        _remove_unused_objects(self.graph)

    def _section(self, block: Any, stack: list[Scopes], caller: Place) -> Section:
        section = Section(block, [])
        self.inside.append(section)
        callers, frames = [caller], list[Any]()
        depth = len(stack)
        for node in list(block.nodes()):
            kind = node.kind()
            if kind in ("prim::Enter", "prim::Exit") and region_class(node.inputsAt(0)) is not None:
                if kind == "prim::Enter":
                    stack.append(self._entered(node, stack))
                else:
                    stack.pop()
                self.edges.append(node)
                continue
            if is_caller_mark(node):
                self._cross(node, callers, frames, stack)
                self.edges.append(node)
                continue
            passed = self.bounds.passage(node)
            if passed is not None:
                if frames and frames[-1] is not None and frames[-1].around:
                    self.passages.append(node)
                    section.items.append(self._passed(node, passed, frames[-1], callers[-1]))
                else:
                    _close(node)
                continue
            if _is_machinery(node):
                continue
            item = Item(node, stack[-1], callers[-1])
            item.blocks = [self._section(inner, [stack[-1]], callers[-1]) for inner in node.blocks()]
            section.items.append(item)
        if len(stack) != depth:
            raise ScriptError(
                asked="a region in a script", found="it is left in another block than it was entered in",
                where=shown_at(block.returnNode()), advice="Write it as a with statement.",
            )  # fmt: skip
        self.inside.pop()
        return section

    def _cross(self, mark: Node, callers: list[Place], frames: list[Any], stack: list[Scopes]) -> None:
        """Go over a mark: into a call, whose boundary may change the regions, or out of one."""
        facts = cross(callers, mark)
        if facts is None:
            if frames.pop() is not None:
                stack.pop()
            return
        entered = self.bounds.enter(stack[-1], callers[-1], facts, self, mark) if "call" in facts else None
        frames.append(None if entered is None else entered[0])
        if entered is not None:
            stack.append(entered[1])

    def _passed(self, node: Node, passed: Mapping[str, str], frame: Any, caller: Place) -> Item:
        """What goes into a call, or comes out: the regions around it decide."""
        item = Item(node, frame.around, caller)
        if "argument" in passed:
            frame.came.append((passed["argument"], node.inputsAt(0)))
        else:
            item.came = tuple(frame.came)
        return item

    def new_session(self) -> int:
        """The session of a region that is entered where there is none, in the block that is being read."""
        self.sessions += 1
        self.homes[self.sessions] = list(self.inside)
        return self.sessions

    def _entered(self, node: Node, stack: list[Scopes]) -> Scopes:
        """What holds inside a region: its device's facts are the new region's, others' stay."""
        before = stack[-1]
        instance = node.inputsAt(0)
        makers = _makers(instance, set())
        device = _the_same(makers, "device")
        if device is None:
            raise ScriptError(
                asked="a region in a script", found="its device type is not known before it runs",
                where=shown_at(instance.node()), advice='Write the device type as a constant, "cuda" for example.',
            )  # fmt: skip
        if device not in DEVICE_TYPES:
            raise ScriptError(
                asked=f"a region on device type {device!r}", found="no autocast lists are known for it",
                where=shown_at(instance.node()), advice=f"Give one of: {', '.join(DEVICE_TYPES)}.",
            )  # fmt: skip
        key = instance.unique()
        if before:
            session = next(iter(before.values())).session
        elif node.hasAttribute("name") and key in self.sessions_of:  # still the same with statement
            session = self.sessions_of[key]
        else:
            self.sessions += 1
            session = self.sessions_of[key] = self.sessions
        if not before:
            earlier = self.homes.get(session, self.inside)
            self.homes[session] = [a for a, b in zip(earlier, self.inside, strict=False) if a is b]
        policy = _the_same(makers, POLICY, missing="")
        if policy is None:
            raise ScriptError(
                asked="a region in a script", found="its policy depends on a condition",
                where=shown_at(instance.node()), advice="Open each region in a branch of its own.",
            )  # fmt: skip
        told = _the_same(makers, "cached", missing=-1)
        inherited = next((s.cached for s in before.values()), True) and self.caches(policy)
        enabled = self._fact(node, makers, "_enabled")
        low = self._fact(node, makers, "fast_dtype")
        if isinstance(low, int):
            if low not in _DTYPES:
                raise ScriptError(
                    asked=f"a region in a script with dtype number {low}", found="it is no floating format",
                    where=shown_at(instance.node()), advice="Give torch.bfloat16 or torch.float16.",
                )  # fmt: skip
            low = dtype_of(low)
        scope = Scope(device, enabled, low, policy, inherited if told in (-1, None) else bool(told), session)
        return {**before, device: scope}

    def _fact(self, node: Node, makers: list[dict[str, Value]] | None, name: str) -> Any:
        """A constant, or a value that is at hand where the region is entered."""
        known = _the_same(makers, name)
        if known is not None:
            return known
        if makers is not None and len(makers) == 1:
            return makers[0][name]
        read = self.graph.create("prim::GetAttr", [node.inputsAt(0)], 1)
        read.s_("name", name)
        read.output().setType(BOOL if name == "_enabled" else INT)
        read.insertBefore(node)
        return read.output()


def _close(passage: Node) -> None:
    """Take a passage out of the graph."""
    passage.output().replaceAllUsesWith(passage.inputsAt(0))
    passage.destroy()


def region_class(value: Value) -> str | None:
    """The qualified name of a region's class, if the value is a region."""
    kind = value.type()
    if kind.kind() != "ClassType":
        return None
    name = str(kind.qualified_name()).removeprefix("__torch__.")
    return name if any(name == c or name.startswith(f"{c}_") for c in (*_CLASSES, REGION)) else None


REGION = "narrowcast.eager.region.autocast"


def dtype_of(number: int) -> torch.dtype:
    """The dtype that TorchScript writes as this number."""
    return _DTYPES[number]


def number_of(dtype: torch.dtype) -> int:
    """The number that TorchScript writes for a dtype."""
    return _NUMBERS[dtype]


_NUMBERS = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10/core/ScalarType.h
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}


def _makers(instance: Value, seen: set[int]) -> list[dict[str, Value]] | None:
    """The attributes of each object that a value may be; None if that cannot be told."""
    if instance.unique() in seen:
        return []
    seen.add(instance.unique())
    node = instance.node()
    if node.kind() == "prim::CreateObject":
        attributes: dict[str, Value] = {}
        for use in instance.uses():
            if use.user.kind() == "prim::SetAttr" and use.offset == 0:
                name = use.user.s("name")
                if name in attributes:
                    return None
                attributes[name] = use.user.inputsAt(1)
        return [attributes]
    if node.kind() == "prim::Enter":  # `as`
        return _makers(node.inputsAt(0), seen)
    if node.kind() == "prim::If":
        found: list[dict[str, Value]] = []
        position = [o.unique() for o in node.outputs()].index(instance.unique())
        for block in node.blocks():
            of_block = _makers(list(block.outputs())[position], seen)
            if of_block is None:
                return None
            found += of_block
        return found
    return None


def _the_same(makers: list[dict[str, Value]] | None, name: str, missing: Any = None) -> Any:
    """The constant that an attribute has in every object; None if there is none."""
    found = {constant(m[name]) if name in m else missing for m in makers or ()}
    return found.pop() if len(found) == 1 else None


def constant(value: Value) -> Any:
    """A constant's value, the device's default dtype included; None for anything else."""
    node = value.node()
    if node.kind() == "prim::Constant":
        return value.toIValue()
    if node.kind() == "aten::get_autocast_dtype":
        device = constant(node.input())
        return number_of(torch.get_autocast_dtype(device)) if isinstance(device, str) else None
    return None


def make_edges(graph: Any) -> None:
    """Turn the marks of regions (source.py) into the nodes that with statements have. Other passes drop marks."""
    for node in graph.findAllNodes("prim::SetAttr"):
        edge = _mark_of(node)
        if edge is None:
            continue
        made = graph.create("prim::Exit" if edge == EXIT_MARK else "prim::Enter", [node.inputsAt(0)], 1)
        made.output().setType(NONE if edge == EXIT_MARK else node.inputsAt(0).type())
        if edge == AGAIN_MARK:
            made.s_("name", AGAIN_MARK)
        made.insertBefore(node)
        node.destroy()


def _mark_of(node: Node) -> str | None:
    """The mark, if an assignment marks the edge of a region."""
    read = node.inputsAt(1).node()
    if region_class(node.inputsAt(0)) is None or read.kind() != "prim::GetAttr" or read.s("name") != node.s("name"):
        return None
    if read.input().unique() != node.inputsAt(0).unique():
        return None
    return node.s("name") if node.s("name") in (ENTER_MARK, AGAIN_MARK, EXIT_MARK) else None


def _is_machinery(node: Node) -> bool:
    """Whether a node makes a region or fills it."""
    if node.kind() == "prim::CreateObject":
        return region_class(node.output()) is not None
    return node.kind() == "prim::SetAttr" and region_class(node.inputsAt(0)) is not None


def _remove_unused_objects(graph: Any) -> None:
    """Region objects that nothing reads go, with the statements that fill them."""
    for node in graph.findAllNodes("prim::CreateObject"):
        users = [use.user for use in node.output().uses()]
        if region_class(node.output()) is not None and all(user.kind() == "prim::SetAttr" for user in users):
            for user in users:
                user.destroy()
            node.destroy()
