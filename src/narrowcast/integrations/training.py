"""The precision of a training loop, whatever the framework: regions, a scaler, ledgers, a watch, a state to resume.

Each plugin holds one `TrainingPrecision` and says to it when a step begins, when it ends, and when all is over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, Unpack

import torch

from narrowcast.analysis.record.record import record
from narrowcast.analysis.watch.watch import watch as open_watch
from narrowcast.core.policy import Policy, as_policy
from narrowcast.errors import RegionError, TrainingError, TrainingWarning
from narrowcast.formats import Format
from narrowcast.frontends.eager.region import autocast
from narrowcast.integrations.resuming import precision_state, take_up
from narrowcast.reports.results.findings import Watching
from narrowcast.reports.results.ledger import Ledger
from narrowcast.runtime.sites.python_stack import loop_line, warn_at
from narrowcast.runtime.torch_bridge import FORMATS, device_type_of
from narrowcast.training.scaler.scaler import Scaler

LedgerTo = Callable[[int, Ledger], None] | str | Path | None


class Settings(TypedDict, total=False):
    """What every plugin takes; `TrainingPrecision` says what each is."""

    policy: Policy | str | Path | None
    dtype: torch.dtype | Format | str | None
    device_type: str | None
    cache_enabled: bool | str | None
    inner: str | None
    scaler: Any
    ledger_every: int
    ledger_to: LedgerTo
    watch: bool | Mapping[str, Any]


class TrainingPrecision:
    """The precision of one training run. Plugins have one in them or are one; a loop of your own may use it as it is.

    policy, dtype, cache_enabled, inner: as in `nc.autocast`.
    device_type: None takes that of the model's parameters.
    scaler:       an object with the methods of torch.amp.GradScaler. None makes an `nc.Scaler` where the low format is
                  fp16, and none elsewhere; False never makes one.
    ledger_every: record the first step and every n-th after it, forward and backward; 0 for none. A recorded step takes
                  longer, and compiled code runs as eager code in it.
    ledger_to:    a folder, which gets `step-000100.json` for the step that begins after 100 (of each rank, where there
                  are several), or a function of that number and the ledger. The last ledger is also in `ledger`.
    watch:        look for NaN and infinity while it trains: True, or arguments of `nc.watch` as a dict. What it found
                  is in `watching`, and a warning at the end shows the first finding.

    Raises TrainingError for settings that make no sense, PolicyError for a policy that cannot be.
    """

    to_open: ClassVar[str] = "Run the forward and its loss in `with precision.training():`."
    """How the region is opened in training, as advice."""

    def __init__(self, **settings: Unpack[Settings]) -> None:
        unknown = [name for name in settings if name not in Settings.__annotations__]
        if unknown:
            asked, there = f"{type(self).__name__}({unknown[0]}=...)", ", ".join(Settings.__annotations__)
            raise TrainingError(asked, "no such setting", advice=f"There are {there}.")
        self.policy: Policy = as_policy(settings.get("policy"))
        self.every = every = settings.get("ledger_every", 0)
        if every < 0:
            found = "steps are counted from 1"
            raise TrainingError(f"ledger_every={every}", found, advice="Give 1 or more; 0 is none.")
        self.steps = 0
        self.ledger: Ledger | None = None
        self.watching: Watching | None = None
        self._settings = settings
        self._model: Any = None
        self._has_opened = False
        self._region: autocast | None = None
        self._own_scaler: Scaler | None = None
        self._process_group: Any = None
        self._recording: tuple[ExitStack, Ledger] | None = None
        self._watch: ExitStack | None = None
        try:
            self._make_region()
        except RegionError as error:  # said where the settings are written, rather than at the first forward
            asked = f"{type(self).__name__}: {error.asked}"
            raise TrainingError(asked, error.found, error.where, error.advice) from None

    # -- regions -------------------------------------------------------------------------------------------------------

    def follow(self, model: Any) -> None:
        """Open regions on this model's device from now on, unless one was given; its parameters' names are shown."""
        self._model, self._region = model, None
        for scaler in (self._own_scaler, self._settings.get("scaler")):
            if isinstance(scaler, Scaler):
                scaler.name_by(model)

    def on_device(self, device_type: str) -> None:
        """Open regions on this device type from now on, unless one was given."""
        self._settings.setdefault("device_type", device_type)
        self._region = None

    @property
    def region(self) -> autocast:
        """The region for a forward or a loss that trains nothing: evaluation, generation. It may be entered again."""
        self._has_opened |= torch.is_grad_enabled()
        return self._own_region

    @property
    def _own_region(self) -> autocast:
        """The region, for what is asked of it rather than run in it."""
        if self._region is None:
            self._region = self._make_region()
        return self._region

    @property
    def device(self) -> str:
        """The device type of regions."""
        return self._own_region.device

    def _make_region(self) -> autocast:
        given = self._settings
        device_type = given.get("device_type") or _device_type(self._model)
        cache, inner = given.get("cache_enabled"), given.get("inner")
        return autocast(device_type, given.get("dtype"), cache_enabled=cache, policy=self.policy, inner=inner)

    @property
    def low(self) -> torch.dtype:
        """The low format. Asked before the model is where it will train, it fixes no device."""
        return (self._region or self._make_region()).fast_dtype

    @contextmanager
    def training(self) -> Iterator[None]:
        """Open the region around a forward and its loss in training; begin a step, unless one has begun."""
        self.begin_step()
        with dropping_step(self), self.region:
            yield

    def around_forward(self) -> Any:
        """Return `training()` where gradients are recorded, the region elsewhere: for loops without the difference.

        What such a forward begins ends with the next step, or with `close`.
        """
        return self.training() if torch.is_grad_enabled() else self.region

    # -- steps ---------------------------------------------------------------------------------------------------------

    def before_step(self, advice: str | None = None) -> None:
        """Raise TrainingError where an optimizer is about to step and nothing has opened the region yet: what it steps
        with was computed as if there were no plugin. advice: how to open it; None is `to_open`.
        """
        if not self._has_opened:
            asked = f"training under policy {self.policy.name} in {FORMATS[self.low]}"
            early = "an optimizer is about to step, and no forward and no loss ran in the region"
            found = f"{early}: nothing was computed under the policy"
            raise TrainingError(asked, found, loop_line().origins, advice or self.to_open)

    def begin_step(self) -> None:
        """Open what observes a forward that trains. Further micro-batches of the step change nothing."""
        wanted = self._settings.get("watch")
        if wanted and self._watch is None:
            self._watch = ExitStack()
            self.watching = self._watch.enter_context(open_watch(**(wanted if isinstance(wanted, Mapping) else {})))
        if self.every and self._recording is None and self.steps % self.every == 0:
            stack = ExitStack()
            self._recording = stack, stack.enter_context(record())

    def end_step(self) -> None:
        """Complete the ledger of the step: the optimizer has stepped, or the scaler has skipped it."""
        if self._recording is not None:
            _, ledger = self._recording
            self.drop_step()
            self.ledger, target = ledger, self._settings.get("ledger_to")
            if callable(target):
                target(self.steps, ledger)
            elif target is not None:
                Path(target).mkdir(parents=True, exist_ok=True)
                ledger.save(Path(target) / f"step-{self.steps:06}{_rank()}.json")
        self.steps += 1

    def drop_step(self) -> None:
        """Drop the records of a step that ended in an error."""
        if self._recording is not None:
            stack, _ = self._recording
            self._recording = None
            stack.close()

    def close(self) -> None:
        """Close what observes when training is over, or broke off, and report the watch's first finding."""
        self.drop_step()
        if self._watch is None:
            return
        self._watch.close()
        self._watch = None
        finding = self.watching.first if self.watching is not None else None
        if finding is not None:
            text = f"narrowcast: while it trained, {finding.in_short()}\n  All of it: print(precision.watching)"
            warn_at(text, loop_line(), TrainingWarning)

    # -- scaling and stepping, for loops that have no framework to do it ----------------------------------------------

    @property
    def scaler(self) -> Any:
        """What scales the loss, or None. The default one is made when it is first asked for."""
        given = self._settings.get("scaler")
        if given is False:
            return None
        if given is not None:
            return given
        if self._own_scaler is None and self._own_region.fast_dtype is torch.float16:
            self._own_scaler = Scaler(self.device, model=self._model, process_group=self._process_group)
        return self._own_scaler

    def share_decisions(self, process_group: Any) -> None:
        """Have the processes of this group skip the same steps: each has only its shards of the gradients. Before the
        default scaler is made. TrainingError for a given scaler that decides for itself.
        """
        given = self._settings.get("scaler")
        if given and not (isinstance(given, Scaler) and given.process_group is not None):
            found = "each process would decide by its own shards whether to step"
            advice = "Leave scaler= out, or give nc.Scaler(device, process_group=torch.distributed.group.WORLD)."
            raise TrainingError(f"a {type(given).__name__} where gradients are sharded", found, advice=advice)
        self._process_group = process_group

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of the loss, scaled where there is a scaler; kwargs go to `Tensor.backward`."""
        with dropping_step(self):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    def step(self, *optimizers: Any, clip: Callable[[], object] | None = None) -> None:
        """Step, and end the step. clip: called between unscaling and stepping, so that it sees true gradients."""
        scaler = self.scaler
        with dropping_step(self):
            self.before_step()
            if clip is not None:
                for optimizer in optimizers if scaler is not None else ():
                    scaler.unscale_(optimizer)
                clip()
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        self.end_step()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the policy's digest and text, the low format, the steps, the scaler.

        Texts, numbers and None alone, beside what the scaler's state holds.
        """
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return precision_state(self.policy, self._own_region, self.steps, scaler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, by what `state_dict` returned or by the state of a bare GradScaler.

        A TrainingWarning names what differs: the policy, with both digests and the first rules that differ, the
        low format, or the scaler. TrainingError for what is neither.
        """
        steps, scaler_state = take_up(state, self.policy, self._own_region, self.scaler is not None)
        self.steps = self.steps if steps is None else steps
        if scaler_state is not None and self.scaler is not None:
            self.scaler.load_state_dict(scaler_state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled without what is open: a process that is started opens its own."""
        return {**self.__dict__, "_recording": None, "_watch": None, "_model": None, "watching": None}


@contextmanager
def dropping_step(precision: TrainingPrecision) -> Iterator[None]:
    """Run a part of a step; an error in it ends the step."""
    try:
        yield
    except BaseException:
        precision.drop_step()
        raise


def find_framework(module: str, package: str, asked: str) -> Any:
    """Return a module of a framework. Raise TrainingError, with what to install, if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrainingError(asked, f"{error}", advice=f"Install it: pip install {package}") from error


def _device_type(model: Any) -> str:
    """Return the device type of the model's parameters; before they are anywhere, the accelerator's."""
    device_type = device_type_of(model) if model is not None else None
    if device_type is not None:
        return device_type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _rank() -> str:
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return f"-rank{distributed.get_rank()}" if several else ""
