"""Numbers that paired calls were given: which are others in b, and which only stand in another place."""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.sides import Side

_MASKED = -1e4
_FACTORS = {"alpha": ("other", "mat1", "mat2", "batch1", "batch2", "mat", "vec"), "beta": ("self",)}
"""By number: the operands of which it is a factor."""
_LAYOUTS = ("keepdim", "batch_first", "bidirectional", "reverse")
"""They say how values lie, or in how many calls they are computed: what another one gives differs by its values."""
_NEAR = 0.25
"""So near is what one program multiplies by a number before a call to what the other multiplies in it, in logarithms:
runs in low formats lead apart.
"""


def other_numbers(pair: Aligned, scaled: set[str]) -> list[tuple[str, str, str]]:
    """Return the numbers of two calls of one kind that are others: name, in a, in b. scaled: those left out."""
    a, b = (dict(bundles[0].call.given) for bundles in (pair.a, pair.b))
    names = [name for name in a if name in b and name not in scaled and name not in _LAYOUTS]
    return [(name, a[name], b[name]) for name in names if a[name] != b[name] and is_number(a[name], b[name])]


def scaled_before(sides: Sequence[Side], pair: Aligned) -> set[str]:
    """Return the numbers by which calls multiply operands, and these operands, where one program multiplies before the
    call as the other does in it: multiplied they are nearer than as they are.
    """
    given, read = ([dict(getattr(x[0].call, part)) for x in (pair.a, pair.b)] for part in ("given", "inputs"))
    found: set[str] = set()
    for factor, operands in _FACTORS.items():
        names = [name for name in operands if all(name in of for of in read)]
        x, y = (of.get(factor, "1") for of in given)
        if not names or x == y or not is_number(x, y) or not all(map(_is_factor, (x, y))):
            continue
        rms = [math.prod(side.piece(0, of[n]).rms for n in names) for side, of in zip(sides, read, strict=True)]
        plain = math.log(rms[0] / rms[1]) if min(rms) > 0 else 0.0
        if abs(plain + math.log(abs(float(x) / float(y)))) < min(abs(plain) / 2, _NEAR):
            found |= {factor, *names}
    return found


def _is_factor(text: str) -> bool:
    try:
        return float(text) != 0
    except ValueError:  # a flag, or a word
        return False


def is_number(a: str, b: str) -> bool:
    """Return whether two texts are different floats, flags or words; whole numbers are sizes, which layouts change, and
    numbers that fill what is masked leave the same of a softmax.
    """
    for text in (a, b):
        if text.startswith("'"):
            return True
        try:
            float(text)
        except ValueError:
            return {a, b} == {"True", "False"}
    if max(float(a), float(b)) <= _MASKED:
        return False
    return not math.isclose(float(a), float(b), rel_tol=1e-6) and any(mark in text for text in (a, b) for mark in ".en")
