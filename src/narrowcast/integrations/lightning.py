"""Lightning's Trainer and Fabric, from `lightning`, `pytorch_lightning` or `lightning_fabric`.

Both plugins are Lightning's own `MixedPrecision` with our regions, scaler and state in the place of its; so each
package's order of scaling, hooks, clipping and stepping, and its signatures, stay as they are.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ClassVar, Unpack

import torch

from narrowcast.errors import TrainingError
from narrowcast.integrations.training import Settings, TrainingPrecision, dropping_step, find_framework
from narrowcast.runtime.torch_surface.state import caches
from narrowcast.training.scaler.scaler import Scaler

PRECISIONS = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}
"""How Lightning calls these low formats; another one is `32-true`."""

TO_OPEN = "Call the module that `fabric.setup` returned, or run the forward in `with fabric.autocast():`."
NATIVE = "MixedPrecision"
"""The name of Lightning's own plugin, under which it saves the scaler's state."""


class _Plugin:
    """What Trainer's and Fabric's plugins have in common. Made with the framework's class as a base besides."""

    homes: ClassVar[dict[str, str]] = {}
    """By package: the module that has the base."""

    def __new__(cls, *, package: str | None = None, **settings: Any) -> Any:
        if not issubclass(cls, _Made):
            home = _home(cls, package)
            framework = find_framework(home, home.partition(".")[0].replace("_", "-"), cls.__name__)
            plugin: Any = cls
            return object.__new__(_joined(plugin, framework.MixedPrecision))
        return object.__new__(cls)

    def __init__(self, *, package: str | None = None, **settings: Unpack[Settings]) -> None:
        self.training = TrainingPrecision(**settings)

    @property
    def scaler(self) -> Any:
        """What scales the loss, or None."""
        return self.training.scaler

    @property
    def device(self) -> str:
        """The device type of regions."""
        return self.training.device

    @property
    def precision(self) -> str:
        """What Lightning shows: `bf16-mixed`, `16-mixed`, or `32-true` for another low format."""
        return PRECISIONS.get(self.training.low, "32-true")

    def convert_module(self, module: Any) -> Any:
        """Return the module as it is: its parameters stay in their format."""
        self.training.follow(module)
        return super().convert_module(module)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step as the framework does, and LBFGS, which it refuses to scale, with our scaler; then end the step."""
        with dropping_step(self.training):
            if kwargs.get("closure") is None:  # a closure runs the forward
                self.training.before_step(TO_OPEN)
            if isinstance(optimizer, torch.optim.LBFGS) and isinstance(self.scaler, Scaler):
                result = self.scaler.step(optimizer, **self.around_closure(optimizer, **kwargs))
                self.scaler.update()
            else:
                result = super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]
        self.training.end_step()
        return result

    def around_closure(self, optimizer: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of the optimizer's step, its closure being the framework's."""
        return kwargs

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `TrainingPrecision`."""
        return self.training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of `TrainingPrecision`, or what Lightning's own plugin has saved."""
        self.training.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Close the training: the framework is done."""
        self.training.close()
        super().teardown()  # type: ignore[misc]

    def __reduce__(self) -> Any:
        plugin, base, _ = type(self).__bases__
        return _again, (plugin, base), self.__dict__

    def __repr__(self) -> str:
        name = f"{type(self).__name__}(policy={self.training.policy})"
        return f"{name} [leave precision= out: the plugin says the formats]"


class LightningPrecision(_Plugin):
    """`Trainer(plugins=[LightningPrecision(policy=..., dtype="bf16")])`, without `precision=`.

    Training, validation, test and prediction steps run in the region; the loss is scaled where the low format is fp16,
    before `on_before_backward`, and gradients are unscaled before `on_before_optimizer_step` and before they are
    clipped. The trainer's checkpoints have the policy's digest and the scaler's state.

    package: `lightning` or `pytorch_lightning`; None takes that of the two which is imported.
    cache_enabled: None is what Lightning's own plugin has: False from 2.6 on.

    The other settings are those of `TrainingPrecision`, which is `plugin.training`. Raises TrainingError if the package
    is missing, or both are imported. FSDP, DeepSpeed and model-parallel strategies take plugins of their own, and
    Lightning refuses others there.
    """

    homes: ClassVar[dict[str, str]] = {
        "lightning": "lightning.pytorch.plugins.precision",
        "pytorch_lightning": "pytorch_lightning.plugins.precision",
    }

    def __init__(self, *, package: str | None = None, **settings: Unpack[Settings]) -> None:
        super().__init__(package=package, **settings)
        below: Any = super()
        if settings.get("cache_enabled") is None and not caches(below.autocast_context_manager()):
            settings["cache_enabled"] = False
            self.training = TrainingPrecision(**settings)

    def autocast_context_manager(self) -> Any:
        """Return the region."""
        return self.training.region

    def train_step_context(self) -> AbstractContextManager[None]:
        """Return a context of the region that begins a step."""
        return self.training.training()

    def around_closure(self, optimizer: Any, **kwargs: Any) -> dict[str, Any]:
        """Return arguments in which hooks and clip follow each call of the closure, when gradients are unscaled."""
        model, closure = kwargs.pop("model"), kwargs.pop("closure")

        def whole() -> Any:
            loss = closure()
            self.scaler.unscale_(optimizer)
            strategy: Any = self
            strategy._after_closure(model, optimizer)
            return loss

        return {"closure": whole, **kwargs}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scaler's state under the name of Lightning's own plugin, too, which can go on with it."""
        if self.scaler is not None:
            checkpoint[NATIVE] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what goes on under another precision where another plugin has saved the checkpoint."""
        if type(self).__qualname__ not in checkpoint and "native_amp_scaling_state" not in checkpoint:
            self.training.load_state_dict(checkpoint.get(NATIVE, {}))


class FabricPrecision(_Plugin):
    """`Fabric(plugins=[FabricPrecision(policy=..., dtype="bf16")])`, without `precision=`.

    Modules that were set up run in the region, and `with fabric.autocast()` opens it for the loss. What comes in is not
    converted; floating results come out in fp32, as Fabric has it. `fabric.save(path, {"precision": plugin, ...})` puts
    the policy's digest and the scaler's state into a checkpoint, and `fabric.load` reads them.

    package: `lightning` or `lightning_fabric`; None takes that of the two which is imported.

    The other settings are those of `TrainingPrecision`, which is `plugin.training`; call `plugin.training.close()` at
    the end where it watches. Raises TrainingError if the package is missing, or both are imported.
    """

    homes: ClassVar[dict[str, str]] = {
        "lightning": "lightning.fabric.plugins.precision",
        "lightning_fabric": "lightning_fabric.plugins.precision",
    }

    def forward_context(self) -> Any:
        """Return a context of the region that, with gradients, begins a step."""
        return self.training.around_forward()

    def convert_input(self, data: Any) -> Any:
        """Return inputs as they are: the policy decides what is cast."""
        return data


class _Made:
    """Marks the classes that `_joined` has made."""


def _home(cls: type[_Plugin], package: str | None) -> str:
    """Return the module with the base: of the package that is named, else of the one that is imported or installed."""
    asked = f"{cls.__name__}(package={package!r})"
    if package is not None:
        if package not in cls.homes:
            raise TrainingError(asked, "no such package", advice=f"Give one of {', '.join(cls.homes)}.")
        return cls.homes[package]
    imported = [name for name, home in cls.homes.items() if sys.modules.get(home.rpartition(".plugins")[0])]
    if len(imported) > 1:
        found = f"{' and '.join(imported)} are both imported, and neither takes the other's plugins"
        advice = f"Say whose Trainer or Fabric it is for: {cls.__name__}(package={imported[0]!r}, ...)."
        raise TrainingError(asked, found, advice=advice)
    return cls.homes[imported[0] if imported else next(iter(cls.homes))]


@cache
def _joined(cls: Any, base: Any) -> Any:
    """Return the plugin with the framework's class below it, under the plugin's name, by which checkpoints know it."""
    joined = type(cls.__name__, (cls, base, _Made), {"__module__": cls.__module__})
    joined.__qualname__ = cls.__qualname__
    return joined


def _again(cls: Any, base: Any) -> Any:
    """Return a plugin that was copied, or pickled for a process that is started; its state comes next."""
    return object.__new__(_joined(cls, base))
