"""PyTorch-Ignite with IgnitePrecision: trainer, evaluator, checkpoints."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from digits import ACCUMULATED, CLIP, EPOCHS, POLICY, asked, held_out, loader, make, plain_losses, tell
from ignite.engine import Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy

from narrowcast.integrations.ignite import IgnitePrecision


def fit(dtype, epochs, checkpoint=None, folder=None, **settings):
    """Train, from the checkpoint on if there is one; save each epoch, if there is a folder."""
    precision = IgnitePrecision(policy=POLICY, dtype=dtype, **settings)
    model, optimizer = make()
    trainer = precision.trainer(
        model, optimizer, F.cross_entropy, gradient_accumulation_steps=ACCUMULATED,
        clip=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    )  # fmt: skip
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    saved = {"model": model, "optimizer": optimizer, "trainer": trainer, "precision": precision}
    if folder is not None:
        saver = Checkpoint(saved, DiskSaver(str(folder), require_empty=False))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if checkpoint is not None:
        Checkpoint.load_objects(saved, checkpoint=torch.load(checkpoint, weights_only=True))
    trainer.run(loader(), max_epochs=epochs)
    evaluator = precision.evaluator(model, {"accuracy": Accuracy()})
    return losses, evaluator.run(held_out()).metrics["accuracy"], precision


def main() -> None:
    """Train, compare, save in the middle, resume."""
    run = asked()
    losses, accuracy, precision = fit(run.dtype, EPOCHS, ledger_every=4, ledger_to=run.folder)
    fit(run.dtype, EPOCHS // 2, folder=run.folder)
    (checkpoint,) = run.folder.glob("*.pt")
    resumed = fit(run.dtype, EPOCHS, checkpoint)[0]
    tell(f"ignite, {run.dtype}", losses, plain_losses(run.dtype, lambda: iter(loader())), resumed, accuracy)
    print(f"  {precision.ledger!r}")


if __name__ == "__main__":
    sys.exit(main())
