"""A rule: which calls it matches, what it does to them, and why."""

from __future__ import annotations

import enum
import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from narrowcast.errors import Origin, PolicyError
from narrowcast.formats import Format, parse_format, tf32
from narrowcast.output.words import did_you_mean


class Kind(enum.Enum):
    """What a rule does to the eligible tensor arguments of a call (docs/concepts.md has a row for each)."""

    LOWER = "lower"
    FULL = "full"
    FULL_SET_DTYPE = "full_set_dtype"
    FULL_APPEND_DTYPE = "full_append_dtype"
    PROMOTE = "promote"
    FOLLOW = "follow"
    ALIGN = "align"
    INSIDE = "inside"
    TO = "to"
    REFUSE = "refuse"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash goes through the name


@dataclass(frozen=True, slots=True)
class Action:
    """A kind, and for `to(format)` the format."""

    kind: Kind
    format: Format | None = None

    def __post_init__(self) -> None:
        if (self.kind is Kind.TO) != (self.format is not None):
            found = "to(...) needs a format, and no other action takes one"
            raise PolicyError(f"action {self.kind.value!r}", found, advice='Write action = "to(bf16)", for example.')
        if self.format is tf32:
            found = "tf32 is no storage format: it is how products of fp32 tensors are computed"
            advice = "Set torch.backends.cuda.matmul.fp32_precision, or name a format that tensors have."
            raise PolicyError("action 'to(tf32)'", found, advice=advice)

    def __str__(self) -> str:
        return f"to({self.format})" if self.format else self.kind.value


ActionName = Literal[
    "lower", "full", "full_set_dtype", "full_append_dtype", "promote", "follow", "align", "inside", "refuse",
    "to(fp64)", "to(fp32)", "to(bf16)", "to(fp16)", "to(e4m3fn)", "to(e5m2)",
]  # fmt: skip
"""How actions are written; `parse_action` takes any text."""
ACTIONS = [f"{k.value}(format)" if k is Kind.TO else k.value for k in Kind]


def parse_action(text: str) -> Action:
    """Return the action of that text: `lower`, `to(fp16)` and so on.

    Raises PolicyError with the nearest known spelling for anything else.
    """
    word = text.strip()
    if word.startswith("to(") and word.endswith(")"):
        return Action(Kind.TO, parse_format(word[3:-1]))
    try:
        return Action(Kind(word))
    except ValueError:
        found = f"no such action{did_you_mean(word, [k.value for k in Kind])}"
        raise PolicyError(f"action {text!r}", found, advice=f"Write one of: {', '.join(ACTIONS)}.") from None


@dataclass(frozen=True, slots=True)
class Site:
    """Where in the program a call is made.

    `module_path` is the dotted path as in `model.named_modules()` (empty at the root); `classes` are the qualified
    class names of the modules around the call, innermost first; `functions` the qualified names of the user's
    functions around it, innermost first; `file` and `line` the user's source line. `around` is the path of that root
    in a larger module whose method called it, if one did: `net` where `training_step` calls `self.net(x)`.
    """

    module_path: str = ""
    classes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    file: str = ""
    line: int = 0
    around: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The module path, and if the root is part of a larger module the path in that one."""
        if not self.around:
            return (self.module_path,)
        return (self.module_path, f"{self.around}.{self.module_path}".strip("."))

    @property
    def at(self) -> tuple[str, str, int]:
        """The module path, the file and the line: what records keep of a place."""
        return self.module_path, self.file, self.line

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The place as errors name it; empty where it is not known."""
        return (Origin(self.file, self.line),) if self.file else ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "?"


NOWHERE = Site()

MODULE_CALL = "module.call"
"""The op of rules about the calls of modules themselves: `argument` then names one of `forward`'s, or `result`."""
MODULE_CALL_OP = f"{MODULE_CALL}.default"

RESULT = "result"
"""The argument that represents what a call returns; `result.1` is the second of several, `result.logits` has a name."""

