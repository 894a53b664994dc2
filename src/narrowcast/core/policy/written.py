"""A policy as TOML text, with the comments of the text that it was loaded from."""

from __future__ import annotations

import tomlkit

from narrowcast.core.policy.policy import Policy
from narrowcast.core.policy.rules import Rule
from narrowcast.core.policy.settings import NOTHING, SETTINGS
from narrowcast.core.policy.storage import Storage
from narrowcast.core.policy.text import SCHEMA


def print_text(policy: Policy) -> str:
    """Return the policy's TOML text. Where its first layers were read from a text, the comments there stay."""
    document = tomlkit.parse(policy.text) if policy.text is not None else _header(policy)
    if document.get("name") != policy.name:
        document["name"] = policy.name
    for key in SETTINGS:
        value = getattr(policy, key)
        if value and document.get(key) != value:
            document[key] = value
    later = list(policy.layers[policy.text_layers :])
    added = policy.allowances if policy.text is None else ()
    if (later and policy.text_layers == 0) or added:
        first = later.pop(0) if later and policy.text_layers == 0 else ()
        document["rule"] = _array_of_rules(first, added)
    if later:
        written = document.get("layer") or tomlkit.aot()
        for layer in later:
            table = tomlkit.table()
            table["rule"] = _array_of_rules(layer)
            written.append(table)
        if "layer" not in document:
            document["layer"] = written
    if policy.storage is not None and document.get("storage") != policy.storage.table():
        document["storage"] = _storage(policy.storage)
    return tomlkit.dumps(document)


def _header(policy: Policy) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    document["schema"] = SCHEMA
    document["name"] = policy.name
    if policy.description:
        document["description"] = policy.description
    names = policy.extends or (NOTHING,)
    document["extends"] = names[0] if len(names) == 1 else list(names)
    return document


def _storage(storage: Storage) -> tomlkit.items.Table:
    section, table = tomlkit.table(), storage.table()
    rules = table.pop("rule", ())
    section.update(table)
    if rules:
        section["rule"] = tomlkit.aot()
        for rule in rules:
            row = tomlkit.table()
            row.update(rule)
            section["rule"].append(row)
    return section


def _array_of_rules(rules: tuple[Rule, ...], allowances: tuple[Rule, ...] = ()) -> tomlkit.items.AoT:
    array = tomlkit.aot()
    for rule in (*rules, *allowances):
        table = tomlkit.table()
        keys = rule.keys
        if any(rule is allowance for allowance in allowances):
            del keys["action"]
            keys["allow_nonfinite"] = True
        for key, value in keys.items():
            table[key] = value
        array.append(table)
    return array
