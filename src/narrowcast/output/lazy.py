"""Imports of rooms where they are first needed, which leave the program's random numbers alone."""

import importlib
import random
from types import ModuleType


def imported(name: str) -> ModuleType:
    """Return a module by its name. Rich draws numbers of Python's generator where it is imported."""
    drawn = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(drawn)
