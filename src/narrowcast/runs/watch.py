"""`nc.watch`: the first call that makes a NaN or an infinity out of finite values, and who made it.

Every tensor that a call gives is summed once: a sum is not finite if an element is not. What came in finite and goes
out otherwise was made there; the call is then run again, on the same inputs, to see whether the cast, the format or the
op itself did it. Infinities that are meant are told by where they come from: a fill with -inf, a mask of the lowest
value of a wider format, an exact limit (the logarithm of zero) that is masked before anything comes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from narrowcast.eager.door import Door
from narrowcast.errors import NotFiniteError, Origin, RunError
from narrowcast.ledger.identity import FORWARD, RECOMPUTATION
from narrowcast.policy import Policy
from narrowcast.report.findings import GIVEN, TREND, Finding, Watching
from narrowcast.runs.by_storage import ByStorage, has_storage
from narrowcast.runs.culprit import cast_finding, find_culprit, finding_of, overflowing_casts
from narrowcast.runs.finiteness import (
    Flags,
    came_in,
    inputs_of,
    is_finite,
    is_floating,
    mask_like,
    numbers_not_finite,
)
from narrowcast.runs.observer import Observer, quietly
from narrowcast.runs.replay import Replay
from narrowcast.runs.rerun import copies_of_written, is_of_others
from narrowcast.runs.seen_call import SeenCall
from narrowcast.runs.trends import Trends
from narrowcast.torch_bridge import OpFacts, tensors_in
from narrowcast.torch_surface.dispatch import storage_key
from narrowcast.torch_surface.modules import told_of_optimizer_steps

MOMENTS = ("auto", "op", "step")
KEPT = 8
"""How many findings keep their tensors for `finding.save`."""


_open: list[watch] = []
"""Those that are open now, on all threads, the innermost last."""


def open_watch() -> watch | None:
    """The watch that was opened last and is open; None if none is."""
    return _open[-1] if _open else None


class watch:  # noqa: N801 - a context manager that reads as a verb, as torch.no_grad
    """`with watch() as w:` find what makes NaN or infinity in the block; `w.first`, `w.findings`.

    at: `op`, looked at as each call ends, with the proof of who made it (on an accelerator each call waits for it);
        `step`, read once where an optimizer steps and where the block ends, without that proof; `auto`, op on the cpu.
    stop: raise NotFiniteError at the first finding. callback: called with each finding.
    every: with optimizers that step in the block: look at gradients each so many steps (`w.history`), and say where a
        share of underflow above `underflow` or a growth of `growth` times since the first look shows what is to come.
    log: a file that gets a JSON line for each finding and each look.
    """

    def __init__(
        self,
        *,
        at: str = "auto",
        stop: bool = False,
        callback: Callable[[Finding], None] | None = None,
        every: int = 1,
        underflow: float = 0.5,
        growth: float = 2.0**20,
        log: str | Path | None = None,
    ) -> None:
        if at not in MOMENTS:
            raise RunError(f"watch(at={at!r})", "no such moment", advice=f"Give one of {', '.join(MOMENTS)}.")
        if every < 1:
            raise RunError(f"watch(every={every})", "steps are counted from 1", advice="Give 1 or more.")
        self._at, self._stop, self._callback = at, stop, callback
        self._trends = Trends(every, underflow, growth)
        self._log = None if log is None else Path(log)
        self._stack = ExitStack()
        self._is_entered = False
        self.found = Watching()

    def __enter__(self) -> Watching:
        if self._is_entered:
            raise RunError("entering a watch again", "it is open, or has ended", advice="Make another: nc.watch().")
        self._is_entered = True
        if self._log is not None:
            try:
                self._stream = self._stack.enter_context(self._log.open("ab", buffering=0))
            except OSError as error:
                raise RunError(
                    f"watch(log={str(self._log)!r})", f"{type(error).__name__}: {error}", (Origin(str(self._log)),),
                    "Name a file in a folder that exists.",
                ) from error  # fmt: skip
        self._observer = WatchCalls(self.found, self._at, self._tell)
        self._door = self._observer.door = Door(self.found.notes)
        tell = partial(self._door.run, "an optimizer's step", self._step)
        self._stack.enter_context(told_of_optimizer_steps(tell, before=True))
        self._stack.enter_context(self._observer.observing())
        _open.append(self)
        self._stack.callback(_open.remove, self)
        return self.found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._door.run("the end of the block", self._settle, True)
        finally:
            self._stack.close()
            self.found.not_inspected = self._door.times

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The outermost modules that were called in the block."""
        return tuple(self._observer.roots)

    def step_skipped(self) -> None:
        """A step ends whose optimizer is not run: it counts, and what was put off is read. Gradients that are to be
        thrown away show no trend.
        """
        self.found.steps += 1
        self._door.run("the end of a step", self._settle, False)

    def _settle(self, final: bool) -> None:
        with quietly():
            self._observer.settle(final)

    def _step(self, optimizer: Any) -> None:
        with quietly():
            self.found.steps += 1
            self._observer.settle(final=False)
            row, findings = self._trends.look(optimizer, self.found.steps, self._observer.roots)
            if row is not None:
                self.found.history.append(row)
                self._write(row)
            for finding in findings:
                self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        self.found.findings.append(finding)
        self._write({"finding": finding.data()})
        if self._callback is not None:
            self._door.of_user(self._callback, finding)
        if self._stop and finding.made_by != TREND:
            raise NotFiniteError(
                f"{finding.what} made by {finding.id}", finding.sentence, (Origin(finding.file, finding.line),),
                finding.advice or "nc.watch(stop=False) goes on and lists all of them.",
            )  # fmt: skip

    def _write(self, row: dict[str, Any]) -> None:
        """Add a line to the log, whole or not at all; a disk that is full ends the log and not the training."""
        if self._log is None:
            return
        line, end = (json.dumps(row) + "\n").encode(), self._stream.seek(0, 2)
        try:
            if self._stream.write(line) == len(line):
                return
            why = "there was no room for a whole line"
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            self._stream.truncate(end)
        self.found.notes.append(f"{self._log} ends at step {self.found.steps}: {why}")
        self._log = None


