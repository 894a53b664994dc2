"""A random program in eager code and in the front ends: what each gives, and where they differ.

script:     nc.script
saved:      what nc.script gives, from a file
converted:  nc.script of that file
jit:        nc.script of what torch.jit.script gives
trace:      nc.trace, for the flag and the number that it is called with
compile:    nc.compile, with the backend aot_eager
export:     nc.export
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from script_programs import drawn, uses_all
from sources import load
from torch import nn

import narrowcast as nc

FRONT_ENDS = ("script", "saved", "converted", "jit", "trace", "compile", "export")
CALLS = ((True, 2), (False, 1))


@dataclass(frozen=True)
class Known:
    """A difference that docs/limits.md explains, or that is torch's own.

    tolerance: of gradients, in relation to their size; None where anything may differ that says this.
    """

    name: str
    holds: Callable[[str, str], bool]
    tolerance: float | None
    says: str = ""

    def covers(self, what: str, part: float | None) -> bool:
        """Whether this explains a difference."""
        small = self.tolerance is None or (part is not None and part <= self.tolerance)
        return small and re.search(self.says, what) is not None


@dataclass(frozen=True)
class Twin:
    """A program without what makes the difference: only if nothing differs in it may gradients differ in the other.

    text: of the twin. low: whether the program's low format is the device's default, which regions take that are off.
    cache: whether the region around the program keeps casts of weights.
    """

    name: str
    holds: Callable[[str, str], bool]
    text: Callable[[str], str] = lambda text: text
    low: bool = False
    cache: bool = True
    tolerance: float = 8e-3  # a few last bits of bf16

    def both(self, other: Twin) -> Twin:
        """Without what makes either difference."""

        def text(text: str) -> str:
            return other.text(self.text(text))

        name = f"{self.name}; {other.name}"
        return Twin(name, self.holds, text, self.low or other.low, self.cache and other.cache)


def uncached(text: str) -> str:
    """The program with regions that keep no casts."""
    return re.sub(r"(autocast\((?:[^()\n]|\(.*?\))*)\)", r"\1, cache_enabled=False)",
                  text.replace(", cache_enabled=False", ""))  # fmt: skip


LAST_BITS = 1e-6
SCRIPTS = ("script", "saved", "converted", "jit")
OFF_BEFORE = re.compile(r"^ *@torch.*enabled=False|made_off\(|stacked|switched_off|first if", re.MULTILINE)
FLOW = re.compile(r"^ +(for|if) ", re.MULTILINE)
TWINS = [
    Twin("ours empty torch's weight cache where regions of two low formats nest, if one may be that is off",
         lambda front, text: "float16" in text and "nc.autocast" in text and bool(OFF_BEFORE.search(text)), low=True),
    Twin("gradients of leaves that go into forks add up in any order", lambda front, text: "fork" in text,
         lambda text: re.sub(r"jit\.wait\((\w+)\)", r"jit.annotate(Tensor, \1)",
                             re.sub(r"torch\.jit\.fork\((\w+), ", r"\1(", text))),
    Twin("torch.jit.script drops cache_enabled", lambda front, text: front == "jit" and "cache_enabled" in text,
         lambda text: text.replace(", cache_enabled=False", "")),
    # casts that a file has are calls like others: a region around it makes casts of its own
    Twin("the casts in a saved script are not those of a region around it", lambda front, text: front == "converted",
         uncached, cache=False, tolerance=0.02),
]  # fmt: skip
KNOWN = [
    # docs/limits.md
    Known("torch.jit.script has no code for nc.autocast, drops decorators, and knows no dtype by a name",
          lambda front, text: front == "jit" and bool(re.search("nc.autocast|LOW|^ *@", text, re.MULTILINE)), None),
    Known("nc.script does not know device types that torch.jit.script left open, and names the line",
          lambda front, text: front == "jit" and "x.device.type" in text, None, "knows its device type"),
    Known("a weight that is used as it is and, in a loop or a branch, cast: the cast is before the loop",
          lambda front, text: front in SCRIPTS and bool(FLOW.search(text)), LAST_BITS),
    # torch's
    Known("a branch that depends on values cannot be exported (torch.export's)",
          lambda front, text: front == "export" and "v0.sum() > 0" in text, None, "data-dependent"),
    Known("Dynamo loses a region object, or the gradient that is None, over a graph break",
          lambda front, text: front == "compile", None,
          r"(ResumePrologueTracingError|: None, in).*\(torch.compile alone"),
    Known("gradients add up in another order in compiled code", lambda front, text: front == "compile", LAST_BITS),
    Known("gradients add up in another order in compiled code, in the low format, too",
          lambda front, text: front == "compile", 8e-3, r"\(torch.compile alone"),
    *(Known(twin.name, lambda front, text: True, twin.tolerance, re.escape(twin.name)) for twin in TWINS),
]  # fmt: skip
"""What differs, by name. A program that is left with nothing else is counted by these."""


class Fixed(nn.Module):
    """A program as a function of tensors alone."""

    def __init__(self, program: Any, flag: bool, n: int):
        super().__init__()
        self.program, self.flag, self.n = program, flag, n

    def forward(self, x, w, b):
        return tuple(self.program(x, w, b, self.flag, self.n))


def inputs():
    torch.manual_seed(0)
    return [t.requires_grad_() for t in (torch.randn(4, 4), torch.randn(4, 4) / 2, torch.randn(4))]


def run(function, arguments=(), around=contextlib.nullcontext):
    """Outputs and gradients, or "error: ..."."""
    leaves = inputs()
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    for weight in weights:
        weight.grad = None
    try:
        with around():
            found = function(*leaves, *arguments)
        torch.stack([o.double().tanh().sum() for o in found]).sum().backward()
    except Exception as error:
        return f"error: {said(error)}"
    return [*found, *[leaf.grad for leaf in (*leaves, *weights)]]


def said(error: Exception) -> str:
    """The type and message of an error; the last line where TorchScript tells where it was first."""
    lines = str(error).strip().splitlines() or [""]
    if "in the TorchScript interpreter" in str(error):
        lines = lines[-1:]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"


def differences(expected, found, whole=True, gradients=3):
    """What differs, and of a gradient by how much, as a part of it: an output's dtype or bits, a gradient, an error.

    whole: eager code has no errors in what nothing uses.
    """
    if isinstance(expected, str) or isinstance(found, str):
        alike = isinstance(expected, str) == isinstance(found, str) or (isinstance(expected, str) and not whole)
        texts = [one if isinstance(one, str) else "no error" for one in (expected, found)]
        return [] if alike else [(f"{texts[0]}, in eager code; {texts[1]}", None)]
    if len(expected) != len(found):
        return [(f"{len(expected)} values in eager code, {len(found)}", None)]
    wrong = []
    for n, (a, b) in enumerate(zip(expected, found, strict=True)):
        is_gradient = n >= len(expected) - gradients
        name = f"gradient {n - len(expected) + gradients}" if is_gradient else f"output {n}"
        if (a is None) != (b is None) or (a is not None and a.dtype is not b.dtype):
            kinds = ["None" if one is None else str(one.dtype) for one in (a, b)]
            wrong.append((f"{name}: {kinds[0]}, in eager code; {kinds[1]}", None))
        elif a is not None and not torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()):
            a, b = a.detach().nan_to_num().double(), b.detach().nan_to_num().double()
            part = ((a - b).norm() / a.norm().clamp(min=1e-6)).item()
            wrong.append((f"{name} differs", part) if is_gradient else (f"{name} differs by {part:.1e}", None))
    return wrong


def whole(text: str) -> bool:
    """Whether nothing is left out of a program: some values of loops over lists are in no output."""
    return uses_all(text) and not re.search(r"\bfor [kt]\d|m\d+ is not", text)


def _loaded(script):
    """A script from the file that it is saved to."""
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def facts(text: str) -> str:
    """What filters read: the low format, and the part that is not in all programs."""
    low = re.search(r"^LOW = (.*)", text, re.MULTILINE)
    return f"# {low[1] if low else ''}\n{drawn(text)}"


def judged(wrong, front_end: str, text: str):
    """What is left of the differences without what is known, and the names of that.

    TorchScript drops what nothing uses, and the errors in that.
    """
    if not whole(text):
        wrong = [one for one in wrong if not re.search(r"error: .*in eager code; no error$", one[0])]
    held = [one for one in KNOWN if one.holds(front_end, facts(text))] if wrong else []
    held.sort(key=lambda one: one.tolerance or 0.0)
    explained = [(one, next((known.name for known in held if known.covers(*one)), "")) for one in wrong]
    left = [one for one, name in explained if not name]
    return left, [] if left else sorted({name for _, name in explained})


@contextlib.contextmanager
def default_low(dtype):
    """The low format of regions on the cpu that name none, inside no other."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", dtype)
    yield
    torch.set_autocast_dtype("cpu", before)


