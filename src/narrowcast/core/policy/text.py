"""The TOML text form of a policy, read with file:line errors. Written, with comments kept, in written.py.

    schema = "narrowcast.policy/1"   # optional
    name = "train-bf16"
    extends = "native"          # or "safe", "ipex", "native:cuda", "other-file.toml", a list of these, or "nothing"
    cache = "native"            # or "off"
    unsupported = "raise"       # or "full": what becomes of a call in a format that the device lacks
    low = "bf16"                # the low format of regions that name none
    training = ["bf16"]         # the low formats to train in: a region in another one warns
    inner = "native"            # or "policy": what rules in torch.autocast blocks inside

    [[rule]]
    op = "aten.softmax"         # or a list of ops
    action = "lower"
    module = "encoder.layer.3"  # optional, like class, function, argument, call, override and torch
    reason = "..."
    source = "..."

    [[rule]]
    op = "aten.log"             # what nc.watch takes as intentional; an action is not needed, and may stand beside it
    allow_nonfinite = true

    [storage]                   # what training keeps weights and states in: storage.py
    weight = "bf16"

Rules of a later layer win whatever their specificity; a file has one layer, and `[[layer]]` with `[[layer.rule]]`
tables starts the next.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

from narrowcast.core.policy.known_ops import unknown_op
from narrowcast.core.policy.rules import Rule, parse_action
from narrowcast.core.policy.settings import NO_ACTION, SETTINGS
from narrowcast.core.policy.storage import Storage
from narrowcast.errors import NarrowcastError, Origin, PolicyError, UnknownOpError, with_origin
from narrowcast.output.words import did_you_mean

SCHEMA = "narrowcast.policy/1"
"""Of the files that this release reads and writes; one that names none is of this schema."""
_HEADER_KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": str, "name": str, "extends": (str, list), "description": str, "cache": str, "unsupported": str,
    "low": str, "training": list, "inner": str, "rule": list, "layer": list, "storage": dict,
}  # fmt: skip
# what such a list holds
_LISTS: dict[str, type] = {
    "extends": str, "training": str, "op": str, "class": str, "argument": str, "rule": dict, "layer": dict,
}  # fmt: skip
_RULE_KEYS: dict[str, type | tuple[type, ...]] = {
    "op": (str, list), "action": str, "module": str, "class": (str, list), "function": str, "argument": (str, list),
    "call": int, "reason": str, "source": str, "override": bool, "torch": str, "allow_nonfinite": bool,
}  # fmt: skip
_TABLE_HEADER = re.compile(r"^\s*\[{1,2}\s*(rule|layer|layer\.rule|storage|storage\.rule)\s*\]{1,2}")
_DECODE_LINE = re.compile(r"\(at line (\d+), column \d+\)")


@dataclass(frozen=True, slots=True)
class _TableLines:
    line: int
    lines: tuple[str, ...]

    def line_of(self, key: str) -> int:
        start = re.compile(rf'^\s*"?{re.escape(key)}"?\s*=')
        return next((self.line + n for n, text in enumerate(self.lines) if start.match(text)), self.line)

    def line_with(self, text: str) -> int:
        return next((self.line + n for n, line in enumerate(self.lines) if f'"{text}"' in line), self.line)


@dataclass(frozen=True, slots=True)
class PolicyText:
    """What a policy's text says. layers: with rules. extends: names of built-in policies, and of files. settings: those
    that are given.
    """

    text: str
    file: str
    name: str
    layers: tuple[tuple[Rule, ...], ...]
    extends: tuple[str, ...]
    description: str
    settings: dict[str, Any]
    head: _TableLines
    allowances: tuple[Rule, ...] = ()
    storage: Storage | None = None

    def line_of(self, error: NarrowcastError) -> int:
        """Return the line of the setting that an error is about, or of `extends`."""
        return self.head.line_of(next((key for key in SETTINGS if error.asked.startswith(key)), "extends"))


def read_text(path: Path) -> str:
    """Return the text of a policy file. Raise PolicyError for one that is missing or no text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or str(error)
        advice = "Give the path of a TOML policy file, or the name of a built-in one: native, safe, ipex."
        raise PolicyError(f"policy file {path}", found, (Origin(str(path)),), advice) from None


