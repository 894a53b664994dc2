"""Plugins for frameworks, on stand-ins with the frameworks' signatures: what runs where, and what is refused."""

import copy
import importlib.util
import inspect
import pickle
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import TrainingError, TrainingWarning
from narrowcast.integrations.accelerate import AcceleratePrecision
from narrowcast.integrations.ignite import IgnitePrecision
from narrowcast.integrations.lightning import FabricPrecision, LightningPrecision
from narrowcast.integrations.loop import LoopPrecision
from narrowcast.integrations.training import TrainingPrecision
from narrowcast.integrations.transformers import PrecisionMixin

_spec = importlib.util.spec_from_file_location("framework_stand_ins", Path(__file__).parent / "framework_stand_ins.py")
stand_ins = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_ins)
sys.modules[stand_ins.__name__] = stand_ins  # its classes are pickled by their names

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Notes in which format it computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.formats = nn.Linear(6, 3), []

    def forward(self, x):
        y = self.layer(x)
        self.formats.append(y.dtype)
        return y


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(y):
    """One that is computed in fp32 in any region."""
    return F.mse_loss(y, torch.zeros_like(y))


def scaler_of(dtype):
    """One under whose scale nothing overflows."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0) if dtype == "fp16" else None


def stepped(dtype):
    """The weights after one step, by hand."""
    model = Net()
    scaler, optimizer = scaler_of(dtype) or torch.amp.GradScaler("cpu", enabled=False), sgd(model)
    with nc.autocast("cpu", dtype):
        loss = loss_of(model(X))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.layer.weight, Net().layer.weight)
    return model.layer.weight


@pytest.fixture
def lightning(monkeypatch):
    """Both packages' modules; only `lightning` is imported. No accelerator is here, whatever the machine has."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    trainers = {"MixedPrecision": stand_ins.MixedPrecision}
    stand_ins.install(
        monkeypatch,
        lightning__pytorch__plugins__precision=trainers,
        lightning__fabric__plugins__precision={"MixedPrecision": stand_ins.FabricMixedPrecision},
    )
    return lambda: stand_ins.install(monkeypatch, pytorch_lightning__plugins__precision=trainers)


def lightning_step(plugin, model, optimizer):
    """As Lightning's strategy makes one."""

    def closure():
        with plugin.train_step_context():
            loss = loss_of(model(X))
        loss = plugin.pre_backward(loss, model)
        plugin.backward(loss, model, optimizer)

    plugin.optimizer_step(optimizer, model=model, closure=closure)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_of_lightning_s_trainer(lightning, dtype):
    """Its order of things, our region and scaler; the ledger of the step, and a validation in the region."""
    plugin, model = LightningPrecision(dtype=dtype, scaler=scaler_of(dtype), ledger_every=1), Net()
    assert isinstance(plugin, stand_ins.MixedPrecision)
    assert plugin.precision == {"bf16": "bf16-mixed", "fp16": "16-mixed"}[dtype]
    assert plugin.convert_module(model) is model
    lightning_step(plugin, model, sgd(model))
    assert torch.equal(model.layer.weight, stepped(dtype))
    assert (model.seen > 100) == (dtype == "fp16") and plugin.device == "cpu"
    assert plugin.training.steps == 1 and plugin.training.ledger.totals().backward
    with torch.inference_mode(), plugin.val_step_context():
        assert model(X).dtype is plugin.training.low
    plugin.teardown()
    assert plugin.torn_down and plugin.training.steps == 1


def test_a_step_that_raises_ends_what_looks_at_it(lightning):
    """In Lightning's step, and in Fabric's."""
    model = Net()
    for plugin in LightningPrecision(dtype="bf16", ledger_every=1), FabricPrecision(dtype="bf16", ledger_every=1):
        plugin.convert_module(model)
        with plugin.training.training():
            model(X)
        with pytest.raises((AttributeError, TypeError)):
            plugin.optimizer_step(object())
        assert plugin.training.ledger is None and plugin.training.steps == 0


