"""Stand-ins for frameworks: what the plugins call and are called by, with the frameworks' own signatures.

The frameworks themselves run in `make conformance` (tools/framework_examples.py).
"""

import contextlib
import sys
import types

import torch


def install(monkeypatch, **modules):
    """Modules by their dotted names (`__` for a dot), and the packages above them."""
    for name, members in modules.items():
        parts = name.replace("__", ".").split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if not isinstance(sys.modules.get(path), types.SimpleNamespace):
                monkeypatch.setitem(sys.modules, path, types.SimpleNamespace())
        vars(sys.modules[name.replace("__", ".")]).update(members)


class FabricMixedPrecision:
    """lightning.fabric.plugins.precision.MixedPrecision."""

    def __init__(self, precision, device, scaler=None):
        raise AssertionError("the plugin has settings of its own")

    def convert_module(self, module):
        return module

    def forward_context(self):
        return torch.autocast(self.device)

    def convert_input(self, data):
        return data.bfloat16()

    def convert_output(self, data):
        return data.float()

    def backward(self, tensor, model, *args, **kwargs):
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        tensor.backward(*args, **kwargs)

    def optimizer_step(self, optimizer, **kwargs):
        if self.scaler is None:
            return optimizer.step(**kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("AMP and the LBFGS optimizer are not compatible.")
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def teardown(self):
        self.torn_down = True


class MixedPrecision(FabricMixedPrecision):
    """lightning.pytorch.plugins.precision.MixedPrecision: the backward takes the optimizer, and hooks see the loss."""

    def pre_backward(self, tensor, module):
        tensor = tensor if self.scaler is None else self.scaler.scale(tensor)
        module.seen = tensor.item()
        return tensor

    def backward(self, tensor, model, optimizer, *args, **kwargs):
        tensor.backward(*args, **kwargs)

    def _after_closure(self, model, optimizer):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def optimizer_step(self, optimizer, model, closure, **kwargs):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("AMP and the LBFGS optimizer are not compatible.")
        closure()
        if self.scaler is None:
            return optimizer.step(**kwargs)
        self.scaler.unscale_(optimizer)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def autocast_context_manager(self):
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    @contextlib.contextmanager
    def forward_context(self):
        with self.autocast_context_manager():
            yield

    @contextlib.contextmanager
    def val_step_context(self):
        with self.forward_context():
            yield


class AcceleratedOptimizer(torch.optim.Optimizer):
    """accelerate.optimizer.AcceleratedOptimizer."""

    def __init__(self, optimizer, accelerator):
        self.optimizer, self.accelerator, self.scaler = optimizer, accelerator, accelerator.scaler

    def step(self, closure=None):
        if self.accelerator.sync_gradients:
            if self.scaler is None:
                self.optimizer.step(closure)
            else:
                self.scaler.step(self.optimizer, closure)
                self.scaler.update()


class Accelerator:
    """accelerate.Accelerator."""

    def __init__(self, mixed_precision="no", distributed_type="DistributedType.NO"):
        self.mixed_precision, self.native_amp = mixed_precision, mixed_precision != "no"
        self.device, self.distributed_type = torch.device("cpu"), distributed_type
        self.scaler, self._optimizers, self._models, self.savers, self.loaders = None, [], [], [], []
        self.sync_gradients = self.is_main_process = True
        self.state = types.SimpleNamespace(fsdp_plugin=None)

    def prepare(self, *objects):
        made = tuple(self._prepare(o) for o in objects)
        return made if len(made) > 1 else made[0]

    def _prepare(self, one):
        if isinstance(one, torch.nn.Module):
            return self.prepare_model(one)
        return self.prepare_optimizer(one) if isinstance(one, torch.optim.Optimizer) else one

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer, device_placement=None):
        self._optimizers.append(AcceleratedOptimizer(optimizer, self))
        return self._optimizers[-1]

    def unwrap_model(self, model, keep_fp32_wrapper=True):
        return model

    def autocast(self, autocast_handler=None):
        raise AssertionError("accelerate's region")

    def backward(self, loss, **kwargs):
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**kwargs)

    def unscale_gradients(self, optimizer=None):
        if self.native_amp:
            raise AssertionError

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def register_save_state_pre_hook(self, hook):
        self.savers.append(hook)

    def register_load_state_pre_hook(self, hook):
        self.loaders.append(hook)

    def save_state(self, folder):
        for hook in self.savers:
            hook([], [], folder)
        if self.scaler is not None:
            torch.save(self.scaler.state_dict(), f"{folder}/scaler.pt")

    def load_state(self, folder):
        for hook in self.loaders:
            hook([], folder)
        if self.scaler is not None:
            self.scaler.load_state_dict(torch.load(f"{folder}/scaler.pt", weights_only=True))


def convert_to_fp32(tensor):
    """accelerate.utils.convert_to_fp32, for what the tests give it."""
    if isinstance(tensor, tuple):
        return tuple(convert_to_fp32(t) for t in tensor)
    return tensor.float() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor


class Trainer:
    """transformers.Trainer, as far as it asks for precision."""

    def __init__(self, model=None, args=None, scaler_file=None):
        self.model, self.args, self.scaler_file = model, args, scaler_file
        self.create_accelerator_and_postprocess()

    def create_accelerator_and_postprocess(self):
        self.accelerator = Accelerator()

    def compute_loss(self, model, x):
        y = model(x)
        return torch.nn.functional.mse_loss(y, torch.zeros_like(y))

    def train(self, batches=()):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.accelerator._optimizers.clear()  # free_memory
        model, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        for x in batches:
            loss = self.compute_loss(model, x)
            self.accelerator.backward(loss)
            self.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1e9)
            self.optimizer.step()
            self.model.zero_grad()
        return loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return None, model(inputs), None

    def _save_scaler(self, output_dir):
        if self.accelerator.scaler is not None:
            torch.save(self.accelerator.scaler.state_dict(), f"{output_dir}/scaler.pt")

    def _load_scaler(self, checkpoint):
        with contextlib.suppress(FileNotFoundError):
            self.accelerator.scaler.load_state_dict(torch.load(f"{checkpoint}/scaler.pt", weights_only=True))


class Events:
    """ignite.engine.Events."""

    COMPLETED, TERMINATE = "completed", "terminate"


class Engine:
    """ignite.engine.Engine."""

    def __init__(self, process_function):
        self.update, self.handlers, self.state = process_function, {}, types.SimpleNamespace(iteration=0, outputs=[])

    def add_event_handler(self, event, handler):
        self.handlers[event] = handler

    def run(self, data):
        for batch in data:
            self.state.iteration += 1
            self.state.outputs.append(self.update(self, batch))
        if Events.COMPLETED in self.handlers:
            self.handlers[Events.COMPLETED]()
        return self.state.outputs


def _prepare_batch(batch, device=None, non_blocking=False):
    return batch


def create_supervised_evaluator(model, metrics=None, device=None, model_fn=None, output_transform=None):
    """ignite.engine.create_supervised_evaluator."""

    def evaluate(engine, batch):
        with torch.no_grad():
            return model_fn(model, batch[0])

    return Engine(evaluate)
