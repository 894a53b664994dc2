"""`narrowcast check`, as a continuous integration without pytest runs it."""

import json

import pytest

SUBJECT = """
import torch
import narrowcast as nc

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.nn.functional.gelu(self.body(x)))

def case():
    return nc.Case(Net(), (torch.ones(4, 8),), name="a net")
"""
POLICY = """
name = "mine"

[[rule]]
op = "aten.gelu"
action = "full"
reason = "tails matter"
"""


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(SUBJECT)
    (tmp_path / "mine.toml").write_text(POLICY)
    return file


def test_a_snapshot_is_written_and_holds(cli, target, tmp_path):
    """A missing file exits with 2 and suggests `--update`; the file that this writes then passes."""
    file = tmp_path / "formats.txt"
    code, out, err = cli("check", target, "--snapshot", file)
    assert code == 2 and not out and "narrowcast check --update" in err and not file.exists()
    assert cli("check", target, "--snapshot", file, "--update") == (0, f"wrote {file}: 3 calls\n", "")
    assert cli("check", target, "--snapshot", file) == (
        0,
        f"3 calls of a net on cpu: the formats are those of {file}\n",
        "",
    )
    assert "gradients off" in file.read_text()


def test_what_changed_is_shown_and_is_exit_code_1(cli, target, tmp_path):
    """A rule's own change and the one that follows from it are listed, and the snapshot is not rewritten."""
    file, policy, result = tmp_path / "formats.txt", tmp_path / "mine.toml", tmp_path / "check.json"
    cli("check", target, "--snapshot", file, "--update")
    before = file.read_text()
    code, out, err = cli("check", target, "--snapshot", file, "--under", policy, "-o", result)
    assert (code, err) == (1, "") and file.read_text() == before
    assert out.startswith(f"a net on cpu differs from {file}: 2 changed (3 calls)\n\nchanged  aten.gelu")
    assert f"aten.gelu: full ({policy}:5)\n         because tails matter\n  at     {target}:11\n" in out
    data = json.loads(result.read_text())
    assert data["schema"] == "narrowcast.check/1" and data["verdict"] == "changed"
    assert [(c["call"], c["follows"]) for c in data["changes"]] == [
        ("aten.gelu.default #1", False), ("head aten.linear.default #1", True)
    ]  # fmt: skip
    code, printed, _ = cli("check", target, "--snapshot", file, "--under", policy, "--json")
    assert code == 1 and json.loads(printed) == data


def test_new_casts_alone(cli, target, tmp_path):
    """`--new-casts` passes fp16 in place of bf16, and fails for a rule that casts one op more."""
    file, policy = tmp_path / "formats.txt", tmp_path / "mine.toml"
    cli("check", target, "--snapshot", file, "--update")
    assert cli("check", target, "--snapshot", file, "--new-casts", "--under", "fp16")[0] == 0
    code, out, _ = cli("check", target, "--snapshot", file, "--new-casts", "--under", policy)
    assert code == 1 and "casts what it did not cast in" in out


def test_other_devices_and_gradients(cli, target, tmp_path):
    """The file says whether gradients were on; a device has a section of its own."""
    file = tmp_path / "formats.txt"
    cli("check", target, "--snapshot", file, "--update", "--gradients")
    assert "gradients on" in file.read_text()
    assert cli("check", target, "--snapshot", file)[0] == 0 and "gradients on" in file.read_text()
    code, _, err = cli("check", target, "--snapshot", file, "--device", "mps")
    assert code == 2 and "holds cpu with torch" in err
    cli("check", target, "--snapshot", file, "--update", "--device", "mps", "--torch-versions", ">=2.11,<3")
    assert cli("check", target, "--snapshot", file, "--device", "mps")[0] == 0
    assert "\ndevice mps\n" in file.read_text() and "\ntorch >=2.11,<3\n" in file.read_text()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text[: text.rindex("\n", 0, -1) + 1], "cut off, or merged wrongly"),
        (lambda text: text.replace("formats/1", "formats/9"), "'narrowcast.formats/1' is known"),
        (lambda text: "print('hello')", "begins with"),
    ],
)
def test_a_broken_snapshot_is_bad_input(cli, target, tmp_path, spoil, says):
    """A truncated file, an unknown version or other text exits with 2 and its place, even under `--update`."""
    file = tmp_path / "formats.txt"
    cli("check", target, "--snapshot", file, "--update")
    file.write_text(spoil(file.read_text()))
    for more in ((), ("--update",)):
        code, out, err = cli("check", target, "--snapshot", file, *more)
        assert code == 2 and not out and says in err and f"{file}:" in err


STEP = """
import torch
import narrowcast as nc

def case():
    nets = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)) for _ in range(2)]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], 0.1)
    x = torch.ones(4, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(net(x).float().square().mean() for net in nets for _ in range(2))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return loss.detach() + nets[0].eval()(x).sum() + nets[1].double()(x.double()).sum()

    return nc.Case(step, name="a step")
"""


def test_a_snapshot_of_a_training_step_holds_at_once(cli, tmp_path):
    """It runs with gradients, as a step does; and calls of two models, or of an evaluation, are told apart."""
    script, file = tmp_path / "step.py", tmp_path / "formats.txt"
    script.write_text(STEP)
    code, _, err = cli("check", script, "--snapshot", file, "--update")
    assert (code, err) == (0, "")
    assert "gradients on" in file.read_text()
    code, out, err = cli("check", script, "--snapshot", file)
    assert (code, err) == (0, ""), out
