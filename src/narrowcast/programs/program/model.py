"""The program: the IR-neutral picture of a graph.

A program is a block of steps. A step is a call, a cast, or the edge of a region; it makes one value, which has the
step's id. Programs are immutable: passes return edits (edits.py), and applying these gives the next program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from narrowcast.core.decide import Region
from narrowcast.core.policy import NOWHERE, Site
from narrowcast.formats import FORMATS, Format

CAST = "cast"
BACK = "cast.back"
TOGETHER = "cast.together"
WEIGHT = "cast.weight"
TENSOR = "tensor"
EXACTLY = "exactly"
ENTER = "region.enter"
EXIT = "region.exit"


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a value before the program runs.

    type:     name of a floating format (`bf16`), of another element type (`i64`, `bool`), `tensor` if only the running
              program knows, or of what is no tensor (`tuple`, `int`, `none`).
    shape:    sizes, a text where a size is symbolic; None if the value is no tensor.
    gradient: autograd may follow it.
    weight:   an fp32 leaf that requires grad: what autocast's weight cache keeps.
    """

    id: int
    type: str
    shape: tuple[int | str, ...] | None = None
    device: str = ""
    gradient: bool = False
    weight: bool = False

    @property
    def format(self) -> Format | None:
        """The floating format; None for everything else."""
        return FORMATS.get(self.type) if self.shape is not None else None

    @property
    def elements(self) -> int:
        """Number of elements; 0 if a size is symbolic or it is no tensor."""
        if self.shape is None or any(isinstance(size, str) for size in self.shape):
            return 0
        return math.prod(size for size in self.shape if isinstance(size, int))

    @property
    def bytes(self) -> int:
        """Size in memory; 0 where `elements` is."""
        return self.elements * element_bytes(self.type)


def element_bytes(type: str) -> int:
    """Return the bytes of one element: of a floating format (`bf16`), or of another element type (`i64`, `bool`)."""
    if type in FORMATS:
        return FORMATS[type].bits // 8
    digits = "".join(c for c in type if c.isdigit())
    return int(digits) // 8 if digits else 1


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that a step reads: the name of the op's argument (a list's elements share it), and the value's id."""

    name: str
    value: int
    written: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a program.

    value:     what it makes; its id is the step's.
    op:        an op id (`aten.mm.default`), `cast` (`constants` is `exactly` if fp64 is cast, too, where only the
               running program knows what comes), `cast.back` (of the first operand, to the format of the first of the
               others that floats), `cast.together` (of several values to the format that they have in common, found
               when it runs; makes a tuple), `cast.weight` (if what comes turns out to be a weight; gives it as it is
               otherwise; `constants` is the format), `region.enter`, `region.exit`, or another callable.
    constants: the other arguments, as text.
    given:     names of arguments that were passed and are no tensors (`dtype` matters).
    computes:  False for views, copies, conversions, factories and whatever writes.
    region:    number of the region that it runs in, in `Program.regions`; None if there is none.
    others:    numbers of the regions around that one for other device types, where nobody knows the device.
    grad_mode: whether autograd records here.
    direction: forward, or backward; of a joint graph also dgrad and wgrad, where that is known.
    aliases:   positions of operands whose memory the result may share.
    effects:   `random`, `order` (may be neither removed nor repeated), or none.
    blocks:    bodies of a higher-order op.
    number:    which call of the op it is in its module's call, from 1; 0 where that is not known before it runs.
    """

    value: Value
    op: str
    operands: tuple[Operand, ...] = ()
    constants: str = ""
    given: frozenset[str] = frozenset()
    computes: bool = False
    region: int | None = None
    grad_mode: bool = True
    direction: str = "forward"
    aliases: tuple[int, ...] = ()
    effects: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    site: Site = NOWHERE
    others: tuple[int, ...] = ()
    number: int = 1

    @property
    def id(self) -> int:
        """The number of the value, unique in the program."""
        return self.value.id

    @property
    def is_cast(self) -> bool:
        """Whether it does nothing but change the format."""
        return self.op == CAST

    @property
    def writes(self) -> bool:
        """Whether it changes a value that exists."""
        return any(o.written for o in self.operands)


@dataclass(frozen=True, slots=True)
class Block:
    """Steps in order, the values that come in, and the ids of those that go out."""

    name: str
    parameters: tuple[Value, ...]
    steps: tuple[Step, ...]
    returns: tuple[int, ...]

    def walk(self) -> Iterator[tuple[Block, Step]]:
        """Yield every step with its block, those of inner blocks before the step that has them."""
        for step in self.steps:
            for inner in step.blocks:
                yield from inner.walk()
            yield self, step


@dataclass(frozen=True, slots=True)
class OpenedRegion:
    """A region that steps run in.

    policy:  digest of its policy. session: regions nested in one outermost region share a weight cache, and this.
    open:    what only the running program knows: `enabled` or `low` (`facts` then has what holds if it is on, and the
             device's default), or `device` (whether a tensor is on the region's).
    """

    facts: Region
    policy: str
    session: int = 0
    open: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A named block, and the regions that its steps run in."""

    name: str
    body: Block
    regions: tuple[OpenedRegion, ...] = ()

    @cached_property
    def values(self) -> dict[int, Value]:
        """Every value by its id."""
        values = {v.id: v for v in self.body.parameters}
        for _, step in self.body.walk():
            for inner in step.blocks:
                values.update((v.id, v) for v in inner.parameters)
            values[step.id] = step.value
        return values

    @cached_property
    def steps(self) -> dict[int, Step]:
        """Every step by its id, in the order of the program, those of inner blocks first."""
        return {step.id: step for _, step in self.body.walk()}

    def open_region(self, step: Step) -> int | None:
        """Return the number of the step's region, if only the running program knows some of that region's facts."""
        is_known = step.region is None or not self.regions[step.region].open
        return None if is_known else step.region

    def casting(self, cast: Step) -> tuple[str, int | None]:
        """Return the device type and the open region, which casts of one tensor must share to be made once.

        The device type whose tensors they cast: the tensor's, or the region's where only the running program knows the
        tensor's. And the region, if only the running program knows more of it than that.
        """
        device_type = self.values[cast.operands[0].value].device
        if cast.region is None:
            return device_type, None
        region = self.regions[cast.region]
        return device_type or region.facts.device_type, None if set(region.open) <= {"device"} else cast.region

    def casts(self) -> list[Step]:
        """Return all casts in order."""
        return [step for step in self.steps.values() if step.is_cast]
