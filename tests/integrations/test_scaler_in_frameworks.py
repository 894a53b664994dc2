"""nc.Scaler and nc.check_training inside training frameworks: stand-ins, and code that bears a framework's name."""

import importlib.util
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import ScalerWarning, TrainingError
from narrowcast.integrations.accelerate import AcceleratePrecision
from narrowcast.integrations.ignite import IgnitePrecision
from narrowcast.integrations.lightning import FabricPrecision, LightningPrecision
from narrowcast.integrations.training import TrainingPrecision
from narrowcast.integrations.transformers import PrecisionMixin
from narrowcast.runtime.sites.python_stack import loop_line

_spec = importlib.util.spec_from_file_location("framework_stand_ins", Path(__file__).parent / "framework_stand_ins.py")
stand_ins = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_ins)

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.zeros(8, 3)
POLICY = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="0", reason="a test"), name="ours")
FRAMEWORK = """
import torch

def fit(model, x, scaler, optimizer, times):
    for _ in range(times):
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

def run(step):
    return step()

def loss_of(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()
"""


def framework(name):
    """A module with this name, in a file of its own."""
    members = {"__name__": name}
    exec(compile(FRAMEWORK, f"/installed/{name.replace('.', '/')}.py", "exec"), members)
    return members


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def here():
    """The line that calls this."""
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize(
    ("name", "is_framework"),
    [("lightning.pytorch.loops", True), ("accelerate.optimizer", True), ("transformers.trainer", True),
     ("ignite.engine.engine", True), ("transformers.models.gpt2", False), ("lightning_strikes", False)],
)  # fmt: skip
def test_what_the_scaler_says_stands_at_the_user_s_line(name, is_framework):
    """Not at that of the framework that runs the loop; once for each line. The op that overflowed, too."""
    model, scaler = make(), nc.Scaler("cpu", patience=2)
    fit = framework(name)["fit"]
    with warnings.catch_warnings(record=True) as found, nc.watch() as watching, nc.autocast("cpu", "fp16"):
        warnings.simplefilter("default")
        line = here() + 1
        fit(model, X * 1e6, scaler, torch.optim.SGD(model.parameters(), 0.1), 2)
    (said,) = [w for w in found if w.category is ScalerWarning]
    place = (__file__, line) if is_framework else (f"/installed/{name.replace('.', '/')}.py", 8)
    assert (said.filename, said.lineno) == place and "0.weight is NaN" in str(said.message)
    assert (watching.first.file, watching.first.line)[:1] == (place[0],)


def test_a_framework_s_line_is_better_than_none():
    """Where nobody else is on the stack, as on a thread that a framework has started."""
    found = []
    members = {"__name__": "accelerate.threads", "look": loop_line, "found": found}
    exec(compile("def run():\n    found.append(look())", "/installed/accelerate/threads.py", "exec"), members)
    thread = threading.Thread(target=members["run"], daemon=True)
    thread.start()
    thread.join(10)
    assert (found[0].file, found[0].line) == ("/installed/accelerate/threads.py", 2)


def lightning_loop(monkeypatch, dtype, model, optimizer):
    stand_ins.install(monkeypatch, lightning__pytorch__plugins__precision={"MixedPrecision": stand_ins.MixedPrecision})
    plugin = LightningPrecision(package="lightning", dtype=dtype)
    plugin.convert_module(model)

    def step():
        def closure():
            optimizer.zero_grad()
            with plugin.train_step_context():
                loss = F.mse_loss(model(X), Y)
            scaled = plugin.pre_backward(loss, model)
            plugin.backward(scaled, model, optimizer)
            return loss.detach()

        return plugin.optimizer_step(optimizer, model=model, closure=closure)

    return step, plugin


def fabric_loop(monkeypatch, dtype, model, optimizer):
    stand_ins.install(
        monkeypatch, lightning__fabric__plugins__precision={"MixedPrecision": stand_ins.FabricMixedPrecision}
    )
    plugin = FabricPrecision(package="lightning", dtype=dtype)
    plugin.convert_module(model)

    def step():
        def closure():
            optimizer.zero_grad()
            with plugin.forward_context():
                loss = F.mse_loss(model(X), Y)
            plugin.backward(loss, model)
            return loss.detach()

        if isinstance(optimizer, torch.optim.LBFGS):
            return plugin.optimizer_step(optimizer, closure=closure)
        closure()
        return plugin.optimizer_step(optimizer)

    return step, plugin


