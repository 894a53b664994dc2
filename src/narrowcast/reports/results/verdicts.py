"""The words for what a comparison says, of a call and of the whole, and the table that gives them."""

from __future__ import annotations

EXACT, ROUND_OFF, FAULT, KERNEL, NONDETERMINISTIC, NOT_FINITE, PASSED_ON, UNKNOWN, NOT_JUDGED, NOT_COMPARED = (
    "exact", "round-off", "fault", "kernel", "nondeterministic", "not finite", "passed on", "not run alone",
    "not judged", "not compared",
)  # fmt: skip
"""Verdicts: no difference; within what one unit in the last place of its formats explains; outputs beyond that, or a
call with other arguments than another model's; a kernel beyond what bounds its error; differs between two runs of the
reference itself; NaN or infinity, made where the reference has none; the same that came with a call's inputs; random,
so that it cannot be run alone; nothing bounds the error, and no band explains it; the reference computes in the
same low formats.
"""
AT_FAULT = (NOT_FINITE, FAULT, KERNEL)
"""Verdicts of which a program is told; the worst first."""


def verdict_of(is_beyond: bool, is_not_finite: bool, has_kernel: bool, differs: bool) -> str:
    """The verdict about a comparison: of three facts the worst gives the word, and without any whether it differs.

    is_beyond: outputs or gradients are beyond their band. is_not_finite: something that ran is not, where the reference
    is. has_kernel: a kernel is beyond its bound, be outputs within their band or not.
    """
    facts = zip(AT_FAULT, (is_not_finite, is_beyond, has_kernel), strict=True)
    return next((word for word, holds in facts if holds), ROUND_OFF if differs else EXACT)
