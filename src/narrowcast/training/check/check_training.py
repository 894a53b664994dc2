"""`nc.check_training`: what is wrong with the precision of a training loop, seen in two of its steps."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from narrowcast.core.ledger import Advice
from narrowcast.errors import RunError
from narrowcast.output.words import counted
from narrowcast.reports.results.training import COST_TIME, TrainingCheck
from narrowcast.runtime.devices.device import random_state_kept
from narrowcast.runtime.torch_bridge.inputs import Inputs, call_arguments
from narrowcast.runtime.torch_surface.modules import by_no_other_thread, told_of_optimizer_steps
from narrowcast.training.check.exact import AVERAGE
from narrowcast.training.check.kept import KeptMemory
from narrowcast.training.check.looking import LoopObserver
from narrowcast.training.check.sums import SUM

_NOT_OF_LOOPS = ("rule without effect", "switched off")
"""Kinds of advice of a recording that two steps cannot judge, or that are about what is intentional."""
_MORE = 32
"""How many more steps are run where a scaler skips each of them, until its scale is small enough."""


def check_training(step: Callable[..., Any], inputs: Inputs = (), *, steps: int = 2) -> TrainingCheck:
    """Run a step of training as it is, `steps` times, and return what is wrong with its precision.

    step: your own function: a batch, the forward in its region, loss, backward, clip, optimizer; with an evaluation in
    it, if that is to be checked. Nothing in it changes. inputs: its arguments, as for `explain`.
    Afterwards all memory that existed before is restored (weights, buffers, averages, the state of optimizers), and so
    are gradients, attributes of modules, groups, schedules, scalers, random state, generators, and variables that the
    function assigns: `nonlocal`, `global`, attributes of its object, items of lists and dicts, what deques hold, and
    arrays of numpy of up to 64 MiB. What it adds to a list or a dict stays there; batches that it takes from an
    iterator are taken. A copy of what is written to is held meanwhile.

    Reported, each with the line and what to write instead: what runs outside of regions and should not (forward, loss,
    evaluation), or inside (backward, optimizer, weights written to); what is lost to rounding (updates of weights,
    averages, sums of losses and of gradients, statistics of batch norm), judged by what changed; losses that are not
    scaled, gradients that underflow, are clipped or added to in the wrong order, or are never cleared; steps that are
    all skipped; what casts besides the region. Compiled code runs as eager code meanwhile. Reads values of gradients
    in fp16, and of tensors in low formats, which synchronizes with an accelerator. Where a scaler skips all steps, more
    are run, until its scale is small enough or one.

    Returns a TrainingCheck, true if nothing is wrong. Raises RunError, and what the step raises.
    """
    if steps < 1:
        raise RunError(f"check_training(steps={steps})", "no step would run", advice="Give 1 or more; 2 is usual.")
    if not callable(step):
        raise RunError(
            f"check_training({type(step).__name__})", "it cannot be called",
            advice="Give a function that makes one step of training: nc.check_training(lambda: step(batch)).",
        )  # fmt: skip
    args, kwargs = call_arguments("check_training", inputs)
    kept = KeptMemory()
    looking = LoopObserver(kept)
    door = looking.door
    own = threading.get_ident()
    trained = 0

    def steps_now(optimizer: Any) -> None:
        nonlocal trained
        trained += 1
        door.run("an optimizer's step", looking.steps, optimizer, threading.get_ident() == own)

    def has_stepped(optimizer: Any) -> None:
        door.run("an optimizer's step", looking.stepped, optimizer)

    with ExitStack() as stack:
        stack.enter_context(kept)
        door.run("the variables of the step", kept.follow, partial(step, *args, **kwargs))
        stack.enter_context(random_state_kept())
        stack.enter_context(told_of_optimizer_steps(by_no_other_thread(steps_now), before=True))
        stack.enter_context(told_of_optimizer_steps(by_no_other_thread(has_stepped)))
        stack.enter_context(looking.observing())
        ran = 0
        while ran < steps or (looking.is_stuck and ran < steps + _MORE):
            _refuse_what_has_not_run(step(*args, **kwargs))
            ran += 1
            door.run("a step as a whole", looking.end_of_round)
    door.run("the steps as a whole", looking.judge)
    excluded = (*_NOT_OF_LOOPS, "no casts") if looking.has_lowered else _NOT_OF_LOOPS  # a region of sums and losses
    if looking.is_cast_beside or looking.rounds_with_care:
        excluded = (*excluded, "weights in a low format")  # a wrapper casts, or nothing is lost
    advised = {a: n for a, n in looking.adviser.advice.items() if a.kind not in excluded}
    findings = _one_per_line(advised | looking.found)
    notes = [*door.notes]
    if not trained and not looking.updates.skipped:
        notes.append(
            "No torch.optim.Optimizer stepped: weights were only inspected where the loop itself writes to them."
        )
    if not looking.has_seen:
        notes.append("no call was seen: what other threads and processes run is not inspected.")
    if looking.updates.skipped:
        skipped = counted(looking.updates.skipped, "step")
        notes.append(f"{skipped} skipped: gradients were not finite at the scaler's scale.")
    return TrainingCheck(findings, ran, looking.calls, notes, door.times)


def _refuse_what_has_not_run(result: Any) -> None:
    """Raise RunError if the step returned a generator or a coroutine: no line of it has run."""
    if inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result):
        kind = type(result).__name__
        if not inspect.isasyncgen(result):
            result.close()
        raise RunError(
            "check_training(step)", f"the step returned a {kind} and ran nothing",
            advice="Give a function that makes the step: lambda: next(generator), or lambda: asyncio.run(step()).",
        )  # fmt: skip


def _one_per_line(findings: dict[Advice, int]) -> dict[Advice, int]:
    """Return the first of the findings of one kind at one line: a loss is several ops. A sum is no average, too. What
    costs time alone comes last.
    """
    first: dict[tuple[str, str, int], Advice] = {}
    for finding in findings:
        first.setdefault((finding.kind, finding.file, finding.line), finding)
    for kind, file, line in [*first]:
        if kind == SUM:
            first.pop((AVERAGE, file, line), None)
    return {finding: findings[finding] for finding in sorted(first.values(), key=lambda one: one.kind in COST_TIME)}
