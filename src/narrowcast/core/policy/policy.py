"""A policy: an immutable, ordered, named, hashable set of rules in layers."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from narrowcast.core.policy.known_ops import cited, existing, installed_torch
from narrowcast.core.policy.rules import Rule, check_is
from narrowcast.core.policy.settings import (
    BUILTIN,
    FULL,
    INNER,
    NOTHING,
    RAISE,
    SETTINGS,
    Lack,
    check_builtin_name,
    check_device_type,
    check_is_loaded,
    check_settings,
)
from narrowcast.core.policy.storage import Storage
from narrowcast.core.policy.table import LintLine, RuleChange, RuleTable, changed_rules, check_layer
from narrowcast.core.policy.text import PolicyText, parse_shape, parse_text, read_text
from narrowcast.errors import NarrowcastError, Origin, PolicyError, with_origin
from narrowcast.formats import Format
from narrowcast.output.files import replace_text
from narrowcast.output.words import counted

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Policy:
    """Rules in layers, over the built-in policies that `extends` names.

    A later layer wins over an earlier one; inside a layer the more specific rule wins; two rules of one layer about
    exactly the same calls are an error unless the later one says `override`. `extends` holds `native` (resolved for
    the region's device type), `native:cuda` (for that device type), `safe`, `ipex`, or `nothing` alone.

    Its settings; one that is None is as in what it extends, or else the first named here. `cache`: `native` (torch's
    weight cache, as `cache_enabled` asks) or `off` (weights are cast each time). `unsupported`, what becomes of a call
    in a format that the device lacks: `raise` (the device's error) or `full` (it runs in fp32, and its results have
    the promised format); `lacks` is what the device lacks, once the policy was fitted to one. `inner`, what rules in
    `torch.autocast` blocks inside a region of this policy, as frameworks open them: `native` (torch's own lists: the
    block hides this policy) or `policy` (this policy, in the block's own format); a block that is switched off is off.
    `low` is the low format of regions that name none, and `training` are those to train in: in another, a region that
    records gradients warns; left open they are the device type's, and any.

    `allowances` say where non-finite values are intentional for `nc.watch` (`allow_nonfinite = true`; their actions are
    nothing). `storage` is what training keeps weights and states in, for `nc.store`; it has a digest of its own. Two
    policies are equal when they decide alike: these, names, reasons and comments take no part.
    """

    name: str = field(compare=False)
    layers: tuple[tuple[Rule, ...], ...] = ()
    extends: tuple[str, ...] = ("native",)
    description: str = field(default="", compare=False)
    cache: str | None = None
    unsupported: str | None = None
    low: str | None = None
    training: tuple[str, ...] = ()
    inner: str | None = None
    lacks: tuple[Lack, ...] | None = None
    allowances: tuple[Rule, ...] = field(default=(), compare=False)
    storage: Storage | None = field(default=None, compare=False)
    text: str | None = field(default=None, compare=False, repr=False)
    text_layers: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self.cache, self.unsupported, self.inner, self.low, self.training)
        extends = (self.extends,) if isinstance(self.extends, str) else self.extends
        object.__setattr__(self, "extends", () if extends == (NOTHING,) else extends)
        for name in self.extends:
            check_builtin_name(name)
        check_is_loaded(self.name, self.extends, bool(self.layers))
        for layer in self.layers:
            check_layer(layer)
        _known[id(self)] = self
        self.digest  # noqa: B018  computed now: code that Dynamo traces reads it, and could not compute it

    # -- the built-in policies, and files

    @staticmethod
    def native(device_type: str | None = None) -> Policy:
        """Return torch.autocast's own lists for the installed torch; without a device type, those of the region's."""
        if device_type is None:
            return _NATIVE
        check_device_type(device_type)
        return load_builtin(f"native:{device_type}")

    @staticmethod
    def safe(device_type: str | None = None) -> Policy:
        """Return native plus fixes of the faults that users report, each rule with its reason and issue number."""
        safe = load_builtin("safe")
        return safe if device_type is None else safe.resolve(device_type)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Return the policy in a TOML file, or the built-in one of that name. PolicyError names file and line."""
        if isinstance(path, str) and path.partition(":")[0] in BUILTIN:
            return as_policy(path)
        return _load(Path(path), ())

    @staticmethod
    def parse(text: str, file: str = "<string>") -> Policy:
        """Return the policy in TOML text; `file` names it in errors."""
        return _made(parse_text(text, file), Path(), ())

    def save(self, path: str | Path) -> None:
        """Write the policy as TOML, replacing the file at once. Comments of the text it was loaded from stay."""
        replace_text(Path(path), self.to_toml())

    def to_toml(self) -> str:
        """Return the policy as TOML text; parsing it gives an equal policy."""
        # By its name, since it is about policies, and here: it loads tomlkit, which nothing else needs.
        return str(importlib.import_module("narrowcast.core.policy.written").print_text(self))

    # -- new policies from old

    def with_rules(self, *rules: Rule | Iterable[Rule], name: str | None = None) -> Policy:
        """Return this policy with one more layer, whose rules win over everything before it."""
        flat = tuple(rule for given in rules for rule in ([given] if isinstance(given, Rule | str) else given))
        for rule in flat:
            check_is(rule, Rule, "with_rules", 'Write with_rules(nc.Rule("aten.gelu", "full")), for example.')
        name = name or (self.name if self.name.endswith("+") else f"{self.name}+")
        return replace(self, name=name, layers=(*self.layers, flat)) if flat else replace(self, name=name)

    def merge(self, other: Policy) -> Policy:
        """Return this policy with `other`'s layers on top; what both extend is taken once, `other`'s cache wins."""
        check_is(other, Policy, "merge", 'Write merge(Policy.load("safe")), for example.')
        built = [load_builtin(name) for name in self.extends if name != "native"]
        extra = tuple(n for n in other.extends if n not in self.extends and not any(n in p.extends for p in built))
        if extra and self.layers:
            names = ", ".join(extra)
            found = f"{other.name} extends {names}, which would have to come below rules that are there"
            advice = f"Merge the other way round (in a file: name {names} first), or let {self.name} extend {names}."
            raise PolicyError(f"{self.name} merged with {other.name}", found, advice=advice)
        settings: dict[str, Any] = {key: getattr(other, key) or getattr(self, key) for key in SETTINGS}
        settings |= {"allowances": self.allowances + other.allowances, "storage": other.storage or self.storage}
        merged = f"{self.name}+{other.name}", self.layers + other.layers, self.extends + extra
        return Policy(*merged, self.description or other.description, **settings)

    def resolve(self, device_type: str) -> Policy:
        """Return this policy with the built-in layers for one device type written out. Cheap after the first time.
        Raises PolicyError for a device type without native lists.
        """
        if not self.extends and not self.table.has_versions:
            return self
        return self.remembered(device_type, lambda: _resolve(self, device_type))

    @cached_property
    def memory(self) -> dict[Any, Any]:
        """What was worked out about this policy, in words and rules: it goes when the last policy like it goes."""
        return _memories.setdefault((self.digest, self.wording), _WeakDict())

    def remembered(self, key: Any, make: Callable[[], T]) -> T:
        """Return what is remembered about this policy under a key; it is made at the first time."""
        value: T = self.memory[key] if key in self.memory else self.memory.setdefault(key, make())
        return value

    def without(self, lacks: Iterable[Lack]) -> Policy:
        """Return this policy for a device that lacks these; what it lacks already stays."""
        return replace(self, lacks=tuple(lacks))

    def repairing(self) -> Policy:
        """Return this policy with fixes: what the device lacks runs in fp32, and what takes one format gets one."""
        if self.resolve("cpu").unsupported == FULL:
            return self
        return self.remembered(FULL, lambda: replace(self, unsupported=FULL))

    def with_inner(self, inner: str) -> Policy:
        """Return this policy with another `inner`: what rules in `torch.autocast` blocks inside its regions."""
        if inner == self.effective_inner:
            return self
        return self.remembered(("inner", inner), lambda: replace(self, inner=inner))

    @cached_property
    def lacking(self) -> dict[str, dict[Format | None, Lack]]:
        """What the device lacks: by op, by format; under None, several formats at once."""
        lacking: dict[str, dict[Format | None, Lack]] = {}
        for lack in self.lacks or ():
            lacking.setdefault(lack.op, {})[lack.format] = lack
        return lacking

    def asks_where(self, op: str, takes_patterns: bool) -> bool:
        """Return whether the plan for a call of this op depends on the place of the call. Of a resolved policy."""
        inside = [lack.inside for lack in self.lacking.get(op, {}).values() if lack.inside]
        asked = [(op, takes_patterns), *((name, True) for name in inside)]
        return any(self.table.candidates(*each).depends_on_site for each in asked)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, weakest layer first (without those of `extends`; see `resolve`)."""
        return tuple(rule for layer in self.layers for rule in layer)

    @cached_property
    def table(self) -> RuleTable:
        """The rules arranged for look-up by op id; only a resolved policy has all of them."""
        return RuleTable(self.layers)

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that change when, and only when, a rule, its order or the cache setting does."""
        lines = [f"cache={self.cache}", *(f"extends={name}" for name in self.extends)]
        lines += [f"{key}={getattr(self, key)}" for key in SETTINGS[1:] if getattr(self, key)]
        lines += [f"lacks={lack.op} {lack.format}" for lack in self.lacks or ()]
        numbered = [(number, rule) for number, layer in enumerate(self.layers) for rule in layer]
        lines += [f"{number}|{rule.conditions}|{rule.action}|{rule.override}" for number, rule in numbered]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def wording(self) -> str:
        """A digest of all that the digest leaves out: names, reasons, sources, places in files."""
        lines = [self.name, self.description, *(lack.reason for lack in self.lacks or ())]
        lines += [f"{rule.reason}|{rule.source}|{rule.origin}" for rule in (*self.rules, *self.allowances)]
        lines += [f"allowed={rule.conditions}" for rule in self.allowances]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def diff(self, other: Policy) -> tuple[RuleChange, ...]:
        """Return what changes from this policy to `other`, rule by rule; built-in layers are compared by name.

        Resolve both first to see `native` against `safe`, or cpu against cuda.
        """
        return changed_rules(self.rules, other.rules)

    def lint(self) -> tuple[LintLine, ...]:
        """Return findings: rules that can never match or change nothing, unknown ops, overlaps decided by order."""
        lint: Any = importlib.import_module("narrowcast.core.policy.lint")  # by its name: it is about policies
        findings: tuple[LintLine, ...] = lint.lint_policy(self)
        return findings

    @cached_property
    def effective_cache(self) -> str:
        """`native` or `off`: its own setting, or that of what it extends."""
        return self.resolve("cpu").cache or "native"

    @cached_property
    def effective_low(self) -> str | None:
        """The low format of regions that name none: its own, or that of what it extends; None is the device type's."""
        return self.resolve("cpu").low

    @cached_property
    def effective_inner(self) -> str:
        """What rules in `torch.autocast` blocks inside: its own setting, or that of what it extends."""
        return self.resolve("cpu").inner or INNER[0]

    def trains_in(self, low: Format) -> bool:
        """Return whether a region in this low format is one to train in. Of a resolved policy."""
        return not self.training or low.name in (*self.training, "fp32")

    @property
    def is_native(self) -> bool:
        """Whether this is torch's own behaviour, neither more nor less."""
        plain = self.cache in (None, "native") and self.unsupported in (None, RAISE) and self.inner in (None, "native")
        leaves_open = not (self.lacks or self.low or self.training)
        return self.extends == ("native",) and not self.layers and plain and leaves_open

    @cached_property
    def has_open_patterns(self) -> bool:
        """Whether a pattern names ops of other libraries, so that what it covers depends on what is loaded."""
        return any(rule.is_pattern and not rule.target.startswith("aten.") for rule in self.rules)

    @cached_property
    def has_module_rules(self) -> bool:
        """Whether a rule is about the calls of modules."""
        return any(rule.is_module_call for rule in self.rules)

    @cached_property
    def counts_calls(self) -> bool:
        """Whether a rule is about the n-th call of an op."""
        return any(rule.call is not None for rule in self.rules)

    @cached_property
    def asked_of_modules(self) -> frozenset[str]:
        """What rules about the calls of modules ask of the place, besides the class: `module`, `function`."""
        rules = [rule for rule in self.rules if rule.is_module_call]
        return frozenset(n for n in ("module", "function") if any(getattr(r, n) is not None for r in rules))

    @cached_property
    def has_backward_rules(self) -> bool:
        """Whether a rule is about what autograd runs, which only compiled code can change."""
        return any(rule.direction != "forward" for rule in self.rules)

    def forward(self) -> Policy:
        """Return this policy without its rules about the backward."""
        layers = self._layers_about(forward=True)
        return replace(self, layers=layers, text=None, text_layers=0) if self.has_backward_rules else self

    def backward(self) -> Policy:
        """Return the rules about the backward alone."""
        return Policy(self.name, self._layers_about(forward=False), extends=())

    def _layers_about(self, forward: bool) -> tuple[tuple[Rule, ...], ...]:
        layers = [tuple(r for r in x if (r.direction == "forward") is forward) for x in self.layers]
        return tuple(filter(None, layers))

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> Any:
        """Copies and pickles have the fields; what was worked out about them is worked out again."""
        return Policy, tuple(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:8]})"

    def __repr__(self) -> str:
        if not self.rules and self.extends == (self.name,):
            return f"<Policy {self.name!r}, built in, {self.digest[:8]}>"
        own, extends = counted(len(self.rules), "rule"), ", ".join(self.extends) or NOTHING
        return f"<Policy {self.name!r}, {own} of its own, extends {extends}, {self.digest[:8]}>"


