"""Which call of its op a node of a script is, inside one call of a module: counted in the order in which nodes run."""

from __future__ import annotations

from narrowcast.frontends.scripts.calls import decided_as, facts_of
from narrowcast.frontends.scripts.scopes import Item, Section, passage

Counts = dict[tuple[int, str], int]  # by the call of a module, and op
_LOST = -1


def number_calls(section: Section, counts: Counts, begins: bool) -> None:
    """Number the calls that regions rule. begins: whether the graph begins where the call of its module does."""
    for item in section.items:
        if item.node.kind() == "prim::If":
            ends = [dict(counts) for _ in item.blocks]
            for inner, end in zip(item.blocks, ends, strict=True):
                number_calls(inner, end, begins)
            _lose_what_differs(counts, ends, item.call)
        elif item.node.kind() == "prim::Loop":
            (body,) = item.blocks
            once = dict(counts)
            number_calls(body, once, begins)
            _lose_what_differs(counts, [dict(counts), once], item.call)
            number_calls(body, dict(counts), begins)
        else:
            for inner in item.blocks:
                number_calls(inner, counts, begins)
            _number(item, counts, begins)


def _lose_what_differs(counts: Counts, ends: list[Counts], call: int) -> None:
    """Counts behind blocks that run or do not: those that are equal at all ends. Calls that began inside are over."""
    for key in dict.fromkeys(key for end in ends for key in end if key[0] == call):
        found = {end.get(key, 0) for end in ends}
        counts[key] = found.pop() if len(found) == 1 else _LOST


def _number(item: Item, counts: Counts, begins: bool) -> None:
    facts = facts_of(item.node)
    rules = [scope for scope in item.scopes.values() if scope.enabled is not False]
    if facts is None or not rules or passage(item.node) is not None:
        return
    key = (item.call, decided_as(item.node, facts))
    before = counts.get(key, 0)
    is_known = before != _LOST and (begins or item.call) and all(scope.enabled is True for scope in rules)
    counts[key] = before + 1 if is_known else _LOST
    item.number = counts[key] if is_known else 0
