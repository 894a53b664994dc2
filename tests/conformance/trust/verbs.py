"""What is asked about a sound program, and what must be answered: one function per verb.

Each makes its program from one seed, and gives an empty text where the answer is right, or what was said instead.
`NotSound` says that the program itself raises, or is not finite, without anybody looking; `Harmed`, that it is not as
it was: outputs, weights, gradients, inputs, random numbers, hooks, modes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy
import torch
from loops import Loop, Step, moved_by
from program import DEVICE, Made, Program, tensors_of

import narrowcast as nc
from narrowcast.reports.results.verdicts import EXACT, ROUND_OFF

SOUND = (EXACT, ROUND_OFF)
ALIKE = ("alike", "round-off", "formats differ")
SEED = [0]
STEPS = 4


class NotSound(Exception):
    """Of a program in a format: not to be judged."""


class Harmed(Exception):
    """Something is other than without us."""


def seeded() -> None:
    torch.manual_seed(SEED[0])
    random.seed(SEED[0])
    numpy.random.seed(SEED[0])


def made_anew(program: Program) -> Made:
    """The same one each time."""
    seeded()
    made = program.make()
    seeded()
    return made


# -- what must stay as it is ------------------------------------------------------------------------------------------


def random_state() -> tuple[Any, ...]:
    own = [state.tolist() for state in torch.cuda.get_rng_state_all()] if DEVICE == "cuda" else []
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist(), own


def bits(tensors: Iterable[torch.Tensor]) -> list[Any]:
    flat = ((t, t.detach().cpu().contiguous().flatten()) for t in tensors)
    return [(t.dtype, t.shape, values.view(torch.uint8).numpy().tobytes()) for t, values in flat]


def state(made: Made) -> dict[str, Any]:
    """What a verb leaves alone, by name."""
    modules, parameters = list(made.model.modules()), list(made.model.parameters())
    return {
        "weights": bits([*parameters, *made.model.buffers()]),
        "gradients": bits(p.grad for p in parameters if p.grad is not None),
        "inputs": bits(tensors_of(made.args)),
        "versions": [p._version for p in parameters],
        "modes": [*(m.training for m in modules), torch.is_grad_enabled(), torch.is_autocast_enabled(DEVICE)],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules],
        "attributes": [sorted(vars(module).keys() - {"_is_torch_compile"}) for module in modules],  # torch marks it
        "random numbers": random_state(),
    }


def unchanged(before: dict[str, Any], after: dict[str, Any], again: Callable[[], dict[str, Any]] | None = None) -> None:
    """again: the same unobserved, which shows whether the program itself gives the same each time."""
    changed = [name for name in before if before[name] != after[name]]
    for _ in range(3 if changed and again is not None else 0):
        once_more = again()
        if any(once_more[name] != before[name] for name in changed):
            raise NotSound(f"other {', '.join(changed)} each time")
    if changed:
        raise Harmed(f"other {', '.join(changed)}")


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


# -- running ----------------------------------------------------------------------------------------------------------


def forward(made: Made, dtype: torch.dtype) -> list[torch.Tensor]:
    with torch.no_grad(), torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        return list(tensors_of(made.model(*made.args)))


def backward(made: Made, dtype: torch.dtype) -> list[torch.Tensor]:
    """With the scale that fp16 needs; a power of two."""
    with nc.autocast(DEVICE, dtype):
        loss = made.loss_of(made.model(*made.args))
    (loss * (256.0 if dtype is torch.float16 else 1.0)).backward()
    return [loss.detach()]


Run = Callable[[Made, torch.dtype], list[torch.Tensor]]
Subject = Program | Loop


def alone(program: Program, dtype: torch.dtype, run: Run) -> dict[str, Any]:
    """What it gives when nobody looks."""
    made = made_anew(program)
    try:
        gave = run(made, dtype)
    except Exception as error:
        raise NotSound(f"{type(error).__name__}: {error}") from error
    gradients = [p.grad for p in made.model.parameters() if p.grad is not None]
    if not finite([*gave, *made.model.buffers(), *gradients]):
        raise NotSound("not finite")
    return {"outputs": bits(gave), **state(made)}


def stepping(subject: Subject, dtype: torch.dtype) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """A step of a right loop, with the scaler as it comes; and what it has moved so far."""
    if isinstance(subject, Loop):
        seeded()
        step = subject.make(dtype)
        seeded()
        return step, lambda: {"weights": bits(moved_by(step)), "random numbers": random_state()}
    made = made_anew(subject)
    optimizer = torch.optim.AdamW([p for p in made.model.parameters() if p.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype is torch.float16)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with nc.autocast(DEVICE, dtype):
            loss = made.loss_of(made.model(*made.args))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step, lambda: {name: of for name, of in state(made).items() if name not in ("gradients", "versions")}


def course(subject: Subject, dtype: torch.dtype, number: int) -> dict[str, Any]:
    """Where this many steps lead when nobody looks."""
    step, moved = stepping(subject, dtype)
    try:
        losses = [step() for _ in range(number)]
    except Exception as error:
        raise NotSound(f"{type(error).__name__}: {error}") from error
    if not finite(tensors_of(losses)):
        raise NotSound("not finite")
    if not any(bool(loss.any()) for loss in tensors_of(losses)):
        raise NotSound("its loss is zero")  # what a model without training makes too small for the format
    return {"losses": bits(tensors_of(losses)), **moved()}


# -- verbs ------------------------------------------------------------------------------------------------------------


def watched(run: Run, **options: Any) -> Callable[[Program, torch.dtype], str]:
    def verb(program: Program, dtype: torch.dtype) -> str:
        before = alone(program, dtype, run)
        made = made_anew(program)
        with nc.watch(**options) as found:
            gave = run(made, dtype)
        unchanged(before, {"outputs": bits(gave), **state(made)}, lambda: alone(program, dtype, run))
        return watching(found)

    return verb


def watched_steps(subject: Subject, dtype: torch.dtype, **options: Any) -> str:
    """The first, planned overflow of a scaler is not told."""
    before = course(subject, dtype, STEPS)
    step, moved = stepping(subject, dtype)
    with nc.watch(**options) as found:
        losses = [step() for _ in range(STEPS)]
    unchanged(before, {"losses": bits(tensors_of(losses)), **moved()}, lambda: course(subject, dtype, STEPS))
    return watching(found)


def watching(found: Any) -> str:
    if found.not_inspected:
        raise Harmed(f"not inspected {found.not_inspected} times: {found.notes}")
    return "\n".join(map(str, found.findings[:2]))


def at_rest(verb: Callable[..., str], run: Run) -> Callable[[Program, torch.dtype], str]:
    """A verb that runs the model itself leaves it alone."""

    def around(program: Program, dtype: torch.dtype) -> str:
        alone(program, dtype, run if program.trains else forward)
        made = made_anew(program)
        before = state(made)
        said = verb(made, dtype, program.trains)
        unchanged(before, state(made))
        return said

    return around


def told(found: Any) -> str:
    """What a comparison says of a sound program: nothing, if it is round-off."""
    if inside := [note for note in found.notes if "not inspected" in note]:
        raise Harmed(inside[0])
    bad = [f"gradient of {g.parameter}: {g.verdict}" for g in found.gradients if g.verdict not in SOUND]
    return "" if found.verdict in SOUND and not bad and not found.faults else "\n".join([str(found), *bad])


def compare(made: Made, dtype: torch.dtype, trains: bool) -> str:
    return told(nc.compare(made.model, made.args, under=dtype, isolate=4))


def compare_backward(made: Made, dtype: torch.dtype, trains: bool) -> str:
    return told(nc.compare(made.model, made.args, under=dtype, isolate=4, backward=made.loss_of))


def explain(made: Made, dtype: torch.dtype, trains: bool) -> str:
    found = nc.explain(made.model, made.args, under=dtype, run=True)
    if found.failure is not None or found.comparison is None:
        return f"no comparison: {found.failure}"
    return told(found.comparison.differences)


def repair(made: Made, dtype: torch.dtype, trains: bool) -> str:
    nc.capture(made.model, made.args).headroom()
    found = nc.repair(made.model, made.args, under=dtype)
    return "" if found.verdict == "nothing to repair" else str(found)


def alike(a: Any, b: Any) -> str:
    found = nc.diff(a, b)
    return "" if found.verdict in ALIKE and not found.producers else str(found)


def against_fp32(made: Made, dtype: torch.dtype, trains: bool) -> str:
    """Forward and backward."""
    runs, options = [], {"backward": made.loss_of} if trains else {}
    for more in ({}, {"under": dtype}):
        seeded()
        runs.append(nc.capture(made.model, made.args, **options, **more))
    seeded()
    return alike(*runs)


def against_twin(made: Made, dtype: torch.dtype, trains: bool) -> str:
    return alike(nc.capture(made.model, made.args, under=dtype), nc.capture(made.twin, made.args, under=dtype))


def decoding(made: Made, dtype: torch.dtype, trains: bool) -> str:
    """The whole sequence at once against a prompt and one token at a time."""
    with torch.no_grad(), nc.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
        with nc.capture() as whole:
            made.model(*made.args)
        with nc.capture() as by_token:
            made.decode(*made.args)
    return alike(whole, by_token)


def compiled(made: Made, dtype: torch.dtype, trains: bool) -> str:
    """The model, and what Inductor makes of it."""
    with torch.no_grad():
        one_by_one = nc.capture(made.model, made.args, under=dtype)
        return alike(one_by_one, nc.capture(nc.compile(made.model, under=dtype), made.args))


def check_training(subject: Subject, dtype: torch.dtype) -> str:
    """Of a right loop: two steps after it lead where two steps without it lead, for it restores what it moved."""
    expected = course(subject, dtype, 2)
    if isinstance(subject, Program):
        alone(subject, dtype, backward)
    step, moved = stepping(subject, dtype)
    before = moved()
    found = nc.check_training(step)
    unchanged(before, moved())
    losses = [step(), step()]
    unchanged(expected, {"losses": bits(tensors_of(losses)), **moved()}, lambda: course(subject, dtype, 2))
    if inside := [note for note in found.notes if "not inspected" in note]:
        raise Harmed(inside[0])
    is_recurrent = DEVICE == "cuda" and found.kinds == ("fp16 without a scaler",) and "_cudnn_rnn" in str(found)
    return "" if found or is_recurrent else str(found)  # torch computes recurrent layers in fp16 there, in any region


Verb = Callable[[Any, torch.dtype], str]
FORWARD: dict[str, Verb] = {
    "compare forward": at_rest(compare, forward),
    "diff, fp32": at_rest(against_fp32, backward),
    "watch forward": watched(forward),
    "watch forward, late": watched(forward, at="step"),
    "explain --run": at_rest(explain, forward),
    "repair, fit": at_rest(repair, forward),
}
WITH_TWIN: dict[str, Verb] = {"diff, written otherwise": at_rest(against_twin, forward)}
WITH_CACHE: dict[str, Verb] = {"diff, decoding": at_rest(decoding, forward)}
COMPILED: dict[str, Verb] = {"diff, compiled": at_rest(compiled, forward)}
TO_COMPILE = ("unet_interpolated", "decoder", "encoder_post_norm")
OF_LOOPS: dict[str, Verb] = {
    "watch step": watched_steps, "watch late": partial(watched_steps, at="step"), "check_training": check_training,
}  # fmt: skip
TRAINING: dict[str, Verb] = {
    "compare backward": at_rest(compare_backward, backward), "watch backward": watched(backward),
    "watch backward, late": watched(backward, at="step"), **OF_LOOPS,
}  # fmt: skip
