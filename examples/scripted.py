"""TorchScript with explicit casts: code with control flow scripted, MiniLM traced under a region, a file converted.

    python examples/scripted.py

Shows that scripts and traces give the bits of eager code, that a file which only PyTorch wrote is converted and
explained line by line, and that what is saved runs in a process that never imports Narrowcast.
"""

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import minilm
from transformers.utils import logging

import narrowcast as nc

BF16 = torch.bfloat16
RUN = """
import sys, torch
y = torch.jit.load(sys.argv[1])(torch.ones(1, 4, 8))
print(y.dtype, "with Narrowcast" if "narrowcast" in sys.modules else "without Narrowcast")
"""


class Decoder(nn.Module):
    """Steps until it is sure; its scores are computed in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, steps, 8) in fp32; returns the same shape in bf16."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(5):
                x = torch.tanh(self.cell(x))
                with torch.autocast("cpu", enabled=False):
                    score = self.score(x.float())
                if bool(score.mean() > 0.5):
                    break
            return x


def says(equal: bool) -> str:
    """In words."""
    return "the bits of eager code" if equal else "OTHER BITS than eager code"


def main() -> None:
    """Print all of it."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.manual_seed(0)
    decoder, x = Decoder(), torch.randn(3, 4, 8)
    print(f"nc.script, a loop left inside two regions: {says(torch.equal(nc.script(decoder)(x), decoder(x)))}")

    case = minilm.case(documents=4)
    model = case.model
    model.config.return_dict = False
    inputs = (case.inputs["input_ids"], case.inputs["attention_mask"])
    with torch.no_grad(), nc.autocast("cpu", BF16):
        expected = model(*inputs)
        traced = nc.trace(model, inputs)
    with torch.no_grad():
        print(f"nc.trace, MiniLM under a region: {says(all(map(torch.equal, traced(*inputs), expected)))}")

    with tempfile.TemporaryDirectory() as folder:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
        torch.jit.script(model).save(f"{folder}/plain.pt")
        plain = torch.jit.load(f"{folder}/plain.pt")
        converted = nc.script(plain, under="bf16")
        converted.save(f"{folder}/low.pt")
        done = subprocess.run(
            [sys.executable, "-c", RUN, f"{folder}/low.pt"], capture_output=True, text=True, check=True
        )
        print(f"nc.script, a file, loaded in another process: {done.stdout.strip()}")
        casts = nc.explain(plain, (torch.ones(1, 4, 8),), under="bf16", front_end="script").ledger.casts
    print(f"  {len(casts)} casts, the first of them:")
    for cast in casts[:4]:
        site = f"{cast.module_path}, {Path(cast.file).name}:{cast.line}"
        print(f"    {cast.op} {cast.argument}: {cast.src} -> {cast.dst} in {site}, {cast.reason}")


if __name__ == "__main__":
    main()
