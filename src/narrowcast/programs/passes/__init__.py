"""Passes: from a program to the edits that change it. Verb and object; none touches a program itself."""

from narrowcast.programs.passes.assign import assign_casts, call_of
from narrowcast.programs.passes.drop import drop_casts
from narrowcast.programs.passes.fold import fold_casts
from narrowcast.programs.passes.hoist import hoist_casts
from narrowcast.programs.passes.pipeline import (
    AFTER_AUTOGRAD,
    BEFORE_AUTOGRAD,
    Pass,
    PassResult,
    before_autograd,
    run_passes,
)
from narrowcast.programs.passes.readers import COMPOSITE, cast_inside
from narrowcast.programs.passes.share import share_casts
from narrowcast.programs.placement.place import move_casts, place_formats

__all__ = [
    "AFTER_AUTOGRAD",
    "BEFORE_AUTOGRAD",
    "COMPOSITE",
    "Pass",
    "PassResult",
    "assign_casts",
    "before_autograd",
    "call_of",
    "cast_inside",
    "drop_casts",
    "fold_casts",
    "hoist_casts",
    "move_casts",
    "place_formats",
    "run_passes",
    "share_casts",
]  # fmt: skip
