"""Functions that leave a with statement early, written so that TorchScript takes them.

A `with` that return, break or continue leave is pushed into the statements around those. In functions that have such
statements, TorchScript's compiler ends with an internal assertion at any `with`: there a region is marked by statements
that change nothing (below). What a condition or an iterable computes is in the region, and stands where it was written,
so that the compiler still concludes from `x is not None and x.dim() > 1` what it concludes in Python's own order.

    with region:                                       region._enabled = region._enabled
        if x is not None and x.sum() > 0:      ->      if x is not None and x.sum() > 0:
            return x                                       region.cached = region.cached
                                                           return x
"""

from __future__ import annotations

import ast
import itertools
from typing import Any

import torch

from narrowcast.errors import Origin, ScriptError
from narrowcast.frontends.scripts.decorated import namespace, signature_of
from narrowcast.frontends.scripts.region_facts import Node, region_class
from narrowcast.runtime.torch_surface.jit import NONE

OURS, TORCH = "__narrowcast_region_ours", "__narrowcast_torch"
"""The names of our region class, and of torch, in functions that TorchScript compiles."""
UNKNOWN = object()


class Meanings:
    """What the expressions of one function mean in Python, as far as that is known before it runs; and their lines."""

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
        """Return what an expression of known names means in Python; UNKNOWN if that is known only when it runs."""
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
        """Return an expression's value, without what the object of a method holds, which may differ in the script."""
        names = set() if expression is None else {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        return UNKNOWN if self.owner in names else self.value(expression)

    def evaluated(self, expression: ast.expr) -> Any:
        """Return what an expression means; raise what it raises."""
        return eval(compile(ast.Expression(expression), "<region>", "eval"), dict(self.names))

    def error(self, asked: str, found: str, place: ast.expr | ast.stmt, advice: str) -> ScriptError:
        """Return a ScriptError with the line, and a caret below the place."""
        lines = self.parsed.source.splitlines()
        text, first = lines[place.lineno - 1], place.col_offset + len(lines[0]) - len(lines[0].lstrip())
        note = f"column {first + 1}\n    {text}\n    {' ' * first}^"
        where = Origin(self.parsed.filename, self.parsed.file_lineno + place.lineno - 1, note)
        return ScriptError(asked, found, (where,), advice)


# -- with statements, as marks -----------------------------------------------------------------------------------------


ENTER_MARK, AGAIN_MARK, EXIT_MARK, BRANCH_MARK = "_enabled", "fast_dtype", "device", "cached"
"""Assigned to themselves where a region is entered, is still open after a part that leaves it, and is left; and at the
begin of each branch or loop body where it was left before that, after the condition."""
_GRAD = "__narrowcast_grad_"
_WITHOUT_OPS = ("range", "enumerate", "zip", "len", "isinstance", "hasattr", "getattr", "is_scripting", "dim", "size")
_numbers = itertools.count()


def exits_early(body: list[ast.stmt]) -> bool:
    """Return whether anything but the last statement of a function leaves it, or a loop."""
    leaving = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Return | ast.Break | ast.Continue)]
    last = body[-1]
    while isinstance(last, ast.With):
        last = last.body[-1]
    return any(node is not last for node in leaving)


