"""The records of a ledger: casts, refusals, and how often which op ran in which formats; and blocks inside a region in
which the region's policy does not rule, with the advice about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from narrowcast.core.policy import NOWHERE, Rule, Site
from narrowcast.output.words import counted


@dataclass(frozen=True, slots=True)
class Cast:
    """One cast that autocasting caused.

    op, argument: the op that asked and its argument (`aten.linear.default`, `weight`).
    module_path, file, line: where the op was called.
    src, dst:     names of formats.
    elements, moved_bytes: size of the tensor, and what the cast reads and writes; 0 where nothing was copied.
    how:          `copied` (a tensor was made), `cached` (the weight cache had it), `shared` (a graph makes it once for
                  several readers), `inside` (the op converts itself).
    direction:    `forward`, or `backward` for the cast of the gradient.
    kind:         `weight` (a leaf that requires grad or a parameter), `input` (made outside the recording) or
                  `activation`.
    action, rule, reason, source: the rule that asked for it.
    repeated:     the same tensor had been cast to the same format before.
    number:       which call of the op asked, in its module's call, from 1; 0 where nobody counted.
    """

    op: str
    argument: str
    module_path: str
    file: str
    line: int
    src: str
    dst: str
    elements: int
    moved_bytes: int
    how: str
    direction: str
    kind: str
    action: str
    rule: str
    reason: str
    source: str
    policy: str
    repeated: bool = False
    number: int = 0

    @staticmethod
    def of(op: str, argument: str, site: Site, asked_by: Rule | None, /, **facts: Any) -> Cast:
        """Return the record of a cast that a rule asked for. facts: all other fields, and what replaces its words."""
        words = {"action": "", "rule": "", "reason": "", "source": ""}
        if asked_by is not None:
            text, reason = str(asked_by), asked_by.reason
            words = {"action": str(asked_by.action), "rule": text, "reason": reason or text, "source": asked_by.source}
        return Cast(op, argument, *site.at, **{**words, **facts})

    @property
    def site(self) -> str:
        """`file:line`, or ? if no line of the user's was on the stack."""
        return f"{self.file}:{self.line}" if self.file else "?"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that was not run, and why."""

    op: str
    module_path: str
    file: str
    line: int
    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallKind:
    """Calls that are alike: the same op at the same place of the program, decided alike, in the same formats.

    input_formats, computes, result: formats of the floating inputs, of what the op computes in, and of its output
    (`fp32` or `bf16,fp32`; empty where there are none). action is `no rule` where the policy says nothing; direction
    is `backward` for what autograd runs.
    """

    op: str
    module_path: str
    file: str
    line: int
    input_formats: str
    computes: str
    result: str
    action: str
    reason: str
    policy: str
    direction: str = "forward"


@dataclass(frozen=True, slots=True)
class EditRecord:
    """One edit that a pass made to a graph.

    kind: `insert`, `share`, `fold`, `remove` (of a cast, or of a region's edge), `set dtype`,
          or `follow` (a result has another format because an operand has).
    by:   the pass. op, argument: what the cast is for; `cast` if the edit is about a cast that was there.
    src, dst, moved_bytes: the cast's formats, and the bytes that it reads and writes; empty and 0 if sizes are symbolic
    or it is no cast. graph: which of a program's graphs.
    """

    kind: str
    by: str
    op: str
    argument: str
    module_path: str
    file: str
    line: int
    src: str
    dst: str
    moved_bytes: int
    direction: str
    action: str
    rule: str
    reason: str
    policy: str
    graph: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that is legal, and probably a mistake: what it is, and what to do instead.

    kind: `backward in a region`, `optimizer step in a region`, `left the region in a low format`, `skipped by
    autocast`, `no casts`, `weights in a low format`, `hidden policy`, `switched off`, or `rule
    without effect`.
    """

    kind: str
    what: str
    todo: str
    module_path: str
    file: str
    line: int


@dataclass(slots=True)
class Tally:
    """How often calls of one kind ran, and the bytes that they read and wrote.

    numbers: which calls of their op they were, in their modules' calls, where somebody counted. multiplications: how
    many they made (ops/multiplications.py); None where that is not known.
    """

    calls: int = 0
    moved_bytes: int = 0
    numbers: set[int] = field(default_factory=set)
    multiplications: int | None = 0

    def add(self, other: Tally) -> None:
        """Count these, too."""
        self.calls += other.calls
        self.moved_bytes += other.moved_bytes
        self.numbers |= other.numbers
        self.multiplications = both(self.multiplications, other.multiplications)


def both(a: int | None, b: int | None) -> int | None:
    """Return the sum of two counts; None if one is not known."""
    return None if a is None or b is None else a + b


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a ledger. `copied` casts moved bytes; `cached`, `shared` and `inside` ones did not."""

    casts: int
    copied: int
    cached: int
    inside: int
    forward: int
    backward: int
    repeated: int
    refusals: int
    calls: int
    cast_bytes: int
    op_bytes: int
    shared: int = 0

    @property
    def share_of_casts(self) -> float:
        """Bytes moved by casts, as a part of all bytes moved (0 to 1)."""
        moved = self.cast_bytes + self.op_bytes
        return self.cast_bytes / moved if moved else 0.0


TO_RULE_INSIDE = (
    'Give the region inner="policy" (in a policy file: inner = "policy") to have the policy hold in such blocks, too'
)

_TO_DECIDE = 'To decide about them, remove the block, and give its module a rule with action = "full".'


@dataclass(frozen=True, slots=True)
class HidingBlock:
    """A block that is opened inside a region, on its device type.

    policy: the one that it hides, being torch's own region; empty if it switches autocasting off. place: where it is
    opened; of a graph, which does not say that, the first call in it.
    """

    policy: str
    device_type: str
    site: Site = NOWHERE

    def advice(self, calls: int) -> Advice:
        """Return the advice if this many calls ran in it."""
        where = f"{self.site.file}:{self.site.line}"
        if self.policy:
            what = f"torch.autocast on {self.device_type}, at {where} inside your region, hides policy "
            what += f"{self.policy} for {counted(calls, 'call')}"
            kind, todo = "hidden policy", f"{TO_RULE_INSIDE}. Or leave it, if torch's own lists are intended there."
        else:
            what = f"the block at {where} switches autocasting on {self.device_type} off for {counted(calls, 'call')}"
            kind, todo = "switched off", f"Nothing, if it is intended: no policy reaches these calls. {_TO_DECIDE}"
        return Advice(kind, what, todo, *self.site.at)
