"""The signature of a call: what its time depends on, as text that is the same in every process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from narrowcast.core.ops import ATTENTION, CONV, COPY, GEMM, multiplications, op_kind
from narrowcast.formats import Format, fp32
from narrowcast.programs.program import CAST, Step, Value, element_bytes

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What a call does: floating operations, bytes that it reads and writes, elements of its largest tensor."""

    flops: float
    moved_bytes: float
    elements: int


@dataclass(frozen=True, slots=True)
class Signature:
    """One call with the formats and shapes of its operands.

    format:   the one that it computes in. backward: the time is that of forward and backward together.
    streamed: operands that come from memory, not from a cache, each time: weights.
    """

    op: str
    types: tuple[str, ...]
    shapes: tuple[Shape, ...]
    result: Shape
    format: Format
    constants: str = ""
    backward: bool = False
    streamed: tuple[int, ...] = ()

    @property
    def family(self) -> str:
        """The family of its op; `copy` for casts; empty for an unknown op."""
        return COPY if self.op == CAST else op_kind(self.op).family

    @property
    def text(self) -> str:
        """`aten.mm.default(fp32[8, 4], fp32[4, 2])`, with what else matters."""
        operands = ", ".join(f"{t}{list(s)}" for t, s in zip(self.types, self.shapes, strict=True))
        notes = [self.constants] if self.constants else []
        notes += [f"-> {self.format}"] if self.op == CAST else []
        notes += ["streams " + ",".join(map(str, self.streamed))] if self.streamed else []
        notes += ["with backward"] if self.backward else []
        return f"{self.op}({operands})" + "".join(f" {note}" for note in notes)

    @property
    def work(self) -> Work:
        """From shapes alone; products count two operations per multiplication."""
        sizes = [math.prod(s) for s in self.shapes]
        result = math.prod(self.result)
        width = [element_bytes(t) for t in self.types]
        moved = sum(n * w for n, w in zip(sizes, width, strict=True)) + result * self.format.bits / 8
        largest = max([result, *sizes], default=0)
        return Work(self._flops(largest), moved, largest)

    def _flops(self, largest: int) -> float:
        if self.family in (GEMM, CONV, ATTENTION):
            count = multiplications(self.op, self.shapes, [self.result])
            if count:
                return 2.0 * count
        return float(largest)


TINY_WITH_BACKWARD = Signature("aten.add.Tensor", (fp32.name,) * 2, ((16,), (16,)), (16,), fp32, backward=True)
"""What takes no time but that of calling, forwards and backwards."""


def signature_of(
    step: Step,
    operands: Sequence[Value],
    format: Format,
    weights: Sequence[int] = (),
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Signature:
    """Return the signature of a step that runs in `format`.

    operands: as the policy has them; those in a low format are taken in `format`. weights: numbers of operands that
    are streamed. sizes: what symbolic sizes represent.
    """
    floats = [n for n, v in enumerate(operands) if v.shape is not None]
    types, shapes = [], []
    for n in floats:
        value = operands[n]
        moves = value.format is not None and value.format.bits < 32 and not step.is_cast
        types.append(format.name if moves else value.type)
        shapes.append(known_shape(value.shape, sizes))
    result = known_shape(step.value.shape, sizes) if step.value.shape is not None else (shapes[0] if shapes else ())
    streamed = tuple(k for k, n in enumerate(floats) if n in weights)
    backward = step.grad_mode and any(operands[n].gradient for n in floats)
    return Signature(step.op, tuple(types), tuple(shapes), result, format, step.constants, backward, streamed)


def cast_signature(
    shape: Sequence[int | str] | None, src: Format, dst: Format, sizes: Mapping[str, int] = MappingProxyType({})
) -> Signature:
    """Return the signature of a cast, a copy if the formats are the same."""
    known = known_shape(shape, sizes)
    return Signature(CAST, (src.name,), (known,), known, dst)


def known_shape(shape: Sequence[int | str] | None, sizes: Mapping[str, int]) -> Shape:
    """Return the shape with numbers for symbolic sizes; 64 for an unknown one."""
    return tuple(size if isinstance(size, int) else sizes.get(size, 64) for size in shape or ())


# -- memory that kernels take beside their operands and results, from shapes -------------------------------------------
#
# Convolutions on a cpu: where it has no units for the format, torch unfolds what comes into columns, one per element of
# the result, `(input channels) x (taps)` long (ATen's slow_conv2d, slow_conv3d and slow_conv_transpose2d, group by
# group); where it has, oneDNN takes copies of the operands in blocks. What libraries take on other devices is not known
# here.


class Workspaces:
    """Bytes per call. emulated: by format, the families that the device has no units for. sizes: of symbolic sizes."""

    def __init__(self, emulated: Mapping[str, Set[str]], sizes: Mapping[str, int]) -> None:
        self.emulated, self.sizes = emulated, sizes

    def __call__(self, step: Step, operands: Sequence[Value]) -> tuple[float, float]:
        """What its kernel takes beside, and that of its backward. operands: in the formats in which it reads them."""
        if op_kind(step.op).family != CONV or step.value.device.partition(":")[0] != "cpu" or len(operands) < 2:
            return 0.0, 0.0
        x, weight = (known_shape(o.shape, self.sizes) for o in operands[:2])
        result = known_shape(step.value.shape, self.sizes)
        if not (len(x) == len(weight) == len(result) > 2):
            return 0.0, 0.0
        width = element_bytes(operands[0].type)
        if CONV not in self.emulated.get(operands[0].type, ()):
            return width * (math.prod(x) + math.prod(weight)), width * (math.prod(x) + math.prod(result))
        taps = math.prod(weight[2:])
        transposed = "transpose" in step.op
        places = x if transposed else result
        groups = x[1] // max(weight[0] if transposed else weight[1], 1)
        columns = 0 if taps == 1 else x[0] * weight[1] * taps * math.prod(places[2:])
        parts = math.prod(result) if groups > 1 else 0  # each group's result, before they are put together
        return width * (columns + parts), width * (columns + parts)
