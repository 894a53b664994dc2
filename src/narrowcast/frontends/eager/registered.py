"""Which of our kernels are registered: for ops that a policy changes, to stay, and for the visits of recordings and
trials, until the last of these ends.
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
from narrowcast.runtime.regions.ruling import is_carried_since, next_carried
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
        self.ids = ids
        of_namespace: defaultdict[str, list[tuple[OpOverload, Callable[..., Any]]]] = defaultdict(list)
        for op, kernel in kernels:
            of_namespace[op.namespace].append((op, kernel))
        self._libraries = [torch.library.Library(namespace, "IMPL") for namespace in of_namespace]
        for library in self._libraries:
            register(library, of_namespace[library.ns], device_type)
        self._functors = [computed_kernel(op, device_type) for op, _ in kernels]

    def remove(self) -> bool:
        """Give the ops back what they had. False, and they keep these kernels, after many removals in one minute."""
        now, removed = time.monotonic(), self._removed
        if len(removed) == removed.maxlen and now - removed[0][0] < 60.0:
            return False
        removed.append((now, self._functors))
        for library in self._libraries:
            release(library)
        return True


@dataclass(slots=True)
class _Visits:
    """How many have not ended, and what is registered for them."""

    count: int = 0
    registrations: list[Registration] = field(default_factory=list)

    @property
    def ids(self) -> set[str]:
        """The ids of the ops that visits have brought."""
        return {identity for entry in self.registrations for identity in entry.ids}


@dataclass(slots=True)
class _Trial:
    """What regions ask for in a block that leaves no kernels. asked: ops, by their ids and device type; visited: these
    device types; carried: a number of regions that checkpoint carries to a recomputation.
    """

    carried: int
    asked: dict[tuple[frozenset[str], str], tuple[OpOverload, ...]] = field(default_factory=dict)
    visited: set[str] = field(default_factory=set)


_lock = threading.Lock()
_kernels: dict[tuple[str, str], Kernel] = {}  # by op id and device type
_staying: dict[str, dict[str, Registration]] = {}  # by device type and op id
_visiting: defaultdict[str, _Visits] = defaultdict(_Visits)  # by device type
_trials: dict[int, list[_Trial]] = {}  # by thread


@contextmanager
def leaves_no_kernels() -> Iterator[None]:
    """Register what regions of this thread ask for in the block for a visit, which ends with it: it would slow later
    regions of the process. Regions of other threads register what they need themselves, to stay. It stays, too, if
    checkpoint has carried a region to a recomputation, which may be made later.
    """
    thread, trial = threading.get_ident(), _Trial(next_carried())
    trials = _trials.setdefault(thread, [])
    trials.append(trial)
    try:
        yield
    finally:
        trials.remove(trial)
        if not trials:
            _trials.pop(thread, None)
        if is_carried_since(trial.carried):
            for (ids, device_type), ops in trial.asked.items():
                install(ops, ids, device_type)
        for device_type in trial.visited:
            remove_visiting(device_type)


def in_trial() -> bool:
    """Return whether what regions of this thread ask for will go."""
    return threading.get_ident() in _trials


def install(ops: tuple[OpOverload, ...], ids: frozenset[str], device_type: str) -> None:
    """Register our kernels for these ops (`ids` are theirs), to stay; in a trial, for that."""
    staying = _staying.get(device_type, {})
    if ids <= staying.keys():
        return
    if trials := _trials.get(threading.get_ident()):
        _visit(trials[-1], ops, ids, device_type)
        return
    with _lock:
        staying = _staying.setdefault(device_type, {})
        for op in ops:
            identity = op_facts(op).id
            if identity not in staying:
                staying[identity] = Registration([(op, _kernel(op, device_type, identity))], {identity}, device_type)
                note_staying(f"{identity} at {autocast_key_name(device_type)}", "a region's policy changes this op")


def _visit(trial: _Trial, ops: tuple[OpOverload, ...], ids: frozenset[str], device_type: str) -> None:
    """Register our kernels for these ops for a trial."""
    if (ids, device_type) not in trial.asked:
        trial.asked[ids, device_type] = ops
        install_visiting(ops, device_type, is_new=device_type not in trial.visited)
        trial.visited.add(device_type)


def install_visiting(ops: Iterable[OpOverload], device_type: str, is_new: bool = True) -> None:
    """Register our kernels for these ops until `remove_visiting`. Visits to one device type overlap as they like: what
    one has brought stays until the last has ended. is_new: it is another visit, and no more of one.
    """
    new = {op_facts(op).id: op for op in ops}
    with _lock:
        visits = _visiting[device_type]
        there = {*_staying.get(device_type, {}), *visits.ids}
        new = {identity: op for identity, op in new.items() if identity not in there} if there else new
        if new:
            kernels = [(op, _kernel(op, device_type, identity)) for identity, op in new.items()]
            visits.registrations.append(Registration(kernels, new.keys(), device_type))
        visits.count += is_new


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
