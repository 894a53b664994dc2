"""Parts for the tests of benchmarks/gpu/run.py: one that passes, and one for each way not to."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/gpu"))

from context import Skip
from part import Part

PARTS = tuple(
    Part(name, f"a part that {name}", f"gpu_parts:{name}", attempts=3 if name == "resumes" else 1, limit_s=60)
    for name in ("passes", "fails", "raises", "skips", "dies", "hangs", "resumes")
)


def passes(context):
    """Two checks, and a figure."""
    context.check("one")
    context.check("two")
    context.data["figure"] = 7


def fails(context):
    """One check of two fails, and the part goes on."""
    context.check("wrong", "aten.mm.default: bits differ")
    with context.attempt("raising"):
        raise ValueError("inside an attempt")
    context.check("right")


def raises(context):
    """An error that no check catches."""
    context.check("before")
    raise ValueError("what it said")


def skips(context):
    """A part that lacks something."""
    raise Skip("the package nothing is not installed")


def dies(context):
    """The process ends without a word."""
    context.check("before")
    os.abort()


def hangs(context):
    """It never ends, and has found something before."""
    context.check("before")
    time.sleep(1000)


def resumes(context):
    """It dies at the second of three things, and goes on after it."""
    for name in ("a", "b", "c"):
        if name not in context.kept:
            context.keep(name, True)
            if name == "b":
                os.abort()
    context.check("all of it", "" if set(context.kept) == {"a", "b", "c"} else context.kept)