def parse_text(text: str, file: str) -> PolicyText:
    """Return the parts of a policy's text; `file` names it in errors. PolicyError, with file:line, for a mistake."""
    if not isinstance(text, str):
        found, advice = f"a {type(text).__name__}", "Give TOML text; of a file, Policy.load(path)."
        raise PolicyError("Policy.parse(...)", found, advice=advice)
    parsed = parse_shape(text, file)
    for rule in (*chain.from_iterable(parsed.layers), *parsed.allowances):
        found = unknown_op(rule)
        if found is not None:
            where = (rule.origin,) if rule.origin else ()
            raise UnknownOpError(f"op {rule.op!r}", found, where, "Correct the name, or delete the rule.")
    return parsed


def parse_shape(text: str, file: str) -> PolicyText:
    """Return the parts of a policy's text, without asking PyTorch whether it has the ops (the built-in policies')."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _DECODE_LINE.search(str(error))
        line = int(at.group(1)) if at else text.count("\n") + 1
        found = f"not TOML: {error}"
        raise PolicyError(f"policy file {file}", found, (Origin(file, line),), "Correct this line.") from None
    head, blocks = _blocks(text)
    _check_schema(data.get("schema", SCHEMA), Origin(file, head.line_of("schema")))
    _check_keys(data, _HEADER_KEYS, file, head, "a policy")
    allowances: list[Rule] = []
    layers = [tuple(_rules(data.get("rule", []), blocks["rule"], file, head, allowances))]
    position = 0
    for table in data.get("layer", []):
        rows = table.get("rule", [])
        _check_keys(table, {"rule": list}, file, head, "a layer")
        layers.append(tuple(_rules(rows, blocks["layer.rule"][position:], file, head, allowances)))
        position += len(rows)
    extends = data.get("extends", "native")
    settings = {key: tuple(data[key]) if isinstance(data[key], list) else data[key] for key in SETTINGS if key in data}
    return PolicyText(
        text, file, data.get("name", Path(file).stem), tuple(layer for layer in layers if layer),
        (extends,) if isinstance(extends, str) else tuple(extends), data.get("description", ""), settings, head,
        tuple(allowances), _storage(data["storage"], blocks, file, head) if "storage" in data else None,
    )  # fmt: skip


def _storage(table: dict[str, Any], blocks: dict[str, list[_TableLines]], file: str, head: _TableLines) -> Storage:
    """Return the section about storage; PolicyError at the line of its first key that is wrong."""
    try:
        return Storage.of(table)
    except PolicyError as error:
        written = [*blocks["storage"], *blocks["storage.rule"]] or [_TableLines(head.line_of("storage"), ())]
        keys = re.findall(r"^(?:key '([^']+)'|(\w+)\b)", error.asked)
        key = next(filter(None, keys[0]), "") if keys else ""
        lines = [block.line_of(key) for block in written if block.line_of(key) != block.line]
        raise with_origin(error, Origin(file, lines[-1] if lines else written[0].line)) from None


def _check_schema(schema: Any, origin: Origin) -> None:
    if schema != SCHEMA:
        is_newer = str(schema).startswith(SCHEMA.rpartition("/")[0])
        advice = (
            "Read it with the release that wrote it, or a later one." if is_newer else f'Write "{SCHEMA}", or omit it.'
        )
        raise PolicyError(f"schema {schema!r}", f"this release reads {SCHEMA}", (origin,), advice)


def _blocks(text: str) -> tuple[_TableLines, dict[str, list[_TableLines]]]:
    """Return the text cut at its [[...]] headers: what precedes the first, and each kind's tables in order."""
    head_lines: list[str] = []
    current = head_lines
    starts: list[tuple[str, int, list[str]]] = []
    quote = ""
    for number, line in enumerate(text.split("\n"), 1):
        header = None if quote else _TABLE_HEADER.match(line)
        if header:
            current = []
            starts.append((header.group(1), number, current))
        current.append(line)
        for mark in re.findall(r'"""|\'\'\'', line):
            quote = "" if quote == mark else quote or mark
    kinds = ("rule", "layer", "layer.rule", "storage", "storage.rule")
    blocks: dict[str, list[_TableLines]] = {kind: [] for kind in kinds}
    for kind, number, lines in starts:
        blocks[kind].append(_TableLines(number, tuple(lines)))
    return _TableLines(1, tuple(head_lines)), blocks


