"""What is asked about a sound program, and what must be answered: one function per verb.

Each makes its program anew, from one seed, and gives an empty text where the answer is right, or what was said instead.
`NotSound` says that the program itself raises, or is not finite, without anybody looking.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from program import Made, Program, tensors_of

import narrowcast as nc
from narrowcast.report.verdicts import EXACT, ROUND_OFF

SOUND = (EXACT, ROUND_OFF)
ALIKE = ("alike", "round-off", "formats differ")
SEED = 0


class NotSound(Exception):
    """Of a program in a format: not to be judged."""


class Harmed(Exception):
    """Bits, gradients or random state are others than without us."""


def made_anew(program: Program) -> Made:
    """The same one each time."""
    seeded()
    made = program.make()
    seeded()
    return made


def seeded() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


def random_state() -> tuple[Any, ...]:
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()


def state(made: Made) -> list[torch.Tensor]:
    """Weights, buffers and gradients."""
    held = [*made.model.parameters(), *made.model.buffers()]
    return [t.detach().clone() for t in (*held, *(p.grad for p in made.model.parameters() if p.grad is not None))]


def same(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(
        a.dtype == b.dtype and a.shape == b.shape and (torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num()))) for a, b in zip(these, those, strict=True)
    )  # fmt: skip


# -- running ----------------------------------------------------------------------------------------------------------


def forward(made: Made, dtype: torch.dtype) -> list[torch.Tensor]:
    with nc.autocast("cpu", dtype):
        return [t.detach() for t in tensors_of(made.model(*made.args))]


def backward(made: Made, dtype: torch.dtype) -> list[torch.Tensor]:
    """With the scale that fp16 needs; a power of two."""
    with nc.autocast("cpu", dtype):
        loss = made.loss_of(made.model(*made.args))
    (loss * (256.0 if dtype is torch.float16 else 1.0)).backward()
    return [loss.detach()]


def step_of(made: Made, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A step of a right loop, with the scaler as it comes; it gives the loss."""
    optimizer = torch.optim.AdamW([p for p in made.model.parameters() if p.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with nc.autocast("cpu", dtype):
            loss = made.loss_of(made.model(*made.args))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def steps(made: Made, dtype: torch.dtype) -> list[torch.Tensor]:
    """Four."""
    step = step_of(made, dtype)
    return [step() for _ in range(4)]


Run = Callable[[Made, torch.dtype], list[torch.Tensor]]


def alone(program: Program, dtype: torch.dtype, run: Run) -> tuple[Any, ...]:
    """What it gives when nobody looks."""
    made = made_anew(program)
    try:
        gave = run(made, dtype)
    except Exception as error:
        raise NotSound(f"{type(error).__name__}: {error}") from error
    if run is not steps and not all(t.isfinite().all() for t in (*gave, *state(made)) if t.is_floating_point()):
        raise NotSound("not finite")
    return gave, state(made), random_state()


def unchanged(before: tuple[Any, ...], gave: list[torch.Tensor], made: Made) -> None:
    names = ("outputs", "weights or gradients", "random state")
    equal = same(before[0], gave), same(before[1], state(made)), before[2] == random_state()
    changed = [name for name, holds in zip(names, equal, strict=True) if not holds]
    if changed:
        raise Harmed(f"changed: {', '.join(changed)}")


# -- verbs ------------------------------------------------------------------------------------------------------------


def watched(run: Run) -> Callable[[Program, torch.dtype], str]:
    """A scaler's first, planned overflow may be told, as such."""

    def verb(program: Program, dtype: torch.dtype) -> str:
        before = alone(program, dtype, run)
        made = made_anew(program)
        with nc.watch() as found:
            gave = run(made, dtype)
        unchanged(before, gave, made)
        if found.not_inspected:
            return f"not inspected {found.not_inspected} times: {found.notes}"
        told = [f for f in found.findings if not (run is steps and "scale" in f.sentence + f.advice)]
        return "\n".join(map(str, told[:2]))

    return verb


def at_rest(verb: Callable[[Made, torch.dtype], str], run: Run) -> Callable[[Program, torch.dtype], str]:
    """A verb that runs the model itself leaves it alone."""

    def around(program: Program, dtype: torch.dtype) -> str:
        alone(program, dtype, run)
        made = made_anew(program)
        before = [], state(made), random_state()
        said = verb(made, dtype)
        unchanged(before, [], made)
        return said

    return around


def told(found: Any) -> str:
    bad = [f"gradient of {g.parameter}: {g.verdict}" for g in found.gradients if g.verdict not in SOUND]
    return "" if found.verdict in SOUND and not bad and not found.faults else "\n".join([str(found), *bad])


def compare(made: Made, dtype: torch.dtype) -> str:
    return told(nc.compare(made.model, made.args, dtype=dtype, isolate=0))


def compare_backward(made: Made, dtype: torch.dtype) -> str:
    return told(nc.compare(made.model, made.args, dtype=dtype, isolate=0, backward=made.loss_of))


def explain(made: Made, dtype: torch.dtype) -> str:
    comparison = nc.explain(made.model, *made.args, dtype=dtype, run=True).comparison
    return "no comparison" if comparison is None else told(comparison.differences)


def repair(made: Made, dtype: torch.dtype) -> str:
    nc.fit(nc.capture(made.model, made.args))
    found = nc.repair(made.model, made.args, dtype=dtype)
    return "" if found.verdict == "nothing to repair" else str(found)


def alike(a: Any, b: Any) -> str:
    found = nc.compare_runs(a, b)
    return "" if found.verdict in ALIKE and not found.producers else str(found)


def against_fp32(made: Made, dtype: torch.dtype) -> str:
    return alike(nc.capture(made.model, made.args), nc.capture(made.model, made.args, dtype=dtype))


def against_twin(made: Made, dtype: torch.dtype) -> str:
    if made.twin is None:
        raise NotSound("has no twin")
    return alike(nc.capture(made.model, made.args, dtype=dtype), nc.capture(made.twin, made.args, dtype=dtype))


def decoding(made: Made, dtype: torch.dtype) -> str:
    """The whole sequence at once against a prompt and one token at a time."""
    if made.decode is None:
        raise NotSound("has no cache")
    with torch.no_grad(), nc.autocast("cpu", dtype):
        with nc.capture() as whole:
            made.model(*made.args)
        with nc.capture() as by_token:
            made.decode(*made.args)
    return alike(whole, by_token)


def check_training(program: Program, dtype: torch.dtype) -> str:
    """Of a right loop."""
    made = made_anew(program)
    step = step_of(made, dtype)
    alone(program, dtype, backward)
    seeded()
    before = [], state(made), random_state()
    found = nc.check_training(step)
    unchanged(before, [], made)
    return "" if found else str(found)


FORWARD: dict[str, Callable[[Program, torch.dtype], str]] = {
    "compare forward": at_rest(compare, forward),
    "compare_runs, fp32": at_rest(against_fp32, forward),
    "compare_runs, written otherwise": at_rest(against_twin, forward),
    "compare_runs, decoding": at_rest(decoding, forward),
    "watch forward": watched(forward),
    "explain --run": at_rest(explain, forward),
    "repair, fit": at_rest(repair, forward),
}
TRAINING: dict[str, Callable[[Program, torch.dtype], str]] = {
    "compare backward": at_rest(compare_backward, backward),
    "watch backward": watched(backward),
    "watch step": watched(steps),
    "check_training": check_training,
}
