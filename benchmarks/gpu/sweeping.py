"""What a sweep over many ops shares with tests/conformance/sweep.py, and what it needs on a device."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Callable
from pathlib import Path

SWEEP = Path(__file__).parents[2] / "tests/conformance/sweep.py"


def stand_in_for_expecttest() -> None:
    """torch's test modules import expecttest, for a base class that nothing here uses."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        made = types.ModuleType("expecttest")
        made.TestCase, made.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = made


def conformance_sweep() -> types.ModuleType:
    """tests/conformance/sweep.py, whose comparisons are used here, too."""
    if "conformance_sweep" not in sys.modules:
        stand_in_for_expecttest()
        spec = importlib.util.spec_from_file_location("conformance_sweep", SWEEP)
        made = importlib.util.module_from_spec(spec)
        sys.modules["conformance_sweep"] = made
        spec.loader.exec_module(made)
    return sys.modules["conformance_sweep"]


def same_results(a: object, b: object, bits_too: bool = True) -> str:
    """Empty if two results have the same dtypes and bits; else what differs."""
    return conformance_sweep().same(a, b, bits_too)


def is_repeatable(call: Callable[[], object], wanted: object) -> bool:
    """Whether it gives the same bits four times more: what does not says nothing about another way to compute it."""
    return not any(same_results(wanted, call()) for _ in range(4))
