"""Where a node of a script's graph comes from: the user's file and line."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from narrowcast.errors import Origin
from narrowcast.runtime.sites.graph_nodes import function_at
from narrowcast.runtime.sites.python_stack import is_user_file

_FRAME = re.compile(r"(.+)\((\d+)\): (\S*)")
_TRACER = str(Path("torch", "jit", "_trace.py"))


def shown_at(node: Any) -> tuple[Origin, ...]:
    """Return the place of a node: file, line, column, the line and a caret below it. Empty if it is not known."""
    return shown_in(node.sourceRange())


def shown_from(node: Any) -> tuple[Origin, ...]:
    """Return the place of a node, or of the first node behind it with a known one."""
    behind = (other for other in node.owningBlock().nodes() if other.isAfter(node))
    return next(filter(None, map(shown_at, (node, *behind))), ())


def functions_around(node: Any) -> tuple[str, ...]:
    """Return the user's functions, in what was traced, that met a node, the innermost first; nothing for a script's."""
    frames = (_FRAME.match(line) for line in node.sourceRange().splitlines())
    inside = takewhile(lambda frame: not frame[1].endswith(_TRACER), filter(None, frames))
    return tuple(function_at(frame[1], int(frame[2]), frame[3]) for frame in inside if is_user_file(frame[1]))


def shown_in(text: str) -> tuple[Origin, ...]:
    """Return the place in TorchScript's text about it."""
    lines = text.splitlines()
    head = next((line for line in lines if line.strip().startswith('File "')), None)
    if head is None:
        frames = [match for line in lines if (match := _FRAME.match(line))]  # traced: the Python stack, innermost first
        inner = next((f for f in frames if is_user_file(f[1])), frames[0] if frames else None)
        return (Origin(inner[1], int(inner[2])),) if inner else ()
    file, _, rest = head.strip().removeprefix('File "').partition('", line ')
    marks = next((n for n, line in enumerate(lines) if "~" in line and line.strip(" ~") in ("", "<--- HERE")), None)
    note = ""
    if marks:
        source, caret = lines[marks - 1], lines[marks].replace(" <--- HERE", "")
        note = f"column {caret.index('~') + 1}\n    {source}\n    {caret.replace('~', '^', 1).rstrip()}"
    return (Origin(file, int(rest.partition(" ")[0]), note),)


def site_of(node: Any) -> tuple[str, int]:
    """Return the file and line of a node; ("", 0) if they are not known."""
    shown = shown_at(node)
    return (shown[0].file, shown[0].line) if shown else ("", 0)
