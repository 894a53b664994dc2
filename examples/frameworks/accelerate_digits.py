"""Accelerate with AcceleratePrecision; in one process, or two (torchrun --nproc-per-node 2)."""

from __future__ import annotations

import itertools
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from digits import ACCUMULATED, BATCH, CLIP, EPOCHS, POLICY, asked, data, held_out, make, plain_losses, tell
from torch.utils.data import DataLoader

from narrowcast.integrations.accelerate import AcceleratePrecision


def fit(accelerator, dtype, epochs, folder=None, from_epoch=0, **settings):
    """Train from an epoch to another; resumes from the folder, if there is one."""
    accelerator.free_memory()
    precision = AcceleratePrecision(accelerator, policy=POLICY, dtype=dtype, **settings)
    batches = DataLoader(data(accelerator.num_processes), BATCH)
    model, optimizer, batches = precision.prepare(*make(), batches)
    if folder is not None:
        accelerator.load_state(folder)
    losses = []
    for _ in range(from_epoch, epochs):
        for x, target in batches:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.cross_entropy(model(x), target)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return model, losses, precision


def main() -> None:
    """Train, compare, save in the middle, resume."""
    run = asked()

    def new():
        return Accelerator(mixed_precision="no", cpu=True, gradient_accumulation_steps=ACCUMULATED)

    accelerator = new()
    folder = gather_object([str(run.folder)])[0]
    model, losses, precision = fit(accelerator, run.dtype, EPOCHS, ledger_every=4, ledger_to=run.folder)
    model.eval()
    with torch.no_grad():
        rights = [(model(x).argmax(-1) == target).float().mean().item() for x, target in held_out()]
    first = new()
    fit(first, run.dtype, EPOCHS // 2)
    first.save_state(f"{folder}/half")
    resumed = fit(new(), run.dtype, EPOCHS, f"{folder}/half", EPOCHS // 2)[1]

    processes, rank = accelerator.num_processes, accelerator.process_index

    def own():
        return itertools.islice(DataLoader(data(processes), BATCH), rank, None, processes)

    name = f"accelerate, {run.dtype}, process {rank} of {processes}"
    tell(name, losses, plain_losses(run.dtype, own, parallel=processes > 1), resumed, sum(rights) / len(rights))
    print(f"  {precision.ledger!r}")
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
