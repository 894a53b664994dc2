"""`target_of`: for which device a program was made."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from narrowcast.errors import NarrowcastError
from narrowcast.frontends.exported.export import noted_target
from narrowcast.frontends.scripts.script import TARGET


def target_of(made: ExportedProgram | torch.jit.ScriptModule | Any) -> str:
    """Return the device that an exported program or a script module was made for: `cpu (avx2), torch 2.13.0`.

    Also of one that was saved and loaded; empty where it was not noted (a script function, another library's program).
    Raises NarrowcastError for anything else.
    """
    if isinstance(made, ExportedProgram):
        return noted_target(made)
    if isinstance(made, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return str(getattr(made, TARGET, ""))
    raise NarrowcastError(
        asked=f"target_of({type(made).__name__})", found="it was not compiled or exported for a device",
        advice="Give what narrowcast.export, script or trace returned, or what was loaded from its file.",
    )  # fmt: skip
