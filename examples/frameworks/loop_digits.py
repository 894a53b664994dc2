"""A plain loop in timm's style: `amp_autocast` and a `loss_scaler` that scales, clips and steps."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from digits import ACCUMULATED, CLIP, EPOCHS, POLICY, asked, held_out, loader, make, plain_losses, tell

from narrowcast.integrations.loop import LoopPrecision


def fit(dtype, epochs, checkpoint=None, **settings):
    """Train, from the checkpoint on if there is one."""
    loss_scaler = LoopPrecision(policy=POLICY, dtype=dtype, device_type="cpu", **settings)
    amp_autocast = loss_scaler.amp_autocast
    model, optimizer = make()
    from_epoch, losses = 0, []
    if checkpoint is not None:
        from_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loss_scaler.load_state_dict(checkpoint[loss_scaler.state_dict_key])
    with loss_scaler:
        for _ in range(from_epoch, epochs):
            for number, (x, target) in enumerate(loader(), 1):
                with amp_autocast():
                    loss = F.cross_entropy(model(x), target)
                losses.append(loss.item())
                update = number % ACCUMULATED == 0
                loss_scaler(loss / ACCUMULATED, optimizer, CLIP, parameters=model.parameters(), need_update=update)
                if update:
                    optimizer.zero_grad()
    saved = {"epoch": epochs, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return model, losses, {**saved, loss_scaler.state_dict_key: loss_scaler.state_dict()}, loss_scaler


def main() -> None:
    """Train, compare, save in the middle, resume."""
    run = asked()
    model, losses, _, precision = fit(run.dtype, EPOCHS, ledger_every=4, ledger_to=run.folder)
    torch.save(fit(run.dtype, EPOCHS // 2)[2], run.folder / "half.pt")
    resumed = fit(run.dtype, EPOCHS, torch.load(run.folder / "half.pt", weights_only=True))[1]
    model.eval()
    with torch.no_grad(), precision.amp_autocast():
        rights = [(model(x).argmax(-1) == target).float().mean().item() for x, target in held_out()]
    plain = plain_losses(run.dtype, lambda: iter(loader()))
    tell(f"loop, {run.dtype}", losses, plain, resumed, sum(rights) / len(rights))
    print(f"  {precision.ledger!r}")


if __name__ == "__main__":
    sys.exit(main())