DIRECTIONS = ("backward", "dgrad", "wgrad")
"""What a rule's op may start with, if it is about what autograd runs: all of it, or gradients of inputs or weights."""


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """Matches calls and gives an action, with a reason and a source.

    op:       `aten.softmax.int` is one overload, `aten.softmax` every functional overload, and a glob (`aten.*norm*`)
              every op that computes; patterns never reach views, copies, in-place or out= forms: name those exactly.
              `backward.aten.mm` is about what autograd runs in compiled code, `dgrad.` and `wgrad.` about gradients of
              inputs and of weights alone. `module.call` is about the calls of modules themselves, see
              docs/reference/control.md.
    module:   glob on the module path (`encoder.layer.3`, `encoder.layer.*.attention`); it holds for everything
              inside the modules that it names, and for `module.call` for the modules themselves.
    module_class: glob on the class name, qualified or not, of any module around the call; for `module.call` of the
              module that is called.
    function: glob on the qualified name of any user function around the call.
    argument: the action is for this argument only (lower, full, follow and to(format) may be given so). `result` is
              what the call returns: `follow` gives it the format of the first floating argument, in its input format.
    call:     the n-th call of the op alone, from 1, inside one call of the innermost module around it (`#2` of a call's
              identity); each overload is counted by itself.
    torch:    version range (`>=2.12`) in which the rule exists.
    """

    op: str
    action: Action
    module: str | None = None
    module_class: str | None = None
    function: str | None = None
    argument: str | None = None
    call: int | None = None
    reason: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    override: bool = False
    torch: str | None = None
    origin: Origin | None = field(default=None, compare=False)

    if TYPE_CHECKING:  # an action is given by its name, too

        def __init__(
            self, op: str, action: Action | ActionName, module: str | None = None, module_class: str | None = None,
            function: str | None = None, argument: str | None = None, call: int | None = None, reason: str = "",
            source: str = "", override: bool = False, torch: str | None = None, origin: Origin | None = None,
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        if isinstance(self.action, str):  # Rule("aten.gelu", "full") reads better than a nested constructor
            object.__setattr__(self, "action", parse_action(self.action))
        if not isinstance(self.op, str):
            found = f"the op is given as a {type(self.op).__name__}, not by name"
            advice = f'Write Rule("{_name_of(self.op)}", "{self.action}"): the names that narrowcast.explain lists.'
            raise PolicyError(f"a rule about {self.op!r}", found, advice=advice)
        namespace, dot, name = self.target.partition(".")
        if not (namespace and dot and name):
            found = "an op is written namespace.name or namespace.name.overload"
            written = self.op.strip(".") or "mm"
            written = written.replace("::", ".") if "::" in written else f"aten.{written}"
            raise self._wrong(f"op {self.op!r}", found, f"Write {written}, for example.")
        self._check_text()
        if self.target == MODULE_CALL and self.direction != "forward":
            found = "modules are called in the forward alone"
            raise self._wrong(f"op {self.op!r}", found, f"Write {MODULE_CALL}, or name an op: backward.aten.mm.")
        if self.torch is not None:
            from packaging.specifiers import InvalidSpecifier, SpecifierSet

            try:
                SpecifierSet(self.torch)
            except InvalidSpecifier:
                advice = 'Write a range such as ">=2.12" or ">=2.12,<2.15".'
                raise self._wrong(f"torch = {self.torch!r} of {self.op}", "no version range", advice) from None
        if self.call is not None:
            self._check_call()
        if self.is_module_call and self.argument is None and self.action.kind not in _PER_MODULE:
            advice = f"Write one of: {', '.join(k.value for k in _PER_MODULE)}."
            raise self._wrong(f"action {self.action} for {MODULE_CALL}", "a module has no such action", advice)
        if self.argument is not None and self.action.kind not in _PER_ARGUMENT:
            asked = f"action {self.action} for argument {self.argument!r} of {self.op}"
            advice = f"Per argument, write one of: {', '.join(k.value for k in _PER_ARGUMENT)}."
            raise self._wrong(asked, "this action looks at all arguments together", advice)

    def _wrong(self, asked: str, found: str, advice: str) -> PolicyError:
        return PolicyError(asked, found, (self.origin,) if self.origin else (), advice)

    def _check_text(self) -> None:
        if not isinstance(self.action, Action):
            advice = f'Write Rule("{self.op}", "full"), for example; "to(fp16)" names a format.'
            found = f"it is given as a {type(self.action).__name__}, not by name"
            raise self._wrong(f"action {self.action!r} of {self.op}", found, advice)
        for name in ("module", "module_class", "function", "argument"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                found = f"it is given as a {type(value).__name__}, not by name"
                advice = f'Write {name}="{_EXAMPLES.get(name) or getattr(value, "__name__", "self")}", for example.'
                raise self._wrong(f"{name} of a rule about {self.op}", found, advice)

    def _check_call(self) -> None:
        is_number = isinstance(self.call, int) and not isinstance(self.call, bool) and self.call >= 1
        found, advice = "", "Omit call."
        if not is_number:
            found, advice = "calls are counted from 1", "Write call = 2, for example."
        elif self.is_glob:
            found, advice = "the calls of each op are counted by themselves", "Name the op, or omit call."
        elif self.is_module_call:
            found = "calls of ops are counted, inside one call of a module"
        elif self.direction != "forward":
            found = "calls of the forward are counted; autograd runs its own in an order of its own"
        if found:
            raise self._wrong(f"call = {self.call!r} of {self.op}", found, advice)

    @property
    def direction(self) -> str:
        """`forward`, or one of DIRECTIONS."""
        first = self.op.partition(".")[0]
        return first if first in DIRECTIONS else "forward"

    @property
    def target(self) -> str:
        """The op without `backward.`, `dgrad.` or `wgrad.` before it."""
        return self.op if self.direction == "forward" else self.op.partition(".")[2]

    @property
    def is_pattern(self) -> bool:
        """Whether `op` names more than one overload (a glob, or a name without overload)."""
        return self.is_glob or self.target.count(".") < 2

    @property
    def is_glob(self) -> bool:
        """Whether `op` has wildcards."""
        return "*" in self.op or "?" in self.op or "[" in self.op

    @property
    def is_module_call(self) -> bool:
        """Whether it is about the calls of modules rather than of ops."""
        return self.op == MODULE_CALL

    @property
    def keys(self) -> dict[str, Any]:
        """The rule by the keys of a policy file, those that are given."""
        given = {
            "op": self.op, "module": self.module, "class": self.module_class, "function": self.function,
            "argument": self.argument, "call": self.call, "action": str(self.action), "torch": self.torch,
            "override": self.override or None, "reason": self.reason or None, "source": self.source or None,
        }  # fmt: skip
        return {key: value for key, value in given.items() if value is not None}

    @property
    def label(self) -> str:
        """The rule, and where it is written."""
        return f"{self} ({self.origin})" if self.origin is not None else str(self)

    @property
    def is_exact(self) -> bool:
        """Whether fp64 is cast, too: `to(format)` of a module's call means exactly that format."""
        return self.is_module_call and self.action.kind is Kind.TO

    @property
    def is_about_result(self) -> bool:
        """Whether `argument` represents what the call returns, or a part of that."""
        return self.argument is not None and self.argument.partition(".")[0] == RESULT

    @property
    def is_builtin(self) -> bool:
        """Whether the rule stands in a built-in policy."""
        return self.origin is not None and self.origin.file.startswith("builtin/")

    @property
    def is_unconditional(self) -> bool:
        """Whether the rule holds wherever the op is called."""
        return self.module is None and self.module_class is None and self.function is None and self.call is None

    @property
    def conditions(self) -> tuple[str | int | None, ...]:
        """What must agree for two rules to be about the same calls."""
        which = () if self.call is None else (self.call,)  # digests of policies that count no calls stay
        return (self.op, self.module, self.module_class, self.function, self.argument, self.torch, *which)

    @property
    def specificity(self) -> tuple[tuple[bool, int], ...]:
        """Orders the rules of one layer: place first, then how exactly the op is named: without wildcards a name of
        one overload is longer than the one for all of them.
        """
        place = map(_literals, (self.module, self.module_class, self.function))
        is_narrow = self.direction in ("dgrad", "wgrad")
        return (*place, (self.call is not None, 0), (is_narrow, not self.is_glob), _literals(self.op))

    def matches_op(self, op: str) -> bool:
        """Return whether the op id `namespace.name.overload` is one that the rule names."""
        target = self.target
        if not self.is_pattern:
            return target == op
        if self.is_glob:  # which means ops: modules are named
            return fnmatchcase(op, target) and not op.startswith(MODULE_CALL)
        return op.rpartition(".")[0] == target

    def matches_direction(self, direction: str) -> bool:
        """Return whether the rule is about calls of this direction (`forward`, `backward`, `dgrad` or `wgrad`)."""
        return self.direction == direction or (self.direction == "backward" and direction != "forward")

    def matches_site(self, site: Site) -> bool:
        """Return whether the call's place satisfies the module, class and function conditions."""
        matches_path: Callable[[str, str], bool] = _matches_path
        classes = site.classes
        if self.is_module_call:  # the module itself, not what is inside
            matches_path, classes = fnmatchcase, classes[:1]
        return (
            (self.module is None or any(matches_path(path, self.module) for path in site.paths))
            and (self.module_class is None or any(_matches_name(self.module_class, c) for c in classes))
            and (self.function is None or any(_matches_name(self.function, f) for f in site.functions))
        )

    def matches_call(self, site: Site, number: int) -> bool:
        """Return whether the rule is about the call at this place, of this number (0: calls are not counted)."""
        return (self.call is None or self.call == number) and self.matches_site(site)

    def __str__(self) -> str:
        module = "the root module" if self.module == "" else self.module
        words = ("call", "argument", "in", "in class", "in function")
        asked = (self.call, self.argument or None, module, self.module_class, self.function)
        parts = [self.op, *(f"{word} {what}" for word, what in zip(words, asked, strict=True) if what is not None)]
        return f"{' '.join(parts)}: {self.action}"

    def __repr__(self) -> str:
        return f"<Rule {self}>"


def naming(module_path: str) -> str | None:
    """Return the glob that names the module of that path, whatever letters are in it; none for the root."""
    return glob.escape(module_path) or None


def modules_around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around one, innermost first; that of the root, empty, last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def find_allowance(rules: tuple[Rule, ...], op: str, site: Site, argument: str = "", number: int = 0) -> Rule | None:
    """Return the allowance for a non-finite input (an argument) or output of a call, if the policy has one."""
    about = [r for r in rules if r.matches_op(op) and r.matches_call(site, number)]
    return next((r for r in about if (r.argument or argument) == argument), None)


def _name_of(op: object) -> str:
    """Return the name of an object that a caller passed as an op."""
    text = str(op)  # torch.ops.aten.gelu.default says its own
    return text if text.startswith("aten.") else f"aten.{getattr(op, '__name__', 'gelu')}"


_EXAMPLES = {"module": "encoder.layer.3"}
_PER_ARGUMENT = (Kind.LOWER, Kind.FULL, Kind.FOLLOW, Kind.TO)
_PER_MODULE = (Kind.LOWER, Kind.FULL, Kind.INSIDE, Kind.FOLLOW, Kind.TO, Kind.REFUSE)


def _literals(pattern: str | None) -> tuple[bool, int]:
    """Return whether there is a pattern, and how many of its characters are fixed."""
    return pattern is not None, sum(c not in "*?[]" for c in pattern or "")


def _matches_path(path: str, pattern: str) -> bool:
    """Return whether a glob names the module of a path, or one around it."""
    return fnmatchcase(path, pattern) or (path != "" and _matches_path(path.rpartition(".")[0], pattern))


def _matches_name(pattern: str, qualified: str) -> bool:
    """Return whether a pattern names a class or function by its qualified name or by any dotted tail of it."""
    return qualified != "" and (fnmatchcase(qualified, pattern) or _matches_name(pattern, qualified.partition(".")[2]))


def check_is(given: object, kind: type[object], asked: str, advice: str) -> None:
    """Raise PolicyError for what is of another class."""
    if not isinstance(given, kind):
        raise PolicyError(f"{asked}({given!r})", f"it is no {kind.__name__}", advice=advice)