def test_a_lightning_checkpoint_of_another_plugin_is_told_of(lightning):
    """Its scaler goes on; what it says nothing of is said. Our own is taken up by its name."""
    plugin = LightningPrecision(dtype="fp16")
    plugin.convert_module(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pytest.warns(TrainingWarning, match="no policy"):
        plugin.on_load_checkpoint({"MixedPrecision": scaler.state_dict()})
    assert plugin.scaler.get_scale() == 64.0
    saved = {}
    plugin.on_save_checkpoint(saved)
    scaler.load_state_dict({**saved["MixedPrecision"], "scale": 32.0})
    assert scaler.get_scale() == 32.0  # Lightning's own goes on with ours
    LightningPrecision(dtype="bf16").on_save_checkpoint(nothing := {})
    assert not nothing
    with pytest.warns(TrainingWarning, match="says nothing"):
        plugin.on_load_checkpoint({"state_dict": {}})
    again = LightningPrecision(dtype="fp16")
    again.convert_module(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.on_load_checkpoint({type(again).__qualname__: plugin.state_dict()})
        again.load_state_dict(plugin.state_dict())
    assert again.scaler.get_scale() == 64.0 and type(again).__qualname__ == "LightningPrecision"


def test_which_package_a_plugin_is_for(lightning):
    """The one that is imported; with both, the one that is named. Copies and subclasses are of the same."""
    assert LightningPrecision(package="lightning").training.every == 0
    lightning()
    with pytest.raises(TrainingError, match="lightning and pytorch_lightning are both imported"):
        LightningPrecision(dtype="bf16")
    with pytest.raises(TrainingError, match="Give one of lightning, pytorch_lightning"):
        LightningPrecision(package="fabric")

    class Mine(LightningPrecision):
        pass

    for kind in LightningPrecision, Mine:
        plugin = kind(package="pytorch_lightning", dtype="bf16", ledger_every=3)
        copied = copy.deepcopy(plugin)
        assert type(copied) is type(plugin) and copied.training.every == 3 and isinstance(copied, kind)
        assert "leave precision= out" in repr(plugin)


def test_a_step_of_fabric(lightning):
    """Inputs stay as they are, results come out in fp32, and evaluation begins no step."""
    plugin, model = FabricPrecision(dtype="fp16", scaler=scaler_of("fp16"), ledger_every=1), Net()
    plugin.convert_module(model)
    optimizer = sgd(model)
    assert plugin.convert_input(X) is X
    with torch.no_grad(), plugin.forward_context():
        assert plugin.convert_output(model(X)).dtype is FP32
    with plugin.forward_context():
        loss = loss_of(model(X))
    plugin.backward(loss, model)
    plugin.optimizer_step(optimizer)
    assert torch.equal(model.layer.weight, stepped("fp16"))
    assert plugin.training.steps == 1 and plugin.state_dict()["steps"] == 1 and plugin.training.ledger is not None
    # a plugin that was pickled is one of the same package
    again = pickle.loads(pickle.dumps(plugin))
    assert type(again) is type(plugin) and again.training.steps == 1


def test_a_fabric_module_that_was_not_set_up_is_no_silent_fp32(lightning):
    """Its optimizer does not step; with a closure, which runs the forward, it may."""
    plugin, model = FabricPrecision(dtype="bf16"), Net()
    optimizer = sgd(model)
    plugin.backward(loss_of(model(X)), model)
    with pytest.raises(TrainingError, match=r"Call the module that `fabric\.setup` returned"):
        plugin.optimizer_step(optimizer)

    def closure():
        with plugin.forward_context():
            loss = loss_of(model(X))
        model.zero_grad()
        loss.backward()

    plugin.optimizer_step(optimizer, closure=closure)
    assert torch.equal(model.layer.weight, stepped("bf16"))


def test_casts_of_weights_are_kept_as_lightning_keeps_them(lightning, monkeypatch):
    """Not at all from 2.6 on, unless the user says so; the gradients of a module that is called twice are the same."""
    given = {}
    for cached in None, True:
        plugin, model = LightningPrecision(dtype="bf16", cache_enabled=cached), Net()
        with plugin.train_step_context():
            loss = loss_of(model(X)) + loss_of(model(2 * X))
        loss.backward()
        given[cached] = model.layer.weight.grad
    model = Net()
    with torch.autocast("cpu", BF16, cache_enabled=False):
        loss = loss_of(model(X)) + loss_of(model(2 * X))
    loss.backward()
    assert torch.equal(given[None], model.layer.weight.grad) and not torch.equal(given[None], given[True])
    older = property(lambda self: lambda: torch.autocast(self.device, BF16))
    monkeypatch.setattr(stand_ins.MixedPrecision, "autocast_context_manager", older)
    _, _, _, cached, _ = LightningPrecision(dtype="bf16").training.region._made.asked
    assert cached is None


@pytest.fixture
def accelerate(monkeypatch):
    utils = {"convert_to_fp32": stand_ins.convert_to_fp32}
    stand_ins.install(monkeypatch, accelerate__utils=utils)
    stand_ins.install(monkeypatch, accelerate={"utils": types.SimpleNamespace(**utils)})


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_accelerate_prepares_runs_in_the_region(accelerate, dtype):
    """Forward, loss, clip, step and checkpoint; what comes out is fp32, inside it is not."""
    accelerator, model = stand_ins.Accelerator(), Net()
    precision = AcceleratePrecision(accelerator, dtype=dtype, scaler=scaler_of(dtype), ledger_every=1)
    prepared, optimizer = precision.prepare(model, sgd(model))
    with accelerator.autocast():
        y = prepared(X)
        loss = loss_of(y)
    assert y.dtype is FP32 and model.formats == [precision.low]
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    assert torch.equal(model.layer.weight, stepped(dtype)) and norm < 10
    assert precision.steps == 1 and precision.ledger is not None
    assert precision.loss(lambda x: x @ x.T)(X).dtype is precision.low
    assert accelerator.autocast(types.SimpleNamespace(enabled=False))._enabled is False


def test_a_micro_batch_of_accelerate_ends_no_step(accelerate):
    """Where gradients are not synchronised, the optimizer does not step; outputs may stay as computed."""
    accelerator, model = stand_ins.Accelerator(), Net()
    precision = AcceleratePrecision(accelerator, dtype="bf16", fp32_outputs=False)
    prepared, optimizer = precision.prepare(model, sgd(model))
    accelerator.sync_gradients = False
    optimizer.step()
    assert precision.steps == 0 and prepared(X).dtype is BF16
    single = precision.prepare(Net())
    assert single(X).dtype is BF16


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_accelerate_prepared_without_us_is_no_silent_fp32(accelerate, when):
    """The first backward raises, and the first step after another backward; not where the forward is in the region."""
    accelerator, model = stand_ins.Accelerator(), Net()
    prepared = accelerator.prepare(model, sgd(model)) if when == "before" else None
    precision = AcceleratePrecision(accelerator, dtype="bf16")
    model, optimizer = prepared or accelerator.prepare(model, sgd(model))
    with torch.no_grad(), accelerator.autocast():  # an evaluation is no training
        model(X)
    with pytest.raises(TrainingError, match=r"write precision\.prepare\(model, optimizer") as refused:
        accelerator.backward(loss_of(model(X)))
    assert refused.value.where[0].file == __file__ and model.layer.weight.grad is None
    loss_of(model(X)).backward()
    with pytest.raises(TrainingError, match="no forward and no loss ran in the region"):
        optimizer.step()
    assert torch.equal(model.layer.weight, Net().layer.weight) and precision.steps == 0
    model.zero_grad()
    with accelerator.autocast():
        loss = loss_of(model(X))
    accelerator.backward(loss)
    optimizer.step()
    assert torch.equal(model.layer.weight, stepped("bf16")) and precision.steps == 1


def test_a_copy_of_a_prepared_model_runs_its_own_weights(accelerate):
    """In the region, as an average of weights does; what it takes can be read off it, as transformers does."""
    precision = AcceleratePrecision(stand_ins.Accelerator(), dtype="bf16", fp32_outputs=False)
    model = precision.prepare(precision.prepare(Net()))
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.layer.weight.zero_()
        copied.layer.bias.zero_()
    assert not copied(X).any() and copied(X).dtype is BF16 and model(X).any()
    patched, function = Net(), lambda x: torch.ones(2, 2) @ x[:2, :2]  # no method
    patched.forward = function
    assert precision.prepare(patched)(X).dtype is BF16
    assert inspect.signature(patched.forward) == inspect.signature(function)


@pytest.mark.parametrize(
    ("accelerator", "says"),
    [
        ({"mixed_precision": "bf16"}, r'Accelerator\(mixed_precision="bf16"\) would autocast'),
        ({"distributed_type": "DistributedType.DEEPSPEED"}, "DEEPSPEED scales and steps by itself"),
    ],
)
def test_an_accelerator_that_autocasts_or_steps_itself_is_refused(accelerate, accelerator, says):
    """With what to write instead."""
    with pytest.raises(TrainingError, match=says):
        AcceleratePrecision(stand_ins.Accelerator(**accelerator), dtype="bf16")


def test_a_scaler_that_comes_too_late_or_was_not_saved_is_refused(accelerate, tmp_path):
    """An optimizer prepared before it would step without it; a folder without its state cannot be loaded."""
    accelerator = stand_ins.Accelerator()
    accelerator.prepare(sgd(Net()))
    with pytest.raises(TrainingError, match="prepared already"):
        AcceleratePrecision(accelerator, dtype="fp16")
    accelerator = stand_ins.Accelerator()
    AcceleratePrecision(accelerator, dtype="fp16")
    with pytest.raises(TrainingError, match="saved without one"):
        accelerator.load_state(tmp_path)


def test_a_folder_of_accelerate_is_read_both_ways(accelerate, tmp_path):
    """Ours has a file that Accelerate does not ask for; one that Accelerate wrote says nothing of precision."""
    first, again = stand_ins.Accelerator(), stand_ins.Accelerator()
    precision = AcceleratePrecision(first, dtype="fp16")
    first.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=64.0).state_dict())
    precision.steps = 3
    first.save_state(tmp_path)
    torch.amp.GradScaler("cpu").load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    resumed = AcceleratePrecision(again, dtype="fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state(tmp_path)
    assert resumed.steps == 3 and again.scaler.get_scale() == 64.0
    (tmp_path / "narrowcast.pt").unlink()
    with pytest.warns(TrainingWarning, match="says nothing"):
        again.load_state(tmp_path)


class Ours(PrecisionMixin, stand_ins.Trainer):
    """What a user writes."""


@pytest.fixture
def transformers(monkeypatch, accelerate):
    stand_ins.install(monkeypatch, transformers={"__version__": "0"})


def arguments(**flags):
    return types.SimpleNamespace(should_save=True, **flags)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_of_transformers_trainer(transformers, dtype):
    """Forward in the region, scaler, clip and the end of the step; what the model gives is fp32, for any loss."""
    precision = TrainingPrecision(dtype=dtype, scaler=scaler_of(dtype), ledger_every=1)
    trainer = Ours(model=Net(), args=arguments(), precision=precision)
    trainer.train([X])
    assert torch.equal(trainer.model.layer.weight, stepped(dtype)) and trainer.norm < 10
    assert precision.steps == 1 and precision.ledger is not None
    _, logits, _ = trainer.prediction_step(trainer.model, X, False)
    assert logits.dtype is FP32 and trainer.model.formats == [precision.low] * 2
    # trained on, and by another trainer: its policy rules, and no region is inside another
    trainer.train([X])
    again = Ours(model=trainer.model, args=arguments(), precision=TrainingPrecision(dtype="fp16", scaler=False))
    again.train([X])
    assert precision.steps == 2 and again.precision.steps == 1 and trainer.model.formats[2:] == [
        precision.low, torch.float16
    ]  # fmt: skip


def test_a_loss_of_the_trainer_s_own_is_outside_of_the_region(transformers):
    """As with the Trainer's own bf16: another model, and what is computed of the logits, run as they are."""
    teacher, seen = Net(), []

    class Distilling(PrecisionMixin, stand_ins.Trainer):
        def compute_loss(self, model, x):
            y, z = model(x), teacher(x)
            seen.extend((y.dtype, z.dtype, (y @ z.T).dtype))
            return F.kl_div(y.log_softmax(-1), z.softmax(-1), reduction="batchmean")

    Distilling(model=Net(), args=arguments(), precision=TrainingPrecision(dtype="bf16")).train([X])
    assert seen == [FP32] * 3 and teacher.formats == [FP32]


def test_a_mixin_after_the_trainer_is_refused(transformers):
    """Where the class is made, also with classes between; a subclass of one that is right is right."""
    with pytest.raises(TrainingError, match=r"Write class Bad\(PrecisionMixin, Trainer\)") as refused:
        type("Bad", (stand_ins.Trainer, PrecisionMixin), {})
    assert "class Bad(Trainer, PrecisionMixin)" in str(refused.value)
    between = type("Between", (stand_ins.Trainer,), {})
    with pytest.raises(TrainingError, match="Trainer comes before PrecisionMixin"):
        type("Bad", (between, PrecisionMixin), {})
    assert type("Good", (Ours,), {"create_accelerator_and_postprocess": None})
    assert type("Good", (type("Logs", (), {}), PrecisionMixin, between), {})


def test_a_trainer_whose_model_ran_outside_is_refused(transformers):
    """As one that was wrapped before runs."""

    class Another(PrecisionMixin, stand_ins.Trainer):
        def compute_loss(self, model, x):
            return Net()(x).sum()

    with pytest.raises(TrainingError, match="Have the Trainer prepare the model"):
        Another(model=Net(), args=arguments(), precision=TrainingPrecision(dtype="bf16")).train([X])


def test_a_checkpoint_of_transformers_trainer(transformers, tmp_path):
    """Digest and scaler; another low format is said, both ways, and so is a checkpoint without ours."""

    def trainer(dtype):
        return Ours(model=Net(), args=arguments(), precision=TrainingPrecision(dtype=dtype))

    first = trainer("fp16")
    first.train([X])
    first.accelerator.scaler.update(2.0)
    first._save_scaler(tmp_path)
    second = trainer("fp16")
    second._load_scaler(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second._load_scaler(tmp_path)
    assert second.precision.steps == 1
    assert second.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
    with pytest.warns(TrainingWarning) as found:
        trainer("bf16")._load_scaler(tmp_path)
    assert [w.category for w in found] == [TrainingWarning] * 2 and "does not use" in str(found[1].message)
    (tmp_path / "narrowcast.pt").write_bytes(b"cut off")
    with pytest.raises(TrainingError, match=r"narrowcast\.pt"):
        second._load_scaler(tmp_path)
    (tmp_path / "narrowcast.pt").unlink()
    with pytest.warns(TrainingWarning, match="says nothing"):
        second._load_scaler(tmp_path)


@pytest.mark.parametrize("flag", ["bf16", "fp16", "bf16_full_eval", "fp16_full_eval"])
def test_a_trainer_that_chooses_formats_itself_is_refused(transformers, flag):
    """With the flag to write."""
    with pytest.raises(TrainingError, match=rf"Write TrainingArguments\({flag}=False\)"):
        Ours(model=Net(), args=arguments(**{flag: True}))


def test_a_mixin_that_stands_alone_is_refused(transformers):
    """Or above a Trainer that has not what it overrides."""
    with pytest.raises(TrainingError, match="has no create_accelerator_and_postprocess"):
        PrecisionMixin()


@pytest.mark.parametrize("dtype", ["fp8", "e4m3fn", torch.float64])
def test_a_format_that_no_region_has_is_refused_by_the_constructor(lightning, accelerate, dtype):
    """Of every plugin, with what to write."""
    made = (
        TrainingPrecision, LoopPrecision, IgnitePrecision, LightningPrecision, FabricPrecision,
        lambda **settings: AcceleratePrecision(stand_ins.Accelerator(), **settings),
    )  # fmt: skip
    for plugin in made:
        with pytest.raises(TrainingError, match=r"Give torch\.bfloat16 or torch\.float16"):
            plugin(dtype=dtype)


def test_a_loop_whose_forward_was_in_no_region_does_not_step():
    """With what opens it; an evaluation before is no forward of training."""
    for kind, opens in (LoopPrecision, "amp_autocast"), (TrainingPrecision, "training"):
        precision, model = kind(dtype="bf16", device_type="cpu"), Net()
        with torch.no_grad(), precision.region:
            model(X)
        precision.backward(loss_of(model(X)))
        with pytest.raises(TrainingError, match=rf"with precision\.{opens}\(\):") as refused:
            precision.step(sgd(model))
        assert refused.value.where[0].file == __file__ and torch.equal(model.layer.weight, Net().layer.weight)


@pytest.fixture
def ignite(monkeypatch):
    stand_ins.install(monkeypatch, ignite__engine=vars(stand_ins))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ignite_s_engines(ignite, dtype):
    """Forward and loss in the region, two micro-batches to a step, the loss not scaled, the clip before the step."""
    model, clipped = Net(), []
    precision = IgnitePrecision(dtype=dtype, scaler=scaler_of(dtype), ledger_every=1)
    trainer = precision.trainer(
        model, sgd(model), F.cross_entropy, gradient_accumulation_steps=2, clip=lambda: clipped.append(True)
    )
    batch = X, torch.tensor([0, 1, 2, 0])
    losses = trainer.run([batch] * 4)
    assert losses[0] == losses[1] and losses[2] < losses[1] < 10 and precision.steps == 2 and clipped == [True] * 2
    evaluator = precision.evaluator(model)
    (y,) = evaluator.run([batch])
    assert y.dtype is precision.low and precision.steps == 2
    assert precision.model_fn(model, X).dtype is precision.low
    precision.close()


@pytest.mark.parametrize("asked", [{"amp_mode": "amp"}, {"scaler": True}])
def test_ignite_s_own_autocast_is_refused(ignite, asked):
    """In the trainer and the evaluator."""
    precision = IgnitePrecision(dtype="bf16")
    with pytest.raises(TrainingError, match="IgnitePrecision"):
        precision.trainer(Net(), None, None, **asked)
    with pytest.raises(TrainingError, match="counted from 1"):
        precision.trainer(Net(), None, None, gradient_accumulation_steps=0)
    if "amp_mode" in asked:
        with pytest.raises(TrainingError, match="rule inside our region"):
            precision.evaluator(Net(), **asked)
