"""Steps of optimizers, refused where a program is run to be looked at: its state is kept, an optimizer's is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.errors import Origin, RunError
from narrowcast.observation.restore.objects import LivingObjects
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.modules import told_of_optimizer_steps


@contextmanager
def without_steps(name: str) -> Iterator[None]:
    """Raise RunError before an optimizer steps inside that was there before, and restore the gradients of its
    parameters. One that the program makes itself may step. name: of the program.
    """
    with quietly():
        living = LivingObjects(())
        living.tensors()  # which are not to be held

    def refuse(optimizer: Any) -> None:
        if living.has(optimizer):
            living.optimizer(optimizer)
            site = find_site(with_names=False)
            raise RunError(
                name, f"it steps an optimizer ({type(optimizer).__name__}), and may run several times here",
                (Origin(site.file, site.line),) if site.file else (),
                "Give a function that returns the loss, with backward=True where that can be given. "
                "nc.check_training(step) looks at whole steps; with nc.capture() as run: captures them.",
            )  # fmt: skip

    try:
        with told_of_optimizer_steps(refuse, before=True):
            yield
    finally:
        with quietly(), torch.no_grad():
            living.restore()
