"""The observer: told of every call of a run, forward, backward and recomputed, each with its identity.

Calls are those that a policy decides: ops at the Autocast keys, which our kernels tell of, and below them whatever
else computes. Compiled graphs are run step by step meanwhile (`regions.stepwise`), so that they tell the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from narrowcast.api.stepwise import is_program, run_program
from narrowcast.decide import Plan
from narrowcast.eager.call_hook import ask_at_calls
from narrowcast.eager.registered import install_visiting, remove_visiting
from narrowcast.eager.watch import DecidedCall, add_watcher, present_device_types, remove_watcher
from narrowcast.eager.words import deciding_rule, format_names, planned_names
from narrowcast.ledger.identity import BACKWARD, FORWARD, RECOMPUTATION, CallId
from narrowcast.policy import MODULE_CALL_OP, Policy, Rule, Site, find_allowance
from narrowcast.regions.stack import innermost
from narrowcast.runs.turns import Turns, Who
from narrowcast.runs.written import Weights
from narrowcast.sites.graph_nodes import current_site
from narrowcast.sites.numbering import coming_round
from narrowcast.sites.python_stack import find_site
from narrowcast.sites.script_sites import script_site, told_of_script_sites
from narrowcast.torch_bridge import OpFacts, op_facts, ops_of, tensors_in
from narrowcast.torch_surface.autograd import (
    current_autograd_node,
    current_graph_task,
    next_sequence_number,
    sequence_number,
)
from narrowcast.torch_surface.dispatch import (
    TO_COPY,
    DispatchMode,
    OpOverload,
    below_modes,
    without_modes,
)
from narrowcast.torch_surface.dynamo import CompiledCode, never_begin_at
from narrowcast.torch_surface.fx import FakeTensor
from narrowcast.torch_surface.jit import script_calls_replaced
from narrowcast.torch_surface.modules import find_recomputation
from narrowcast.torch_surface.state import autocast_key, autocast_off, autocast_was_on, switched_on

_AS_IT_IS = nullcontext()
_COPY = torch.ops.aten.copy_.default
_KEPT_NODES = 200_000
"""How many autograd nodes are remembered; their backward knows the forward call."""


@dataclass(slots=True, eq=False)
class SeenCall:
    """A call of a run. args, kwargs: as the op was called, before the casts of the plan.

    formats: those of its tensors as they came, and as the op reads them; None: it reads them as they came. forward: of
    a backward call, the forward call whose gradients it computes. policy: of the region that is open, or was at the
    forward. is_cast: a conversion between formats, of autocasting's or of the user's.
    """

    who: Who
    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    formats: tuple[str, str] | None = None
    plan: Plan | None = None
    rule: Rule | None = None
    forward: CallId | None = None
    is_cast: bool = False
    result: Any = None
    notes: dict[str, Any] = field(default_factory=dict)
    policy: Policy | None = None

    @property
    def id(self) -> CallId:
        """Its identity, asked for while it runs."""
        return self.who.id

    @property
    def site(self) -> Site:
        """Its place, asked for while it runs."""
        return self.who.site

    @property
    def came(self) -> str:
        """The formats of its tensors as they came."""
        return self._formats()[0]

    @property
    def computes(self) -> str:
        """The formats in which the op reads them."""
        return self._formats()[1]

    def _formats(self) -> tuple[str, str]:
        if self.formats is None:
            names = format_names([t.dtype for t in tensors_in(self.args, self.kwargs)])
            self.formats = names, names
        return self.formats

    def without_tensors(self) -> SeenCall:
        """The call for whoever keeps it, and not its tensors."""
        who = self.who.known()
        return replace(self, who=who, formats=self._formats(), args=(), kwargs={}, result=None, plan=None, notes={})

    def allows_nonfinite(self, argument: str = "") -> Rule | None:
        """The rule that allows what is not finite here, in an argument or in what the call gives."""
        of = self.forward or self.id
        return (
            None
            if self.policy is None
            else find_allowance(self.policy.allowances, of.op, self.site, argument, of.number)
        )

    @property
    def results(self) -> list[torch.Tensor]:
        """The tensors that it returned."""
        return tensors_in(self.result)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.decided: list[SeenCall | None] = []
        self.starts: list[int] = []
        self.executing = False
        self.looking = False


class Observer(DispatchMode):
    """`with observer.observing():` its `before` and `after` are called around each call of the block.

    On the thread that opened it, and on autograd's threads.
    """

    steps_graphs = True
    """Compiled graphs run step by step while it looks."""
    casts_scripts = True
    """Scripts that are called are cast as always; else TorchScript's own pass, which asks no policy, is off."""
    weights: Weights | None = None
    """Those that are to be put back after the run."""
    saw_scripts = False
    """Whether scripts of torch's own were called, of which a policy's rules do not say what is low."""

    def __init__(self, policies: tuple[Policy, ...] = ()) -> None:
        super().__init__()
        self._device_types = present_device_types()
        self._keys = tuple(autocast_key(device_type) for device_type in self._device_types)
        self._ops = {device_type: _listed_ops(device_type, policies) for device_type in self._device_types}
        self._local = _ThreadState()
        self._turns = Turns()
        self._nodes: OrderedDict[int, tuple[CallId, Site, Policy | None]] = OrderedDict()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo gives up for good on code that it meets under a mode which does not say this."""
        return True

    @property
    def roots(self) -> Iterable[torch.nn.Module]:
        """The outermost modules that were called."""
        return self._turns.roots

    # -- what those who look are told --------------------------------------------------------------------------------

    def looks_before(self, facts: OpFacts) -> bool:
        """Whether `before` is to be told of calls of this op: each telling costs as much as a small op."""
        return True

    def before(self, call: SeenCall) -> None:
        """A call is about to run."""

    def after(self, call: SeenCall) -> None:
        """It has run."""

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What an op gives in place of its result; facts, args, kwargs: of the call itself, or of one inside it."""
        return result

    # -- opening -----------------------------------------------------------------------------------------------------

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Look at what runs inside."""
        ask_at_calls()
        with ExitStack() as stack:
            for device_type, ops in self._ops.items():
                install_visiting(ops.values(), device_type)
                stack.callback(remove_visiting, device_type)
            stack.enter_context(CompiledCode(on=False))
            stack.enter_context(told_of_script_sites())
            around = lambda call: partial(self._called_script, threading.get_ident(), call)  # noqa: E731
            stack.enter_context(script_calls_replaced(around, around, "runs are observed"))
            add_watcher(self)
            stack.callback(remove_watcher, self)
            stack.enter_context(self)
            yield

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call. Exported programs run call by call."""
        self._turns.begin(module)
        try:
            return run_program(module, (self,), args, kwargs) if is_program(module) else call(args, kwargs)
        finally:
            self._turns.end()

    def _called_script(self, thread: int, call: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a script function or method of torch's own, in the thread that is observed."""
        self.saw_scripts = True
        uncast = autocast_off() if not self.casts_scripts and threading.get_ident() == thread else _AS_IT_IS
        with uncast:
            return call(script, *args, **kwargs)

    # -- told by our kernels, and by graphs that run step by step ------------------------------------------------------

    def begin(self, call: DecidedCall) -> None:
        """A call that is decided is about to run."""
        state = self._local
        tensors = [t for _, t in call.tensors if t is not None]
        is_fake = any(isinstance(t, FakeTensor) for t in tensors)
        if call.facts.id == MODULE_CALL_OP or state.decided or state.executing or state.looking or is_fake:
            state.decided.append(None)
            return
        came = format_names([t.dtype for t in tensors])
        rule = deciding_rule(call.plan)
        computes = came if rule is None else planned_names(call.plan, call.tensors)
        seen = self._seen(call.facts, call.noted, call.args, call.kwargs, (came, computes))
        seen.plan, seen.rule = call.plan, rule
        if self.looks_before(call.facts):
            self._look(self.before, seen)
        state.starts.append(next_sequence_number())
        state.decided.append(seen)

    def end(self, result: Any) -> None:
        """The call that began last has returned."""
        state = self._local
        seen = state.decided.pop()
        if seen is None:
            return
        for number in range(state.starts.pop(), next_sequence_number()):
            self._nodes[number] = (seen.id, seen.site, seen.policy)
        seen.result = result
        self._look(self.after, seen)
        seen.who.end()

    def fail(self, error: BaseException) -> None:
        """The call that began last has raised."""
        if self._local.decided.pop() is not None:
            self._local.starts.pop()

    def wants_whole(self, op: str, device_type: str) -> bool:
        """What eager code tells of on that device: its lists are not another's."""
        return op in self._ops[device_type]

    def let_go(self, tensors: tuple[Any, ...]) -> None:
        """Nothing is kept by tensors' identity."""

    # -- seen by the mode ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        state = self._local
        facts = op_facts(func)
        if facts.is_view and not state.decided:
            return func(*args, **kwargs)
        is_nobodys = state.looking or facts.id.startswith("prim.")
        if is_nobodys or (types and any(issubclass(t, FakeTensor) for t in types)):
            return func(*args, **kwargs)
        if facts.writes and self.weights is not None:
            with quietly():
                self.weights.before_write(facts, args, kwargs)
        is_cast = func is TO_COPY or (func is _COPY and args[0].dtype is not args[1].dtype)
        if state.decided or not (is_cast or facts.computes or (facts.writes and func is not _COPY)):
            result = self._execute(func, args, kwargs)
            around = state.decided[0] if state.decided else None
            return result if around is None else self.gives(around, facts, args, kwargs, result)
        seen = self._seen(facts, None, args, kwargs, None, is_cast)
        if self.looks_before(facts):
            self._look(self.before, seen)
        seen.result = self.gives(seen, facts, args, kwargs, self._execute(func, args, kwargs))
        if torch.is_grad_enabled() and seen.id.direction != BACKWARD:
            # an op without a gradient makes no node: the last one is another's
            self._nodes.setdefault(next_sequence_number() - 1, (seen.id, seen.site, seen.policy))
        self._look(self.after, seen)
        seen.who.end()
        return seen.result

    def _execute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op with autocast as it would be without us: kernels that call other ops must find it on."""
        state = self._local
        if state.decided or state.executing:
            return func(*args, **kwargs)
        on = autocast_was_on(self._keys)
        if not on:
            return func(*args, **kwargs)
        state.executing = True
        try:
            with switched_on(on), coming_round(op_facts(func).id):
                return func(*args, **kwargs)
        finally:
            state.executing = False

    def _look(self, told: Callable[[SeenCall], None], seen: SeenCall) -> None:
        """Tell of a call; what is computed meanwhile is nobody's call."""
        state = self._local
        state.looking = True
        try:
            with below_modes(), autocast_off():
                if torch.is_grad_enabled():
                    with torch.no_grad():
                        told(seen)
                else:
                    told(seen)
        finally:
            state.looking = False

    # -- identities ----------------------------------------------------------------------------------------------------

    def _seen(
        self, facts: OpFacts, noted: Site | None, args: tuple[Any, ...], kwargs: dict[str, Any],
        formats: tuple[str, str] | None, is_cast: bool = False,
    ) -> SeenCall:  # fmt: skip
        direction, forward = self._direction()
        if direction == BACKWARD:
            of, site, policy = forward or (None, noted or find_site(with_names=False), None)
            path, turn = (of.module_path, of.turn) if of is not None else (site.module_path, 1)
            who = Who(self._turns.of_backward(path, facts.id, turn), site)
            return SeenCall(who, facts, args, kwargs, formats, forward=of, is_cast=is_cast, policy=policy)
        region = innermost()
        policy = region.prepared.policy if region is not None else None
        with_names = policy is not None and policy.table.asks_for_names
        who = self._turns.who(facts.id, direction, is_cast, noted or current_site() or script_site(), with_names)
        return SeenCall(who, facts, args, kwargs, formats, is_cast=is_cast, policy=policy)

    def _direction(self) -> tuple[str, tuple[CallId, Site, Policy | None] | None]:
        """Forward, backward or recomputation; and of a backward call the forward call."""
        if current_graph_task() == -1:
            return FORWARD, None
        if find_recomputation() is not None:
            return RECOMPUTATION, None
        node = current_autograd_node()
        found = self._nodes.get(sequence_number(node)) if node is not None else None
        while len(self._nodes) > _KEPT_NODES:
            self._nodes.popitem(last=False)
        return BACKWARD, found


never_begin_at(Observer.called)


def _listed_ops(device_type: str, policies: tuple[Policy, ...]) -> dict[str, OpOverload]:
    """The ops that native autocast, or one of these policies, decides about by name; by their ids."""
    named = [op for policy in policies for op in _named_ops(policy.resolve(device_type))]
    return _native_ops(device_type) | {op_facts(op).id: op for op in named} if named else _native_ops(device_type)


@cache
def _native_ops(device_type: str) -> dict[str, OpOverload]:
    return {op_facts(op).id: op for op in _named_ops(Policy.native(device_type))}


def _named_ops(policy: Policy) -> tuple[OpOverload, ...]:
    return tuple(op for rule in policy.rules if not rule.is_glob for op in ops_of(rule))


@contextmanager
def quietly() -> Iterator[None]:
    """Code of ours that computes with the user's tensors: no mode, no autocast, no autograd."""
    with without_modes(), autocast_off(), torch.no_grad():
        yield
