"""The TOML text form of a policy: read with file:line errors, written with comments kept.

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
    module = "encoder.layer.3"  # optional, like class, function, argument, override and torch
    reason = "..."
    source = "..."

Rules of a later layer win whatever their specificity; a file has one layer, and `[[layer]]` with `[[layer.rule]]`
tables starts the next.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import tomlkit

from narrowcast.errors import NarrowcastError, Origin, PolicyError, UnknownOpError
from narrowcast.files import replace_text
from narrowcast.policy.known_ops import unknown_op
from narrowcast.policy.policy import NOTHING, Policy, with_origin
from narrowcast.policy.rules import Rule, did_you_mean, parse_action

_HEADER_KEYS: dict[str, type | tuple[type, ...]] = {
    "name": str, "extends": (str, list), "description": str, "cache": str, "unsupported": str, "low": str,
    "training": list, "inner": str, "rule": list, "layer": list,
}  # fmt: skip
# what such a list holds
_LISTS: dict[str, type] = {
    "extends": str, "training": str, "op": str, "class": str, "argument": str, "rule": dict, "layer": dict,
}  # fmt: skip
_RULE_KEYS: dict[str, type | tuple[type, ...]] = {
    "op": (str, list), "action": str, "module": str, "class": (str, list), "function": str, "argument": (str, list),
    "reason": str, "source": str, "override": bool, "torch": str,
}  # fmt: skip
_SETTINGS = ("cache", "unsupported", "low", "training", "inner")
_TABLE_HEADER = re.compile(r"^\s*\[\[\s*(rule|layer|layer\.rule)\s*\]\]")
_DECODE_LINE = re.compile(r"\(at line (\d+), column \d+\)")


@dataclass(frozen=True, slots=True)
class _Block:
    """The lines of one table: its header's line number and its text lines."""

    line: int
    lines: tuple[str, ...]

    def line_of(self, key: str) -> int:
        """The line of `key = ...`, or the header's."""
        start = re.compile(rf'^\s*"?{re.escape(key)}"?\s*=')
        return next((self.line + n for n, text in enumerate(self.lines) if start.match(text)), self.line)

    def line_with(self, text: str) -> int:
        """The first line that quotes `text`, or the header's."""
        return next((self.line + n for n, line in enumerate(self.lines) if f'"{text}"' in line), self.line)