class Flattener:
    """One function's with statements, as marks; there are marks for regions alone."""

    def __init__(self, meanings: Meanings) -> None:
        self.meanings = meanings
        self.entered: set[str] = set()

    def flattened(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements without `with`."""
        flat: list[ast.stmt] = []
        for statement in body:
            for name in ("body", "orelse"):
                if getattr(statement, name, None) and not isinstance(statement, ast.FunctionDef):
                    setattr(statement, name, self.flattened(getattr(statement, name)))
            if isinstance(statement, ast.With):
                flat += self._pushed(statement)
            else:
                flat.append(statement)
        return flat

    def _pushed(self, statement: ast.With) -> list[ast.stmt]:
        """Return a with statement as marks around those of its parts that nothing leaves; what is no region stays."""
        for n, item in enumerate(statement.items):
            if self._is_other(item.context_expr):
                if _leaves(statement.body):
                    asked = f"a with statement in a script, {ast.unparse(item.context_expr)}"
                    found = "a return, break or continue leaves it, and TorchScript knows that of regions alone"
                    raise self.meanings.error(asked, found, item.context_expr, "Return behind the with statement.")
                outer, inner = (ast.With(items=i, body=[]) for i in (statement.items[:n], statement.items[n + 1 :]))
                inner.body = statement.body
                statement.items, statement.body = [item], self._pushed(inner) if inner.items else inner.body
                outer.body = [statement]
                return self._pushed(at(outer, statement)) if outer.items else outer.body
        kept_items: list[ast.stmt] = []
        items: list[str] = []
        for item in statement.items:
            if self._is_no_grad(item.context_expr):
                name = f"{_GRAD}{next(_numbers)}"
                kept_items.append(at(ast.parse(f"{name} = {TORCH}.is_grad_enabled()").body[0], statement))
                items.append(name)
                continue
            name, keep = kept("with", item.context_expr, statement)
            kept_items.append(keep)
            if item.optional_vars is not None:
                again = ast.Assign(targets=[item.optional_vars], value=ast.Name(name, ast.Load()))
                kept_items.append(at(again, statement))
            items.append(name)
        return kept_items + self._inside(items, statement.body)

    def _inside(self, items: list[str], body: list[ast.stmt]) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        whole: list[ast.stmt] = []

        def close() -> None:
            if whole:
                statements.extend([*self._edges(items, whole[0]), *whole, *_exits(items, EXIT_MARK, whole[-1])])
                whole.clear()

        for statement in body:
            if isinstance(statement, ast.Return):
                whole += _hoisted(statement)
            if not _leaves([statement]):
                whole.append(statement)
                continue
            close()
            if isinstance(statement, ast.Return | ast.Break | ast.Continue):
                statements.append(statement)
            else:
                statements += self._compound(items, statement)
        close()
        return statements

    def _compound(self, items: list[str], statement: Any) -> list[ast.stmt]:
        edges: list[ast.stmt] = []
        is_if, asked = isinstance(statement, ast.If), getattr(statement, "test", getattr(statement, "iter", None))
        if isinstance(statement, ast.While) and _computes(statement.test):
            branch = ast.If(test=statement.test, body=statement.body, orelse=[ast.Break()])
            statement.body, statement.test = [at(branch, statement)], at(ast.Constant(True), statement)
        elif not isinstance(statement, ast.While) and asked is not None and _computes(asked):
            edges += self._edges(items, statement)
        marked = bool(edges)
        if not is_if and not self.entered.issuperset(items):  # one region for all steps of the loop
            edges = [*self._edges(items, statement), *_exits(items, EXIT_MARK, statement)]
        for name in ("body", "orelse"):
            inner = self._inside(items, getattr(statement, name, []))
            if marked and (is_if or inner):
                inner = [*_exits(items, BRANCH_MARK, statement), *inner]
            if inner:
                setattr(statement, name, inner)
        return [*edges, statement]

    def _edges(self, items: list[str], place: ast.stmt) -> list[ast.stmt]:
        edges = [at(_edge(name, AGAIN_MARK if name in self.entered else ENTER_MARK), place) for name in items]
        self.entered.update(items)
        return edges

    def _is_no_grad(self, expression: ast.expr) -> bool:
        return isinstance(expression, ast.Call) and self.meanings.value(expression.func) is torch.no_grad

    def _is_other(self, expression: ast.expr) -> bool:
        value = self.meanings.value(expression.func) if isinstance(expression, ast.Call) else None
        is_class = isinstance(value, type) and value is not torch.no_grad
        return is_class and signature_of(value) is None


def _exits(items: list[str], mark: str, place: ast.stmt) -> list[ast.stmt]:
    return [at(_edge(name, mark), place) for name in reversed(items)]


def _edge(name: str, mark: str) -> ast.stmt:
    """Return the statement by which a region, or a part without gradients, is entered or left."""
    if name.startswith(_GRAD):
        is_left = mark in (EXIT_MARK, BRANCH_MARK)
        return ast.parse(f"{TORCH}.set_grad_enabled({name if is_left else False})").body[0]
    return ast.parse(f"{name}.{mark} = {name}.{mark}").body[0]


def _hoisted(statement: ast.Return) -> list[ast.stmt]:
    """Return the assignments of what a return computes; it then returns their names, in the same tuple or list."""
    assignments: list[ast.stmt] = []

    def hoist(value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Tuple | ast.List):
            value.elts = [hoist(element) for element in value.elts]
        elif _computes(value):
            name, keep = kept("value", value, statement)
            assignments.append(keep)
            return at(ast.Name(name, ast.Load()), statement)  # type: ignore[no-any-return]
        return value

    if statement.value is not None:
        statement.value = hoist(statement.value)
    return assignments


def kept(what: str, value: ast.expr, place: ast.stmt) -> tuple[str, ast.stmt]:
    """Return a new name, and the statement that assigns it a value."""
    name = f"__narrowcast_{what}_{next(_numbers)}"
    return name, at(ast.Assign(targets=[ast.Name(name, ast.Store())], value=value), place)


def _leaves(body: list[ast.stmt], in_loop: bool = False) -> bool:
    """Return whether return, or break and continue of a loop outside, occur in the statements."""
    for statement in body:
        if isinstance(statement, ast.Return) or (isinstance(statement, ast.Break | ast.Continue) and not in_loop):
            return True
        loop = in_loop or isinstance(statement, ast.For | ast.While)
        if isinstance(statement, ast.If | ast.For | ast.While | ast.With):
            if _leaves(statement.body, loop) or _leaves(getattr(statement, "orelse", []), loop):
                return True
    return False


def _computes(expression: ast.expr) -> bool:
    """Return whether an expression may call an op: then it is computed in the region."""
    if isinstance(expression, ast.Call):
        called = getattr(expression.func, "attr", getattr(expression.func, "id", ""))
        return called not in _WITHOUT_OPS or any(map(_computes, (*expression.args, expression.func)))
    if isinstance(expression, ast.BinOp | ast.Subscript):
        return True
    if isinstance(expression, ast.UnaryOp) and not isinstance(expression.op, ast.Not):
        return not isinstance(expression.operand, ast.Constant)
    if isinstance(expression, ast.Compare) and not all(isinstance(o, ast.Is | ast.IsNot) for o in expression.ops):
        return not all(isinstance(e, ast.Constant) or _counts(e) for e in (expression.left, *expression.comparators))
    return any(_computes(child) for child in ast.iter_child_nodes(expression) if isinstance(child, ast.expr))


def _counts(expression: ast.expr) -> bool:
    """Return whether it is a number of Python's, and no tensor."""
    called = getattr(expression, "func", None)
    return getattr(called, "attr", getattr(called, "id", "")) in ("dim", "size", "len") and not _computes(expression)


def at(node: Any, place: Any) -> Any:
    """Return a new node with the position of another in the source."""
    return ast.fix_missing_locations(ast.copy_location(node, place))


# -- what becomes of the marks in a graph ------------------------------------------------------------------------------


def make_edges(graph: Any) -> None:
    """Turn the marks of regions (leaving.py) into the nodes that with statements have. Other passes drop marks."""
    _make_edges_in(graph, graph.block(), None, [])


def _make_edges_in(graph: Any, block: Any, owner: Node | None, around: list[int]) -> None:
    """Make the edges in a block. owner: the node of the block. around: the objects entered in that node's block."""
    entered: list[int] = []
    for node in list(block.nodes()):
        for inner in node.blocks():
            _make_edges_in(graph, inner, node, entered)
        edge = _mark_of(node) if node.kind() == "prim::SetAttr" else None
        if edge is None:
            continue
        key, place = node.inputsAt(0).unique(), node
        if edge == BRANCH_MARK and key not in entered:  # the condition ends before the branches
            place = owner if key in around else None
        if place is not None:
            leaves = edge in (EXIT_MARK, BRANCH_MARK)
            edge_node = graph.create("prim::Exit" if leaves else "prim::Enter", [node.inputsAt(0)], 1)
            edge_node.output().setType(NONE if leaves else node.inputsAt(0).type())
            if edge == AGAIN_MARK:
                edge_node.s_("name", AGAIN_MARK)
            edge_node.copyMetadata(node)
            edge_node.insertBefore(place)
            open_here = entered if place is node else around
            open_here.remove(key) if leaves else open_here.append(key)
        node.destroy()


def _mark_of(node: Node) -> str | None:
    read = node.inputsAt(1).node()
    if region_class(node.inputsAt(0)) is None or read.kind() != "prim::GetAttr" or read.s("name") != node.s("name"):
        return None
    if read.input().unique() != node.inputsAt(0).unique():
        return None
    return node.s("name") if node.s("name") in (ENTER_MARK, AGAIN_MARK, EXIT_MARK, BRANCH_MARK) else None