class _WeakDict(dict[Any, Any]):
    __slots__ = ("__weakref__",)


_memories: WeakValueDictionary[tuple[str, str], _WeakDict] = WeakValueDictionary()  # by digest and wording
_known: WeakValueDictionary[int, Policy] = WeakValueDictionary()  # by id: equal ones may come and go


def known_policy(digest: str) -> Policy | None:
    """Return a policy of that digest that is in use: compiled code can name a policy, but not hold one."""
    return next((policy for policy in list(_known.values()) if policy.digest == digest), None)


def as_policy(wanted: Policy | str | Path | None) -> Policy:
    """Return the policy given as itself, as the name of a built-in one (native, safe, ipex, native:cuda), as a file's
    path, or as the digest of one that is in use, which is how compiled code names them.

    None is native. Raises PolicyError for a name that is neither.
    """
    if isinstance(wanted, Policy):
        return wanted
    if wanted is None or wanted == "native":
        return Policy.native()
    if str(wanted).endswith(".toml"):
        return Policy.load(Path(wanted))
    in_use = known_policy(str(wanted))
    if in_use is None:
        check_builtin_name(str(wanted))
    return in_use or load_builtin(str(wanted))


def _load(path: Path, inside: tuple[Path, ...]) -> Policy:
    """Return the policy in the file; `inside` are the files that extend one another on the way here."""
    if path.resolve() in inside:
        where = tuple(Origin(str(p)) for p in inside)
        raise PolicyError(f"policy file {path}", "it extends itself", where, "Break the circle.")
    return _made(parse_text(read_text(path), str(path)), path.parent, (*inside, path.resolve()))


