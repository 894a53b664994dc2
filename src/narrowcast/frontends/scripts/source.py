"""The Python source that TorchScript compiles: regions that its compiler refuses, written so that it takes them.

While `rewriting` is on, each function that TorchScript parses is rewritten:

    @torch.autocast("cpu")              def f(x):
    def f(x):                   ->          with region:
        return x @ x                            return x @ x

The regions that decorate a function are read off the function (decorated.py), those that it finds in its module, its
closure or its object are written as the calls that make them, and policies, which may be any expression, as their
digests. torch's region classes forget `cache_enabled` in scripts: their calls are written as calls of ours. A region
whose device type only the running script knows is written once for each device type that is possible, behind an `if`.
With statements that something leaves early are written as marks (leaving.py).
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from narrowcast.core.policy import DEVICE_TYPES, as_policy
from narrowcast.errors import NarrowcastError
from narrowcast.formats import fp32 as _fp32
from narrowcast.frontends.scripts.decorated import described, is_region, regions_around, signature_of, undecorated
from narrowcast.frontends.scripts.leaving import OURS, TORCH, UNKNOWN, Flattener, Meanings, at, exits_early, kept
from narrowcast.frontends.scripts.region_facts import hold_policy, number_of
from narrowcast.runtime.torch_bridge import FORMATS, to_dtype
from narrowcast.runtime.torch_surface.jit import ScriptFunction, ScriptMethod, parser_replaced

_is_scripting: Any = vars(torch.jit)["is_scripting"]
_SPELT = "Write them out, each by its name: with torch.autocast(device_type=..., dtype=...): ..."
_WITH = "Use a with statement: with torch.autocast(...): ..."


def rewriting(device_types: tuple[str, ...]) -> AbstractContextManager[None]:
    """Let TorchScript parse functions through us inside; one thread at a time.

    device_types: those that a region may take where only the running script knows which.
    """

    def parse_rewritten(parse: Any, function: Any) -> Any:
        parsed = parse(undecorated(function))  # of a decorated function torch names the decorator's file
        _Rewriter(function, parsed, device_types).run()
        return parsed

    return parser_replaced(lambda parse: partial(parse_rewritten, parse))


class _Rewriter:
    def __init__(self, function: Any, parsed: Any, device_types: tuple[str, ...]) -> None:
        self.function = function
        self.definition = parsed.ast.body[0]
        self.file, self.first_line = parsed.filename, parsed.file_lineno
        self.device_types = device_types
        self.meanings = Meanings(function, parsed)
        self.value, self.error = self.meanings.value, self.meanings.error

    def run(self) -> None:
        definition = self.definition
        around = regions_around(self.function)
        decorators = definition.decorator_list
        places = decorators if len(decorators) == len(around) else [definition.body[0]] * len(around)
        calls = [self._as_call(region, place) for region, place in zip(around, places, strict=True)]
        assigned = [n for n in ast.walk(definition) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)]
        assigned = [n for n in assigned if signature_of(self.value(n.value.func)) is not None]  # type: ignore[attr-defined]
        self.made = {t.id for n in assigned for t in n.targets if isinstance(t, ast.Name)}
        definition.body = self._per_device(definition.body)
        within = [n for s in definition.body for n in ast.walk(s) if isinstance(n, ast.With)]
        for item in [item for node in within for item in node.items]:
            item.context_expr = self._existing(item.context_expr) or item.context_expr
        for node in [n for statement in definition.body for n in ast.walk(statement)]:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                self._check_called(node)
                self._make_ours(node)
        if calls:
            first, *rest = definition.body
            is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and rest
            docstring, body = ([first], rest) if is_docstring else ([], [first, *rest])
            items = [ast.withitem(context_expr=region) for region in calls]
            definition.body = [*docstring, at(ast.With(items=items, body=body), first)]
        if exits_early(definition.body):
            definition.body = Flattener(self.meanings).flattened(definition.body)
        ast.fix_missing_locations(definition)

    # -- region expressions

    def _existing(self, expression: ast.expr) -> ast.expr | None:
        """Return a region that an expression means in Python as the call that makes it; None for what makes its own."""
        if isinstance(expression, ast.Call):
            function = self.value(expression.func)
            home = getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", ""))
            if home == nullcontext.__module__ and function is not nullcontext:  # what contextmanager decorates, too
                asked = f"a with statement in a script, {ast.unparse(expression)}"
                found = "TorchScript cannot compile this context manager"
                advice = "Open the region itself, with torch.autocast(...): ..., and write out what else it does."
                raise self.error(asked, found, expression, advice)
            starred = any(isinstance(a, ast.Starred) for a in expression.args)
            whole = starred or not all(k.arg for k in expression.keywords)
            made_here = hasattr(function, "__code__") or (signature_of(function) is not None and not whole)
            if function is UNKNOWN or made_here:
                return None
            if not whole and not is_region(getattr(function, "func", function)):  # of a functools.partial, too
                return None
        value = self.value(expression)
        if isinstance(expression, ast.Call) and value is UNKNOWN:
            raise self.error(_asked(expression), "not all of its arguments are known", expression, _SPELT)
        if isinstance(value, type) and is_region(value):
            name = ast.unparse(expression)
            raise self.error(f"a region in a script, {name}", "it is a class", expression, f"Call it: {name}(...).")
        return self._as_call(value, expression) if value is not UNKNOWN and is_region(value) else None

    def _check_called(self, call: ast.Call) -> None:
        """Raise ScriptError for an object in place of the function that it decorates: TorchScript takes it for another.
        And for a region that is entered by hand.
        """
        value = self.value(call.func)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("__enter__", "__exit__"):
            owner = call.func.value
            if getattr(owner, "id", "") in self.made or is_region(self.value(owner)):
                found = "only a with statement tells a script where a region ends"
                raise self.error(_asked(call), found, call, _WITH)
        if getattr(value, "__name__", "").startswith("set_autocast_"):
            found = "only a with statement switches autocast in a script"
            raise self.error(f"a script of {ast.unparse(call)}", found, call, _WITH)
        if value is not UNKNOWN and hasattr(value, "__wrapped__") and not hasattr(value, "__code__"):
            if not isinstance(value, types.MethodType | type | ScriptFunction | ScriptMethod):
                regions_around(value)

    def _as_call(self, region: Any, place: Any) -> ast.expr:
        if type(region) is torch.no_grad:
            return at(ast.parse(f"{TORCH}.no_grad()", mode="eval").body, place)  # type: ignore[no-any-return]
        try:
            facts = described(region)
        except NarrowcastError as error:
            raise self.error(error.asked, error.found, place, error.advice) from None
        arguments = ", ".join(f"{k}={v!r}" for k, v in facts.items())
        return at(ast.parse(f"{OURS}({arguments})", mode="eval").body, place)  # type: ignore[no-any-return]

    def _make_ours(self, call: ast.Call) -> None:
        """Rewrite a call of a region class, torch's or ours, in place, as one of ours."""
        kind = self.value(call.func)
        signature = signature_of(kind)
        if signature is None:
            return
        names, defaults = signature
        if len(call.args) > len(names):
            found = f"it takes at most {len(names)} arguments by position"
            raise self.error(_asked(call), found, call, f"Its arguments are {', '.join(names)}.")
        if not all(k.arg for k in call.keywords):
            raise self.error(_asked(call), "not all of its arguments are known", call, _SPELT)
        given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg is not None}
        self._check_arguments(kind, given, call)
        written = {k: ast.parse(v, mode="eval").body for k, v in defaults.items()} | given
        constants = {name: self.meanings.constant(given.get(name)) for name in ("dtype", "enabled", "cache_enabled")}
        for name, value in constants.items():
            if name == "dtype" and value is not UNKNOWN and value is not None:
                is_off = constants["enabled"] is False and FORMATS.get(value, _fp32).bits < 16
                written[name] = at(ast.Constant(None if is_off else number_of(to_dtype(value))), call)
            elif isinstance(value, bool):
                written[name] = at(ast.Constant(value), call)
        call.func, call.args = ast.Name(OURS, ast.Load()), []
        call.keywords = [ast.keyword(k, v) for k, v in written.items()]
        at(call, call)
        self._with_digest(call)

    def _check_arguments(self, kind: Any, given: dict[str, ast.expr], call: ast.Call) -> None:
        """Raise ScriptError for what the class itself refuses, as far as its arguments are known."""
        values = {name: self.value(e) for name, e in given.items() if name not in ("policy", "inner")}
        known = {name: value for name, value in values.items() if value is not UNKNOWN}
        if "device_type" in given:
            known.setdefault("device_type", "cpu")
        advice = f"Its arguments are {', '.join(inspect.signature(kind).parameters)}."
        try:
            inspect.signature(kind).bind(**given)
            advice = f"Give one of {', '.join(DEVICE_TYPES)}; for a tensor x, that is x.device.type."
            if "device_type" in given and known["device_type"] not in DEVICE_TYPES:
                raise TypeError(f"autocast knows no device type {known['device_type']!r}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a device that is not here
                kind(**known)
            advice = "Give True or False; bool(x) of a tensor or a number x."
            if not isinstance(known.get("enabled", True), bool):
                raise TypeError(f"enabled is of type {type(known['enabled']).__name__}, and regions take a bool")
            advice = "Give torch.bfloat16 or torch.float16."
            if not isinstance(known.get("dtype"), torch.dtype | None) and issubclass(kind, torch.autocast):
                wrong = type(known["dtype"]).__name__
                raise TypeError(f"dtype is of type {wrong}, and torch's regions take a torch.dtype")
            if known.get("enabled") is not False:
                number_of(to_dtype(known.get("dtype") or torch.bfloat16))
        except Exception as error:
            found = error.found if isinstance(error, NarrowcastError) else str(error).partition("\n")[0]
            raise self.error(_asked(call), found, call, getattr(error, "advice", "") or advice) from None

    def _with_digest(self, call: ast.Call) -> None:
        """Rewrite a call of ours, in place: a policy, any Python expression, becomes text. Its cache is its own."""
        call.keywords = [k for k in call.keywords if k.arg != "cache_limit_bytes"]
        for keyword in call.keywords:
            if keyword.arg == "cache_enabled" and isinstance(keyword.value, ast.Constant):
                grade = keyword.value.value
                keyword.value = at(ast.Constant(True if isinstance(grade, str) else grade), keyword.value)
        call.keywords = [k for k in call.keywords if k.arg != "policy" or ast.unparse(k.value) != "None"]
        settings = {k.arg: k.value for k in call.keywords if k.arg in ("policy", "inner")}
        if not settings or ("policy" in settings and ast.unparse(settings["policy"]) == "''"):  # torch's own
            return
        try:
            value = as_policy(self.meanings.evaluated(settings["policy"]) if "policy" in settings else None)
            if "inner" in settings:
                value = value.with_inner(self.meanings.evaluated(settings["inner"]))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            advice = "Name a policy that exists when the function is scripted."
            if isinstance(error, NarrowcastError):
                found, advice = error.found, error.advice
            elif isinstance(error, NameError) and error.name in self.meanings.local:
                found = "it is known only when the script runs"
            asked = " and ".join(f"{name}={ast.unparse(value)}" for name, value in settings.items())
            raise self.error(f"a region in a script with {asked}", found, call, advice) from None
        if "inner" in settings or not isinstance(settings["policy"], ast.Constant):
            call.keywords = [k for k in call.keywords if k.arg not in settings]
            call.keywords.append(at(ast.keyword("policy", ast.Constant(hold_policy(value))), call))

    # -- device types that only the running script knows

    def _per_device(self, body: list[ast.stmt]) -> list[ast.stmt]:
        chosen: list[ast.stmt] = []
        for statement in body:
            known = self._scripting(statement.test) if isinstance(statement, ast.If) else None
            if known is not None:  # TorchScript does not compile the other branch
                chosen += self._per_device(statement.body if known else statement.orelse) or [at(ast.Pass(), statement)]  # type: ignore[attr-defined]
                continue
            for name in ("body", "orelse"):
                if getattr(statement, name, None):
                    setattr(statement, name, self._per_device(getattr(statement, name)))
            chosen += self._chosen(statement) if isinstance(statement, ast.With) else [statement]
        return chosen

    def _scripting(self, test: ast.expr) -> bool | None:
        """Return what a condition is in a script because of `torch.jit.is_scripting()`; None for others."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            known = self._scripting(test.operand)
            return None if known is None else not known
        if isinstance(test, ast.BoolOp):
            ends = isinstance(test.op, ast.Or)
            return ends if any(self._scripting(value) is ends for value in test.values) else None
        return True if isinstance(test, ast.Call) and self.value(test.func) is _is_scripting else None

    def _chosen(self, statement: ast.With) -> list[ast.stmt]:
        """Return a with statement, or one for each device type that the script may choose; none for nullcontext."""
        statement.items = [item for item in statement.items if not self._is_null(item)]
        if not statement.items:
            return statement.body
        for n, item in enumerate(statement.items):
            if isinstance(item.context_expr, ast.IfExp) and self.value(item.context_expr) is UNKNOWN:
                return self._branched(statement, n, item.context_expr)
            device = self._device_of(item.context_expr)
            if device is None or isinstance(device.value, ast.Constant):
                continue
            value = self.meanings.constant(device.value)
            if value is not UNKNOWN:
                device.value = at(ast.Constant(value), device.value) if isinstance(value, str) else device.value
                continue
            name, keep = kept("device", device.value, statement)
            place = f"{self.file}:{self.first_line + statement.lineno - 1}"
            devices = ", ".join(self.device_types)
            text = f"narrowcast: {place}: this region was scripted for {devices} alone; script it where it is to run"
            branches: list[ast.stmt] = ast.parse(f"raise RuntimeError({text!r})").body
            for device_type in reversed(self.device_types):
                device.value = at(ast.Constant(device_type), statement)
                inner = copy.deepcopy(ast.With(items=statement.items[n:], body=statement.body))
                test = ast.parse(f"{name} == {device_type!r}", mode="eval").body
                branches = [ast.If(test=test, body=self._chosen(at(inner, statement)), orelse=branches)]
            return _within(statement, n, [keep, *[at(branch, statement) for branch in branches]])
        return [statement]

    def _branched(self, statement: ast.With, n: int, chosen: ast.IfExp) -> list[ast.stmt]:
        bodies = []
        for expression in (chosen.body, chosen.orelse):
            item = ast.withitem(context_expr=expression, optional_vars=statement.items[n].optional_vars)
            inner = copy.deepcopy(ast.With(items=[item, *statement.items[n + 1 :]], body=statement.body))
            bodies.append(self._chosen(at(inner, statement)))
        return _within(statement, n, [at(ast.If(test=chosen.test, body=bodies[0], orelse=bodies[1]), statement)])

    def _is_null(self, item: ast.withitem) -> bool:
        expression = item.context_expr
        is_made = isinstance(expression, ast.Call) and self.value(expression.func) is nullcontext
        return item.optional_vars is None and (is_made or isinstance(self.value(expression), nullcontext))

    def _device_of(self, expression: ast.expr) -> ast.keyword | None:
        """Return the device type in a call of a region class as an argument with a name; None for other expressions."""
        if not isinstance(expression, ast.Call):
            return None
        signature = signature_of(self.value(expression.func))
        if signature is None or "device_type" not in signature[0]:
            return None
        if 0 < len(expression.args) <= len(signature[0]) and not isinstance(expression.args[0], ast.Starred):
            expression.asked = ast.unparse(expression)  # type: ignore[attr-defined]
            names = dict(zip(signature[0], expression.args, strict=False))
            expression.keywords[:0] = [ast.keyword(k, v) for k, v in names.items()]
            expression.args = []
            at(expression, expression)
        return next((k for k in expression.keywords if k.arg == "device_type"), None)


def _within(statement: ast.With, n: int, body: list[ast.stmt]) -> list[ast.stmt]:
    return [at(ast.With(items=statement.items[:n], body=body), statement)] if n else body


def _asked(call: ast.Call) -> str:
    return f"a region in a script, {getattr(call, 'asked', None) or ast.unparse(call)}"
