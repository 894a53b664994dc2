"""Memory that kernels take beside their operands and results, from shapes.

Convolutions on a cpu: where it has no units for the format, torch unfolds what comes into columns, one per element of
the result, `(input channels) x (taps)` long (ATen's slow_conv2d, slow_conv3d and
slow_conv_transpose2d, group by group); where it has, oneDNN takes copies of the operands in blocks. What libraries
take on other devices is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from narrowcast.core.ops import CONV, op_kind
from narrowcast.programs.program import Step, Value, element_bytes
from narrowcast.runtime.devices.signature import known_shape


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