def _made(parsed: PolicyText, folder: Path, inside: tuple[Path, ...]) -> Policy:
    """Return the policy that a text says; the paths of files that it extends start at `folder`."""
    names = tuple(name for name in parsed.extends if not name.endswith(".toml"))
    try:
        own = Policy(
            parsed.name, parsed.layers, names or (NOTHING,), parsed.description, allowances=parsed.allowances,
            storage=parsed.storage, text=parsed.text, text_layers=len(parsed.layers), **parsed.settings,
        )  # fmt: skip
        if names == parsed.extends:
            return own
        below = [Policy(n, extends=(n,)) if n in names else _load(folder / n, inside) for n in parsed.extends]
        return replace(reduce(Policy.merge, [*below, own]), name=own.name, description=own.description)
    except NarrowcastError as error:
        if error.where:
            raise
        raise with_origin(error, Origin(parsed.file, parsed.line_of(error))) from None


@cache
def load_builtin(name: str) -> Policy:
    """Return the built-in policy of that name, for the installed torch."""
    file = Path(__file__).parent / "builtin" / f"{name.replace(':', '_')}.toml"
    policy = _made(parse_shape(file.read_text(encoding="utf-8"), f"builtin/{file.name}"), Path(), ())
    version = installed_torch()
    layers = ([replace(r, source=cited(r.source, version)) for r in layer] for layer in existing(policy.layers))
    return replace(policy, text=None, text_layers=0, layers=tuple(map(tuple, layers)))


def _resolve(policy: Policy, device_type: str) -> Policy:
    below: list[tuple[Rule, ...]] = []
    for name in policy.extends:
        base = Policy.native(device_type) if name == "native" else load_builtin(name).resolve(device_type)
        below += [layer for layer in base.layers if layer not in below]
    says = (policy, *(load_builtin(name) for name in policy.extends if name != "native"))
    settings = {key: next(filter(None, (getattr(p, key) for p in says)), getattr(policy, key)) for key in SETTINGS}
    return replace(policy, layers=(*below, *existing(policy.layers)), extends=(), text=None, text_layers=0, **settings)


_NATIVE = Policy("native", extends=("native",))
