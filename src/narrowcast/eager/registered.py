"""Which of our kernels are registered: for ops that a policy changes, to stay, and for a recording's, until its end."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from narrowcast.eager.kernels import Kernel
from narrowcast.torch_bridge import OpOverload, autocast_key_name, op_facts, registered_kernel


class Registration:
    """Python kernels `kernel(keyset, *args, **kwargs)` registered for ops at an Autocast key, until removed.

    Another thread may be in the middle of one that is removed, so the dispatcher's own objects are kept for some time.
    """

    _removed: ClassVar[deque[list[Any]]] = deque(maxlen=32)

    def __init__(self, kernels: Sequence[tuple[OpOverload, Callable[..., Any]]], device_type: str) -> None:
        self._of = [(op, device_type) for op, _ in kernels]
        self._libraries = {op.namespace: torch.library.Library(op.namespace, "IMPL") for op, _ in kernels}
        key = autocast_key_name(device_type)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is overridden, which is the purpose
            for op, kernel in kernels:
                name = op._opname if op._overloadname == "default" else f"{op._opname}.{op._overloadname}"
                self._libraries[op.namespace].impl(name, kernel, key, with_keyset=True)

    def remove(self) -> None:
        """Give the ops back what they had."""
        self._removed.append([registered_kernel(op, device_type) for op, device_type in self._of])
        for library in self._libraries.values():
            library._destroy()


@dataclass(slots=True)
class _Visits:
    """Those that have not ended: how many, the ids of ops that have kernels for them, and what registered these."""

    count: int = 0
    ids: set[str] = field(default_factory=set)
    registrations: list[Registration] = field(default_factory=list)


_lock = threading.Lock()
_kernels: dict[tuple[str, str], Kernel] = {}  # by op id and device type
_staying: dict[str, dict[str, Registration]] = {}  # by device type and op id
_visiting: dict[str, _Visits] = {}  # by device type


def install(ops: tuple[OpOverload, ...], ids: frozenset[str], device_type: str) -> None:
    """Register our kernels for these ops (`ids` are theirs), to stay."""
    staying = _staying.get(device_type, {})
    if ids <= staying.keys():
        return
    with _lock:
        staying = _staying.setdefault(device_type, {})
        for op in ops:
            identity = op_facts(op).id
            if identity not in staying:
                staying[identity] = Registration([(op, _kernel(op, device_type))], device_type)


def install_visiting(ops: tuple[OpOverload, ...], device_type: str) -> None:
    """Register our kernels for these ops until `remove_visiting`. Visits to one device type overlap as they like: what
    one has brought stays until the last has ended.
    """
    with _lock:
        visits = _visiting.setdefault(device_type, _Visits())
        there = {*_staying.get(device_type, {}), *visits.ids}
        new = {op_facts(op).id: op for op in ops if op_facts(op).id not in there}
        visits.count += 1
        visits.ids.update(new)
        visits.registrations.append(Registration([(op, _kernel(op, device_type)) for op in new.values()], device_type))


def remove_visiting(device_type: str) -> None:
    """Undo one `install_visiting`."""
    with _lock:
        visits = _visiting[device_type]
        visits.count -= 1
        if not visits.count:
            for registration in _visiting.pop(device_type).registrations:
                registration.remove()


def _kernel(op: OpOverload, device_type: str) -> Kernel:
    """The one kernel object of an op and device type, made while torch's own kernel is the registered one."""
    pair = (op_facts(op).id, device_type)
    kernel = _kernels.get(pair)
    if kernel is None:
        kernel = _kernels[pair] = Kernel(op, device_type)
    return kernel
