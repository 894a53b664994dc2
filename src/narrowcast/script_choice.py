"""Goals for scripts: a placement as a policy, and the policies between which a script's time decides.

TorchScript does not know shapes before it runs, so the formats are placed in the exported graph of the same model and
become rules about ops in modules; scripts are made under these, and timed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.costs.choices import Choice
from narrowcast.costs.device import random_state_kept
from narrowcast.errors import GoalError
from narrowcast.formats import fp32
from narrowcast.fx.candidates import HIGH, PLACED, POLICY
from narrowcast.fx.choosing import Side, time_sides
from narrowcast.fx.exported import graph_inputs
from narrowcast.fx.placing import place_graph
from narrowcast.goals import CAST, Goal
from narrowcast.passes.place import Placement
from narrowcast.policy import MODULE_CALL, RESULT, Action, Kind, Policy, Rule
from narrowcast.torch_bridge import FORMATS, op_id, ops_of, tensors_in

Run = Callable[..., Any]
_LIFTED = "placed: it costs less in fp32 here"


def policies_for(
    model: torch.nn.Module, inputs: tuple[Any, ...], policy: Policy, region: Any, device_type: str, goal: Goal
) -> dict[str, Policy]:
    """By candidate's name the policies to make scripts under; the placed one first, if it could be placed.

    region: the region around the model, not open.
    """
    results = _result_rules(model, inputs, region)
    found: dict[str, Policy] = {}
    placement = _placed(model, inputs, region, goal)
    free = _free_ops(policy.resolve(device_type))
    if placement is not None and placement.raised:
        found[PLACED] = policy.with_rules(_rules(placement, free), results, name=f"{policy.name}, placed")
    found[POLICY] = policy
    lifted = [Rule(op, Action(Kind.FULL), reason=_LIFTED) for op in sorted(free)]
    found[HIGH] = policy.with_rules(lifted, results, name=f"{policy.name}, all high")
    return found


def choose_script(
    make: Callable[[Policy, torch.nn.Module], Any],
    model: torch.nn.Module,
    policies: dict[str, Policy],
    inputs: tuple[Any, ...],
    verify: bool,
) -> tuple[Any, Choice]:
    """The fastest script, without gradients; without `verify` the first. Those that raise, or give other formats than
    the policy's, are left out.

    make: scripts a module under a policy. What runs here are scripts of copies.
    """
    sides: list[Side] = []
    wanted: list[Any] | None = None
    with torch.no_grad(), random_state_kept():
        for name in (POLICY, *(n for n in policies if n != POLICY)):
            try:
                made = make(policies[name], copy.deepcopy(model))
                dtypes = [t.dtype for t in tensors_in(made(*copy.deepcopy(inputs)))]
            except Exception:
                if name == POLICY:
                    raise
                continue  # code that takes low formats only cannot run higher
            wanted = dtypes if wanted is None else wanted
            if dtypes == wanted:
                sides.append(Side(name, made))
        sides.sort(key=lambda side: list(policies).index(side.name))
        choice = Choice(sides[0].name, {}, {}, 0, 0.0)
        if verify and len(sides) > 1:
            choice = time_sides(sides, copy.deepcopy(inputs), frozenset(range(len(inputs))))
    return make(policies[choice.chosen], model), choice


def _placed(model: torch.nn.Module, inputs: tuple[Any, ...], region: Any, goal: Goal) -> Placement | None:
    """The placement of the exported model; None, with a warning, if it cannot be exported."""
    try:
        with region, torch.no_grad(), torch.fx.traceback.preserve_node_meta():
            exported = torch.export.export(model, inputs, strict=False)
            values, weights, mode = graph_inputs(exported)
            plan = Goal(goal.kind, False, CAST, goal.profile)
            with mode:
                placed = place_graph(exported.graph_module, values, plan, False, "script", weights, rests=False)
    except GoalError:
        raise
    except Exception as error:  # whatever torch.export raises for what it does not take
        first = str(error).strip().partition("\n")[0]
        warnings.warn(
            "narrowcast: the script's formats are chosen as a whole, not call by call: torch.export does not take the "
            f"model ({type(error).__name__}: {first[:120]})",
            stacklevel=4,
        )
        return None
    return next(c.placement for c in placed.candidates if c.name == PLACED)


def _free_ops(policy: Policy) -> set[str]:
    """`aten.linear`, and so on: what the policy lowers somewhere, and runs low or in fp32 everywhere. Rules of ours are
    stronger than those of the policy, and what else it asks for (fp64 in one module) is not to be overruled.
    """
    lowered, held = set(), set()
    for rule in policy.rules:
        named = {_packet(op_id(op)) for op in ops_of(rule)} if rule.is_pattern else {_packet(rule.target)}
        if rule.action.kind is Kind.LOWER:
            lowered |= named
        elif rule.action.kind is not Kind.FULL and rule.argument is None:
            held |= named
    return lowered - held


def _packet(op: str) -> str:
    """`aten.linear` of `aten.linear.default`: a script may call another overload than the exported graph."""
    return ".".join(op.split(".")[:2])


def _rules(placement: Placement, free: set[str]) -> list[Rule]:
    """Rules for free ops in modules whose calls, and those of modules inside, all run higher than the policy asks."""
    calls: dict[tuple[str, str], bool] = {}
    for call in placement.calls:
        op, path = _packet(call.op), call.place.module_path.split(".")
        is_high = call.chosen is fp32 and call.formats[0] is not fp32
        for around in range(len(path) + 1):
            key = (op, ".".join(path[:around]))
            calls[key] = calls.get(key, True) and is_high
    wanted = dict.fromkeys((_packet(c.op), c.place.module_path) for c in placement.calls)
    return [
        Rule(op, Action(Kind.FULL), module=path, reason=_LIFTED)
        for op, path in wanted
        if calls[op, path] and op in free
    ]


def _result_rules(model: torch.nn.Module, inputs: tuple[Any, ...], region: Any) -> list[Rule]:
    """Rules that give the model's results the formats that they have under its policy."""
    with region, torch.no_grad(), random_state_kept():
        results = copy.deepcopy(model)(*copy.deepcopy(inputs))
    parts = {"": results} if isinstance(results, torch.Tensor) else {}
    if isinstance(results, (tuple, list)):
        parts = {f".{n}": part for n, part in enumerate(results) if isinstance(part, torch.Tensor)}
    return [
        Rule(MODULE_CALL, Action(Kind.TO, FORMATS[t.dtype]), module="", argument=f"{RESULT}{part}",
             reason="placed: results keep their formats")
        for part, t in parts.items()
        if t.dtype in FORMATS and t.is_floating_point()
    ]  # fmt: skip
