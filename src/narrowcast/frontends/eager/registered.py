"""Which of our kernels are registered: for ops that a policy changes, to stay, or until the end of a trial; and for a
recording's, until its end.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from narrowcast.frontends.eager.kernels import Kernel
from narrowcast.runtime.torch_bridge import op_facts
from narrowcast.runtime.torch_surface.dispatch import OpOverload, computed_kernel, register, release
from narrowcast.runtime.torch_surface.patches import note_staying
from narrowcast.runtime.torch_surface.state import autocast_key_name


class Registration:
    """Python kernels `kernel(keyset, *args, **kwargs)` registered for ops at an Autocast key, until removed.

    A thread that has found one may wait for the interpreter before it enters, while that one is removed, and others
    are made and removed. So the dispatcher's own objects are kept for a minute, and those of the last 128 in any case.
    """

    _removed: ClassVar[deque[tuple[float, list[Any]]]] = deque(maxlen=128)

    def __init__(
        self, kernels: Sequence[tuple[OpOverload, Callable[..., Any]]], ids: Set[str], device_type: str
    ) -> None:
        self._of = [(op, device_type) for op, _ in kernels]
        self.ids = ids
        of_namespace: defaultdict[str, list[tuple[OpOverload, Callable[..., Any]]]] = defaultdict(list)
        for op, kernel in kernels:
            of_namespace[op.namespace].append((op, kernel))
        self._libraries = [torch.library.Library(namespace, "IMPL") for namespace in of_namespace]
        for library in self._libraries:
            register(library, of_namespace[library.ns], device_type)

    def remove(self) -> bool:
        """Give the ops back what they had. False, and they keep these kernels, after many removals in one minute."""
        now, removed = time.monotonic(), self._removed
        if len(removed) == removed.maxlen and now - removed[0][0] < 60.0:
            return False
        removed.append((now, [computed_kernel(op, device_type) for op, device_type in self._of]))
        for library in self._libraries:
            release(library)
        return True


@dataclass(slots=True)
class _Visits:
    """How many have not ended, and what is registered for them."""

    count: int = 0
    registrations: list[Registration] = field(default_factory=list)


_lock = threading.Lock()
_kernels: dict[tuple[str, str], Kernel] = {}  # by op id and device type
_staying: dict[str, dict[str, Registration]] = {}  # by device type and op id
_visiting: defaultdict[str, _Visits] = defaultdict(_Visits)  # by device type
_tried: dict[int, list[list[tuple[str, Registration]]]] = {}  # by thread: for each trial, what it has registered


@contextmanager
def leaves_no_kernels() -> Iterator[None]:
    """What regions of this thread register in the block goes when it ends: it would slow later regions of the process.
    Other threads do not rely on it.
    """
    thread, of_trial = threading.get_ident(), list[tuple[str, Registration]]()
    trials = _tried.setdefault(thread, [])
    trials.append(of_trial)
    try:
        yield
    finally:
        with _lock:
            trials.remove(of_trial)
            if not trials:
                del _tried[thread]
            for device_type, registration in of_trial:
                if registration.remove():
                    staying = _staying[device_type]
                    for identity in [x for x in registration.ids if staying.get(x) is registration]:
                        del staying[identity]


def in_trial() -> bool:
    """Return whether kernels may go that regions ask for, in some thread."""
    return bool(_tried)


def install(ops: tuple[OpOverload, ...], ids: frozenset[str], device_type: str) -> None:
    """Register our kernels for these ops (`ids` are theirs): to stay, or until the trial of this thread ends."""
    if ids <= _known(device_type):
        return
    with _lock:
        known, staying = _known(device_type), _staying.setdefault(device_type, {})
        new = {identity: op for op in ops if (identity := op_facts(op).id) not in known}
        kernels = [(op, _kernel(op, device_type, identity)) for identity, op in new.items()]
        trials = _tried.get(threading.get_ident())
        if trials and kernels:
            registration = Registration(kernels, new.keys(), device_type)
            trials[-1].append((device_type, registration))
            staying.update(dict.fromkeys(new, registration))
            return
        for (identity, _), kernel in zip(new.items(), kernels, strict=True):
            staying[identity] = Registration([kernel], {identity}, device_type)
            note_staying(f"{identity} at {autocast_key_name(device_type)}", "a region's policy changes this op")


def _known(device_type: str) -> Set[str]:
    """Return the ids of the ops whose kernels are there, without those of other threads' trials."""
    staying = _staying.get(device_type, {}).keys()
    if not _tried:
        return staying
    thread = threading.get_ident()
    others = [of_trial for other, trials in [*_tried.items()] if other != thread for of_trial in trials]
    return staying - {identity for of_trial in others for _, entry in of_trial for identity in entry.ids}


def install_visiting(ops: Iterable[OpOverload], device_type: str) -> None:
    """Register our kernels for these ops until `remove_visiting`. Visits to one device type overlap as they like: what
    one has brought stays until the last has ended.
    """
    new = {op_facts(op).id: op for op in ops}
    with _lock:
        visits = _visiting[device_type]
        there = {*_known(device_type), *(op for entry in visits.registrations for op in entry.ids)}
        new = {identity: op for identity, op in new.items() if identity not in there} if there else new
        visits.count += 1
        if new:
            kernels = [(op, _kernel(op, device_type, identity)) for identity, op in new.items()]
            visits.registrations.append(Registration(kernels, new.keys(), device_type))


def remove_visiting(device_type: str) -> None:
    """Undo one `install_visiting`. Kernels that may not go yet are there for the next, and go with it."""
    with _lock:
        visits = _visiting[device_type]
        visits.count -= 1
        if not visits.count:
            visits.registrations = [entry for entry in visits.registrations if not entry.remove()]


def _kernel(op: OpOverload, device_type: str, identity: str) -> Kernel:
    """Return the one kernel object of an op and device type, made while torch's own kernel is the registered one."""
    kernel = _kernels.get((identity, device_type))
    if kernel is None:
        kernel = _kernels[identity, device_type] = Kernel(op, device_type)
    return kernel