def arounds(low, cache=True):
    return {
        "alone": contextlib.nullcontext,
        "inside": lambda: nc.autocast("cpu", low, cache_enabled=None if cache else False),
    }


class Runs:
    """The runs of one program. What eager code gives is computed once."""

    def __init__(self, module: Any, text: str, twin: Twin | None = None):
        self.module, self.text, self.is_twin = module, text, twin is not None
        self.arounds = arounds(module.LOW, twin is None or twin.cache)
        self.expected = {
            (call, name): run(module.program, call, around)
            for call in CALLS for name, around in self.arounds.items()
        }  # fmt: skip
        self.gradients = 3 + len(self.weights())
        self.raises = any(isinstance(one, str) for one in self.expected.values())
        self.no_form: dict[str, str] = {}

    def weights(self):
        return list(self.module.program.parameters()) if isinstance(self.module.program, nn.Module) else []

    def wrong(self, front_end: str, calls=CALLS) -> list[tuple[str, float | None]]:
        """What differs in a front end, and of a gradient by which part of it; the twin in which nothing does."""
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call, name, times, made in getattr(self, f"_{front_end}")(calls):
                for n in range(times):
                    result = made if isinstance(made, str) else made()
                    wrong = differences(self.expected[call, name], result, whole(self.text), self.gradients)
                    found += [(f"flag={call[0]} n={call[1]} {name} call {n + 1}: {what}", part) for what, part in wrong]
        if front_end == "compile" and any(part is None or part > LAST_BITS for _, part in found):
            alone = {what[:60] for what, part in self.wrong("compile_alone", calls) if part is None or part > LAST_BITS}
            found = [(what + " (torch.compile alone, too)" * (what[:60] in alone), part) for what, part in found]
        twin = self._twin(front_end, calls, found)
        return [(f"{what} ({twin.name})", part) for what, part in found] if twin is not None else found

    def _twin(self, front_end, calls, found):
        """That has the same program without these differences, if they are of gradients alone."""
        if self.is_twin or front_end == "compile_alone" or not found or any(part is None for _, part in found):
            return None
        held = [twin for twin in TWINS if twin.holds(front_end, facts(self.text))]
        for twin in [*held, functools.reduce(Twin.both, held)] if held else []:
            with default_low(self.module.LOW) if twin.low else contextlib.nullcontext():
                text = twin.text(self.text)
                if not judged(Runs(load(text), text, twin).wrong(front_end, calls), front_end, text)[0]:
                    return twin
        return None

    def refused(self, front_end: str) -> str:
        """Why torch has no such form of the program; empty where it has."""
        return self.no_form.get(front_end, "")

    def _refusal(self, calls, error):
        """Compared with a call that eager code runs, if there is one."""
        keys = [(call, name) for call in calls for name in self.arounds]
        runs = [key for key in keys if not isinstance(self.expected[key], str)]
        return *[*runs, *keys][0], 1, f"refused: {said(error)}"

    def _each(self, function, calls, names=("alone", "inside")):
        for call in calls:
            for name in names:
                yield call, name, 2, lambda call=call, name=name: run(function, call, self.arounds[name])

    def _script(self, calls):
        try:
            self.made = nc.script(self.module.program)
        except Exception as error:
            yield self._refusal(calls, error)
            return
        yield from self._each(self.made, calls)

    def _file(self):
        """What nc.script gives, from a file; None where it gives nothing, which is counted there."""
        with contextlib.suppress(Exception):
            self.made = getattr(self, "made", None) or nc.script(self.module.program)
            for call in CALLS:  # as a user does who saves what he has trained
                run(self.made, call)
        if not hasattr(self, "made"):
            return None
        return _loaded(self.made)

    def _saved(self, calls):
        """As TorchScript interprets it: its second call otherwise adds up gradients by rules of torch's own."""
        for call, name, times, found in self._made(self._file, calls, ("alone",)):
            yield call, name, times, found if isinstance(found, str) else self._interpreted(found)

    def _interpreted(self, found):
        def interpreted():
            with torch.jit.optimized_execution(False):
                return found()

        return interpreted

    def _converted(self, calls):
        try:
            loaded = self._file()
        except Exception:
            return  # it is counted as saved
        if loaded is not None:
            yield from self._made(lambda: nc.script(loaded), calls)

    def _made(self, make, calls, names=("alone", "inside")):
        try:
            made = make()
        except Exception as error:
            yield self._refusal(calls, error)
            return
        if made is not None:
            yield from self._each(made, calls, names)

    def _jit(self, calls):
        try:
            made = torch.jit.script(self.module.program)
            _loaded(made)  # torch cannot load some of what it saves
        except Exception as error:
            self.no_form["jit"] = f"{type(error).__name__}: {error}"[:200]
            return
        yield from self._made(lambda: nc.script(made), calls)

    def _fixed(self, calls, make, times=2, inside=True):
        for call in calls:
            for name, around in self.arounds.items():
                fixed = Fixed(self.module.program, *call)
                if isinstance(self.expected[call, name], str):
                    continue
                try:
                    made = make(fixed, around)
                except Exception as error:
                    yield call, name, 1, f"refused: {said(error)}"
                    continue
                called = around if inside else contextlib.nullcontext
                yield call, name, times, lambda made=made, called=called: run(made, (), called)

    def _trace(self, calls):
        def make(fixed, around):
            with around():
                return nc.trace(fixed, tuple(inputs()), check_trace=False)

        yield from self._fixed(calls, make)

    def _compile(self, calls):
        def make(fixed, around):
            torch._dynamo.reset()
            return nc.compile(fixed, backend="aot_eager")

        yield from self._fixed(calls, make)

    def _compile_alone(self, calls):
        def make(fixed, around):
            torch._dynamo.reset()
            return torch.compile(fixed, backend="aot_eager")

        yield from self._fixed(calls, make)

    def _export(self, calls):
        def make(fixed, around):
            with around():
                made = nc.export(fixed, tuple(inputs())).module()
            return made

        yield from self._fixed(calls, make, 1, inside=False)  # its region is in the program
