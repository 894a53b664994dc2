"""What expressions in the source of a function mean in Python, as far as that is known before it runs, and where they
stand.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from narrowcast.errors import Origin, ScriptError
from narrowcast.frontends.scripts.decorated import namespace

OURS, TORCH = "__narrowcast_region_ours", "__narrowcast_torch"
"""The names of our region class, and of torch, in functions that TorchScript compiles."""
UNKNOWN = object()


class Meanings:
    """Of the expressions of one function."""

    def __init__(self, function: Any, parsed: Any) -> None:
        """parsed: what TorchScript has parsed of it."""
        self.parsed = parsed
        definition = parsed.ast.body[0]
        self.names = {**namespace(function), TORCH: torch}
        stored = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.local = {a.arg for a in ast.walk(definition) if isinstance(a, ast.arg)} | stored
        self.owner = ""  # the name of the object whose method this is: what it holds is known
        owner, arguments = getattr(function, "__self__", None), definition.args.args
        if owner is not None and arguments and arguments[0].arg not in stored:
            self.owner = arguments[0].arg
            self.local.discard(self.owner)
            self.names[self.owner] = owner

    def value(self, expression: ast.expr | None) -> Any:
        """What an expression of names that are known means in Python; UNKNOWN if that is known only when it runs."""
        if expression is None or isinstance(expression, ast.Starred):
            return UNKNOWN
        names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        calls = any(isinstance(n, ast.Call) for n in ast.walk(expression))
        if names & self.local or (calls and self.owner in names):
            return UNKNOWN
        try:
            return self.evaluated(expression)
        except Exception:
            return UNKNOWN

    def constant(self, expression: ast.expr | None) -> Any:
        """The same, without what the object of a method holds: that may be another when the script runs."""
        names = set() if expression is None else {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        return UNKNOWN if self.owner in names else self.value(expression)

    def evaluated(self, expression: ast.expr) -> Any:
        """What an expression means; raises what it raises."""
        return eval(compile(ast.Expression(expression), "<region>", "eval"), dict(self.names))

    def error(self, asked: str, found: str, place: ast.expr | ast.stmt, advice: str) -> ScriptError:
        """With the line, and a caret below the place."""
        lines = self.parsed.source.splitlines()
        text, first = lines[place.lineno - 1], place.col_offset + len(lines[0]) - len(lines[0].lstrip())
        note = f"column {first + 1}\n    {text}\n    {' ' * first}^"
        where = Origin(self.parsed.filename, self.parsed.file_lineno + place.lineno - 1, note)
        return ScriptError(asked, found, (where,), advice)
