"""What a scaler is made with, what it keeps between iterations, and how that is saved: readable by torch's, too."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from narrowcast.core.ledger.records import Advice
from narrowcast.errors import ScalerError
from narrowcast.reports.results.scaler_history import History
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_surface.grad_scaling import NativeScaler, is_definitely_without_cuda
from narrowcast.training.scaler.findings import Findings
from narrowcast.training.scaler.losses import LossScale
from narrowcast.training.scaler.results import StepResult
from narrowcast.training.scaler.steps import Steps
from narrowcast.training.scaler.stuck import Streak

ON_STUCK = ("warn", "raise")
_SMALLEST = 2.0**-126
"""The reciprocal of a smaller scale is infinite in fp32, or nearly so."""
_LOWEST = 1.0
"""The default of `min_scale`."""
OURS = "narrowcast"
"""The key of our own part of a state_dict; torch's scaler passes it by."""


class ScalerState(NativeScaler):
    """A scaler between iterations."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        patience: int = 20,
        on_stuck: str = "warn",
        model: torch.nn.Module | None = None,
        process_group: Any = None,
    ) -> None:
        _check(init_scale, backoff_factor, min_scale, patience, on_stuck)
        without = enabled and device == "cuda" and is_definitely_without_cuda()
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled and not without)
        self._min_scale, self._group = _LOWEST if min_scale is None else float(min_scale), process_group
        self._floor: float | torch.Tensor = min(self._min_scale, float(init_scale))
        self._model = None if model is None else weakref.ref(model)
        self._steps = Steps(patience, on_stuck)
        self._losses: dict[str, LossScale] = {}
        self._findings = Findings(self.is_enabled())
        self.begin_iteration()
        if without:
            todo = "Write nc.Scaler('cpu') to train on the CPU."
            self._findings.say("no CUDA", "this scaler is for CUDA, there is none, and it is off", todo, loop_line())

    def begin_iteration(self) -> None:
        """Forget what is known of the iteration that ends."""
        self._results: list[StepResult] = []
        self._scaled: weakref.ref[torch.Tensor] | None = None
        self._named: set[str] = set()

    def name_by(self, model: torch.nn.Module) -> None:
        """Show the names that this model has for its parameters, unless a model was given before."""
        if self._model is None or self._model() is None:
            self._model = weakref.ref(model)

    # -- what is asked for ---------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> Any:
        """The processes that decide alike besides those of DTensors; None if each decides for itself."""
        return self._group

    @property
    def history(self) -> History:
        """What became of every step, as rows; waits for those whose numbers are still on the device."""
        self._steps.collect(wait=True)
        return self._steps.history

    @property
    def findings(self) -> tuple[Advice, ...]:
        """What is probably a mistake, in the order in which it was found; each was warned of at its line."""
        return tuple(self._findings.found)

    @property
    def loss_scales(self) -> dict[str, float]:
        """The scale of each loss that has one of its own; waits for the device."""
        return {name: float(loss.data()["scale"]) for name, loss in self._losses.items()}

    def get_scale(self) -> float:
        """Return the scale as a number, 1.0 if the scaler is off; waits for the device, as torch's does."""
        self._findings.was_asked = True
        return super().get_scale()

    # -- the lowest scale ----------------------------------------------------------------------------------------------

    def set_floor(self, new_scale: float | torch.Tensor | None) -> None:
        """Set the floor under a scale that the user sets: `min_scale`, or that scale if it is less."""
        if isinstance(new_scale, torch.Tensor):
            scale = self.make_scale(new_scale.device)
            self._floor = new_scale.detach().to(scale, copy=True).reshape(()).clamp_(max=self._min_scale)
        elif new_scale is not None:
            _check_scale(float(new_scale), f"update(new_scale={new_scale})")
            self._floor = min(self._min_scale, float(new_scale))

    # -- saved ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, under the keys of torch's scaler, which can load it, and one of ours; waits for devices."""
        state = super().state_dict()
        if state:
            state[OURS] = {
                "steps": self._steps.number,
                "streaks": {n: [s.skipped, s.at_floor, s.told_at] for n, s in self._steps.streaks.items()},
                "losses": {name: loss.data() for name, loss in self._losses.items()},
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, ours or that of torch's scaler. ScalerError if its scale would ruin the weights."""
        if self.is_enabled():
            if not state_dict:
                raise ScalerError(
                    "loading a scaler's state", "it is empty, as that of a scaler that was off",
                    advice="Begin with the first scale: do not call load_state_dict.",
                )  # fmt: skip
            _check_scale(float(state_dict["scale"]), "loading a scaler's state")
            ours = state_dict.get(OURS, {})
            self._floor = min(self._min_scale, float(state_dict["scale"]))
            self._steps.number = int(ours.get("steps", 0))
            self._steps.streaks = {name: Streak(*numbers) for name, numbers in ours.get("streaks", {}).items()}
            self._load_losses(ours.get("losses", {}))
        super().load_state_dict(state_dict)

    def _load_losses(self, saved: dict[str, Any]) -> None:
        rows = saved.items()
        self._losses = {n: LossScale(row["scale"], self._min_scale, row["_growth_tracker"]) for n, row in rows}

    def __getstate__(self) -> dict[str, Any]:
        """Between iterations; without the model, whose names are then unknown, and without what was found."""
        if self._group is not None:
            raise ScalerError(
                "pickling a scaler", "it has a process group, which means nothing elsewhere",
                advice="Save scaler.state_dict() instead.",
            )  # fmt: skip
        self._steps.collect(wait=True)
        state: dict[str, Any] = super().__getstate__()
        floor = self._floor
        state["_floor"] = float(floor.item()) if isinstance(floor, torch.Tensor) else floor
        state["_losses"] = {name: loss.data() for name, loss in self._losses.items()}
        for name in ("_model", "_findings", "_results", "_scaled", "_named"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        losses = state.pop("_losses")
        super().__setstate__(state)
        self._load_losses(losses)
        self._model = None
        self._findings = Findings(self.is_enabled())
        self.begin_iteration()


def _check(init_scale: float, backoff_factor: float, min_scale: float | None, patience: int, on_stuck: str) -> None:
    _check_scale(init_scale, f"Scaler(init_scale={init_scale})")
    if min_scale is not None:
        _check_scale(min_scale, f"Scaler(min_scale={min_scale})")
        if min_scale > init_scale:
            raise ScalerError(
                f"Scaler(init_scale={init_scale}, min_scale={min_scale})", "the first scale is below the lowest one",
                advice=f"Give init_scale={min_scale} or more, or a lower min_scale.",
            )  # fmt: skip
    if not backoff_factor > 0:
        advice = "Give a factor between 0 and 1: 0.5 halves."
        raise ScalerError(f"Scaler(backoff_factor={backoff_factor})", "the scale would be 0", advice=advice)
    if patience < 1:
        raise ScalerError(f"Scaler(patience={patience})", "steps are counted from 1", advice="Give 1 or more.")
    if on_stuck not in ON_STUCK:
        raise ScalerError(f"Scaler(on_stuck={on_stuck!r})", "not a choice", advice=f"Give {' or '.join(ON_STUCK)}.")


def _check_scale(scale: float, asked: str) -> None:
    """Refuse a scale whose reciprocal is not a number of fp32."""
    if not _SMALLEST <= scale < float("inf"):
        raise ScalerError(
            asked, f"a scale of {scale:g} has no reciprocal in fp32, and the next clean step would ruin the weights",
            advice="Give a scale between 2**-126 and 2**127; 65536 is usual.",
        )  # fmt: skip
