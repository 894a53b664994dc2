"""`nc.capture`: what a run computes, call by call, as data that can be saved, read and compared."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast, overload

import torch

from narrowcast.analysis.capture.filling import Filling
from narrowcast.analysis.capture.parameters import Parameters
from narrowcast.analysis.capture.tokens import log_probabilities_of, without_padding
from narrowcast.analysis.capture.views import Views
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.core.ops import is_named
from narrowcast.core.policy import Policy
from narrowcast.errors import RunError
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under, asked_or_around
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.observation.observer.door import Door
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.observer.words import format_names
from narrowcast.observation.restore.weights import Weights
from narrowcast.observation.statistics.arguments import others_as_text, results_by_name, tensors_by_name
from narrowcast.observation.statistics.statistics import Statistics, folder_for
from narrowcast.observation.trial.environment import environment
from narrowcast.observation.trial.finiteness import fills, gives_memory, is_floating
from narrowcast.observation.trial.trial import Loss, Trial
from narrowcast.observation.trial.uncast import NOTHING, Unasked, Uncast
from narrowcast.output.words import counted
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import CallRecord, TensorFacts
from narrowcast.runtime.sites.python_stack import callers_of
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, device_type_of, tensors_in
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs
from narrowcast.runtime.torch_bridge.ops import written_tensors
from narrowcast.runtime.torch_surface.autograd import gradient_of
from narrowcast.runtime.torch_surface.dispatch import CLONE, COPY, TO_COPY, OpOverload, quietly

STATISTICS = ("sampled", "whole")


@overload
def capture(
    model: None = None, *, statistics: str = ..., checksums: bool = ..., tensors: str | Path | None = ...,
    tensor_limit_bytes: int = ..., times: bool = ...,
) -> Capturing: ...  # fmt: skip
@overload
def capture(
    model: Callable[..., Any] | Case, inputs: Inputs = ..., *, under: Under = ...,
    backward: bool | Loss = ..., statistics: str = ..., checksums: bool = ..., tensors: str | Path | None = ...,
    tensor_limit_bytes: int = ..., tokens: torch.Tensor | None = ..., times: bool = ...,
) -> Run: ...  # fmt: skip
def capture(
    model: Callable[..., Any] | Case | None = None,
    inputs: Inputs = (),
    *,
    under: Under = None,
    backward: bool | Loss = False,
    statistics: str = "sampled",
    checksums: bool = False,
    tensors: str | Path | None = None,
    tensor_limit_bytes: int = 1 << 30,
    tokens: torch.Tensor | None = None,
    times: bool = False,
) -> Run | Capturing:
    """Capture what the model computes on its inputs; or, without a model, what runs in `with capture() as run:`.

    Each call is listed with its identity, place, rule, formats, arguments that are no tensors, and facts of its
    tensors: finite range, mean, rms, shares of zeros, subnormal, saturated and non-finite values, a histogram of
    exponents. With them come gradients of parameters, moments of optimizers that step in the block, and the
    environment. Inside a block the regions that are open hold; nothing of the user's code changes.

    model:  a Module, compiled or not, a script, an exported program, any callable, or a Case. It runs on a copy that
            shares its weights, and leaves gradients and random state alone.
    inputs: as for `explain`.
    under:  as for `explain`; without it, and no region around the call, the model runs in one that casts nothing, in
            which calls have the identities that they have under a policy.
    backward: also differentiate: True for a scalar output, an output's `loss`, or else a fixed random sum of the
            outputs; or a function that makes the loss of the output, outside of the region. A loss that training
            computes inside of it belongs to the model here: give a function that returns the loss.
    statistics: `sampled`, the range exactly and the rest of at most 4,096 elements of each tensor; or `whole`.
    checksums: also one of each tensor's bytes. tensors: a folder to write the tensors themselves into, as long as
            tensor_limit_bytes last (their raw bytes, as .npy files that need no pickle).
    tokens: ids [..., T] of a language model whose logits are [..., T, V], -100 where nothing is wanted (a prompt,
            padding): the run keeps the log-probability of each other one given those before it, for `diff` and
            `parity`. In a block, or where an engine samples: `run.keep_tokens`.
    times:  also how long each call takes, and each cast of its arguments, as eager code and observed: some microseconds
            of each are ours. `run.to_trace()` shows them.

    Nothing waits for an accelerator before the block ends, unless checksums, tensors or times are asked for. Raises
    RunError.
    """
    if statistics not in STATISTICS:
        advice = f"Give one of {', '.join(STATISTICS)}."
        raise RunError(f"capture(statistics={statistics!r})", "no such statistics", advice=advice)
    folder = None if tensors is None else folder_for(tensors)
    table = Statistics(statistics == "whole", checksums, folder, tensor_limit_bytes)
    if model is None:
        is_given = not (type(inputs) is tuple and not inputs)
        given = {"inputs": is_given or None, "under": under, "backward": backward or None, "tokens": tokens}
        wrong = next((name for name, value in given.items() if value is not None), None)
        if wrong is not None:
            raise RunError(f"capture({wrong}=...) without a model", "the block runs what it runs",
                           advice="Give a model, or open the region inside the block.")  # fmt: skip
        return Capturing(table, times)
    trial = Trial.of("capture", model, inputs, backward)
    opened = observed_region("capture", trial, under)
    weights = trial.kept_weights()
    capturing = Capturing(table, times, opened, weights)
    try:
        with weights, leaves_no_kernels():
            gives = None if isinstance(trial.model, torch.nn.Module) else capturing.returns
            outcome = replace(trial, gives=gives).run(opened, capturing)
    finally:
        changed = weights.changed
        capturing.run.notes += [f"{note_of_changed(changed)}: they are restored."] if changed else []
    if tokens is not None:
        capturing.run.keep_tokens(*log_probabilities_of(outcome.output, without_padding(tokens, trial)))
    capturing.note_environment()
    return capturing.run


def note_of_changed(names: list[str]) -> str:
    """Return a note of weights: `The model changes its own weights while it runs (linear.weight)`."""
    shown = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
    return f"The model changes its own weights while it runs ({shown})"


def observed_region(verb: str, trial: Trial, under: Under, default: str | None = None) -> autocast:
    """Return the region that was asked for, or the one around the call; or else under `default`, or without casts."""
    asked = asked_or_around(verb, under, trial.device_type)
    device = asked.device_type or trial.device_type
    if not asked.is_there:
        return Uncast(device) if default is None else Unasked(device, default)
    return replace(asked, dtype=asked.fast_dtype_on(device)).on(device, asked.policy)


class _CapturedRun(Run):
    """A run whose tensors' facts are put together when they are first asked for. later: gives them. module: the one
    that was called, if all calls were its, and it is still there.
    """

    __slots__ = ("_tensors", "later", "module")
    module: weakref.ref[torch.nn.Module] | None

    @property
    def tensors(self) -> list[TensorFacts]:
        if self.later is not None:
            with quietly():
                self.tensors = self.later()
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: list[TensorFacts]) -> None:
        self._tensors = tensors
        self.later: Callable[[], list[TensorFacts]] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and all(getattr(self, f.name) == getattr(other, f.name) for f in fields(Run))

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> object:
        """Copies and pickles have the facts, and not what they come from."""
        self.tensors = self.tensors
        nothing, slots = cast("tuple[None, dict[str, Any]]", object.__getstate__(self))
        return nothing, {name: value for name, value in slots.items() if name != "module"}


def module_of(run: Run) -> torch.nn.Module | None:
    """Return the module whose calls a run holds, if they are all of one, which is still there."""
    reference = getattr(run, "module", None)
    module: torch.nn.Module | None = None if reference is None else reference()
    return module


class Capturing:
    """`with capture() as run:` the run grows as the block runs, and is whole when it has ended.

    region, weights: of a model that is run in a region, which writes to its weights at most.
    """

    def __init__(
        self, table: Statistics, times: bool, region: autocast | None = None, weights: Weights | None = None
    ) -> None:
        self.run = _CapturedRun()
        self._of: torch.nn.Module | None = None
        self._table, self._region = table, region
        self._observer = _Capture(self.run, table, () if region is None else (region.policy,), times)
        self._observer.weights = weights
        self._observer.casts_scripts = region is None or region.policy is not NOTHING
        self._door = self._observer.door = Door(self.run.notes)
        self._stack = ExitStack()
        self._is_entered = False
        observer = self._observer
        observer.parameters = Parameters(self.run, table, self._door, lambda: observer.roots)

    def of(self, module: torch.nn.Module) -> Capturing:
        """Return this, for the calls of one module alone, in whichever thread they are made: an engine may have one of
        its own. `with nc.capture().of(engine.model) as run:`. A call beside another one, in a second thread, is left
        out; a note says so.
        """
        self._of = module
        return self

    def returns(self, output: Any) -> None:
        """Note what a function returned, whatever the modules did that it called."""
        self._observer.returns(output)

    def __enter__(self) -> Run:
        if self._is_entered:
            raise RunError("entering a capture again", "it is open, or has ended", advice="Make another: nc.capture().")
        self._is_entered = True
        self._stack.enter_context(self._observer.parameters.noted())
        self._stack.enter_context(self._observer.observing() if self._of is None else self._observer.calls_of(self._of))
        return self.run

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._stack.close()
        with quietly():
            self._door.run("parameters", self._observer.parameters.enter)
            self._door.run("parameters", self._observer.leave_out_filling)
            self.run.later = self._tensors
            roots = list(self._observer.roots)
            self.run.module = weakref.ref(roots[0]) if len(roots) == 1 else None
        if self._region is None:  # else when the model is as it was
            self._door.run("the environment", self.note_environment)
        if error is not None:
            self.run.notes.append(f"The run raised: {type(error).__name__}: {str(error).splitlines()[:1]}")
        if self._table.not_written:
            not_written = counted(self._table.not_written, "tensor", "were")
            self.run.notes.append(f"{not_written} not written: the limit was reached.")

    def _tensors(self) -> list[TensorFacts]:
        tensors = self._door.run("the values of tensors", self._table.table)
        return self._table.without_values() if tensors is None else tensors

    def note_environment(self) -> None:
        """Note the environment of the run, and where the tensors themselves are, if they were asked for."""
        region = self._region
        if region is None:
            self.run.environment = environment(self._observer.device_type or "cpu")
        else:
            policy = None if region.policy is NOTHING else region.policy
            self.run.environment = environment(region.device, policy, str(FORMATS[region.fast_dtype]))
        if self._table.folder is not None:
            self.run.environment["tensors"] = str(self._table.folder.resolve())


class _Capture(Observer):
    """Enters each call into a run."""

    sees_views = sees_draws = True

    def __init__(self, run: Run, table: Statistics, policies: tuple[Policy, ...], times: bool) -> None:
        super().__init__(policies)
        self._times = self.sees_inside = times
        self._run, self._table = run, table
        self._filling, self._views = Filling(), Views()
        self.parameters: Parameters
        self.device_type = ""

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call; note what an outermost one returns."""
        is_outermost, self._local.is_inside = not self._local.is_inside, True
        try:
            result = super().called(call, module, args, kwargs)
        finally:
            self._local.is_inside = not is_outermost
        if is_outermost:
            self._look(self._note_returned, "what a model returns", result)
        return result

    def begins(self, module: torch.nn.Module) -> None:
        """Note some of its weights: an engine may get others between its calls."""
        with quietly():
            self.parameters.note_version(module)

    def returned(self, result: Any) -> None:
        """Note what the captured module returned."""
        self._look(self._note_returned, "what a model returns", result)

    def returns(self, output: Any) -> None:
        """Note what the function returned that was called, and not what its modules did; unless it is no floats, as
        tokens are, or nothing.
        """
        if any(map(is_floating, tensors_in(output))):
            self._run.returned.clear()
            self._look(self._note_returned, "what a function returns", output)

    def _note_returned(self, result: Any) -> None:
        floats = filter(is_floating, tensors_in(result))
        self._run.returned += [self._table.number(t) for t in floats]  # in the shape in which it is returned

    def leave_out_filling(self) -> None:
        """Leave out the calls that filled the parameters and buffers of the modules that were called."""
        found = self._filling.of(t for root in self.roots for t in (*root.parameters(), *root.buffers()))
        if found:
            self._run.leave_out(found)

    @property
    def _may_fill(self) -> bool:
        """Whether what runs may fill new parameters: outside of modules, before the first step."""
        return not (self._local.is_inside or self._run.steps)

    @property
    def follows(self) -> bool:
        """Copies, which are no calls."""
        return True

    def moved(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Trace a copy to the call that made its source."""
        if facts.op is CLONE:
            self._table.copied(args[0], result)
        elif facts.op is COPY and fills(args[0]) and args[1].shape == args[0].shape:
            self._table.copied(args[1], args[0])
        read = tensors_in(args, kwargs)
        if facts.op is CLONE or is_named(facts.id, "family.view"):
            self._views.viewed(args[0], tensors_in(result))
        if facts.op is CLONE or facts.writes or not read:  # not a view
            written = list(written_tensors(facts, args, kwargs)) if facts.writes else []
            made = [] if written else tensors_in(result)
            self._filling.note(None, read, written, made, self._may_fill)

    def viewed(self, args: tuple[Any, ...], result: Any) -> None:
        """Note its line."""
        self._views.viewed(args[0], tensors_in(result))

    def before(self, call: SeenCall) -> None:
        """Note the facts of its tensors, before an op may write to them."""
        tensors = tensors_by_name(call.facts, call.args, call.kwargs)
        if call.facts.writes:
            written = written_tensors(call.facts, call.args, call.kwargs)
            self.parameters.about_to_write(tensor for tensor in written if not self._filling.fills(tensor))
        self.device_type = self.device_type or device_type_of([t for _, t in tensors]) or ""
        call.notes["inputs"] = tuple((name, self._table.number(tensor)) for name, tensor in tensors)
        if call.id.direction == FORWARD:
            own = call.site.file, call.site.line
            call.notes["lines"] = callers_of(call.site), self._views.of_all([t for _, t in tensors], own)
        if self._times:
            call.notes["began"] = self._now()

    def after(self, call: SeenCall) -> None:
        """Add the call to the run."""
        if self._times:
            self._run.elapsed_ns.append(self._now() - call.notes["began"])
            number = len(self._run.calls)
            self._run.cast_elapsed_ns += [(number, *cast) for cast in call.notes.get("casts", ())]
        overwritten = written_tensors(call.facts, call.args, call.kwargs)
        for tensor in overwritten:  # ops on lists, and norms their running statistics, leave versions alone
            self._table.written(tensor)
        written = overwritten if call.facts.writes else []
        may_fill = self._may_fill and call.id.direction == FORWARD
        read = tensors_in(call.args, call.kwargs)
        self._filling.note(len(self._run.calls), read, written, [] if written else call.results, may_fill)
        results = [] if gives_memory(call) else call.results  # as of a deep copy: it lies there, or comes there later
        if written and not (call.results or self._are_gradients(written)):
            results = written  # of an op on lists
        outputs = tuple((name, self._table.number(tensor)) for name, tensor in results_by_name(results))
        given = others_as_text(call.facts, call.args, call.kwargs)
        rule, reason = (call.rule.label, call.rule.reason) if call.rule is not None else ("", "")
        self._run.calls.append(
            CallRecord(
                call.id, call.site.file, call.site.line, call.input_formats, call.computes, rule, reason,
                call.notes["inputs"], outputs, given, call.forward, call.is_cast, *call.notes.get("lines", ()),
            )
        )  # fmt: skip

    def _are_gradients(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether some are the gradients of parameters, which are those of the backward that made them, however
        they are clipped.
        """
        made = [gradient_of(p) for root in self.roots for p in root.parameters()]  # alive, so that ids are theirs
        return not {*map(id, made)}.isdisjoint(map(id, tensors))

    def _execute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], on: tuple[Any, ...]) -> Any:
        """Run the op; a cast inside a call that is decided is timed by itself."""
        around = self._local.decided[0] if self._local.decided else None
        if not self._times or around is None or func is not TO_COPY:
            return super()._execute(func, args, kwargs, on)
        began = self._now()
        result = super()._execute(func, args, kwargs, on)
        formats = (format_names([tensor.dtype]) for tensor in (args[0], result))
        around.notes.setdefault("casts", []).append((*formats, self._now() - began))
        return result

    def _now(self) -> int:
        """Return nanoseconds, once the accelerator has done its work."""
        if self.device_type not in ("", "cpu"):
            torch.accelerator.synchronize()
        return time.perf_counter_ns()
