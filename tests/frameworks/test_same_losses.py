"""Under the policy `native` a plugin computes what the framework's own mixed precision computes, bit for bit.

In bf16: in fp16 the frameworks' own refuse the CPU. Nothing here is fp32 for want of a word.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import narrowcast as nc
from narrowcast.errors import RegionWarning, TrainingError
from narrowcast.integrations.accelerate import AcceleratePrecision
from narrowcast.integrations.lightning import FabricPrecision, LightningPrecision
from narrowcast.integrations.training import TrainingPrecision
from narrowcast.integrations.transformers import PrecisionMixin

X = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 4


@pytest.fixture(autouse=True)
def state_of_its_own():
    """Accelerate remembers how the first Accelerator of a process was made."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def language_model(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def trained(base, folder, own, **options):
    """Losses, and what evaluation gives, of a Trainer with its own bf16 or with ours."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    kind = base if own else type("Ours", (PrecisionMixin, base), {})
    rows = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4, bf16=own, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    given = {} if own else {"precision": TrainingPrecision(dtype="bf16")}
    trainer = kind(model=language_model(), args=arguments, train_dataset=data, eval_dataset=data, **given)
    assert isinstance(trainer, Trainer)
    before = trainer.predict(data)
    trainer.train()
    after = trainer.predict(data)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return losses, before, after, weights


def distilling():
    from transformers import Trainer

    class Distilling(Trainer):
        teacher = language_model(1)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            with torch.no_grad():
                teacher = self.teacher(input_ids=inputs["input_ids"])
            loss = F.kl_div(
                (outputs.logits / 2).log_softmax(-1), (teacher.logits / 2).softmax(-1), reduction="batchmean"
            )
            return (loss, outputs) if return_outputs else loss

    return Distilling


def plain():
    from transformers import Trainer

    return Trainer


@pytest.mark.parametrize(
    ("base", "options"),
    [(plain, {}), (plain, {"label_smoothing_factor": 0.1}), (distilling, {})],
    ids=["its model's loss", "label smoothing", "distillation"],
)
def test_transformers_losses_are_those_of_the_trainer_s_own(base, options, tmp_path):
    """Training, and evaluation before and after it: losses, logits and weights."""
    base = base()
    own, ours = (trained(base, tmp_path, flag, **options) for flag in (True, False))
    assert own[0] == ours[0] and len(own[0]) == 3
    for one, two in (own[1], ours[1]), (own[2], ours[2]):
        assert one.metrics["test_loss"] == two.metrics["test_loss"]
        assert (one.predictions == two.predictions).all() and one.predictions.dtype == two.predictions.dtype
    assert all(torch.equal(a, b) for a, b in zip(own[3], ours[3], strict=True))


def test_a_mixin_after_the_trainer_is_refused():
    """transformers' own Trainer, where the class is made."""
    from transformers import Trainer

    with pytest.raises(TrainingError, match=r"Write class Bad\(PrecisionMixin, Trainer\)"):

        class Bad(Trainer, PrecisionMixin):
            pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_s_own_prepare_is_no_silent_fp32(when):
    """Before the plugin is made or after it: the first backward raises, with what to write."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(mixed_precision="no", cpu=True), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "before":
        model, optimizer = accelerator.prepare(model, optimizer)
    AcceleratePrecision(accelerator, dtype="bf16")
    if when == "after":
        model, optimizer = accelerator.prepare(model, optimizer)
    loss = F.cross_entropy(model(X), Y)
    with pytest.raises(TrainingError, match=r"precision\.prepare\(model, optimizer"):
        accelerator.backward(loss)
    loss.backward()
    with pytest.raises(TrainingError, match=r"precision\.prepare\(model, optimizer"):
        optimizer.step()


def test_a_model_that_fabric_did_not_set_up_is_no_silent_fp32():
    """Its optimizer does not step."""
    import lightning as L

    runs = L.Fabric(accelerator="cpu", devices=1, plugins=[FabricPrecision(package="lightning", dtype="bf16")])
    model = net()
    _, optimizer = runs.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    runs.backward(F.cross_entropy(model(X), Y))
    with pytest.raises(TrainingError, match=r"fabric\.setup"):
        optimizer.step()


def fitted(task, **precision):
    """A LightningModule after two batches."""
    import lightning as L

    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **precision,
    )  # fmt: skip
    trainer.fit(task, DataLoader(TensorDataset(X, Y), 8))
    return task


def task_of(loss_of):
    import lightning as L

    class Task(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = net(), []

        def training_step(self, batch, number):
            loss = loss_of(self, *batch)
            self.seen.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Task()


def test_lightning_s_gradients_of_a_module_that_is_called_twice():
    """Lightning keeps no casts of weights from 2.6 on, and sums both gradients in fp32."""

    def twice(task, x, y):
        return F.cross_entropy(task.net(x), y) + F.cross_entropy(task.net(-2 * x), y)

    own = fitted(task_of(twice), precision="bf16-mixed")
    ours = fitted(task_of(twice), plugins=[LightningPrecision(package="lightning", dtype="bf16")])
    assert own.seen == ours.seen
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), ours.parameters(), strict=True))


SOURCE = """
import lightning as L, torch, torch.nn.functional as F
class Task(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net, self.formats = net, []
    def training_step(self, batch, number):
        hidden = self.net[1](self.net[0](batch[0]))
        logits = self.net(batch[0])
        self.formats.append(logits.dtype)
        return F.cross_entropy(logits, batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.parametrize("file", ["<ipython-input-3-0f2b>", "<string>", "<stdin>", "notebook.py"])
def test_a_rule_holds_for_a_lightning_module_without_a_file(file):
    """Named from the LightningModule, which is not called without DDP."""
    program = {}
    exec(compile(SOURCE, file, "exec"), program)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="net.2"))
    task = fitted(
        program["Task"](net()), plugins=[LightningPrecision(package="lightning", dtype="bf16", policy=policy)]
    )
    assert task.formats == [torch.float32] * 2


def test_a_region_of_the_user_s_in_a_training_step_is_told_of_once():
    """At its line, where it keeps our policy from ruling."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="net.2"))

    def inside(task, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(task.net(x), y)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fitted(task_of(inside), plugins=[LightningPrecision(package="lightning", dtype="bf16", policy=policy)])
    (said,) = [w for w in found if w.category is RegionWarning]
    assert said.filename == __file__ and "hides policy" in str(said.message)
