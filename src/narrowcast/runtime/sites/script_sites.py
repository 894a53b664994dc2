"""Where in a script the running interpreter is: told by an op that observed scripts call before each call of theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from narrowcast.core.policy import Site
from narrowcast.runtime.torch_surface.patches import note_staying, once

MARK = "narrowcast::at"
"""The op; it takes the number of a site."""


class _ScriptNow(threading.local):
    wanted = 0
    site: Site | None = None


_now = _ScriptNow()
_sites: list[Site] = []
_numbers: dict[Site, int] = {}
_library: list[torch.library.Library] = []


@contextmanager
def told_of_script_sites() -> Iterator[None]:
    """Scripts that are called on this thread say where they are."""
    _register()
    _now.wanted += 1
    try:
        yield
    finally:
        _now.wanted -= 1


def are_wanted() -> bool:
    """Whether somebody wants to know."""
    return _now.wanted > 0


def script_site() -> Site | None:
    """The place of the call that a script makes now; None where none runs, or it does not say."""
    return _now.site


@contextmanager
def inside_script() -> Iterator[None]:
    """A script runs that says where it is."""
    before = _now.site
    try:
        yield
    finally:
        _now.site = before


def number_of(site: Site) -> int:
    """The number by which the op names a site."""
    if site not in _numbers:
        _numbers[site] = len(_sites)
        _sites.append(site)
    return _numbers[site]


def _at(number: int) -> None:
    _now.site = _sites[number]


@once
def _register() -> None:
    library = torch.library.Library("narrowcast", "FRAGMENT")
    library.define("at(int number) -> ()", alias_analysis="CONSERVATIVE")  # nothing may drop or move it
    library.impl("at", _at, "CompositeExplicitAutograd")
    _library.append(library)
    note_staying(MARK, "observed scripts say where they are")
