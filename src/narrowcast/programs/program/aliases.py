"""Which values may share memory, and where it is written to."""

from __future__ import annotations

from bisect import bisect_left

from narrowcast.programs.program.model import Block, Step


class Memories:
    """Which values may show one memory: each shows its own, until two are joined."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: dict[int, int] = {}

    def of(self, value: int) -> int:
        """Return the same number for all values that may show the same memory."""
        path = []
        while self._root.get(value, value) != value:
            path.append(value)
            value = self._root[value]
        for passed in path:
            self._root[passed] = value
        return value

    def join(self, a: int, b: int) -> None:
        """Let two values, and all that share with either, show one memory: that of `b`."""
        self._root[self.of(a)] = self.of(b)


class Writes:
    """The writes of one block by what they may reach: the memories that a value may show.

    Conservative: views of views, results of in-place ops and elements of tuples show what they are made of; what a
    higher-order op may write to is said by its operands. A list shows the memories of all that it holds, each of which
    shows its own; a step that may change one or keep something joins those that it may show and those that it takes.
    """

    def __init__(self, block: Block) -> None:
        self._memories = Memories()
        self._shown: dict[int, frozenset[int]] = {}
        self.position = {step.id: n for n, step in enumerate(block.steps)}
        self._last = len(block.steps)
        self._follow(block)
        self._at: dict[int, list[int]] = {}
        for n, step in enumerate(block.steps):
            for memory in self.memories(*(o.value for o in step.operands if o.written)):
                self._at.setdefault(memory, []).append(n)

    def _follow(self, block: Block) -> None:
        for step in block.steps:
            branches = step.blocks if not any(inner.parameters for inner in step.blocks) else ()
            for branch in branches:
                self._follow(branch)
            sources = [value for branch in branches for value in branch.returns]
            sources += [] if branches else [step.operands[n].value for n in step.aliases]
            if sources or branches:
                self._shown[step.id] = shown = frozenset().union(*map(self._first, sources))
                if not branches and _may_keep(step):
                    for memory in shown:
                        self._memories.join(memory, min(shown))

    def _first(self, value: int) -> frozenset[int]:
        return self._shown.get(value, frozenset((value,)))

    def memories(self, *values: int) -> frozenset[int]:
        """Return the numbers of all memories that values may be views of, the same for all views of one."""
        return frozenset(self._memories.of(memory) for value in values for memory in self._first(value))

    def share_memory(self, a: int, b: int) -> bool:
        """Return whether two values may be views of one memory."""
        return not self.memories(a).isdisjoint(self.memories(b))

    def is_written(self, value: int, after: int, before: int) -> bool:
        """Return whether a step between two steps (ids; neither of them counts) may write to what the value shows."""
        start, end = self.position.get(after, -1), self.position.get(before, self._last)
        return self._count(value, end) > self._count(value, start + 1)

    def count_before(self, value: int, step: int) -> int:
        """Return how many writes to what the value shows come before a step."""
        return self._count(value, self.position.get(step, self._last))

    def is_written_after(self, value: int, step: int) -> bool:
        """Return whether anything after a step may write to what the value shows."""
        return self.is_written(value, step, -1)

    def _count(self, value: int, end: int) -> int:
        return sum(bisect_left(self._at.get(memory, ()), end) for memory in self.memories(value))


def reaching(blocks: tuple[Block, ...]) -> set[int]:
    """Return the values whose memory may be among what blocks return, or put into something."""
    values = {value for block in blocks for value in block.returns}
    for block in blocks:
        for step in reversed(block.steps):
            if step.id in values or _may_keep(step):
                values.update(step.operands[n].value for n in step.aliases)
    return values


def _may_keep(step: Step) -> bool:
    """Return whether what a step takes may be in something else that it takes, after it."""
    return step.writes or bool(step.blocks) or "order" in step.effects
