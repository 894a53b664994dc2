"""The most bytes that a program holds at once, read off it: what the goal `memory` is about.

Memory that a call makes lives until its last reader, or, if a reader keeps it for its backward, until that backward is
done. The backward goes through the calls in reverse, and holds the gradient of a value from its last reader's backward
to its maker's; gradients of the program's inputs stay. These inputs are not counted. Where a compiler fuses,
values between two calls of one loop are in no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.programs.placement.memory import KeptBytes
from narrowcast.programs.program import Block, Step, Value, Writes

Bytes = Callable[[Value], float]
Workspace = tuple[float, float]
"""What a kernel takes beside its operands and results, and its backward."""


@dataclass(frozen=True, slots=True)
class Peak:
    """bytes: the most at once, with what kernels take beside (`workspace`, of these). kept: held for the backward when
    the forward ends. op, place: of the call at which it is reached; in_backward: whether it is reached in its backward.
    """

    bytes: float
    workspace: float = 0.0
    kept: float = 0.0
    op: str = ""
    site: Site = NOWHERE
    in_backward: bool = False


@dataclass(slots=True)
class _MemoryBlock:
    """What one or several values lie in: its size, and the first and last step that knows it.

    keeper: the first step that keeps it for its backward, which is the last of them to run. gradient: it has one.
    """

    size: float
    made: int
    last: int
    keeper: int | None = None
    gradient: bool = False


@dataclass(slots=True)
class Lives:
    """When the memory of a block lives. workspaces: by step; none is nothing. size: bytes of a value."""

    block: Block
    kept: KeptBytes
    is_fused: Callable[[Step], bool]
    workspaces: Mapping[int, Workspace]
    size: Bytes
    memory: dict[int, _MemoryBlock] = field(init=False)
    inside: list[float] = field(init=False)

    def __post_init__(self) -> None:
        rules = (self.kept, self.is_fused, self.workspaces, self.size)
        self.inside = [max((Lives(b, *rules).peak().bytes for b in s.blocks), default=0.0) for s in self.block.steps]
        writes = Writes(self.block)
        given = writes.memories(*(v.id for v in self.block.parameters))
        self.memory = {}
        in_loops = self._in_loops()
        for position, step in enumerate(self.block.steps):
            for read in writes.memories(*(o.value for o in step.operands)) & self.memory.keys():
                memory = self.memory[read]
                memory.last = position
                if memory.keeper is None and self.kept.stores(step):
                    memory.keeper = position
            shown = writes.memories(step.id)
            if shown & given or step.value.shape is None or step.id in in_loops:
                continue
            memory = self.memory.setdefault(min(shown), _MemoryBlock(0.0, position, position))
            memory.size = max(memory.size, self.size(step.value))
            memory.gradient |= step.value.gradient
        for held in writes.memories(*self.block.returns) & self.memory.keys():
            self.memory[held].last = len(self.block.steps)

    def _in_loops(self) -> set[int]:
        """Return the values that a fusing compiler has in registers alone."""
        readers: dict[int, list[Step | None]] = {}
        for step in self.block.steps:
            for operand in step.operands:
                readers.setdefault(operand.value, []).append(step)
        for value in self.block.returns:
            readers.setdefault(value, []).append(None)
        return {
            step.id
            for step in self.block.steps
            if self.is_fused(step)
            and all(r is not None and self.is_fused(r) and not self.kept.stores(r) for r in readers.get(step.id, ()))
        }

    def peak(self) -> Peak:
        """Return the larger of the forward's and, where gradients flow, the backward's."""
        steps = self.block.steps
        kept = sum(m.size for m in self.memory.values() if m.keeper is not None)
        highest = Peak(kept, 0.0, kept)
        for position, held in enumerate(self._held(lambda m: (m.made, len(steps) if m.keeper is not None else m.last))):
            highest = self._higher(highest, position, held, kept, False)
        if not any(s.value.gradient and s.grad_mode for s in steps):
            return highest
        # in the backward, kept memory lives until its keeper's backward, a gradient from the last reader's to the
        # maker's: positions count down; what the caller gave has gradients that stay
        saved = self._held(lambda m: (m.keeper, len(steps)) if m.keeper is not None else None)
        flowing = self._held(lambda m: (m.made, m.last) if m.gradient else None)
        stay = 0.0
        last = {o.value: n for n, step in enumerate(steps) for o in step.operands}  # whose backward is the first
        given: dict[int | None, float] = {}  # gradients of what the caller gave, by where they are made
        for value in self.block.parameters:
            given[last.get(value.id)] = given.get(last.get(value.id), 0.0) + self.size(value) * value.gradient
        for position in reversed(range(len(steps))):
            stay += given.get(position, 0.0)
            highest = self._higher(highest, position, saved[position] + flowing[position] + stay, kept, True)
        return highest

    def _held(self, life: Callable[[_MemoryBlock], tuple[int, int] | None]) -> list[float]:
        """Return the bytes held at each position, from the first and last position of each memory's life."""
        changes = [0.0] * (len(self.block.steps) + 2)
        for memory in self.memory.values():
            span = life(memory)
            if span is not None:
                changes[span[0]] += memory.size
                changes[span[1] + 1] -= memory.size
        held, total = [], 0.0
        for change in changes[: len(self.block.steps)]:
            total += change
            held.append(total)
        return held

    def _higher(self, highest: Peak, position: int, held: float, kept: float, in_backward: bool) -> Peak:
        step = self.block.steps[position]
        beside = self.workspaces.get(step.id, (0.0, 0.0))[in_backward]
        total = held + beside + self.inside[position]
        if total <= highest.bytes:
            return highest
        return Peak(total, beside, kept, step.op, step.site, in_backward)
