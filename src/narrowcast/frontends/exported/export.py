"""`export`: torch.export with explicit casts, equal to eager."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram

from narrowcast.core.goals import Goal, GoalName, as_goal
from narrowcast.errors import CaptureError, GoalError, NarrowcastError, RegionError
from narrowcast.frontends.eager.asked import Under, asked_region
from narrowcast.frontends.exported.exported_program import explicit_program, note_target, placed_program, traced_program
from narrowcast.frontends.graphs.check import tell_other_paths
from narrowcast.runtime.devices.abilities import for_target
from narrowcast.runtime.torch_bridge import device_type_of
from narrowcast.runtime.torch_bridge.inputs import Inputs, call_arguments


def export(
    model: torch.nn.Module,
    inputs: Inputs = (),
    *,
    dynamic_shapes: Any = None,
    under: Under = None,
    strict: bool = False,
    fold_weights: bool = False,
    goal: GoalName | Goal = "exact",
    runs_in: str = "eager",
    made_for: str = "",
) -> ExportedProgram:
    """Export a module with plain casts, those of eager autocast, and no region; it needs no Narrowcast to run.

    inputs: as for `narrowcast.explain`. dynamic_shapes, strict: as for torch.export.export.
    under: the region in which it runs, as for `narrowcast.explain`. If it is None no region is opened: those around
        this call, and those inside the model, hold in any case.
    fold_weights: store each weight once, in the format in which it is used, where all its uses agree. The program then
        has no casts of these weights, and its state_dict their low format.

    goal: as for `narrowcast.compile`; candidates are timed on the inputs, without gradients.
    runs_in: `eager`, or `inductor` if the program is going to be compiled (AOTInductor): what a cast costs differs.

    made_for: file of the profile of the device that the program is made for, if it is not this one: what that device
        cannot run is avoided as the policy says (docs/reference/devices.md). `narrowcast.frontends.target.target_of`
        reads it off a program.

    Rules of the policy about the backward are refused (RegionError): an exported program has none. CaptureError if the
    program cannot be made explicit; GoalError, ProfileError; and what torch.export.export raises.
    """
    if not isinstance(model, torch.nn.Module):
        raise RegionError(
            asked=f"export({type(model).__name__})", found="not a Module",
            advice="torch.export takes modules: write a Module whose forward calls the function.",
        )  # fmt: skip
    wanted = as_goal(goal)
    if runs_in not in ("eager", "inductor"):
        raise GoalError(f"runs_in={runs_in!r}", "no such way to run it", advice="Give 'eager' or 'inductor'.")
    asked = asked_region("export", under)
    args, kwargs = call_arguments("export", inputs)
    chosen = asked.policy
    if wanted.places:  # a goal never raises where fp32 runs
        chosen = chosen.repairing()
    around: AbstractContextManager[Any] = nullcontext()
    is_on = device_type_of(model)
    made_on = for_target(chosen, is_on or "cpu")[1]
    if asked.is_there:
        device = asked.device_type or is_on or device_type_of(args, kwargs) or "cpu"
        chosen, made_on = for_target(chosen, device, made_for)
        around = asked.on(device, chosen)
    elif made_for:
        raise RegionError(
            asked=f"export with made_for={made_for!r}", found="there is no region to make for it",
            advice="Give under=, too.",
        )  # fmt: skip
    with around:
        exported = traced_program(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
        try:
            if wanted.places:
                made = placed_program(exported, args, kwargs, wanted, fold_weights, runs_in == "inductor")
            else:
                made, explicit = explicit_program(exported, fold_weights)
                tell_other_paths(model, explicit.reading.program)
            return note_target(made, made_on)
        except NarrowcastError:
            raise
        except Exception as error:
            raise CaptureError(
                asked=f"{type(model).__name__} exported with explicit casts",
                found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                advice="Please report this with the model. torch.export.export alone would lose the region.",
            ) from error