@dataclass(slots=True, eq=False)
class _Limit:
    """An exact limit (the logarithm of zero) of which nothing has come yet. Its tensors may die meanwhile."""

    call: SeenCall
    finding: Finding


class WatchCalls(Observer):
    """Looks at what each call gives, and tells of findings."""

    def __init__(
        self, found: Watching, at: str, tell: Callable[[Finding], None], policies: tuple[Policy, ...] = ()
    ) -> None:
        super().__init__(policies)
        self._found, self._at, self._tell = found, at, tell
        self._flags = Flags()
        self._meant: ByStorage[str] = ByStorage()
        self._limits: ByStorage[_Limit] = ByStorage()
        self._told: ByStorage[bool] = ByStorage()
        self._known: set[tuple[str | int, ...]] = set()
        self._later: list[tuple[SeenCall, list[int], list[int]]] = []

    # -- as calls end --------------------------------------------------------------------------------------------------

    def looks_before(self, facts: OpFacts) -> bool:
        """What an op does not write to is there afterwards, too, and looked at only if something is wrong."""
        return facts.overwrites

    def before(self, call: SeenCall) -> None:
        """What came in, before the op writes to it."""
        came = call.notes["came"] = came_in(call)
        call.notes["flags"] = [self._flags.number(t) for t in came]
        if call.facts.writes and self._looks_now(came):
            call.args, call.kwargs = copies_of_written(call.facts, call.args, call.kwargs)

    def after(self, call: SeenCall) -> None:
        """What went out."""
        self._found.calls += 1
        results = [t for t in call.results if is_floating(t)]
        if call.facts.writes:
            for tensor in results:
                self._flags.written(tensor)
        if not self._looks_now(results or came_in(call)):
            self._later.append((_light(call), self._came(call), [self._flags.number(t) for t in results]))
            return
        gave_finite = all(is_finite(tensor) for tensor in results)
        overflowed, masks = overflowing_casts(call, gave_finite)
        for name, _ in masks:
            self._count_meant(f"a mask that the cast of an argument makes -inf ({name} of {call.id.op})")
        if overflowed and not self._is_allowed(call, overflowed[0][0]):
            self._report(call, cast_finding(call, overflowed))
        elif gave_finite:
            self._mask(call)
        else:
            self._judge(call, results)

    def _came(self, call: SeenCall) -> list[int]:
        """The flags of what came in."""
        flags: list[int] | None = call.notes.get("flags")
        return [self._flags.number(t) for t in came_in(call)] if flags is None else flags

    def _looks_now(self, tensors: list[torch.Tensor]) -> bool:
        return self._at == "op" or (self._at == "auto" and all(t.is_cpu for t in tensors))

    def _mask(self, call: SeenCall) -> None:
        """All it gave is finite: an exact limit among its inputs was masked in time."""
        for tensor in came_in(call) if self._limits else ():
            if self._limits.get(tensor) is not None:
                self._limits.drop(tensor)
                self._meant.put(tensor, "an exact limit, masked before anything came of it")
                self._count_meant("an exact limit, masked before anything came of it")

    def _judge(self, call: SeenCall, results: list[torch.Tensor]) -> None:
        pairs = zip(inputs_of(call), came_in(call), self._came(call), strict=True)
        bad = [(name, tensor, came) for (name, tensor), came, flag in pairs if not self._flags.is_finite(flag)]
        if bad:
            self._pass_on(call, bad, results)
            return
        why = numbers_not_finite(call) or mask_like(call, results) or self._is_allowed(call)
        if why:
            self._mean(results, why)
            self._count_meant(why)
            return
        finding, is_limit = find_culprit(call, inputs_of(call), results)
        if not is_limit:
            self._report(call, finding)
            return
        limit = _Limit(call.without_tensors(), replace(finding, step=self._found.steps + 1))
        for tensor in results:
            self._limits.put(tensor, limit)

    def _pass_on(
        self, call: SeenCall, bad: list[tuple[str, torch.Tensor, torch.Tensor]], results: list[torch.Tensor]
    ) -> None:
        """What came in was not finite, either: told of already, meant, an exact limit, or given from outside."""
        has_nan = any(bool(torch.isnan(t).any()) for t in results)
        nan_came = any(bool(torch.isnan(t).any()) for _, t, _ in bad)
        limit = next((found for _, _, t in bad if (found := self._limits.get(t)) is not None), None)
        meant = next((why for _, _, t in bad if (why := self._meant.get(t)) is not None), None)
        if any(self._told.get(t) for _, _, t in bad):
            self._found.spread += 1
            self._note_told(results)
        elif limit is not None and has_nan:
            where = f"it became NaN in {call.id} ({call.site.file}:{call.site.line})"
            self._report_limit(limit, where)
            self._note_told(results)
        elif limit is not None:
            for tensor in results:
                self._limits.put(tensor, limit)
        elif meant is None and not self._given(call, bad, nan_came):
            self._note_told(results)
        elif has_nan and not nan_came and not self._is_allowed(call):
            finding, _ = find_culprit(call, inputs_of(call), results)
            why = meant or "given from outside"
            self._report(call, replace(finding, sentence=f"NaN out of infinities that were meant: {why}"))
        else:
            self._mean(results, meant or "given from outside")

    def _given(self, call: SeenCall, bad: list[tuple[str, torch.Tensor, torch.Tensor]], has_nan: bool) -> bool:
        """The first reader of what nobody saw being made; whether it is taken as meant, as infinities are."""
        name, value, tensor = bad[0]
        if not has_nan:
            self._mean([t for _, _, t in bad], "given from outside")
            self._count_meant("given from outside")
            return True
        kind = self._parameter(tensor) or "a tensor made outside of the watched calls"
        sentence = f"its argument {name}, {kind}, holds NaN: {int(value.isnan().sum())} of {value.numel()} elements"
        advice = "Look at the data and the weights, and at what made them."
        self._report(call, finding_of(call, inputs_of(call), "nan", GIVEN, sentence, advice))
        self._note_told([tensor])
        return False

    def _parameter(self, tensor: torch.Tensor) -> str:
        """`the parameter encoder.weight`, if the tensor is one of the models that run, or a view of one."""
        for root in self.roots:
            for name, parameter in root.named_parameters():
                if has_storage(parameter) and storage_key(parameter) == storage_key(tensor):
                    return f"the parameter {name}"
        return ""

    def _is_allowed(self, call: SeenCall, argument: str = "") -> str:
        """Why the policy allows what is not finite, if one of its rules does."""
        rule = call.allows_nonfinite(argument)
        return f"allowed by a rule about {rule.op} ({rule.origin})" if rule is not None else ""

    def _mean(self, results: list[torch.Tensor], why: str) -> None:
        for tensor in results:
            self._meant.put(tensor, why)

    def _count_meant(self, why: str) -> None:
        self._found.meant[why] = self._found.meant.get(why, 0) + 1

    def _note_told(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self._told.put(tensor, True)

    def _report(self, call: SeenCall, finding: Finding) -> None:
        """Tell of a finding once: not again in later steps, nor where a checkpoint repeats the forward."""
        self._note_told(call.results)
        direction = FORWARD if call.id.direction == RECOMPUTATION else call.id.direction
        key = (call.id.module_path, call.id.op, direction, call.site.file, call.site.line, finding.made_by)
        if key in self._known:
            self._found.repeated += 1
            return
        self._known.add(key)
        finding = replace(finding, step=self._found.steps + 1)
        if len(self._found.findings) < KEPT and call.args and not any(map(is_of_others, tensors_in(call.args))):
            finding = Replay.attach(finding, call)
        self._tell(finding)

    def _report_limit(self, limit: _Limit, where: str) -> None:
        finding = replace(limit.finding, sentence=f"{limit.finding.sentence}; {where}")
        self._report(limit.call, finding)

    # -- at the end of a step ------------------------------------------------------------------------------------------

    def settle(self, final: bool) -> None:
        """Read what was put off, in one transfer, and judge it by who read what of whom. Exact limits that reached a
        gradient, or are alive at the end, came to something.
        """
        finite = self._flags.read()
        later, self._later = self._later, []
        for call, came, gave in later:
            if all(finite(n) for n in gave):
                continue
            if not all(finite(n) for n in came):
                self._found.spread += 1
            elif call.notes["numbers"]:
                self._count_meant(call.notes["numbers"])
            else:
                sentence = "its inputs were finite; nc.watch(at='op') proves who made it"
                self._report(call, finding_of(call, [], "nan or infinity", "", sentence))
        for gradient in [p.grad for root in self.roots for p in root.parameters()] if self._limits else ():
            limit = self._limits.get(gradient) if gradient is not None else None
            if limit is not None:
                self._report_limit(limit, "it reached the gradient of a parameter")
        if final:
            for limit in dict.fromkeys(self._limits.living()):
                self._report_limit(limit, "what it gave is there at the end, and nothing masked it")


def _light(call: SeenCall) -> SeenCall:
    """What is kept of a call until its step ends: not its tensors."""
    why, light = numbers_not_finite(call), call.without_tensors()
    light.notes["numbers"] = why
    return light
