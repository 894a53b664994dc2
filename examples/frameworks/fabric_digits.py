"""Lightning Fabric with FabricPrecision: the loop is your own."""

from __future__ import annotations

import importlib
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from digits import ACCUMULATED, CLIP, EPOCHS, POLICY, asked, held_out, loader, make, plain_losses, tell

from narrowcast.integrations.lightning import FabricPrecision

PACKAGE = os.environ.get("NARROWCAST_FABRIC", "lightning.fabric")
Fabric = importlib.import_module(PACKAGE).Fabric


def fit(dtype, epochs, checkpoint=None, **settings):
    """Train, from the checkpoint on if there is one."""
    precision = FabricPrecision(policy=POLICY, dtype=dtype, **settings)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
    model, optimizer = fabric.setup(*make())
    batches, losses = fabric.setup_dataloaders(loader()), []
    state = {"model": model, "optimizer": optimizer, "precision": precision, "epoch": 0}
    if checkpoint is not None:
        fabric.load(checkpoint, state)
    for epoch in range(state["epoch"], epochs):
        for number, (x, target) in enumerate(batches, 1):
            last = number % ACCUMULATED == 0
            with fabric.no_backward_sync(model, enabled=not last):
                with fabric.autocast():
                    loss = F.cross_entropy(model(x), target)
                losses.append(loss.item())
                fabric.backward(loss / ACCUMULATED)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] = epoch + 1
    return fabric, model, losses, state, precision


def main() -> None:
    """Train, compare, save in the middle, resume."""
    run = asked()
    _, model, losses, _, precision = fit(run.dtype, EPOCHS, ledger_every=4, ledger_to=run.folder)
    first, _, _, state, _ = fit(run.dtype, EPOCHS // 2)
    first.save(run.folder / "half.ckpt", state)
    resumed = fit(run.dtype, EPOCHS, run.folder / "half.ckpt")[2]
    with torch.no_grad():
        rights = [(model(x).argmax(-1) == target).float().mean().item() for x, target in held_out()]
    name = f"{PACKAGE}, {run.dtype}"
    tell(name, losses, plain_losses(run.dtype, lambda: iter(loader())), resumed, sum(rights) / len(rights))
    print(f"  {precision.training.ledger!r}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"lightning")
    sys.exit(main())
