"""The Python source that TorchScript compiles: regions that its compiler refuses, written so that it takes them.

While `scripting` is on, each function that TorchScript parses is rewritten:

    @torch.autocast("cpu")                  def f(x):                         with region:
    def f(x):                         ->        with torch.autocast("cpu"):       if x.sum() > 0:          -> ...
        return x @ x                                return x @ x                      return x

A `with` that return, break or continue leave is pushed into the statements around those. In functions that have such
statements, TorchScript's compiler ends with an internal assertion at any `with`: there a region is marked by statements
that change nothing, `region._enabled = region._enabled` before it and `region.device = region.device` after it.
Instances of regions that the function finds in its module are written as the calls that make them, and policies, which
may be any expression, as their digests. torch's region classes forget `cache_enabled` in scripts: their calls are
written as calls of ours.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.jit import frontend as _frontend

from narrowcast.errors import Origin, ScriptError
from narrowcast.policy import as_policy
from narrowcast.scripts.policies import hold_policy
from narrowcast.sites.python_stack import is_user_file
from narrowcast.torch_surface.jit import parser_replaced

frontend: Any = _frontend
_numbers = itertools.count()
_NATIVE = ast.Constant("native")
_FRAME = re.compile(r"(.+)\((\d+)\): ")
OURS = "__narrowcast_region_ours"
"""The name of our region class in functions that TorchScript compiles."""
TORCH = "__narrowcast_torch"
"""The name of torch in them."""
_GRAD = "__narrowcast_grad_"
Signature = tuple[tuple[str, ...], dict[str, str]]
"""Of a region class: names of its arguments, and what ours is given, as source, where a call does not say it."""


@contextmanager
def rewriting(
    describe: Callable[[Any], dict[str, Any] | None],
    signature_of: Callable[[Any], Signature | None],
    as_number: Callable[[Any], int | None],
) -> Iterator[None]:
    """TorchScript parses functions through us inside; one thread at a time.

    describe: from a region object to the arguments that make it, or None for any other object.
    signature_of: from region classes to their signature, or None for any other object.
    as_number: from a dtype to the number that TorchScript writes for it, or None for any other object.
    """

    def parse_rewritten(parse: Any, function: Any) -> Any:
        parsed = parse(function)
        _Rewriter(function, parsed, describe, signature_of, as_number).run()
        return parsed

    with parser_replaced(lambda parse: partial(parse_rewritten, parse)):
        yield


class _Rewriter:
    """One function's rewriting, in its own syntax tree."""

    def __init__(self, function: Any, parsed: Any, describe: Any, signature_of: Any, as_number: Any) -> None:
        self.definition = parsed.ast.body[0]
        self.parsed = parsed
        self.describe = describe
        self.signature_of = signature_of
        self.as_number = as_number
        self.entered: set[str] = set()
        self.names = _namespace(function)
        self.local = {a.arg for a in ast.walk(self.definition) if isinstance(a, ast.arg)} | {
            n.id for n in ast.walk(self.definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }

    def run(self) -> None:
        definition = self.definition
        regions = [made for d in definition.decorator_list if (made := self._existing(d)) is not None]
        for node in [n for statement in definition.body for n in ast.walk(statement)]:
            if isinstance(node, ast.With):
                for item in node.items:
                    if not isinstance(item.context_expr, ast.Call):
                        item.context_expr = self._existing(item.context_expr) or item.context_expr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                self._make_ours(node)
        if regions:
            docstring, body = _without_docstring(definition.body)
            items = [ast.withitem(context_expr=r) for r in regions]
            definition.body = [*docstring, _at(ast.With(items=items, body=body), definition.body[0])]
        if _exits_early(definition.body):
            definition.body = self._flattened(definition.body)
        ast.fix_missing_locations(definition)

    # -- region expressions

    def _value(self, expression: ast.expr) -> Any:
        """What an expression of global names means in Python; None if it has none there."""
        names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        if names & self.local or not isinstance(expression, ast.Name | ast.Attribute | ast.Call):
            return None
        try:
            return self._evaluated(expression)
        except Exception:
            return None

    def _existing(self, expression: ast.expr) -> ast.expr | None:
        """A region that an expression means in Python, with the facts that it has there, as the call that makes it."""
        value = self._value(expression)
        facts = self.describe(value) if value is not None else None
        if facts is None:
            return None
        arguments = ", ".join(f"{k}={v!r}" for k, v in facts.items())
        return _at(ast.parse(f"{OURS}({arguments})", mode="eval").body, expression)  # type: ignore[no-any-return]

    def _with_digest(self, call: ast.Call) -> None:
        """A call of ours, in place: its policy is any Python expression, in a script it is text; so is its dtype, if
        that has a name of the user's. A script's cache is its own.
        """
        for keyword in call.keywords:
            if keyword.arg == "dtype" and (number := self.as_number(self._value(keyword.value))) is not None:
                keyword.value = _at(ast.Constant(number), keyword.value)
        call.keywords = [k for k in call.keywords if k.arg != "cache_limit_bytes"]
        for keyword in call.keywords:
            if keyword.arg == "cache_enabled" and isinstance(keyword.value, ast.Constant):
                grade = keyword.value.value
                keyword.value = _at(ast.Constant(True if isinstance(grade, str) else grade), keyword.value)
        call.keywords = [k for k in call.keywords if k.arg != "policy" or ast.unparse(k.value) != "None"]
        told = {k.arg: k.value for k in call.keywords if k.arg in ("policy", "inner")}
        if "inner" not in told and isinstance(told.get("policy", _NATIVE), ast.Constant):
            return
        try:
            value = as_policy(self._evaluated(told.get("policy", _NATIVE)))
            inner = self._evaluated(told["inner"]) if "inner" in told else None
            digest = hold_policy(value if inner is None else value.with_inner(inner))
        except Exception as error:
            raise ScriptError(
                asked="a region's policy in a script", found=f"{type(error).__name__}: {error}",
                where=(Origin(self.parsed.filename, self.parsed.file_lineno + call.lineno - 1),),
                advice="Name a policy that exists when the function is scripted.",
            ) from None  # fmt: skip
        call.keywords = [k for k in call.keywords if k.arg not in told]
        call.keywords.append(_at(ast.keyword("policy", ast.Constant(digest)), call))

    def _evaluated(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), "<region>", "eval"), dict(self.names))

    def _make_ours(self, call: ast.Call) -> None:
        """A call of a region class, torch's or ours, in place: as one of ours."""
        if isinstance(call.func, ast.Name) and call.func.id == OURS:
            return
        signature = self.signature_of(self._value(call.func))
        if signature is None:
            return
        names, defaults = signature
        found = {k: ast.parse(v, mode="eval").body for k, v in defaults.items()}
        found.update(zip(names, call.args, strict=False))
        found.update({k.arg: k.value for k in call.keywords if k.arg is not None})
        call.func = ast.Name(OURS, ast.Load())
        call.args = []
        call.keywords = [ast.keyword(k, v) for k, v in found.items()]
        _at(call, call)
        self._with_digest(call)

    # -- control flow out of a with statement

    def _flattened(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            for name in ("body", "orelse"):
                if getattr(statement, name, None) and not isinstance(statement, ast.FunctionDef):
                    setattr(statement, name, self._flattened(getattr(statement, name)))
            if isinstance(statement, ast.With):
                found += self._pushed(statement)
            else:
                found.append(statement)
        return found

    def _pushed(self, statement: ast.With) -> list[ast.stmt]:
        """A with statement as marks around those of its parts that nothing leaves."""
        made: list[ast.stmt] = []
        items: list[str] = []
        for item in statement.items:
            if self._is_no_grad(item.context_expr):
                name = f"{_GRAD}{next(_numbers)}"
                made.append(_at(ast.parse(f"{name} = {TORCH}.is_grad_enabled()").body[0], statement))
                items.append(name)
                continue
            self._check_region(item.context_expr, statement)
            name = f"__narrowcast_with_{next(_numbers)}"
            made.append(_at(ast.Assign(targets=[ast.Name(name, ast.Store())], value=item.context_expr), statement))
            if item.optional_vars is not None:
                again = ast.Assign(targets=[item.optional_vars], value=ast.Name(name, ast.Load()))
                made.append(_at(again, statement))
            items.append(name)
        return made + self._inside(items, statement.body)

    def _is_no_grad(self, expression: ast.expr) -> bool:
        return isinstance(expression, ast.Call) and self._value(expression.func) is torch.no_grad

    def _check_region(self, expression: ast.expr, statement: ast.With) -> None:
        """ScriptError for what is known to be no region: there are marks for regions alone."""
        value = self._value(expression.func) if isinstance(expression, ast.Call) else None
        if isinstance(value, type) and self.signature_of(value) is None:
            raise ScriptError(
                asked=f"a script of a function in which something leaves with {ast.unparse(expression)}",
                found="TorchScript cannot leave a with statement early, and this one is no region",
                where=(Origin(self.parsed.filename, self.parsed.file_lineno + statement.lineno - 1),),
                advice="Write the function with one return, at its end.",
            )

    def _inside(self, items: list[str], body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements, each in the regions with these names."""
        made: list[ast.stmt] = []
        whole: list[ast.stmt] = []

        def around(statements: list[ast.stmt]) -> list[ast.stmt]:
            first, last = statements[0], statements[-1]
            enter = [_at(_edge(name, AGAIN_MARK if name in self.entered else ENTER_MARK), first) for name in items]
            self.entered.update(items)
            return [*enter, *statements, *[_at(_edge(name, EXIT_MARK), last) for name in reversed(items)]]

        for statement in body:
            if not _leaves([statement]):
                whole.append(statement)
                continue
            if whole:
                made += around(whole)
                whole = []
            if isinstance(statement, ast.Return):
                if statement.value is not None and not isinstance(statement.value, ast.Name | ast.Constant):
                    name = f"__narrowcast_value_{next(_numbers)}"
                    assign = ast.Assign(targets=[ast.Name(name, ast.Store())], value=statement.value)
                    made += around([_at(assign, statement)])
                    statement.value = _at(ast.Name(name, ast.Load()), statement)
                made.append(statement)
            elif isinstance(statement, ast.Break | ast.Continue):
                made.append(statement)
            else:
                made += self._compound(items, statement, around)
        if whole:
            made += around(whole)
        return made

    def _compound(
        self, items: list[str], statement: ast.stmt, around: Callable[[list[ast.stmt]], list[ast.stmt]]
    ) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        if isinstance(statement, ast.If) and _computes(statement.test):
            name = f"__narrowcast_value_{next(_numbers)}"
            assign = ast.Assign(targets=[ast.Name(name, ast.Store())], value=statement.test)
            made += around([_at(assign, statement)])
            statement.test = _at(ast.Name(name, ast.Load()), statement)
        if isinstance(statement, ast.While) and _computes(statement.test):
            stop = ast.If(test=ast.UnaryOp(ast.Not(), statement.test), body=[ast.Break()], orelse=[])
            statement.body = [_at(stop, statement), *statement.body]
            statement.test = _at(ast.Constant(True), statement)
        for name in ("body", "orelse"):
            inner = getattr(statement, name, None)
            if inner:
                setattr(statement, name, self._inside(items, inner))
        made.append(statement)
        return made


ENTER_MARK, AGAIN_MARK, EXIT_MARK = "_enabled", "fast_dtype", "device"
"""Assigned to themselves where a region is entered, is still open after a part that leaves it, and is left."""


def _edge(name: str, mark: str) -> ast.stmt:
    """Where a region, or a part without gradients, is entered or left."""
    if name.startswith(_GRAD):
        return ast.parse(f"{TORCH}.set_grad_enabled({name if mark == EXIT_MARK else False})").body[0]
    return ast.parse(f"{name}.{mark} = {name}.{mark}").body[0]


def _exits_early(body: list[ast.stmt], top: bool = True) -> bool:
    """Whether anything but the last statement of a function leaves it, or a loop."""
    for n, statement in enumerate(body):
        if isinstance(statement, ast.Break | ast.Continue):
            return True
        if isinstance(statement, ast.Return) and not (top and n == len(body) - 1):
            return True
        if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
            inside = top and isinstance(statement, ast.With) and n == len(body) - 1
            if _exits_early(statement.body, inside) or _exits_early(getattr(statement, "orelse", []), False):
                return True
    return False


def _leaves(body: list[ast.stmt], in_loop: bool = False) -> bool:
    """Whether return, or break and continue of a loop outside, occur in the statements."""
    for statement in body:
        if isinstance(statement, ast.Return):
            return True
        if isinstance(statement, ast.Break | ast.Continue) and not in_loop:
            return True
        loop = in_loop or isinstance(statement, ast.For | ast.While)
        if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
            if _leaves(statement.body, loop) or _leaves(getattr(statement, "orelse", []), loop):
                return True
    return False


def _computes(expression: ast.expr) -> bool:
    """Whether an expression may call an op of a list: then it is computed in the region."""
    return any(
        isinstance(n, ast.Call) or (isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult | ast.Pow))
        for n in ast.walk(expression)
    )


def _without_docstring(body: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(body) > 1:
        return body[:1], body[1:]
    return [], body


def _at(node: Any, site: Any) -> Any:
    """A new node with the position of another in the source."""
    ast.copy_location(node, site)
    for child in ast.walk(node):
        if not hasattr(child, "lineno"):
            ast.copy_location(child, site)
    return node


def _namespace(function: Any) -> Mapping[str, Any]:
    """The names that a function sees: its module's, and those it closes over. A decorated one's are the original's."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = dict(getattr(function, "__globals__", {}))
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return names


# -- places ------------------------------------------------------------------------------------------------------------


def shown_at(node: Any) -> tuple[Origin, ...]:
    """Where a node comes from: file, line, column, the line itself and a caret below it. Empty if that is not known."""
    lines = node.sourceRange().splitlines()
    head = next((line for line in lines if line.strip().startswith('File "')), None)
    if head is None:
        return _shown_in_trace(lines)
    file, _, rest = head.strip().removeprefix('File "').partition('", line ')
    marks = next((n for n, line in enumerate(lines) if "~" in line and line.strip(" ~") in ("", "<--- HERE")), None)
    note = ""
    if marks:
        source, caret = lines[marks - 1], lines[marks].replace(" <--- HERE", "")
        note = f"column {caret.index('~') + 1}\n    {source}\n    {caret.replace('~', '^', 1).rstrip()}"
    return (Origin(file, int(rest.partition(" ")[0]), note),)


def _shown_in_trace(lines: list[str]) -> tuple[Origin, ...]:
    """Of a traced node, whose lines are the Python stack, the user's innermost."""
    frames = [found for line in lines if (found := _FRAME.match(line))]
    inner = next((f for f in frames if is_user_file(f[1])), frames[0] if frames else None)
    return (Origin(inner[1], int(inner[2])),) if inner else ()


def site_of(node: Any) -> tuple[str, int]:
    """The file and line of a node; ("", 0) if they are not known."""
    found = shown_at(node)
    return (found[0].file, found[0].line) if found else ("", 0)
