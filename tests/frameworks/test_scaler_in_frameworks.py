"""nc.Scaler and nc.check_training in the frameworks themselves: what a user reads, and how a run goes on.

Each loop is run with one batch that overflows, and its weights are those of the plain loop with torch's scaler.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import narrowcast as nc
from narrowcast.errors import ScalerError, ScalerWarning
from narrowcast.integrations.accelerate import AcceleratePrecision
from narrowcast.integrations.ignite import IgnitePrecision
from narrowcast.integrations.lightning import FabricPrecision, LightningPrecision
from narrowcast.integrations.training import TrainingPrecision
from narrowcast.integrations.transformers import PrecisionMixin

X = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(48) % 4
POLICY = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="2", reason="a test"), name="ours")
BAD, CLIP = 2, 1.0


class Net(nn.Sequential):
    """Gives a loss, as models of transformers do, if it is given labels."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x, labels=None, **ignored):
        y = super().forward(x)
        return y if labels is None else {"loss": F.cross_entropy(y, labels), "logits": y}


def batches(bad=(BAD,)):
    """Six; those numbered so overflow."""
    x = X.clone()
    for number in bad:
        x[number * 8 : number * 8 + 8] *= 1e6
    return DataLoader(TensorDataset(x, Y), 8)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain():
    """The loop by hand, with torch's scaler: its weights."""
    model = Net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for x, y in batches():
        with nc.autocast("cpu", "fp16"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**15
    return list(model.parameters())


def lightning(loader, tmp_path, **settings):
    import lightning as L

    class Task(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return sgd(self)

    task, precision = Task(), LightningPrecision(package="lightning", **settings)
    trainer = L.Trainer(
        plugins=[precision], accelerator="cpu", max_epochs=1, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, loader)
    return task.net, precision.scaler


def fabric(loader, tmp_path, **settings):
    import lightning as L

    precision = FabricPrecision(package="lightning", **settings)
    runs = L.Fabric(accelerator="cpu", devices=1, plugins=[precision])
    net = Net()
    model, optimizer = runs.setup(net, sgd(net))
    for x, y in loader:
        with runs.autocast():
            loss = F.cross_entropy(model(x), y)
        runs.backward(loss)
        runs.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    precision.training.close()
    return net, precision.scaler


def accelerate(loader, tmp_path, **settings):
    from accelerate import Accelerator

    accelerator, net = Accelerator(mixed_precision="no", cpu=True), Net()
    precision = AcceleratePrecision(accelerator, **settings)
    model, optimizer = precision.prepare(net, sgd(net))
    skipped = 0
    for x, y in loader:
        with accelerator.autocast():
            loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        skipped += optimizer.step_was_skipped
        optimizer.zero_grad()
    precision.close()
    assert precision.scaler is None or skipped == precision.scaler.history.skipped
    return net, precision.scaler


def transformers(loader, tmp_path, **settings):
    from transformers import Trainer, TrainingArguments

    class Mine(PrecisionMixin, Trainer):
        def get_train_dataloader(self):
            return loader

        def _prepare_inputs(self, inputs):
            return {"x": inputs[0], "labels": inputs[1]}

        def compute_loss(self, model, inputs, **ignored):
            return model(**inputs)["loss"]

    net = Net()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, max_grad_norm=CLIP, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", lr_scheduler_type="constant", logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    precision = TrainingPrecision(**settings)
    Mine(model=net, args=arguments, optimizers=(sgd(net), None), precision=precision, train_dataset=X).train()
    return net, precision.scaler


def ignite(loader, tmp_path, **settings):
    net, precision = Net(), IgnitePrecision(**settings)
    clip = list(net.parameters()), CLIP
    trainer = precision.trainer(net, sgd(net), F.cross_entropy, clip=lambda: nn.utils.clip_grad_norm_(*clip))
    trainer.run(loader, max_epochs=1)
    return net, precision.scaler


LOOPS = [lightning, fabric, accelerate, transformers, ignite]


@pytest.fixture(autouse=True)
def state_of_its_own():
    """Accelerate remembers how the first Accelerator of a process was made."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_that_overflows_is_skipped_and_told_of(loop, tmp_path):
    """The weights are those of the plain loop with torch's scaler, bit for bit; the names are the model's."""
    net, scaler = loop(batches(), tmp_path, dtype="fp16")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain(), strict=True))
    assert type(scaler) is nc.Scaler and scaler.get_scale() == 2.0**15 and not scaler.findings
    (row,) = [row for row in scaler.history if row.skipped]
    assert row.step == BAD + 1 and row.parameters[0].endswith("0.weight") and "of group" not in row.why
    torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_that_is_stuck_is_told_of_at_the_user_s_line(loop, tmp_path):
    """Once, in this file, with the op."""
    given = nc.Scaler("cpu", patience=4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loop(batches(range(6)), tmp_path, dtype="fp16", scaler=given, watch=True)
    (said,) = [w for w in found if w.category is ScalerWarning]
    assert said.filename == __file__ and "4 steps were skipped in a row" in str(said.message)
    assert f"aten.linear.default #1 ({__file__}" in str(said.message), str(said.message)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_a_framework_is_a_right_one(loop, dtype, tmp_path):
    """nc.check_training finds nothing wrong in it."""
    check = nc.check_training(lambda: loop(batches(()), tmp_path, dtype=dtype), steps=1)
    assert not check.findings, str(check)
    assert check.calls["inside"] >= 12 and check.calls["outside"] == 0


def lightning_beside(tmp_path):
    import lightning as L

    net = Net()
    runs = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = runs.setup(net)
    return lambda: model(X)


def accelerate_beside(tmp_path):
    from accelerate import Accelerator

    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(Net())
    return lambda: model(X)


@pytest.mark.parametrize(
    ("make", "place"), [(lightning_beside, "lightning/fabric/"), (accelerate_beside, "accelerate/")]
)
def test_a_region_that_the_framework_opens_beside_ours_is_found(make, place, tmp_path):
    """With the framework's file and line."""
    forward = make(tmp_path)

    def step():
        with nc.autocast("cpu", "bf16", policy=POLICY):
            forward()

    check = nc.check_training(step)
    (found,) = [found for found in check.findings if found.kind == "hidden policy"]
    assert place in found.file and found.line > 0


def test_lightning_trains_with_lbfgs_in_fp16():
    """Trainer and Fabric, with the Trainer's clip; a step that overflows is undone."""
    import lightning as L

    class Task(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = Net(), []

        def training_step(self, batch, number):
            self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]))
            return self.losses[-1]

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    task, precision = Task(), LightningPrecision(package="lightning", dtype="fp16")
    trainer = L.Trainer(
        plugins=[precision], accelerator="cpu", max_epochs=2, gradient_clip_val=0.5, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, batches())
    assert task.losses[-1] < task.losses[0] and precision.training.steps == 12
    assert [row.step for row in precision.scaler.history if row.skipped] == [3, 9]
    assert not precision.scaler.findings and all(p.isfinite().all() for p in task.parameters())


