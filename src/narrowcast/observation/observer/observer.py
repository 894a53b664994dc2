"""The observer: notified of every call of a run, forward, backward and recomputed, each with its identity.

Calls are those that a policy decides: ops at the Autocast keys, which our kernels report, and below them whatever
else computes. Compiled graphs are run step by step meanwhile (`frontends.compiled.stepwise`), so that they report the
same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from narrowcast.core.ledger.identity import BACKWARD, FORWARD, RECOMPUTATION, CallId
from narrowcast.core.ops.facts import is_named
from narrowcast.core.policy import MODULE_CALL_OP, Policy, Site
from narrowcast.frontends.compiled.stepwise import is_program, run_program
from narrowcast.frontends.eager.call_hook import ask_at_calls
from narrowcast.frontends.eager.watch import DecidedCall
from narrowcast.observation.observer.mode import WatchingMode
from narrowcast.observation.observer.module_calls import ModuleCalls, Who
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.observer.words import deciding_rule, planned_names
from narrowcast.runtime.regions.stack import stack
from narrowcast.runtime.sites.graph_nodes import current_site, script_site, told_of_script_sites
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.torch_bridge import OpFacts, op_facts, tensors_in
from narrowcast.runtime.torch_surface.autograd import (
    current_autograd_node,
    current_graph_task,
    next_sequence_number,
    sequence_number,
)
from narrowcast.runtime.torch_surface.dispatch import (
    COPY,
    TO_COPY,
    OpOverload,
    below_modes,
    call_op,
    step_in,
    step_out,
    without_functions,
)
from narrowcast.runtime.torch_surface.dynamo import never_begin_at
from narrowcast.runtime.torch_surface.fx import FakeTensor
from narrowcast.runtime.torch_surface.jit import script_calls_replaced
from narrowcast.runtime.torch_surface.modules import find_recomputation
from narrowcast.runtime.torch_surface.state import autocast_off

_AS_IT_IS = nullcontext()
_BESIDE = "not captured: calls that a second thread made beside another one"
_KEPT_NODES = 200_000
"""How many autograd nodes are remembered; their backward knows the forward call."""


class _ObserverState(threading.local):
    def __init__(self) -> None:
        self.decided: list[SeenCall | None] = []
        self.starts: list[int] = []
        self.outer: SeenCall | None = None  # the call whose kernel runs with autocast on, as listed ops inside need it
        self.is_out = False
        self.looking = False
        self.is_inside = False  # of a module


class Observer(WatchingMode):
    """`with observer.observing():` its `before` and `after` are called around each call of the block."""

    steps_graphs = True
    casts_scripts = True
    """Scripts that are called are cast as always; else TorchScript's own pass, which asks no policy, is off."""
    saw_scripts = False
    """Whether scripts of torch's own were called, of which a policy's rules do not say what is low."""
    runs_fakes = False
    """Whether fake tensors are the run's own; else they are those of code that is being compiled."""
    sees_inside = False
    """Whether `gives` is called for the ops inside of calls that are decided: casts, and what the op is made of."""
    sees_views = False
    """Whether `viewed` is called."""
    sees_draws = False
    """Whether numbers that are drawn by others, as tokens by their probabilities, are calls: they have no format."""

    def __init__(self, policies: tuple[Policy, ...] = ()) -> None:
        super().__init__([], policies)
        self._local = _ObserverState()
        self._module_calls = ModuleCalls()
        self._nodes: OrderedDict[int, tuple[CallId, Site, Policy | None]] = OrderedDict()

    @property
    def roots(self) -> Iterable[torch.nn.Module]:
        """The outermost modules that were called."""
        return list(self._module_calls.roots)

    # -- what those who look are told --------------------------------------------------------------------------------

    def looks_before(self, facts: OpFacts) -> bool:
        """Return whether `before` is called for calls of this op: each time costs as much as a small op."""
        return True

    def before(self, call: SeenCall) -> None:
        """Inspect a call that is about to run."""

    def after(self, call: SeenCall) -> None:
        """Inspect a call that has run."""

    @property
    def follows(self) -> bool:
        """Whether `moved` is to be called."""
        return False

    def moved(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Inspect an op that has run and is no call: a copy, memory of some shape."""

    def passed_through(self, args: tuple[Any, ...], result: Any) -> None:
        """Inspect the results of something whose parts were not seen."""

    def viewed(self, args: tuple[Any, ...], result: Any) -> None:
        """Inspect an op that has returned views of its first argument, which is no call."""

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Return what replaces an op's output; facts, args, kwargs: of the call itself, or of one inside it."""
        return result

    def begins(self, module: torch.nn.Module) -> None:
        """Inspect the module of `calls_of` before a call of it."""

    def returned(self, result: Any) -> None:
        """Inspect what the module of `calls_of` has returned; None where it raised."""

    # -- opening -----------------------------------------------------------------------------------------------------

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe what runs inside."""
        ask_at_calls()
        around = lambda call: partial(self._called_script, threading.get_ident(), call)  # noqa: E731
        with told_of_script_sites(), script_calls_replaced(around, "runs are observed"), super().observing():
            yield

    @contextmanager
    def calls_of(self, module: torch.nn.Module) -> Iterator[None]:
        """Observe what runs in calls of a module, in whichever thread; not those beside another in a second thread."""
        opened: list[tuple[int, ExitStack]] = []

        def begin(*_: Any) -> None:
            thread = threading.get_ident()
            if not opened:
                stack = ExitStack()
                opened.append((thread, stack))
                stack.enter_context(self.observing())
                self.door.run("a module's call", self._module_calls.begin, module)
                stack.callback(self._module_calls.end)
                self.door.run("weights", self.begins, module)
                self._local.is_inside = True
            elif opened[0][0] != thread:
                self.door.notes.append(_BESIDE) if _BESIDE not in self.door.notes else None
            else:
                opened.append((thread, ExitStack()))

        def end(_: Any, args: Any, result: Any) -> None:
            if opened and opened[-1][0] == threading.get_ident():
                if len(opened) == 1:
                    self._local.is_inside = False
                    self.returned(result)
                opened.pop()[1].close()

        with ExitStack() as hooks:
            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(end, always_call=True).remove)
            yield

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call. Exported programs run call by call."""
        is_begun = self.door.run("a module's call", self._module_calls.begin, module)
        try:
            return run_program(module, (self,), args, kwargs) if is_program(module) else call(args, kwargs)
        finally:
            if is_begun:
                self._module_calls.end()

    def _called_script(self, thread: int, call: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of a script function or method of torch's own, in the thread that is observed."""
        self.saw_scripts = True
        uncast = autocast_off() if not self.casts_scripts and threading.get_ident() == thread else _AS_IT_IS
        with uncast:
            return call(script, *args, **kwargs)

    # -- told by our kernels, and by graphs that run step by step ------------------------------------------------------

    def begin(self, call: DecidedCall) -> None:
        """Note that a decided call is about to run."""
        seen = self.door.run(call.facts.id, self._begun, call)
        if seen is not None:
            self._local.starts.append(next_sequence_number())
        self._local.decided.append(seen)
        if len(self._local.decided) == 1 and not self.sees_inside and self.weights is None:
            self._local.is_out = step_out(self)

    def _begun(self, call: DecidedCall) -> SeenCall | None:
        """Return the call, if it is not part of another."""
        state = self._local
        if state.outer is not None and self._executing.op not in (None, call.facts.op) and any(call.plan.formats):
            state.outer.runs_inside(planned_names(call.plan, call.tensors))
        if call.facts.id == MODULE_CALL_OP or state.decided or self._executing.op or state.looking:
            return None
        if not self.runs_fakes and any(isinstance(t, FakeTensor) for _, t in call.tensors):
            return None
        return self._seen(call.facts, call.args, call.kwargs, decided=call)

    def end(self, result: Any) -> None:
        """Note that the call that began last has returned."""
        seen = self._over()
        if seen is None:
            return
        self.door.run(seen, self._note_nodes, seen, self._local.starts.pop())
        seen.result = result
        self._tell_of(self.after, seen)
        seen.who.end()

    def _note_nodes(self, seen: SeenCall, start: int) -> None:
        """Assign the autograd nodes made since to the call. Without gradients only casts of weights make some."""
        if not torch.is_grad_enabled():
            return
        for number in range(start, next_sequence_number()):
            self._nodes[number] = (seen.id, seen.site, seen.policy)

    def fail(self, error: BaseException) -> None:
        """Note that the call that began last has raised."""
        if self._over() is not None:
            self._local.starts.pop()

    def _over(self) -> SeenCall | None:
        """Return the call that began last, which is over. What follows it is seen again."""
        state = self._local
        seen = state.decided.pop()
        if state.is_out and not state.decided:
            state.is_out = False
            step_in(self)
        return seen

    def wants_whole(self, op: str, device_type: str) -> bool:
        """Return whether eager code reports an op on that device: its lists are not another's."""
        return op in self._ops[device_type]

    # -- seen by the mode ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = op_facts(func)
        if self._is_nobodys(facts, types):
            result = call_op(func, args, kwargs)
            if self.sees_views and facts.is_view and not (types or self._local.looking):
                self.door.run(facts.id, self.viewed, args, result)
            return result
        decided = self._local.decided
        self._keep_weights(facts, args, kwargs)
        seen = decided[0] if decided else self.door.run(facts.id, self._met, facts, args, kwargs)
        on = () if decided or self._executing.op else self._autocast_on()
        if on:
            result = self._execute_around(seen, func, args, kwargs, on)
        else:
            result = self._execute(func, args, kwargs, on)
        if seen is None:
            if self.follows and not decided:
                self._look(self.moved, facts.id, facts, args, kwargs, result)
            return result
        try:
            result = self.gives(seen, facts, args, kwargs, result)
            if decided:
                return result
            seen.result = result
            if torch.is_grad_enabled() and seen.who.direction != BACKWARD:
                number = next_sequence_number() - 1
                # an op without a gradient makes no node: the last one is another's
                if number not in self._nodes and any(t.requires_grad for t in tensors_in(args, kwargs)):
                    self._nodes[number] = (seen.id, seen.site, seen.policy)
        except Exception as error:
            self.door.caught(error, seen)
            return result
        self._tell_of(self.after, seen)
        seen.who.end()
        return result

    def ran_higher_order(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Inspect the results of flex_attention and its like, if anything is followed."""
        if self.follows:
            self._look(self.passed_through, name, args, result)

    def _execute_around(
        self, seen: SeenCall | None, func: OpOverload, args: Any, kwargs: dict[str, Any], on: tuple[Any, ...]
    ) -> Any:
        """Run an op with autocast on; listed ops that its kernel calls are noted with its call."""
        self._local.outer = seen
        try:
            return self._execute(func, args, kwargs, on)
        finally:
            self._local.outer = None

    def _is_nobodys(self, facts: OpFacts, types: Any) -> bool:
        """Return whether an op is ignored: a view, a question, what we compute ourselves, what is fake."""
        if (facts.is_view and not self._local.decided) or self._local.looking or facts.id.startswith("prim."):
            return True
        return bool(types) and not self.runs_fakes and any(issubclass(t, FakeTensor) for t in types)

    def _met(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenCall | None:
        """Return the call of an op that no kernel has decided about, if it is not part of another."""
        func = facts.op
        is_cast = func is TO_COPY or (func is COPY and args[0].dtype is not args[1].dtype)
        is_call = is_cast or facts.computes or (facts.writes and func is not COPY)
        if not (is_call or (self.sees_draws and is_named(facts.id, "computation.draws"))):
            return None
        return self._seen(facts, args, kwargs, is_cast)

    def _tell_of(self, look: Callable[[SeenCall], None], seen: SeenCall) -> None:
        """Pass a call to a method, unless inspecting it has failed."""
        if not seen.is_lost and not self._look(look, seen, seen):
            seen.is_lost = True

    def _look(self, look: Callable[..., None], what: Any, *args: Any) -> bool:
        """Call a method that inspects; return whether that went well. What it computes is no call."""
        state = self._local
        state.looking = True
        unrecorded = torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS
        try:
            with below_modes(), without_functions(), autocast_off(), unrecorded:
                look(*args)
            return True
        except Exception as error:
            self.door.caught(error, what)
            return False
        finally:
            state.looking = False

    # -- identities ----------------------------------------------------------------------------------------------------

    def _seen(
        self, facts: OpFacts, args: Any, kwargs: Any, is_cast: bool = False, decided: DecidedCall | None = None
    ) -> SeenCall:
        """Return the call that is passed to the observer's methods."""
        noted, plan = (decided.noted, decided.plan) if decided is not None else (None, None)
        direction, forward = self._direction()
        of: CallId | None = None
        if direction == BACKWARD:
            of, site, policy = forward or (None, noted or find_site(with_names=False), None)
            path, module_call = (of.module_path, of.module_call) if of is not None else (site.module_path, 1)
            who = Who(self._module_calls.of_backward(path, facts.id, module_call), site)
        else:
            region = stack.innermost
            policy = region.prepared.policy if region is not None else None
            with_names = policy is not None and policy.table.asks_for_names
            who = self._module_calls.who(
                facts.id, direction, is_cast, noted or current_site() or script_site(), with_names
            )
        seen = SeenCall(who, facts, args, kwargs, plan=plan, forward=of, is_cast=is_cast, policy=policy)
        seen.rule = deciding_rule(plan)
        if self.looks_before(facts):
            self._tell_of(self.before, seen)
        return seen

    def _direction(self) -> tuple[str, tuple[CallId, Site, Policy | None] | None]:
        """Return forward, backward or recomputation; and of a backward call the forward call."""
        if current_graph_task() == -1:
            return FORWARD, None
        if find_recomputation() is not None:
            return RECOMPUTATION, None
        node = current_autograd_node()
        forward = self._nodes.get(sequence_number(node)) if node is not None else None
        while len(self._nodes) > _KEPT_NODES:
            self._nodes.popitem(last=False)
        return BACKWARD, forward


never_begin_at(Observer.called)
