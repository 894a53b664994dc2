"""Lightning's Trainer with LightningPrecision, from either package; in one process, or two with DDP."""

from __future__ import annotations

import importlib
import os
import sys
import warnings

import torch.nn.functional as F
from digits import ACCUMULATED, BATCH, CLIP, EPOCHS, asked, data, held_out, make, plain_losses, policy_for, tell
from torch.utils.data import DataLoader, DistributedSampler

from narrowcast.integrations.lightning import LightningPrecision

PACKAGE = os.environ.get("NARROWCAST_LIGHTNING", "lightning.pytorch")
L = importlib.import_module(PACKAGE)
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


class Digits(L.LightningModule):
    """The network as Lightning has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.optimizer = make()
        self.losses: list[float] = []

    def training_step(self, batch, number):
        """The loss of a micro-batch; forward and loss run in the region."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        """The region holds here as well."""
        self.log("accuracy", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        """AdamW."""
        return self.optimizer


def trainer(plugin, epochs):
    """One as people write it; the plugin says the formats, and `precision=` is left out."""
    return L.Trainer(
        accelerator="cpu", devices=PROCESSES, strategy="ddp" if PROCESSES > 1 else "auto", plugins=[plugin],
        max_epochs=epochs, accumulate_grad_batches=ACCUMULATED, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )  # fmt: skip


def own_batches():
    """The batches of this process, in their order."""
    whole = data(PROCESSES)
    rank = int(os.environ.get("RANK", "0"))
    return DataLoader(whole, BATCH, sampler=DistributedSampler(whole, PROCESSES, rank, shuffle=False))


def fit(dtype, epochs, checkpoint=None, **settings):
    """Train, as far as `epochs`."""
    plugin = LightningPrecision(policy=policy_for("net.head"), dtype=dtype, **settings)
    model, runs = Digits(), trainer(plugin, epochs)
    runs.fit(model, own_batches(), ckpt_path=checkpoint)
    return model, runs, plugin


def main() -> None:
    """Train, compare, save in the middle, resume."""
    run = asked()
    whole, runs, plugin = fit(run.dtype, EPOCHS, ledger_every=4, ledger_to=run.folder)
    plain = plain_losses(run.dtype, lambda: iter(own_batches()), parallel=PROCESSES > 1)
    _, first, _ = fit(run.dtype, EPOCHS // 2)
    checkpoint = first.strategy.broadcast(str(run.folder / "half.ckpt"))
    first.save_checkpoint(checkpoint)
    second, _, _ = fit(run.dtype, EPOCHS, checkpoint)
    (found,) = runs.validate(whole, held_out(), verbose=False)
    tell(f"{PACKAGE} {L.__version__}, {run.dtype}", whole.losses, plain, second.losses, found["accuracy"])
    print(f"  ledgers: {', '.join(sorted(file.name for file in run.folder.glob('*.json')))}")
    print(f"  {plugin.training.ledger!r}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"(pytorch_)?lightning")
    sys.exit(main())
