"""The program: a graph as data, its text form, its verifier, and the edits that may change it."""

from narrowcast.program.aliases import Writes
from narrowcast.program.edits import (
    CastResult,
    CastTogether,
    Edit,
    Follow,
    Hoist,
    InsertCast,
    Move,
    Remove,
    Retarget,
    SetDtype,
    Share,
    Why,
    apply_edits,
)
from narrowcast.program.model import (
    CAST,
    ENTER,
    EXIT,
    TENSOR,
    TOGETHER,
    WEIGHT,
    Block,
    OpenedRegion,
    Operand,
    Program,
    Step,
    Value,
)
from narrowcast.program.text import parse_program, print_program
from narrowcast.program.verify import ASSIGNED, READ, verify

__all__ = [
    "ASSIGNED", "CAST", "ENTER", "EXIT", "READ", "TENSOR", "TOGETHER", "WEIGHT", "Block", "CastResult", "CastTogether",
    "Edit", "Follow", "Hoist", "InsertCast", "Move", "OpenedRegion", "Operand", "Program", "Remove", "Retarget",
    "SetDtype", "Share", "Step", "Value", "Why", "Writes", "apply_edits", "parse_program", "print_program", "verify",
]  # fmt: skip
