"""Goals for recurrent ops, which Dynamo leaves to eager code: as the policy says, or in fp32 where that is faster.

What runs between graphs has no placement. But whether the recurrent ops of a model gain by their low format is found as
it is for a graph: by running both on the inputs that they are really given. What is found becomes rules of the policy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from narrowcast.costs.choices import Choice, choice_key, load_choice, save_choice
from narrowcast.costs.measure import device_now
from narrowcast.eager import autocast
from narrowcast.fx.candidates import HIGH, POLICY
from narrowcast.fx.choosing import Side, time_sides
from narrowcast.fx.placing import input_text
from narrowcast.goals import FAST, Goal
from narrowcast.isolation import isolated
from narrowcast.policy import RESULT, Action, Kind, Policy, Rule
from narrowcast.torch_bridge import FORMATS, tensors_in

OPS: dict[Callable[..., Any], str] = {
    torch.lstm: "aten.lstm",
    torch.gru: "aten.gru",
    torch.rnn_tanh: "aten.rnn_tanh",
    torch.rnn_relu: "aten.rnn_relu",
}
_INSIDE = ("aten.linear", "aten.matmul", "aten.mm", "aten.addmm", "aten.mkldnn_rnn_layer", "aten._cudnn_rnn")
"""What these ops call; a rule that gives one of them a certain format is not overruled."""


@dataclass(slots=True)
class _Calls:
    """The calls of one op in a run of the model: arguments, and the formats of what came back."""

    arguments: list[tuple[Any, ...]] = field(default_factory=list)
    results: set[torch.dtype] = field(default_factory=set)


def with_recurrent_ops(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: autocast, goal: Goal
) -> Policy:
    """The region's policy, with rules for those recurrent ops of a module that take less time in fp32.

    Results keep the formats that they have under the policy. The module runs once as eager code, isolated, to see its
    calls; a module without recurrent layers does not. region: not open.
    """
    policy = region.policy
    is_raced = goal.kind == FAST and goal.verify and region.fast_dtype.itemsize < 4
    has_layers = isinstance(model, torch.nn.Module) and any(isinstance(m, torch.nn.RNNBase) for m in model.modules())
    if not is_raced or not has_layers or torch._dynamo.config.allow_rnn:
        return policy
    try:
        found = _observe(model, args, kwargs, region)
    except Exception as error:
        warnings.warn(
            "narrowcast: recurrent layers keep the policy's formats: the module could not be run apart to see what "
            f"they are given ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})",
            stacklevel=4,
        )
        return policy
    rules: list[Rule] = []
    for op, calls in found.items():
        formats = {FORMATS.get(dtype) for dtype in calls.results}
        low = formats.pop() if len(formats) == 1 else None
        if low is not None and not _is_pinned(op, policy, region.device):
            rules += _raced(op, calls, region, Action(Kind.TO, low))
    return policy.with_rules(rules, name=f"{policy.name}, {HIGH} recurrent ops") if rules else policy


def recurrent_note(policy: Policy) -> str:
    """What the policy that was found says, for a reader; a sentence for each op that it lifts."""
    lifted = [rule for rule in policy.layers[-1] if not rule.argument]
    return " ".join(f"{rule.op} runs as eager code between graphs, in fp32 ({rule.reason})." for rule in lifted)


class _Watch(TorchFunctionMode):
    """Keeps the calls of recurrent ops."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, _Calls] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in OPS:
            calls = self.found.setdefault(OPS[func], _Calls())
            calls.arguments.append((func, args, kwargs or {}))
            calls.results.update(t.dtype for t in tensors_in(results))
        return results


def _observe(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: autocast) -> dict[str, _Calls]:
    watch = _Watch()
    with isolated(model, args, kwargs, fake=False) as run, region, watch:
        run()
    return watch.found


def _is_pinned(op: str, policy: Policy, device_type: str) -> bool:
    """Whether a rule of the policy asks for one certain format, or refuses one, in or inside of the op."""
    pins = (rule for rule in policy.resolve(device_type).rules if rule.action.kind in (Kind.TO, Kind.REFUSE))
    names = [name for inside in (op, *_INSIDE) for name in (inside, f"{inside}.default")]
    return any(rule.op.startswith(f"{op}.") or any(fnmatchcase(n, rule.op) for n in names) for rule in pins)


def _raced(op: str, calls: _Calls, region: autocast, keep: Action) -> list[Rule]:
    """The rules for one op, if its calls together take less time in fp32."""
    full = Rule(op, Action(Kind.FULL))
    back = Rule(op, keep, argument=RESULT, reason="its results keep the policy's format")
    lifted = autocast(
        region.device, region.fast_dtype, cache_enabled=region._cache, policy=region.policy.with_rules(full, back)
    )
    leaves, spec = pytree.tree_flatten([(args, kwargs) for _, args, kwargs in calls.arguments])
    functions = [function for function, _, _ in calls.arguments]

    def inside(around: autocast) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            with around:
                made = pytree.tree_unflatten(list(given), spec)
                return [f(*args, **kwargs) for f, (args, kwargs) in zip(functions, made, strict=True)]

        return run

    inputs = ", ".join(map(input_text, leaves))
    key = choice_key(
        device_now(region.device), op, lifted._prepared.policy.digest, inputs, str(torch.is_grad_enabled())
    )
    choice = load_choice(key, (POLICY, HIGH))
    if choice is None:
        choice = time_sides([Side(POLICY, inside(region)), Side(HIGH, inside(lifted))], leaves, frozenset())
        save_choice(key, choice)
    if choice.chosen != HIGH:
        return []
    return [Rule(op, full.action, reason=_reason(choice)), back]


def _reason(choice: Choice) -> str:
    """`measured: 3.1 ms in fp32, 8.2 ms as the policy says`."""
    high, policy = (choice.times_ns[name] / 1e6 for name in (HIGH, POLICY))
    return f"measured: {high:.3g} ms in fp32, {policy:.3g} ms as the policy says"
