"""`narrowcast repair`, as a user runs it."""

import json

import pytest

import narrowcast as nc

SUBJECT = """
import torch
import narrowcast as nc

class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.first(x).masked_fill(x > 1, -1e9).tanh())

def case():
    torch.manual_seed(0)
    return nc.Case(Masked().eval(), (torch.randn(4, 8),), name="masked")

def measured():
    made = case()
    with torch.no_grad():
        best = made.model(*made.inputs)
    def off(model):
        return float((model(*made.inputs) - best).abs().max())
    return nc.Case(made.model, made.inputs, evaluate=off, name="measured")

def broken():
    made = case()
    return nc.Case(lambda x: made.model(x) @ torch.ones(3, 3), made.inputs, name="broken")
"""


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "masked.py"
    file.write_text(SUBJECT)
    return file


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('# mine\nname = "mine"\nlow = "fp16"\n\n[[rule]]\nop = "aten.gelu"\naction = "full"\n')
    return file


def test_a_policy_is_repaired_into_another_file(cli, target, mine, tmp_path):
    """`--policy-out` receives the rules, the original is untouched, and the result needs no further repair."""
    before = mine.read_text()
    code, out, err = cli("repair", target, "--under", mine, "--policy-out", tmp_path / "fixed.toml",
                         "-o", tmp_path / "repair.json", "--html", tmp_path / "page.html")  # fmt: skip
    assert '"kind":"repair"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert (code, err) == (0, "") and "VERDICT: Repaired: raises RuntimeError" in out and "wrote" in out
    assert mine.read_text() == before
    fixed = nc.Policy.load(tmp_path / "fixed.toml")
    assert (fixed.name, str(fixed.rules[-1])) == ("fixed", "aten.masked_fill.Scalar: full")
    assert "# mine" in (tmp_path / "fixed.toml").read_text() and fixed.rules[-1].reason
    code, again, _ = cli("show", tmp_path / "repair.json")
    assert code == 0 and again.strip() in out and len(again.splitlines()) <= 25
    assert "under mine" in cli("show", tmp_path / "repair.json", "--all")[1]
    code, out, _ = cli("repair", target, "--under", tmp_path / "fixed.toml")
    assert code == 0 and "VERDICT: Nothing to repair" in out


def test_the_user_s_own_file_is_written_to_only_by_force(cli, target, mine, tmp_path):
    """Its path is recognized however it is spelled, and only `--force` lets the repair replace it."""
    before = mine.read_text()
    command = ("repair", target, "--under", mine, "--policy-out", tmp_path / "." / "mine.toml")
    code, out, err = cli(*command)
    assert (code, out) == (2, "") and "holds the policy that is to be repaired" in err and mine.read_text() == before
    code, _, _ = cli(*command, "--force")
    assert code == 0 and "masked_fill" in mine.read_text()


def test_a_budget_and_the_case_s_evaluation_are_asked(cli, target):
    """`--budget` limits the error of the output, and `--tolerance` the loss of the case's own metric."""
    code, out, _ = cli("repair", target, "--under", "bf16", "--budget", "60 dB", "--json")
    found = json.loads(out)
    assert code == 0 and found["schema"] == "narrowcast.repair/2"
    assert found["before"]["error"] > 1e-3 >= found["after"]["error"]
    code, out, _ = cli("repair", f"{target}:measured", "--under", "bf16", "--lower-is-better", "--tolerance", "0")
    assert code == 0 and "metric at most 0 above fp32's" in out


def test_a_model_that_raises_in_fp32_is_a_crash_as_with_other_commands(cli, target, tmp_path):
    """It leaves no policy file."""
    code, _, err = cli("repair", f"{target}:broken", "--policy-out", tmp_path / "fixed.toml")
    assert code == 3 and "Raised in fp32, too: no policy is to blame." in err
    assert not (tmp_path / "fixed.toml").exists()


def test_bad_input_is_said_before_anything_runs(cli, target, tmp_path):
    """A missing folder, an unknown policy and a budget that is no error each exit with 2."""
    code, _, err = cli("repair", target, "--policy-out", tmp_path / "nowhere" / "fixed.toml")
    assert code == 2 and "its folder does not exist" in err
    assert cli("repair", target, "--under", "nowhere.toml")[0] == 2
    assert cli("repair", target, "--budget", "loud")[0] == 2