def _rules(
    rows: list[Any], blocks: list[_TableLines], file: str, head: _TableLines, allowances: list[Rule]
) -> list[Rule]:
    """Return the rules of a layer; those that allow what is not finite are added to the allowances."""
    inline = _TableLines(head.line_of("rule"), ())  # `rule = [{...}]` has no headers to find lines by
    rules: list[Rule] = []
    for number, row in enumerate(rows):
        block = blocks[number] if number < len(blocks) else inline
        _check_keys(row, _RULE_KEYS, file, block, "a rule")
        allows = row.get("allow_nonfinite", False)
        if allows:
            allowances += _rules_of_row({**row, "action": NO_ACTION}, block, file)
        for key in ("op",) if allows else ("op", "action"):
            if key not in row:
                where = (Origin(file, block.line),)
                raise PolicyError("a rule", f"it has no {key}", where, f'Add a line: {key} = "...".')
        if "action" in row:
            rules += _rules_of_row(row, block, file)
    return rules


def _rules_of_row(row: dict[str, Any], block: _TableLines, file: str) -> list[Rule]:
    try:
        action = parse_action(row["action"])
    except NarrowcastError as error:
        raise with_origin(error, Origin(file, block.line_of("action"))) from None
    several = [row.get(key) for key in ("op", "class", "argument")]
    others = ("module", "function", "call", "reason", "source", "override", "torch")
    same = {key: row[key] for key in others if key in row}
    rules = []
    for op, of_class, argument in product(*(given if isinstance(given, list) else [given] for given in several)):
        origin = Origin(file, block.line_with(str(op)) if isinstance(row["op"], list) else block.line_of("op"))
        try:
            rule = Rule(str(op), action, module_class=of_class, argument=argument, origin=origin, **same)
        except NarrowcastError as error:
            raise with_origin(error, origin) from None
        rules.append(rule)
    return rules


def _check_keys(row: dict[str, Any], known: dict[str, Any], file: str, block: _TableLines, what: str) -> None:
    for key, value in row.items():
        asked, where = f"key {key!r} of {what}", (Origin(file, block.line_of(key)),)
        if key not in known:
            found = f"no such key{did_you_mean(key, list(known))}"
            raise PolicyError(asked, found, where, f"Write one of: {', '.join(known)}.")
        if not isinstance(value, known[key]):
            wanted = known[key] if isinstance(known[key], tuple) else (known[key],)
            advice = f"Give a value of type {' or '.join(t.__name__ for t in wanted)}."
            raise PolicyError(asked, f"a value of type {type(value).__name__}", where, advice)
        if isinstance(value, list) and (not value or any(not isinstance(item, _LISTS[key]) for item in value)):
            items = "tables" if _LISTS[key] is dict else "strings"
            found = f"a list of other things than {items}" if value else "an empty list"
            raise PolicyError(asked, found, where, f"Give a list of {items}.")


def rule_text(keys: Mapping[str, Any]) -> str:
    """Return a rule, by its keys, in the form of a policy file."""
    return "\n".join(["[[rule]]", *(f"{key} = {_value(value)}" for key, value in keys.items())])


def rule_in_line(rule: Rule) -> str:
    """Return the rule on one line: `[[rule]] with op = "aten.mm.default", action = "full"`."""
    first, *lines = rule_text(rule.keys).split("\n")
    return f"{first} with {', '.join(lines)}"


def _value(value: str | int | bool) -> str:
    """Return a value of TOML, a text as a basic string."""
    if not isinstance(value, str):
        return str(value).lower()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    plain = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped)
    return f'"{plain}"'