def accelerate_loop(monkeypatch, dtype, model, optimizer):
    utils = type("utils", (), {"convert_to_fp32": staticmethod(stand_ins.convert_to_fp32)})
    stand_ins.install(monkeypatch, accelerate={"utils": utils})
    accelerator = stand_ins.Accelerator()
    precision = AcceleratePrecision(accelerator, dtype=dtype)
    prepared, optimizer = precision.prepare(model, optimizer)

    def step():
        prepared.zero_grad()
        with accelerator.autocast():
            loss = F.mse_loss(prepared(X), Y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()

    return step, precision


def transformers_loop(monkeypatch, dtype, model, optimizer):
    stand_ins.install(monkeypatch, transformers={"__version__": "0"})
    stand_ins.install(monkeypatch, accelerate__utils={"convert_to_fp32": stand_ins.convert_to_fp32})

    class Mine(PrecisionMixin, stand_ins.Trainer):
        pass

    arguments = type("arguments", (), {})
    trainer = Mine(model=model, args=arguments, precision=TrainingPrecision(dtype=dtype))
    return lambda: trainer.train([X]), trainer.precision


def ignite_loop(monkeypatch, dtype, model, optimizer):
    stand_ins.install(monkeypatch, ignite__engine=vars(stand_ins))
    precision = IgnitePrecision(dtype=dtype)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    trainer, evaluator = precision.trainer(model, optimizer, F.mse_loss, clip=clip), precision.evaluator(model)

    def step():
        trainer.update(trainer, (X, Y))
        evaluator.run([(X, Y)])

    trainer.state.iteration = 1
    return step, precision


LOOPS = {
    "lightning": lightning_loop, "fabric": fabric_loop, "accelerate": accelerate_loop,
    "transformers": transformers_loop, "ignite": ignite_loop,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_with_a_plugin_is_a_right_one(name, dtype, monkeypatch):
    """nc.check_training finds nothing in it, and sees what it looks for: calls in the region."""
    model = make()
    step, precision = LOOPS[name](monkeypatch, dtype, model, torch.optim.AdamW(model.parameters(), 0.1))
    before = {n: p.clone() for n, p in model.state_dict().items()}
    check = nc.check_training(step)
    assert not check.findings, str(check)
    assert check.calls["inside"] >= 4 and check.calls["outside"] == 0
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    (precision.training if name in ("lightning", "fabric") else precision).close()


def test_a_framework_s_own_autocast_inside_ours_is_found_where_it_is_opened():
    """In the framework's file; what the user's own line does wrong is shown at that line."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    other = framework("lightning.pytorch.amp")

    def step():
        optimizer.zero_grad()
        with nc.autocast("cpu", "bf16", policy=POLICY):
            loss = other["loss_of"](model, X)
            other["run"](loss.backward)
        optimizer.step()

    check = nc.check_training(step)
    rows = {found.kind: found for found in check.findings}
    assert set(rows) == {"hidden policy", "backward in a region"}
    assert (rows["hidden policy"].file, rows["hidden policy"].line) == ("/installed/lightning/pytorch/amp.py", 14)
    assert rows["backward in a region"].file == __file__


@pytest.mark.parametrize("name", ["lightning", "fabric"])
def test_lbfgs_goes_with_our_scaler_and_not_with_torch_s(name, monkeypatch):
    """As by hand, bit for bit; with the Trainer's clip when gradients are unscaled. Lightning refuses torch's."""
    model, plain = make(), make()
    how = {"max_iter": 3, "line_search_fn": "strong_wolfe"}
    step, plugin = LOOPS[name](monkeypatch, "fp16", model, torch.optim.LBFGS(model.parameters(), **how))
    optimizer, scaler = torch.optim.LBFGS(plain.parameters(), **how), nc.Scaler("cpu")

    def closure():
        optimizer.zero_grad()
        with nc.autocast("cpu", "fp16"):
            loss = F.mse_loss(plain(X), Y)
        scaler.scale(loss).backward()
        if name == "lightning":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        return loss.detach()

    for _ in range(2):
        result = step()
        assert float(result) == float(scaler.step(optimizer, closure))
        scaler.update()
    assert not torch.equal(model[0].weight, make()[0].weight) and plugin.training.steps == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    plugin.training._settings["scaler"] = torch.amp.GradScaler("cpu")
    with pytest.raises(TypeError, match="not compatible"):
        step()


@pytest.fixture
def alone(monkeypatch, process_group):
    """A process group of this process, and Accelerate's stand-in."""
    utils = type("utils", (), {"convert_to_fp32": staticmethod(stand_ins.convert_to_fp32)})
    stand_ins.install(monkeypatch, accelerate={"utils": utils})
    return process_group


def test_shards_of_fsdp_are_stepped_alike_or_refused(alone):
    """The default scaler asks all processes; a scaler that asks none, and formats of FSDP's own, are refused."""
    sharded = {"distributed_type": "DistributedType.FSDP"}
    assert AcceleratePrecision(stand_ins.Accelerator(**sharded), dtype="fp16").scaler.process_group is alone
    ours = nc.Scaler("cpu", process_group=alone)
    assert AcceleratePrecision(stand_ins.Accelerator(**sharded), dtype="fp16", scaler=ours).scaler is ours
    assert AcceleratePrecision(stand_ins.Accelerator(**sharded), dtype="bf16", scaler=False).scaler is None
    for given in torch.amp.GradScaler("cpu"), nc.Scaler("cpu"):
        with pytest.raises(TrainingError, match=r"shards(.*\n)*.*process_group=torch\.distributed\.group\.WORLD"):
            AcceleratePrecision(stand_ins.Accelerator(**sharded), dtype="fp16", scaler=given)
    second = stand_ins.Accelerator(**sharded)
    second.is_fsdp2 = True  # DTensors say who has the other shards
    assert AcceleratePrecision(second, dtype="fp16").scaler.process_group is None
    second.state.fsdp_plugin = type("plugin", (), {})
    second.state.fsdp_plugin.mixed_precision_policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.float16)
    with pytest.raises(TrainingError, match=r"param_dtype=torch\.float16(.*\n)*.*Leave mixed_precision_policy out"):
        AcceleratePrecision(second, dtype="fp16")
