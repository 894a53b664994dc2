"""Passes: from a program to the edits that change it. Verb and object; none touches a program itself."""

from narrowcast.programs.passes.assign import assign_casts as assign_casts, call_of as call_of
from narrowcast.programs.passes.drop import drop_casts as drop_casts
from narrowcast.programs.passes.fold import fold_casts as fold_casts
from narrowcast.programs.passes.hoist import hoist_casts as hoist_casts
from narrowcast.programs.passes.pipeline import (
    AFTER_AUTOGRAD as AFTER_AUTOGRAD,
    BEFORE_AUTOGRAD as BEFORE_AUTOGRAD,
    Pass as Pass,
    PassResult as PassResult,
    before_autograd as before_autograd,
    run_passes as run_passes,
)
from narrowcast.programs.passes.readers import COMPOSITE as COMPOSITE, cast_inside as cast_inside
from narrowcast.programs.passes.share import share_casts as share_casts
from narrowcast.programs.placement.place import move_casts as move_casts, place_formats as place_formats
