"""Where a node of a script's graph comes from: the user's file and line."""

from __future__ import annotations

import re
from typing import Any

from narrowcast.errors import Origin
from narrowcast.runtime.sites.python_stack import is_user_file

_FRAME = re.compile(r"(.+)\((\d+)\): ")


def shown_at(node: Any) -> tuple[Origin, ...]:
    """Where a node comes from: file, line, column, the line itself and a caret below it. Empty if that is not known."""
    return shown_in(node.sourceRange())


def shown_from(node: Any) -> tuple[Origin, ...]:
    """Where a node comes from, or the first node behind it of which that is known."""
    behind = (other for other in node.owningBlock().nodes() if other.isAfter(node))
    return next(filter(None, map(shown_at, (node, *behind))), ())


def shown_in(text: str) -> tuple[Origin, ...]:
    """The same, of what TorchScript says of a place."""
    lines = text.splitlines()
    head = next((line for line in lines if line.strip().startswith('File "')), None)
    if head is None:
        frames = [found for line in lines if (found := _FRAME.match(line))]  # traced: the Python stack, innermost first
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
    """The file and line of a node; ("", 0) if they are not known."""
    found = shown_at(node)
    return (found[0].file, found[0].line) if found else ("", 0)
