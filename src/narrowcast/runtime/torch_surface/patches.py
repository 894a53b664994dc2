"""Everything of torch that stands replaced: one table.

Two classes. What is *held* is replaced for a while, by holders that come and go in any order on any thread: what they
do is put around the original one by one, and with the last of them the attribute is what it was. What *stays* is
replaced or registered for the process, at the first region, pin or recording and never at import, and passes on exactly
what comes to it outside of ours (decisions 0005, 0015, 0020).

Somebody else may replace the same attribute while ours stands. Then theirs stays on top when ours goes, and what they
kept of ours only passes on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

Function = Callable[..., Any]
Wrap = Callable[[Any], Any]
"""From what stood there to what is to stand there."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A line of the table: what is replaced or registered now, for how long, and why. holders: 0 for what stays."""

    what: str
    why: str
    holders: int = 0


@dataclass(eq=False, slots=True)
class _HeldAttribute:
    """An attribute that is replaced for a while by `function`, which runs `chain`: all wraps around the original."""

    owner: Any
    name: str
    original: Function
    was_own: bool
    wraps: list[tuple[Wrap, str]] = field(default_factory=list)  # and why
    chain: Function = field(init=False)
    function: Function = field(init=False)
    is_classmethod: bool = field(init=False)

    def __post_init__(self) -> None:
        self.chain = self.original
        self.is_classmethod = isinstance(vars(self.owner).get(self.name), classmethod)

        @functools.wraps(self.original)  # TorchScript compiles the source of the original, and looks at its name
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.chain(*args, **kwargs)

        self.function = replaced

    def put(self, function: Function) -> None:
        """Set the attribute."""
        setattr(self.owner, self.name, classmethod(function) if self.is_classmethod else function)

    def make_chain(self) -> None:
        """Put all wraps around the original, the first innermost."""
        chained = self.original
        for wrap, _ in self.wraps:
            chained = wrap(chained)
        self.chain = chained


_lock = threading.RLock()
_held: list[_HeldAttribute] = []
_staying: dict[str, Standing] = {}


@contextmanager
def held(owner: Any, why: str, **wraps: Wrap) -> Iterator[None]:
    """Replace attributes of a module or class inside: each by its wrap around the former one."""
    with ExitStack() as stack:
        for name, wrap in wraps.items():
            stack.callback(_let_go, _hold(owner, name, wrap, why), wrap, why)
        yield


def _hold(owner: Any, name: str, wrap: Wrap, why: str) -> _HeldAttribute:
    with _lock:
        attribute = next((h for h in _held if h.owner is owner and h.name == name and _stands(h)), None)
        if attribute is None:
            attribute = _HeldAttribute(owner, name, _current(owner, name), name in vars(owner))
            _held.append(attribute)
            attribute.put(attribute.function)
        attribute.wraps.append((wrap, why))
        attribute.make_chain()
        return attribute


def _let_go(attribute: _HeldAttribute, wrap: Wrap, why: str) -> None:
    with _lock:
        attribute.wraps.remove((wrap, why))
        attribute.make_chain()
        if attribute.wraps:
            return
        _held.remove(attribute)
        if _current(attribute.owner, attribute.name) is not attribute.function:
            return  # somebody else stands on top, or has restored what was there before us
        if attribute.was_own:
            attribute.put(attribute.original)
        else:
            delattr(attribute.owner, attribute.name)


def _current(owner: Any, name: str) -> Function:
    """Return what stands there: of a class method, the function that takes the class first."""
    current: Function = getattr(owner, name)
    return current.__func__ if isinstance(vars(owner).get(name), classmethod) else current  # type: ignore[attr-defined]


def _stands(attribute: _HeldAttribute) -> bool:
    """Return whether our function is still there, alone or below wrappers that others made by functools.wraps."""
    current = _current(attribute.owner, attribute.name)
    while current is not attribute.function and hasattr(current, "__wrapped__"):
        current = current.__wrapped__
    return current is attribute.function


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Run a function once for the process, whichever thread comes first; the others wait for it."""
    done: list[None] = []

    @functools.wraps(function)
    def run() -> None:
        if not done:
            with _lock:
                if not done:
                    function()
                    done.append(None)

    return run


def stay(owner: Any, name: str, wrap: Wrap, why: str) -> None:
    """Replace an attribute of a module or class for the process. Done once, however often it is asked for."""
    what = f"{_words(owner)}.{name}"
    with _lock:
        if what not in _staying:
            setattr(owner, name, wrap(getattr(owner, name, None)))
            _staying[what] = Standing(what, why)


def note_staying(what: str, why: str) -> None:
    """Note in the table what was registered with torch for the process."""
    with _lock:
        _staying.setdefault(what, Standing(what, why))


def standing() -> tuple[Standing, ...]:
    """Return the table as it is now: what is held first, then what stays, each in the order of its registration."""
    with _lock:
        held_now = [
            Standing(f"{_words(h.owner)}.{h.name}", "; ".join(why for _, why in h.wraps), len(h.wraps)) for h in _held
        ]
        return (*held_now, *_staying.values())


def _words(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(getattr(owner, "__name__", type(owner).__name__))
