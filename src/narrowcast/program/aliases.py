"""Which values may share memory, and where it is written to."""

from __future__ import annotations

from bisect import bisect_right

from narrowcast.program.model import Block


class Memories:
    """Which values may show one memory: each shows its own, until two are joined."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: dict[int, int] = {}

    def of(self, value: int) -> int:
        """The same number for all values that may show the same memory."""
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
    """The writes of one block by what they may reach: values that may share memory count as one.

    Conservative: views of views, results of in-place ops and elements of tuples share; what a higher-order op may
    write to is said by its operands.
    """

    def __init__(self, block: Block) -> None:
        self._memories = Memories()
        self.position = {step.id: n for n, step in enumerate(block.steps)}
        self._last = len(block.steps)
        for step in block.steps:
            for operand in step.aliases:
                self._memories.join(step.id, step.operands[operand].value)
        self._at: dict[int, list[int]] = {}
        for n, step in enumerate(block.steps):
            for o in step.operands:
                if o.written:
                    self._at.setdefault(self._memories.of(o.value), []).append(n)

    def memory(self, value: int) -> int:
        """The same number for values that may be views of one memory."""
        return self._memories.of(value)

    def share_memory(self, a: int, b: int) -> bool:
        """Whether two values may be views of one memory."""
        return self._memories.of(a) == self._memories.of(b)

    def is_written(self, value: int, after: int, before: int) -> bool:
        """Whether a step between two steps (ids; neither of them counts) may write to what the value shows."""
        at = self._at.get(self._memories.of(value))
        if not at:
            return False
        start, end = self.position.get(after, -1), self.position.get(before, self._last)
        following = bisect_right(at, start)
        return following < len(at) and at[following] < end

    def count_before(self, value: int, step: int) -> int:
        """How many writes to what the value shows come before a step."""
        at = self._at.get(self._memories.of(value))
        return bisect_right(at, self.position.get(step, self._last) - 1) if at else 0

    def is_written_after(self, value: int, step: int) -> bool:
        """Whether anything after a step may write to what the value shows."""
        return self.is_written(value, step, -1)


def reaching(blocks: tuple[Block, ...]) -> set[int]:
    """The values whose memory may be among what blocks return."""
    found = {value for block in blocks for value in block.returns}
    for block in blocks:
        for step in reversed(block.steps):
            if step.id in found:
                found.update(step.operands[n].value for n in step.aliases)
    return found
