"""`nc.Scaler`: torch's GradScaler that says what it skips and why, and whose scale does not fall for ever."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from narrowcast.analysis.watch.watch import open_watch
from narrowcast.core.policy import Site
from narrowcast.errors import Origin, ScalerError
from narrowcast.reports.results.findings import Watching
from narrowcast.reports.results.verdicts import TREND
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_surface.dispatch import quietly, version_of
from narrowcast.runtime.torch_surface.grad_scaling import READY, STEPPED, UNSCALED, innermost, takes_scale
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.scaler.gradients import Culprits, Flags, check, in_one, inverse_of
from narrowcast.training.scaler.losses import LossScale, backward_of
from narrowcast.training.scaler.readings import HostNumbers
from narrowcast.training.scaler.results import StepResult, name_of
from narrowcast.training.scaler.state import ScalerState
from narrowcast.training.scaler.steps import EndedStep


class Scaler(ScalerState):
    """A `torch.amp.GradScaler`, with the same arguments and methods, that cannot fail in silence.

    min_scale: the scale is not backed off below it; None is 1, or the first scale if that is less. patience: after this
    many skipped steps in a row, or a few at the lowest scale, `on_stuck` says what to do: `warn`, again each time that
    the streak doubles, or `raise` ScalerError. model: whose parameters' names are shown. process_group: of the ranks
    that hold shards of plain tensors and must decide alike; those of DTensors (FSDP2, tensor parallel) are known.
    """

    # -- what a loop calls ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if not self._enabled:
            return "<Scaler, disabled>"
        scale = self._init_scale if self._scale is None else self.get_scale()
        return f"<Scaler on {self._device}, scale {scale:g}>"

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each of an iterable of them, by the scale."""
        if self._named:
            raise self._error(
                "scale()", "losses with scales of their own were run since the last update()",
                "Run all losses of an iteration with scaler.backward(loss, optimizer, loss_id=...).",
            )  # fmt: skip
        if not self._findings.losses:
            self._steps.let_go()
        self._findings.scaled(outputs)
        scaled = super().scale(outputs)
        if isinstance(scaled, torch.Tensor) and self.is_enabled() and not torch.compiler.is_compiling():
            self._scaled = weakref.ref(scaled)
        return scaled

    def backward(self, loss: torch.Tensor, optimizer: Any, *, loss_id: str, **kwargs: Any) -> None:
        """Run the backward of one loss among several, scaled by a scale of its own, and add its gradients unscaled.

        optimizer: the one whose parameters it reaches, or several. The optimizer's gradients are then unscaled, and
        `step` takes them as they are; `update()` sees to each loss's scale by its own overflows. kwargs: of `backward`
        (`retain_graph`). Gradients that were there before are held during the backward.
        """
        optimizers = tuple(map(innermost, (optimizer,) if hasattr(optimizer, "param_groups") else optimizer))
        if not self.is_enabled():
            loss.backward(**kwargs)
            return
        if self._findings.losses and not self._named:
            raise self._error(
                f"backward(loss_id={loss_id!r})", "scale() was called since the last update()",
                "Run all losses of an iteration with scaler.backward(loss, optimizer, loss_id=...).",
            )  # fmt: skip
        for one in optimizers:
            self._refuse_stepped(one, "backward()")
        if not self._named:
            self._steps.let_go()
        self._findings.scaled(loss)
        self.make_scale(loss.device)
        if loss_id not in self._losses:
            self._losses[loss_id] = LossScale(self.first_scale, self._min_scale)
        self._named.add(loss_id)
        flags_of_each = backward_of(loss, self._losses[loss_id], optimizers, self._group, kwargs)
        for one, flags in zip(optimizers, flags_of_each, strict=True):
            state = self.state_of(one)
            before = state["found_inf_per_device"]
            state["found_inf_per_device"] = {
                device: torch.maximum(before[device], flag) if device in before else flag
                for device, flag in {**before, **flags}.items()
            }
            state.update(stage=UNSCALED, line=loop_line())

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place: before they are clipped or inspected."""
        if not self.is_enabled():
            return
        self._refuse_unscaled_loss("unscale_()")
        optimizer = innermost(optimizer)
        state = self.state_of(optimizer)
        if state["stage"] is UNSCALED or self._are_unscaled(optimizer):
            raise self._error(
                "unscale_()", "it was called for this optimizer, or one with these gradients, since the last update()",
                "Call it once, when all gradients of the iteration are there; step() does, where nobody did. "
                "Lightning's and Accelerate's optimizers unscale in their step: clip in a hook of theirs before it.",
                state.get("line"),
            )  # fmt: skip
        self._refuse_stepped(optimizer, "unscale_()")
        self._unscale(optimizer, state)
        state["line"] = loop_line()

    def _unscale(self, optimizer: Any, state: dict[str, Any]) -> None:
        self._findings.to_be_unscaled(optimizer)
        super().unscale_(optimizer)
        first = next(((p, g) for p in optimized_by(optimizer) if (g := p.grad) is not None), None)
        state["weight"], state["unscaled"] = (None, None) if first is None else ((t, version_of(t)) for t in first)
        flags = state["found_inf_per_device"].values()
        # What the user does next may spread NaN over all gradients, as a clip does: they are looked at before, where
        # the host knows that some are not finite, or steps are being skipped one after the other.
        if any(flag.device.type == "cpu" and flag.numpy() for flag in flags) or self._steps.was_skipped:
            state["early"] = _look(optimizer)

    def _are_unscaled(self, optimizer: Any) -> bool:
        """Return whether gradients of this optimizer were unscaled by way of another, and not written to since: of a
        wrapper that does not declare what it wraps.
        """
        own = self.state_of(optimizer)
        others = [s["unscaled"] for s in self.states() if s is not own and s.get("unscaled") is not None]
        done = [gradient for gradient, version in others if version_of(gradient) == version]
        return bool(done) and any(p.grad is one for one in done for p in optimized_by(optimizer))

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Unscale the optimizer's gradients, if nobody has, and clip their norm; the norm, unscaled, on its device."""
        optimizer = innermost(optimizer)
        if self.is_enabled():
            self._refuse_stepped(optimizer, "clip_grad_norm_()")
            if self.state_of(optimizer)["stage"] is READY:
                self.unscale_(optimizer)
        parameters = list(optimized_by(optimizer))
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Let the optimizer step if all gradients are finite; return a `StepResult`.

        A closure (LBFGS) scales the loss, runs the backward and returns the loss; its gradients are unscaled after each
        call, unless it has called `unscale_`, to clip them. If some are not finite, parameters and the optimizer's
        state are restored; a copy of both is held.
        """
        if not self.is_enabled():
            value = optimizer.step(*args, **kwargs)
            return StepResult(value, HostNumbers(False), lambda number, _: str(number), lambda: None)
        inner = innermost(optimizer)
        self._refuse_stepped(inner, "step()")
        state = self.state_of(inner)
        skipped: bool | None
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):
            if state["stage"] is UNSCALED:
                raise self._error(
                    "step() with a closure", "the gradients are unscaled already",
                    "Call unscale_() in the closure, or leave it to step(): a closure computes gradients again.",
                    state.get("line"),
                )  # fmt: skip
            checked = partial(self._checked, inner, closure)
            named = {"closure": checked} if "closure" in kwargs else {}
            given = args if named else (checked, *args[1:])
            value, skipped = _whole_step(optimizer, partial(optimizer.step, *given, **{**kwargs, **named}))
            state["stage"] = STEPPED
        else:
            self._refuse_unscaled_loss("step()")
            if state["stage"] is READY and self._are_unscaled(inner):
                self.unscale_(inner)  # raises
            if inner is optimizer and takes_scale(inner):
                if state["stage"] is READY:
                    self._findings.to_be_unscaled(inner)  # its kernel unscales: unscale_ is not called
                value, skipped = super().step(inner, *args, **kwargs), None
            else:  # a wrapper's kernel is not its own, and sees no scale
                if state["stage"] is READY:
                    self._unscale(inner, state)
                flags = state["found_inf_per_device"]
                self._refuse_without_gradients(flags)
                # one look at the device for each, as torch's scaler has it
                skipped = bool(sum(flag.item() for flag in flags.values()))
                value = None if skipped else optimizer.step(*args, **kwargs)
                state["stage"] = STEPPED
        result = self._result(inner, value, state, skipped)
        watch = open_watch()
        if watch is not None:
            if skipped and not callable(closure):  # its step was not run: who watches was not told
                watch.step_skipped()
            result.op = _op_seen(watch.found)
        state["line"] = loop_line()
        self._results.append(result)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Grow the scales or back them off by what was found since the last update, or set the shared one."""
        if not self.is_enabled():
            return
        self._refuse_unscaled_loss("update()")
        if new_scale is None and not any(state["found_inf_per_device"] for state in self.states()):
            raise self._error(
                "update()", "no gradients were checked since the last one",
                "Call scaler.step(optimizer) first: without it the scale knows nothing to go by.",
            )  # fmt: skip
        self._steps.number += 1
        self._end(new_scale)
        self.begin_iteration()
        self._findings.updated()
        self._steps.collect()
        self._steps.speak()

    # -- how -----------------------------------------------------------------------------------------------------------

    def gradients_checked(self, optimizer: Any, inverse: torch.Tensor, found: torch.Tensor) -> Flags:
        """Check the optimizer's gradients and multiply them by `inverse`; a flag for each device."""
        return check(optimizer, inverse, found, self._group)

    def _checked(self, optimizer: Any, closure: Callable[[], Any]) -> Any:
        """Return what a closure returns; its gradients are unscaled and checked before the optimizer sees it."""
        loss = closure()
        self._refuse_unscaled_loss("step() with a closure")
        scaled = None if self._scaled is None else self._scaled()
        if scaled is not None and scaled is loss:
            raise self._error(
                "step() with a closure", "it returned the scaled loss",
                "Return the loss itself: optimizers compare what closures return, and its gradients are unscaled.",
            )  # fmt: skip
        scale, state = self.make_scale(torch.device(self._device)), self.state_of(optimizer)
        if state["stage"] is UNSCALED:  # the closure has done it, to clip; the next call of it may do so again
            flags, state["stage"] = state["found_inf_per_device"], READY
            self._findings.computed_anew()
        else:
            self._findings.to_be_unscaled(optimizer)
            zero = torch.zeros((), device=scale.device)
            flags = state["found_inf_per_device"] = check(optimizer, inverse_of(scale), zero, self._group)
        self._refuse_without_gradients(flags)
        if in_one(flags.values(), scale.device).item():
            raise _StepNotFinite
        return loss

    def _result(self, optimizer: Any, value: Any, state: dict[str, Any], skipped: bool | None) -> StepResult:
        """Return the result of `step`. Where the optimizer's kernel decided, the host does not ask what it did."""
        watch, flags = open_watch(), state["found_inf_per_device"]
        scale, decided = self.scale_tensor, HostNumbers(bool(skipped))
        if skipped is None and flags and scale is not None:
            decided = HostNumbers(in_one(flags.values(), scale.device))
        early = state.get("early")
        given = None if self._model is None else self._model()
        models = [model for model in (given, *(watch.models if watch else ())) if model is not None]
        names = partial(name_of, optimizer, models)
        result = StepResult(value, decided, names, lambda: early or _look(optimizer))
        # While steps are being skipped one after the other, the gradients are looked at before they are gone.
        result.look_if_skipped(always=skipped is None and self._steps.was_skipped)
        return result

    def _end(self, new_scale: float | torch.Tensor | None) -> None:
        """Set the scales for the next iteration; the result of this one waits for its numbers."""
        scale = self.make_scale(torch.device(self._device))
        results, watched = tuple(self._results), open_watch() is not None
        number, floor = self._steps.number, HostNumbers(self._floor)
        for name in sorted(self._named):
            loss = self._losses[name]
            if loss.scale is not None and loss.found is not None:
                numbers = HostNumbers(loss.scale), HostNumbers(loss.floor)
                self._steps.waiting.append(EndedStep(number, *numbers, results, HostNumbers(loss.found), name, watched))
            loss.update(self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval())
        if not self._named:
            unscaled = [state for state in self.states() if state["stage"] is UNSCALED]
            left = [flag for state in unscaled for flag in state["found_inf_per_device"].values()]
            found = HostNumbers(in_one(left, scale.device)) if left else None
            weights = [state["weight"] for state in unscaled if state.get("weight") is not None]
            by_itself = any(version_of(weight) != version for weight, version in weights)  # optimizer.step()
            tell = partial(self._findings.not_stepped, loop_line()) if left and not by_itself else None
            self._steps.waiting.append(EndedStep(number, HostNumbers(scale), floor, results, found, "", watched, tell))
        if self._named and new_scale is None:
            self.forget_states()
            return
        self.set_floor(new_scale)
        super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
        scale.clamp_(min=self._floor)

    # -- what is refused -----------------------------------------------------------------------------------------------

    def _error(self, asked: str, found: str, advice: str, site: Site | None = None) -> ScalerError:
        where = [*loop_line().origins]
        if site is not None and site.file:
            where.append(Origin(site.file, site.line, "it was called here"))
        return ScalerError(asked, found, tuple(where), advice)

    def _refuse_stepped(self, optimizer: Any, asked: str) -> None:
        if self.state_of(optimizer)["stage"] is STEPPED:
            raise self._error(
                asked, "step() was called for this optimizer since the last update()",
                "Call update() once at the end of each iteration, after all optimizers.",
                self.state_of(optimizer).get("line"),
            )  # fmt: skip

    def _refuse_unscaled_loss(self, asked: str) -> None:
        if self.scale_tensor is None:
            raise self._error(
                asked, "no loss was scaled yet",
                "Write scaler.scale(loss).backward() before it; without that the gradients are divided for nothing.",
            )  # fmt: skip

    def _refuse_without_gradients(self, flags: Flags) -> None:
        if not flags:
            raise self._error(
                "step()", "none of the optimizer's parameters has a gradient",
                "Run the backward before it; are these the parameters of the model that ran?",
            )  # fmt: skip


def _look(optimizer: Any) -> Culprits:
    with quietly():
        return Culprits(optimizer)


def _op_seen(watch: Watching) -> str:
    """Return what an open watch has found about the step that has just ended, or the last time."""
    makers = [finding for finding in watch.findings if finding.made_by != TREND]
    if not makers:
        return ""
    first = next(finding for finding in makers if finding.step == makers[-1].step)
    when = "" if first.step == watch.steps else f", first at step {first.step}"
    return f"{first.what} made by {first.id} ({first.file}:{first.line}){when}"


class _StepNotFinite(Exception):
    """Leaves the step of an optimizer whose closure computed gradients that are not finite."""


def _whole_step(optimizer: Any, step: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the result of a step with a closure, and whether it was skipped: then parameters and state, which are kept
    until it ends, are restored.
    """
    weights = [(p, p.detach().clone()) for p in optimized_by(optimizer)]
    state = {p: copy.deepcopy(held) for p, held in optimizer.state.items()}
    try:
        return step(), False
    except _StepNotFinite:
        with torch.no_grad():
            for parameter, before in weights:
                parameter.copy_(before)
        optimizer.state.clear()
        optimizer.state.update(state)
        return None, True
