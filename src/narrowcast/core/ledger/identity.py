"""The identity of a call: the same in eager, compiled, exported and scripted code, and in every run of a program."""

from __future__ import annotations

import re
from dataclasses import dataclass

from narrowcast.errors import RunError

FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"


@dataclass(frozen=True, slots=True, order=True)
class CallId:
    """Which call of a program: as text `encoder.layer.0.attention aten.matmul.default #2`.

    module_path: of the innermost module around it, empty outside of modules. op: its id. number: from 1, which call of
    this op it is inside one call of the module. module_call: from 1, which call of the module. direction:
    forward, backward, or recomputation (a forward that a checkpoint repeats in the backward). A backward call has the
    path of the forward call whose gradients it computes.
    """

    module_path: str
    op: str
    number: int = 1
    module_call: int = 1
    direction: str = FORWARD

    def __str__(self) -> str:
        index = f" module call {self.module_call}" if self.module_call > 1 else ""
        direction = "" if self.direction == FORWARD else f" {self.direction}"
        return f"{self.module_path} {self.op} #{self.number}{index}{direction}".strip()

    @property
    def is_sum_of_gradients(self) -> bool:
        """Whether autograd adds up a tensor's gradients: in which order, and formats, depends on the casts."""
        return self.direction == BACKWARD and self.op == "aten.add.Tensor"

    @property
    def adds_to_gradient(self) -> bool:
        """Whether autograd adds to a gradient that a parameter has already, as one that was not cleared."""
        return self.direction == BACKWARD and self.op == "aten.add_.Tensor"

    @staticmethod
    def parse(text: str) -> CallId:
        """Return the identity written as a text; raise RunError for other text."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            advice = "Write MODULE_PATH OP #NUMBER, as encoder.layer.0.attention aten.matmul.default #2."
            raise RunError(f"a call named {text!r}", "no identity of a call", advice=advice)
        path, op, number, index, direction = match.groups()
        return CallId(path or "", op, int(number), int(index or 1), direction or FORWARD)


_TEXT = re.compile(r"(?:(.*) )?([\w.:]+) #(\d+)(?: module call (\d+))?(?: (backward|recomputation))?")