def test_lightning_s_wrapper_is_its_optimizer():
    """In manual optimization: a scaler of the user's own, and the plugin's, which refuses to unscale twice."""
    import lightning as L

    class Task(L.LightningModule):
        automatic_optimization = False

        def __init__(self, how):
            super().__init__()
            self.net, self.how, self.scaler = Net(), how, nc.Scaler("cpu", init_scale=1024.0)

        def training_step(self, batch, number):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.how(self, optimizer, F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return sgd(self)

    def trained(how, *plugins):
        task = Task(how)
        L.Trainer(
            plugins=list(plugins), accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(task, batches(()))  # fmt: skip
        return list(task.net.parameters())

    def by_hand(task, optimizer, loss):
        task.manual_backward(loss)
        optimizer.step()

    def both(task, optimizer, loss):
        task.scaler.scale(loss).backward()
        task.scaler.unscale_(optimizer)
        task.scaler.step(optimizer.optimizer)
        task.scaler.update()

    def wrapper(task, optimizer, loss):
        task.scaler.scale(loss).backward()
        task.scaler.step(optimizer)
        task.scaler.update()

    def twice(task, optimizer, loss):
        task.manual_backward(loss)
        task.trainer.precision_plugin.scaler.unscale_(optimizer)
        optimizer.step()

    plain = trained(by_hand)
    for how in both, wrapper:
        assert all(torch.allclose(a, b) for a, b in zip(trained(how), plain, strict=True))
    with pytest.raises(ScalerError, match="Lightning's and Accelerate's optimizers unscale in their step"):
        trained(twice, LightningPrecision(package="lightning", dtype="fp16"))
