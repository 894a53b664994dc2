"""The sound programs: nothing is wrong with any of them, and nothing may be said to be."""

from __future__ import annotations

import fields
import idioms
import pretrained
import sequences
from program import PROGRAMS, Program

__all__ = ["corpus", "fields", "sequences"]


def corpus(seed: int, composed: int) -> tuple[list[Program], list[str]]:
    """All of them, with so many composed anew; and what is missing here."""
    missing = pretrained.enter()
    return [*PROGRAMS.values(), *idioms.programs(seed, composed)], [missing] * bool(missing)
