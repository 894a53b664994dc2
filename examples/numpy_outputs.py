"""Two models that native autocast breaks, fixed by one rule from outside.

    python examples/numpy_outputs.py

MTCNN finds faces, Resemblyzer tells voices apart; their own code calls `.numpy()` on what their networks return, and
numpy has no bf16. A rule about the networks' results, in examples/policies/numpy_outputs.toml, is enough: no line of
theirs is touched, and the networks still compute in bf16. Weights come with the packages, the photograph with
scikit-image; the voices are synthetic. Nothing is downloaded.
"""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import narrowcast as nc

POLICY = Path(__file__).parent / "policies/numpy_outputs.toml"


def stand_in(name: str, **contents: object) -> None:
    """A module that a package imports, with the little of it that is used here, where the real one is not installed."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules.setdefault(name, module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, sys.modules[name])


def batched_nms(boxes: torch.Tensor, scores: torch.Tensor, groups: torch.Tensor, threshold: float) -> torch.Tensor:
    """Non-maximum suppression within each group: the boxes to keep, best first. boxes: (n, 4), x1 y1 x2 y2."""
    shifted = boxes + groups[:, None].to(boxes) * (boxes.max() + 1 if len(boxes) else 1)
    area = (shifted[:, 2:] - shifted[:, :2]).prod(1)
    order, kept = scores.argsort(descending=True), []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        corners = (
            torch.maximum(shifted[best, :2], shifted[order, :2]),
            torch.minimum(shifted[best, 2:], shifted[order, 2:]),
        )
        shared = (corners[1] - corners[0]).clamp(min=0).prod(1)
        order = order[shared / (area[best] + area[order] - shared) <= threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.long)


def melspectrogram(y: np.ndarray, sr: int, n_fft: int, hop_length: int, n_mels: int) -> np.ndarray:
    """Power in mel bands, (n_mels, frames): triangles on Slaney's scale, as librosa has them."""

    def to_mel(hz: float) -> float:
        return hz * 3 / 200 if hz < 1000 else 15 + 27 * np.log(hz / 1000) / np.log(6.4)

    mels = np.linspace(0, to_mel(sr / 2), n_mels + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(np.log(6.4) / 27 * (mels - 15)))
    bins = np.fft.rfftfreq(n_fft, 1 / sr)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    bands = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    window = torch.hann_window(n_fft)
    spectrum = torch.stft(
        torch.from_numpy(y), n_fft, hop_length, window=window, pad_mode="constant", return_complex=True
    )
    return bands @ spectrum.abs().pow(2).numpy()


def faces() -> tuple[torch.nn.Module, Image.Image]:
    """The detector, and a photograph with one face."""
    for name in ("requests", "requests.adapters", "torchvision", "torchvision.transforms", "torchvision.ops"):
        stand_in(name, HTTPAdapter=None)
    stand_in("torchvision.transforms.functional")
    stand_in("torchvision.ops.boxes", batched_nms=batched_nms)
    from facenet_pytorch.models.mtcnn import MTCNN

    photographs = Path(importlib.util.find_spec("skimage").origin).parent / "data"
    return MTCNN(keep_all=True, device="cpu"), Image.open(photographs / "astronaut.png").convert("RGB")


def voices() -> tuple[torch.nn.Module, list[np.ndarray]]:
    """The encoder, and four utterances of two seconds: two of a low voice, two of a high one."""
    stand_in("webrtcvad")
    stand_in("librosa")
    stand_in("librosa.feature", melspectrogram=melspectrogram)
    from resemblyzer import VoiceEncoder

    time = np.arange(32000) / 16000
    utterances = []
    for pitch, formants in ((110, (700, 1200)), (115, (500, 1000)), (215, (850, 1700)), (220, (600, 1900))):
        harmonics = np.arange(1, 30) * pitch
        loudness = sum(np.exp(-(((harmonics - f) / 200) ** 2)) for f in formants) + 0.02
        vibrato = 2 * np.pi * np.cumsum(1 + 0.01 * np.sin(2 * np.pi * 5 * time)) / 16000
        wave = sum(a * np.sin(h * vibrato) for h, a in zip(harmonics, loudness, strict=True))
        utterances.append((wave / np.abs(wave).max() * 0.3).astype("f4"))
    return VoiceEncoder("cpu", verbose=False), utterances


def main() -> None:
    """Each model in fp32, under native autocast, and under the rule."""
    print(POLICY.read_text())
    detector, photograph = faces()
    encoder, utterances = voices()

    def find_face() -> str:
        boxes, probabilities = detector.detect(photograph)
        return f"face at {[round(float(v)) for v in boxes[0]]}, probability {probabilities[0]:.4f}"

    def compare_voices() -> str:
        low, low_again, high, high_again = (encoder.embed_utterance(wave) for wave in utterances)
        return f"same voice {(low @ low_again + high @ high_again) / 2:.3f}, other voice {low @ high:.3f}"

    regions = {
        "fp32": nc.autocast("cpu", enabled=False),
        "native bf16": torch.autocast("cpu"),
        "one rule, bf16": nc.autocast("cpu", policy=POLICY),
    }
    for task in (find_face, compare_voices):
        for name, region in regions.items():
            try:
                with region:
                    found = task()
            except (TypeError, RuntimeError) as error:  # a RuntimeError where the processor has no bf16 LSTM
                found = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:90]}"
            print(f"{name:15} {found}")
        if "Error" in found:  # under the rule, which is tried last
            sys.exit(1)
    with nc.record() as ledger, regions["one rule, bf16"]:
        find_face()
        compare_voices()
    formats = ledger.op_formats()
    for op in ("aten.conv2d.default", "aten.linear.default", "aten.mkldnn_rnn_layer.default"):
        print(f"{op:31} calls by format: {formats.get(op)}")


if __name__ == "__main__":
    main()
