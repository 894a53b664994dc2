"""Composite ops: in the place of those that no rule names, scripts get what their kernels do (products.py).

Eager autocast works so by itself: such an op has no autocast kernel, and the ops that it calls have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from narrowcast.core.ops import called_by, named
from narrowcast.core.policy import Policy, Rule, Site
from narrowcast.errors import ScriptWarning
from narrowcast.frontends.scripts import products
from narrowcast.frontends.scripts.callers import site_in
from narrowcast.frontends.scripts.calls import decided_as_itself, device_of_regions, facts_of, padding_called
from narrowcast.frontends.scripts.runtime import graph_of
from narrowcast.frontends.scripts.scopes import Item, Scope, Section, policy_of
from narrowcast.runtime.sites.python_stack import warn_here
from narrowcast.runtime.torch_bridge import find_registered, op_id
from narrowcast.runtime.torch_surface.dispatch import op_name

_FORMULAS: dict[str, Callable[..., Any]] = {
    f"aten::{formula.__name__}": formula
    for formula in (
        products.lstm_cell, products.gru_cell, products.rnn_tanh_cell, products.rnn_relu_cell,
        products.tensordot, products.inner, products.linalg_multi_dot, products.chain_matmul,
        products.linalg_matrix_power, products.cov, products.corrcoef, products.mv,
    )
} | {"aten::_sparse_mm": products.sparse_mm, "aten::_sparse_addmm": products.sparse_addmm}  # fmt: skip
_OF_OTHERS = ("aten::inner", "aten::corrcoef")
"""Those whose kernels call another of them, which a policy may name."""
_GRU, _PAD, _EINSUM = "aten::gru", "aten::pad", "aten::einsum"


def open_composites(graph: Any, section: Section, of_others: bool) -> bool:
    """Replace these ops by what their kernels do, in regions whose policies do not name them: those that call others of
    them, or the rest. Return whether any is.
    """
    opened = False
    for item in section.walk():
        node = item.node
        on = [scope for scope in item.scopes.values() if scope.enabled is not False]
        is_opened = node.kind() == _EINSUM or is_composite(node)
        if not on or not is_opened or any(_is_ruled(policy_of(scope), item) for scope in on):
            continue
        if (node.kind() in _OF_OTHERS) is not of_others:
            continue
        if node.kind() == _PAD and padding_called(node) is not None:
            continue
        if node.kind() == _GRU and not any(scope.device_type == "cpu" for scope in on):
            continue  # elsewhere it has a kernel of its own
        site = site_in(item.caller, node)
        _tell_of_part(node, site, on)
        graph.setInsertPoint(node)
        start = graph.insertConstant(None).node()
        if node.kind() in (_GRU, _EINSUM):
            outs = (products.insert_gru if node.kind() == _GRU else products.insert_einsum)(graph, node)
            if outs is None:
                continue
        else:
            outs = list(graph.insertGraph(graph_of(_formula(node)), list(node.inputs())))
            if node.outputsSize() > 1:
                outs = list(graph.insertNode(graph.create("prim::TupleUnpack", outs, node.outputsSize())).outputs())
        for inner in node.owningBlock().nodes():
            if start.isBefore(inner) and inner.isBefore(node):
                _place(inner, node)
        for old, new in zip(node.outputs(), outs, strict=True):
            new.setType(old.type())
            old.replaceAllUsesWith(new)
        node.destroy()
        opened = True
    return opened


def _place(inner: Any, node: Any) -> None:
    """Place a node that replaces another, with all that is in it, where that one is."""
    inner.copyMetadata(node)
    for block in inner.blocks():
        for each in block.nodes():
            _place(each, node)


def traced_inside() -> list[str]:
    """Return the ops of which a trace records what they call, so that the casts of regions inside it are in it.

    Not recurrent ones, of which libraries compute the whole, nor `mv`, which casts inside for sparse ones alone.
    """
    names = (*_FORMULAS, _EINSUM, *(f"aten::{name}" for name in named("inside.stands_for_one")))
    return [name for name in names if name != "aten::mv"]


def casts_inside(node: Any, policies: Iterable[Policy], device_type: str) -> bool:
    """Return whether eager autocast, under these policies, casts inside what a trace has recorded as one op."""
    facts = facts_of(node)
    if facts is None:
        return False
    calls_one = not decided_as_itself(facts.id, device_type) or op_name(facts.op) in named("inside.stands_for_one")
    if not (calls_one or is_composite(node)):
        return False
    of_op = (rule for policy in policies for rule in _rules_about(policy, node))
    return not any(rule.is_unconditional for rule in of_op)  # where others hold is seen as the graph is made explicit


def is_composite(node: Any) -> bool:
    """Return whether it is known what the op's kernel does, and this is the known overload."""
    formula = _formula(node)
    if formula is not None:
        return bool(len(list(graph_of(formula).inputs())) == node.inputsSize())
    return bool(node.kind() == _GRU and node.schema().startswith("aten::gru.input("))


