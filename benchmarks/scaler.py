"""What nc.Scaler costs beside torch.amp.GradScaler: whole training steps in fp32 with scaling, in alternating order.

    python benchmarks/scaler.py [--rounds N]

Bounds, as the median of the rounds' ratios: 1.03 for models of at least 10 ms a step, 1.1 for many small parameters,
where there is little but the scaler's and the optimizer's own work. A step of one parameter of one element has no
bound: it shows what a step costs at least. torch's scaler runs twice: the second is the noise.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from alternate import alternate, ratio
from machine import facts

import narrowcast as nc

SCALERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.amp.GradScaler("cpu"),
    "torch, again": lambda: torch.amp.GradScaler("cpu"),
    "nc.Scaler": lambda: nc.Scaler("cpu"),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
}


def middle() -> tuple[torch.nn.Module, torch.Tensor]:
    """Three layers of 512: a step of more than ten milliseconds."""
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.randn(256, 512)


class One(torch.nn.Module):
    """One parameter of one element: nothing but overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class Many(torch.nn.Module):
    """So many scales of 8 elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList([torch.ones(8) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.scales)).mean() * x.mean()  # summed, the steps would diverge, and be skipped


MODELS: dict[str, tuple[Callable[[], tuple[torch.nn.Module, torch.Tensor]], float | None]] = {
    "three layers of 512": (middle, 1.03),
    "200 parameters of 8": (lambda: (Many(200), torch.randn(8)), 1.1),
    "1,000 parameters of 8": (lambda: (Many(1000), torch.randn(8)), 1.1),
    "1 parameter of 1": (lambda: (One(), torch.ones(1)), None),
}


def step_of(make: Callable[[], Any], optimizer: str, scaler: Any, clips: bool) -> Callable[[], None]:
    """A training step of a model of its own."""
    torch.manual_seed(0)
    model, x = make()
    steps = OPTIMIZERS[optimizer](model.parameters())

    def step() -> None:
        steps.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if clips:
            scaler.unscale_(steps)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(steps)
        scaler.update()

    return step


def main() -> int:
    """Measure, print, write the result file; exit code 1 if a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", default="", help="models and optimizers whose names, side by side, have this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, (make, bound) in MODELS.items():
        for optimizer in [one for one in OPTIMIZERS if options.only in f"{name} {one}"]:
            for clips in (False, True):
                sides = {side: step_of(make, optimizer, scaler(), clips) for side, scaler in SCALERS.items()}
                times = alternate(sides, options.rounds)
                rows.append(
                    {
                        "model": name,
                        "optimizer": optimizer,
                        "clips": clips,
                        "milliseconds": {side: round(sorted(t)[len(t) // 2], 3) for side, t in times.items()},
                        "noise": ratio(times, "torch, again", "torch"),
                        "ours": ratio(times, "nc.Scaler", "torch"),
                        "bound": bound,
                    }
                )
                ours, noise = rows[-1]["ours"], rows[-1]["noise"]
                print(
                    f"{name:22}{optimizer:13}{'clip' if clips else '':6}{rows[-1]['milliseconds']['torch']:8.2f} ms "
                    f"{ours['median']:7.3f} ({ours['lower_quartile']:.3f} to {ours['upper_quartile']:.3f})"
                    f"  noise {noise['median']:.3f}  bound {bound or 'none'}"
                )
    missed = [row for row in rows if row["bound"] and row["ours"]["median"] > row["bound"]]
    result = {"benchmark": "scaler: training steps", "machine": facts(), "rounds": options.rounds, "rows": rows}
    file = Path(__file__).parent / "results/scaler.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in missed:
        print(f"over the bound: {row['model']}, {row['optimizer']}: {row['ours']['median']} ({row['bound']})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
