"""Scripts and traces of real models: equal to eager code, bit for bit; a deployed script converted.

    python tests/conformance/scripts.py

traces:  MiniLM and EfficientNet-Lite0 traced under a region with the weight cache on, which torch refuses
         (pytorch/pytorch#50231): outputs, every gradient and dtype against eager code, also from a saved file.
scripts: the models that TorchScript compiles, in a region.
silero:  silero-vad, a script with state that exists as a file only: its AUC over pyannote's sample recording before and
         after, and its casts with the lines of the code that it was made of.
"""

import copy
import sys
import tempfile
import warnings
import wave
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

sys.path.insert(0, str(Path(__file__).parent))
import models

import narrowcast as nc

RATE, CHUNK = 16000, 512


def outcome(function, model, inputs):
    """Outputs and gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(0)
    found = [y for y in torch.utils._pytree.tree_leaves(function(*inputs)) if isinstance(y, torch.Tensor)]
    torch.stack([y.double().tanh().sum() for y in found if y.requires_grad]).sum().backward()
    return found, [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def differences(expected, found):
    """How many outputs and gradients are not the same bits in the same dtype."""
    pairs = [*zip(expected[0], found[0], strict=True), *zip(expected[1], found[1], strict=True)]
    return sum(
        (a is None) != (b is None) or (a is not None and (a.dtype != b.dtype or not torch.equal(a, b)))
        for a, b in pairs
    )  # fmt: skip


def as_tuples(name):
    """A model in evaluation and its inputs by position."""
    model, inputs, kwargs = getattr(models, name)()
    model.eval()
    if kwargs:
        inputs = (kwargs["input_ids"], kwargs["attention_mask"])
        model.config.return_dict = False
    return model, inputs


def compare(name, how):
    """A line of the table; returns the number of differences."""
    model, inputs = as_tuples(name)

    def eager(*inputs):
        with nc.autocast("cpu", torch.bfloat16):
            return model(*inputs)

    expected = outcome(eager, model, inputs)
    refused = ""
    if how == "trace":
        with nc.autocast("cpu", torch.bfloat16):
            model(*inputs)
            made = nc.trace(model, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            try:
                model(*inputs)
                torch.jit.trace(model, inputs)
            except RuntimeError as error:
                refused = f"; torch: {str(error).strip().splitlines()[0][:60]}"
    else:
        made = nc.script(copy.deepcopy(model), under="bf16")
        made.load_state_dict(model.state_dict())
    owner = made if how == "script" else model
    wrong = sum(differences(expected, outcome(made, owner, inputs)) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        torch.jit.save(made, f"{folder}/m.pt")
        loaded = torch.jit.load(f"{folder}/m.pt")
    with torch.no_grad():
        again = [y for y in torch.utils._pytree.tree_leaves(loaded(*inputs)) if isinstance(y, torch.Tensor)]
    wrong += sum(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(expected[0], again, strict=True))
    count = len(expected[0]) + sum(g is not None for g in expected[1])
    print(f"{how:7} {name:14} {wrong} differences in {count} tensors x 3 runs and a saved file{refused}")
    return wrong


def recording():
    """Samples and, for each chunk, whether somebody speaks."""
    folder = models.package_folder("pyannote.audio") / "sample"
    with wave.open(str(folder / "sample.wav")) as file:
        assert file.getframerate() == RATE
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16).astype("float32") / 32768
    speech = np.zeros(len(samples) // CHUNK, bool)
    for line in (folder / "sample.rttm").read_text().splitlines():
        if line.strip():
            start, length = (float(part) * RATE / CHUNK for part in line.split()[3:5])
            speech[int(start) : int(np.ceil(start + length))] = True
    return torch.from_numpy(samples), speech


def silero():
    """AUC before and after; returns whether it held."""
    file = models.package_folder("silero_vad") / "data/silero_vad.jit"
    script = torch.jit.load(file).eval()
    converted = nc.script(script, under="bf16")
    samples, speech = recording()
    aucs = []
    for model in (script, converted):
        model.reset_states()
        with torch.no_grad():
            chunks = [samples[n * CHUNK : (n + 1) * CHUNK] for n in range(len(speech))]
            scores = torch.stack([model(chunk, RATE).reshape(()) for chunk in chunks])
        aucs.append(roc_auc_score(speech, scores.float().numpy()))
    explained = nc.explain(script, under="bf16", front_end="script")
    casts = [cast for cast in explained.ledger.casts if cast.how == "copied"]
    placed = sum(bool(cast.file and cast.line) for cast in casts)
    print(f"silero  AUC {aucs[0]:.5f} in fp32, {aucs[1]:.5f} in bf16; {len(casts)} casts, {placed} with their lines:")
    for line in sorted({f"{Path(c.file).name}:{c.line} {c.op} {c.argument} in {c.module_path}" for c in casts})[:5]:
        print(f"          {line}")
    return abs(aucs[0] - aucs[1]) < 0.001 and placed == len(casts)


def main():
    """All parts; exits with 1 if one differs."""
    warnings.simplefilter("ignore")
    wrong = [f"trace {name}" for name in ("minilm", "effnet_lite0", "crepe_tiny") if compare(name, "trace")]
    wrong += [f"script {name}" for name in ("mnist_cnn", "unet") if compare(name, "script")]
    wrong += [] if silero() else ["silero"]
    print(f"DIFFERENT: {', '.join(wrong)}" if wrong else "all the same")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