def _formula(node: Any) -> Callable[..., Any] | None:
    return products.pad if node.kind() == _PAD else _FORMULAS.get(node.kind())


def tell_closed(section: Section) -> None:
    """Warn of ops inside which eager autocast casts, and a script does not."""
    for item in section.walk():
        node, on = item.node, [scope for scope in item.scopes.values() if scope.enabled is not False]
        if on and called_by(_overload(node), device_of_regions(on)) is not None:
            _tell_of_part(node, site_in(item.caller, node), on)
        if not on or not _is_closed(node):
            continue
        site, device_type = site_in(item.caller, node), device_of_regions(on)
        if decided_as_itself(_overload(node), device_type):
            tell_of_inside(node, site)
        elif (rule := _rule_about_part(called_by(_overload(node), device_type) or "", site, on)) is not None:
            text = f"narrowcast: {_name(node)} ({site}) calls {rule.op} inside, and a script casts its tensors around "
            text += f"the whole: the rule {rule} does not hold in it. Write what it does, or let the rule be about all "
            warn_here(f"{text}arguments", ScriptWarning)


def _tell_of_part(node: Any, site: Site, on: Sequence[Scope]) -> None:
    """Warn of a rule about one argument or result of an op that is decided by what it calls."""
    if (rule := _rule_about_part(_overload(node), site, on)) is not None:
        text = f"narrowcast: a script has the calls inside of {_name(node)} in its place ({site}): "
        warn_here(f"{text}the rule {rule} does not hold in it. Name what reads the result", ScriptWarning)


def tell_of_inside(node: Any, site: Site) -> None:
    """Warn that a script does not cast inside of an op as eager code does."""
    text = f"narrowcast: {_name(node)} ({site}) calls ops inside that eager code casts in this region; "
    text += "in a script it follows its input dtype. Write what it does, or give it a rule of its own"
    warn_here(text, ScriptWarning)


def is_closed(node: Any, policies: Iterable[Policy], device_type: str) -> bool:
    """Return whether eager code casts inside of what a trace has recorded as one op, and a script does not: no rule is
    about the op itself, with which it would be recorded cast.
    """
    is_known = decided_as_itself(_overload(node), device_type) and not is_composite(node)
    return _is_closed(node) and is_known and not any(_rules_about(policy, node) for policy in policies)


def _is_closed(node: Any) -> bool:
    return _name(node).removeprefix("aten.") in named("inside.closed")


def _name(node: Any) -> str:
    return str(node.kind()).replace("::", ".")


def _overload(node: Any) -> str:
    name = str((node.schema() or "").partition("(")[0]).replace("::", ".")
    return name if name.count(".") != 1 else f"{name}.default"


def _rule_about_part(op: str, site: Site, on: Sequence[Scope]) -> Rule | None:
    """Return a rule about one argument, or the result, of calls of this op, if one holds there."""
    rules = (r for scope in on for r in policy_of(scope).table.candidates(op, True).per_argument)
    return next((rule for rule in rules if rule.matches_site(site)), None)


def _is_ruled(policy: Policy, item: Item) -> bool:
    """Return whether a rule about the op holds where the node is."""
    site = site_in(item.caller, item.node)
    return any(rule.matches_site(site) for rule in _rules_about(policy, item.node))


def _rules_about(policy: Policy, node: Any) -> tuple[Rule, ...]:
    """Return the rules about calls of the op as a whole."""
    op = find_registered(node.schema().partition("(")[0])
    return policy.table.candidates(op_id(op), True).whole if op is not None else ()
