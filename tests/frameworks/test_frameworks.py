"""The plugins in the frameworks themselves; `make frameworks` runs this, in environments that have them.

Each example trains beside the plain loop and stops with an error if a bit of a loss differs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from narrowcast.errors import TrainingError
from narrowcast.integrations.accelerate import AcceleratePrecision
from narrowcast.integrations.lightning import FabricPrecision, LightningPrecision
from narrowcast.integrations.training import TrainingPrecision
from narrowcast.integrations.transformers import PrecisionMixin

FOLDER = Path(__file__).parents[2] / "examples/frameworks"
ALONE = {
    "lightning": ("lightning_digits.py", {}),
    "pytorch_lightning": ("lightning_digits.py", {"NARROWCAST_LIGHTNING": "pytorch_lightning"}),
    "fabric": ("fabric_digits.py", {}),
    "lightning_fabric": ("fabric_digits.py", {"NARROWCAST_FABRIC": "lightning_fabric"}),
    "transformers": ("transformers_text.py", {}),
    "accelerate": ("accelerate_digits.py", {}),
    "ignite": ("ignite_digits.py", {}),
    "loop": ("loop_digits.py", {}),
}
TWO = ("lightning", "pytorch_lightning", "accelerate")


def run(settings, *command):
    done = subprocess.run(
        [sys.executable, *command], cwd=FOLDER, env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ALONE)
def test_an_example_has_the_losses_of_the_plain_loop_also_after_a_checkpoint(name, dtype):
    """Bit for bit, with accumulation, a clip, and every fourth step recorded."""
    example, settings = ALONE[name]
    said = run(settings, example, "--dtype", dtype)
    assert "as the plain loop, bit for bit: True; after a checkpoint in the middle: True" in said
    assert "<Ledger: 0 casts" not in said and "<Ledger: " in said


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", TWO)
def test_two_processes_have_the_losses_of_a_plain_loop_under_ddp(name, dtype):
    """gloo, on the cpu; both processes say so."""
    example, settings = ALONE[name]
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(settings, *launch, example, "--dtype", dtype)
    assert said.count("as the plain loop, bit for bit: True; after a checkpoint in the middle: True") == 2


def test_a_loss_that_differs_fails_an_example(tmp_path):
    """The check that the examples make rejects another policy."""
    changed = (FOLDER / "loop_digits.py").read_text().replace("policy=POLICY", 'policy="native"')
    (tmp_path / "changed.py").write_text(changed)
    with pytest.raises(AssertionError, match="losses differ"):
        run({"PYTHONPATH": f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}, str(tmp_path / "changed.py"))


def test_lightning_says_what_to_write_where_both_would_autocast():
    """Its own error, which shows our plugin, and that says it."""
    import lightning

    for kind, plugin in (
        (lightning.Trainer, LightningPrecision(package="lightning", dtype="bf16")),
        (lightning.Fabric, FabricPrecision(package="lightning", dtype="bf16")),
    ):
        with pytest.raises(ValueError, match="leave precision= out"):
            kind(accelerator="cpu", precision="bf16-mixed", plugins=[plugin])


def test_accelerate_and_transformers_that_would_autocast_are_refused(tmp_path):
    """With what to write."""
    import transformers
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(TrainingError, match='Write Accelerator\\(mixed_precision="no"\\)'):
        AcceleratePrecision(Accelerator(mixed_precision="bf16", cpu=True))
    AcceleratorState._reset_state(reset_partial_state=True)

    class Mine(PrecisionMixin, transformers.Trainer):
        pass

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))
    arguments = transformers.TrainingArguments(str(tmp_path), bf16=True, use_cpu=True)
    with pytest.raises(TrainingError, match=r"Write TrainingArguments\(bf16=False\)"):
        Mine(model=model, args=arguments, precision=TrainingPrecision(dtype="bf16"))
    AcceleratorState._reset_state(reset_partial_state=True)