def load_policy(path: Path, inside: tuple[Path, ...] = ()) -> Policy:
    """The policy in the file. PolicyError for a file that is missing or wrong, with file:line.

    `inside` are the files that extend one another on the way here.
    """
    if path.resolve() in inside:
        raise PolicyError(
            f"policy file {path}", "it extends itself", tuple(Origin(str(p)) for p in inside), "Break the circle."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(
            asked=f"policy file {path}",
            found=getattr(error, "strerror", None) or str(error),
            where=(Origin(str(path)),),
            advice="Give the path of a TOML policy file, or the name of a built-in one: native, safe, ipex.",
        ) from None
    return parse_policy(text, str(path), path.parent, (*inside, path.resolve()))


def parse_policy(text: str, file: str, folder: Path | None = None, inside: tuple[Path, ...] = ()) -> Policy:
    """The policy in `text`; `file` names it in errors, and relative `extends` paths start at `folder`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _DECODE_LINE.search(str(error))
        line = int(at.group(1)) if at else text.count("\n") + 1
        raise PolicyError(
            f"policy file {file}", f"not TOML: {error}", (Origin(file, line),), "Correct this line."
        ) from None
    head, blocks = _blocks(text)
    _check_keys(data, _HEADER_KEYS, file, head, "a policy")
    layers = [tuple(_rules(data.get("rule", []), blocks["rule"], file, head))]
    position = 0
    for table in data.get("layer", []):
        rows = table.get("rule", [])
        _check_keys(table, {"rule": list}, file, head, "a layer")
        layers.append(tuple(_rules(rows, blocks["layer.rule"][position:], file, head)))
        position += len(rows)
    extends = data.get("extends", "native")
    names = [extends] if isinstance(extends, str) else extends
    try:
        below = [load_policy((folder or Path()) / n, inside) for n in names if n.endswith(".toml")]
        policy = Policy(
            name=data.get("name", Path(file).stem),
            layers=tuple(layer for layer in layers if layer),
            extends=tuple(n for n in names if not n.endswith(".toml")) or (NOTHING,),
            description=data.get("description", ""),
            cache=data.get("cache"),
            unsupported=data.get("unsupported"),
            low=data.get("low"),
            training=tuple(data.get("training", ())),
            inner=data.get("inner"),
            text=text,
            text_layers=sum(1 for layer in layers if layer),
        )
    except NarrowcastError as error:
        if error.where:
            raise
        key = next((key for key in _SETTINGS if error.asked.startswith(key)), "extends")
        raise with_origin(error, Origin(file, head.line_of(key))) from None
    for base in reversed(below):
        policy = replace(base.merge(policy), name=policy.name, description=policy.description)
    return policy


def print_policy(policy: Policy) -> str:
    """TOML text that parses to an equal policy, keeping the text it was loaded from where there is one."""
    document = tomlkit.parse(policy.text) if policy.text is not None else _header(policy)
    later = list(policy.layers[policy.text_layers :])
    if document.get("name") != policy.name:
        document["name"] = policy.name
    for key, value in _settings(policy).items():
        if document.get(key) != value:
            document[key] = value
    if later and policy.text_layers == 0:
        document["rule"] = _array_of_rules(later.pop(0))
    if later:
        layers = document.get("layer") or tomlkit.aot()
        for layer in later:
            table = tomlkit.table()
            table["rule"] = _array_of_rules(layer)
            layers.append(table)
        if "layer" not in document:
            document["layer"] = layers
    return tomlkit.dumps(document)


def save_policy(policy: Policy, path: Path) -> None:
    """Replace the file with the policy's text, at once."""
    replace_text(path, print_policy(policy))


def _header(policy: Policy) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    document["name"] = policy.name
    if policy.description:
        document["description"] = policy.description
    names = policy.extends or (NOTHING,)
    document["extends"] = names[0] if len(names) == 1 else list(names)
    document.update(_settings(policy))
    return document


def _settings(policy: Policy) -> dict[str, Any]:
    """What the policy itself says in its head, as TOML has it."""
    values = {key: getattr(policy, key) for key in _SETTINGS}
    return {k: v for k, v in values.items() if v}


def _array_of_rules(rules: tuple[Rule, ...]) -> tomlkit.items.AoT:
    array = tomlkit.aot()
    for rule in rules:
        table = tomlkit.table()
        values = {
            "op": rule.op, "action": str(rule.action), "module": rule.module, "class": rule.module_class,
            "function": rule.function, "argument": rule.argument, "torch": rule.torch,
            "override": rule.override or None, "reason": rule.reason or None, "source": rule.source or None,
        }  # fmt: skip
        for key, value in values.items():
            if value is not None:
                table[key] = value
        array.append(table)
    return array


def _blocks(text: str) -> tuple[_Block, dict[str, list[_Block]]]:
    """The text cut at its [[...]] headers: what stands before the first, and each kind's tables in order."""
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
    blocks: dict[str, list[_Block]] = {"rule": [], "layer": [], "layer.rule": []}
    for kind, number, lines in starts:
        blocks[kind].append(_Block(number, tuple(lines)))
    return _Block(1, tuple(head_lines)), blocks


def _rules(rows: list[Any], blocks: list[_Block], file: str, head: _Block) -> list[Rule]:
    inline = _Block(head.line_of("rule"), ())  # `rule = [{...}]` has no headers to find lines by
    rules: list[Rule] = []
    for number, row in enumerate(rows):
        block = blocks[number] if number < len(blocks) else inline
        _check_keys(row, _RULE_KEYS, file, block, "a rule")
        for key in ("op", "action"):
            if key not in row:
                raise PolicyError(
                    "a rule", f"it has no {key}", (Origin(file, block.line),), f'Add a line: {key} = "...".'
                )
        rules += _rules_of_row(row, block, file)
    return rules


def _rules_of_row(row: dict[str, Any], block: _Block, file: str) -> list[Rule]:
    try:
        action = parse_action(row["action"])
    except NarrowcastError as error:
        raise with_origin(error, Origin(file, block.line_of("action"))) from None
    several = [row.get(key) for key in ("op", "class", "argument")]
    rules = []
    for op, of_class, argument in product(*(given if isinstance(given, list) else [given] for given in several)):
        origin = Origin(file, block.line_with(str(op)) if isinstance(row["op"], list) else block.line_of("op"))
        try:
            rule = Rule(
                op=str(op), action=action, module=row.get("module"), module_class=of_class,
                function=row.get("function"), argument=argument, reason=row.get("reason", ""),
                source=row.get("source", ""), override=row.get("override", False), torch=row.get("torch"),
                origin=origin,
            )  # fmt: skip
        except NarrowcastError as error:
            raise with_origin(error, origin) from None
        nearest = unknown_op(rule)
        if nearest is not None:
            raise UnknownOpError(
                f"op {rule.op!r}",
                f"PyTorch has no such op{nearest}",
                (origin,),
                "Correct the name, or delete the rule.",
            )
        rules.append(rule)
    return rules


def _check_keys(row: dict[str, Any], known: dict[str, Any], file: str, block: _Block, what: str) -> None:
    for key, value in row.items():
        origin = Origin(file, block.line_of(key))
        if key not in known:
            raise PolicyError(
                f"key {key!r} of {what}", f"no such key{did_you_mean(key, list(known))}", (origin,),
                f"Write one of: {', '.join(known)}.",
            )  # fmt: skip
        if not isinstance(value, known[key]):
            wanted = known[key] if isinstance(known[key], tuple) else (known[key],)
            raise PolicyError(
                f"key {key!r} of {what}", f"a value of type {type(value).__name__}", (origin,),
                f"Give a value of type {' or '.join(t.__name__ for t in wanted)}.",
            )  # fmt: skip
        if isinstance(value, list) and (not value or any(not isinstance(item, _LISTS[key]) for item in value)):
            items = "tables" if _LISTS[key] is dict else "strings"
            found = f"a list of other things than {items}" if value else "an empty list"
            raise PolicyError(f"key {key!r} of {what}", found, (origin,), f"Give a list of {items}.")
