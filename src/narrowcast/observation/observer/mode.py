"""What recordings and observers share: a dispatch mode to which kernels report calls, and that sees the ops below."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from narrowcast.core.policy import Policy
from narrowcast.frontends.eager.registered import install_visiting, remove_visiting
from narrowcast.frontends.eager.watch import Watcher, add_watcher, present_device_types, remove_watcher
from narrowcast.observation.observer.door import Door
from narrowcast.observation.restore.weights import Weights
from narrowcast.runtime.regions.ruling import carry_into_recomputation
from narrowcast.runtime.sites.numbering import coming_round
from narrowcast.runtime.torch_bridge import OpFacts, op_facts, ops_of
from narrowcast.runtime.torch_surface.dispatch import DispatchMode, OpOverload, call_op, quietly
from narrowcast.runtime.torch_surface.dynamo import CompiledCode
from narrowcast.runtime.torch_surface.state import autocast_key, autocast_was_on, switched_on


class _Executing(threading.local):
    op: OpOverload | None = None


class WatchingMode(DispatchMode, Watcher):
    """`with mode.observing():` kernels report calls to it (`begin`, `end`, `fail`), and it sees what executes.

    On the thread that opened it, and on autograd's threads. Compiled code runs as eager code meanwhile.
    """

    weights: Weights | None = None
    """Those that are to be restored after the run."""

    def __init__(self, notes: list[str], policies: tuple[Policy, ...] = ()) -> None:
        """notes: where failures of ours go. policies: whose ops kernels report, besides native autocast's."""
        super().__init__()
        self.door = Door(notes)
        device_types = present_device_types()
        self._keys = tuple(autocast_key(device_type) for device_type in device_types)
        self._ops = {device_type: _listed_ops(device_type, policies) for device_type in device_types}
        self._executing = _Executing()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo does not trace code again that it meets under a mode which returns False."""
        return True

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe what runs inside."""
        carry_into_recomputation()
        with ExitStack() as stack:
            for device_type, ops in self._ops.items():
                install_visiting(ops.values(), device_type)
                stack.callback(remove_visiting, device_type)
            stack.enter_context(CompiledCode(on=False))
            add_watcher(self)
            stack.callback(remove_watcher, self)
            stack.enter_context(self)
            yield

    def _autocast_on(self) -> tuple[Any, ...]:
        """Return the keys for which autocast is on around the op that the mode sees."""
        return autocast_was_on(self._keys)

    def _keep_weights(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the weights copied that an op is about to write to, if they are to be restored."""
        if self.weights is not None and (facts.overwrites or "generator" in kwargs):
            with quietly():
                self.door.run(facts.id, self.weights.before_write, facts, args, kwargs)

    def _execute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], on: tuple[Any, ...]) -> Any:
        """Run an op with autocast as it would be without us: kernels that call other ops must find it on."""
        if not on:
            return call_op(func, args, kwargs)
        self._executing.op = func
        try:
            with switched_on(on), coming_round(op_facts(func).id):
                return call_op(func, args, kwargs)
        finally:
            self._executing.op = None


def _listed_ops(device_type: str, policies: tuple[Policy, ...]) -> dict[str, OpOverload]:
    """Return the ops that native autocast, or one of these policies, decides about by name; by their ids."""
    named = [op for policy in policies for op in _named_ops(policy.resolve(device_type))]
    return _native_ops(device_type) | {op_facts(op).id: op for op in named} if named else _native_ops(device_type)


@cache
def _native_ops(device_type: str) -> dict[str, OpOverload]:
    return {op_facts(op).id: op for op in _named_ops(Policy.native(device_type))}


def _named_ops(policy: Policy) -> tuple[OpOverload, ...]:
    return tuple(op for rule in policy.rules if not rule.is_glob for op in ops_of(rule))
