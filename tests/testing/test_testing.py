"""`narrowcast.testing`: formats, casts, front ends and numbers that users hold in tests of their own."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import CheckError, CheckWarning, NarrowcastError, RunError, SnapshotError
from narrowcast.testing import (
    assert_close_to,
    assert_finite,
    assert_formats,
    assert_front_ends_agree,
    assert_no_new_casts,
    check_formats,
    take_snapshot,
)

ROOT = Path(__file__).parents[2]
POLICY = """
name = "mine"

[[rule]]
op = "aten.linear"
action = "full"
module = "blocks.0"
reason = "long inputs overflow"
"""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(8, 8)

    def forward(self, x):
        scores = self.dense(x) @ x.transpose(-1, -2)
        weights = torch.softmax(scores, -1)
        return weights @ x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


X = torch.ones(2, 4, 8) / 8


@pytest.fixture
def updating(monkeypatch):
    """Snapshots are written inside the block."""

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setenv("NARROWCAST_UPDATE", "1")
            yield

    monkeypatch.delenv("NARROWCAST_UPDATE", raising=False)
    return block


@pytest.fixture
def held(net, tmp_path):
    """A snapshot of the model, written."""
    file = tmp_path / "formats" / "net.txt"
    check_formats(net, (X,), snapshot=file, update=True)
    return file


def lines(file):
    return [line for line in file.read_text().splitlines() if " | " in line and not line.startswith("#")]


# -- formats -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_has_a_line_for_each_call_and_holds(net, held):
    """All nine calls are listed in order with their casts, and the same model passes against the file."""
    assert lines(held) == [
        "blocks.0.dense aten.linear.default #1 | fp32 -> bf16 -> bf16 | lower: input, weight, bias",
        "blocks.0 aten.matmul.default #1 | bf16,fp32 -> bf16 -> bf16 | lower: other",
        "blocks.0 aten._softmax.default #1 | bf16 -> bf16 -> bf16 | no rule",
        "blocks.0 aten.matmul.default #2 | bf16,fp32 -> bf16 -> bf16 | lower: other",
        "blocks.1.dense aten.linear.default #1 | bf16,fp32 -> bf16 -> bf16 | lower: weight, bias",
        "blocks.1 aten.matmul.default #1 | bf16 -> bf16 -> bf16 | lower",
        "blocks.1 aten._softmax.default #1 | bf16 -> bf16 -> bf16 | no rule",
        "blocks.1 aten.matmul.default #2 | bf16 -> bf16 -> bf16 | lower",
        "head aten.linear.default #1 | bf16,fp32 -> bf16 -> bf16 | lower: weight, bias",
    ]
    found = assert_formats(net, (X,), snapshot=held)
    assert [str(c.id) for c in found.calls][-1] == "head aten.linear.default #1"
    assert found.gradients and "gradients on" in held.read_text()


def test_a_file_is_shown_by_its_path_from_the_current_folder(net, held, monkeypatch):
    """Messages have a relative path with a line number, which terminals and editors can open."""
    monkeypatch.chdir(held.parent.parent)
    with pytest.raises(CheckError, match=r"from formats/net\.txt: .*(?s:.)*    formats/net\.txt:12"):
        assert_formats(net, (X,), under="fp16", snapshot=held)


def test_a_snapshot_that_is_not_there_is_never_written_unasked(net, tmp_path, updating):
    """A continuous integration that begins without one must not pass."""
    file = tmp_path / "net.txt"
    with pytest.raises(SnapshotError, match="Write it once with pytest --narrowcast-update"):
        assert_formats(net, (X,), snapshot=file)
    assert not file.exists()
    with updating():
        assert_formats(net, (X,), snapshot=file)
    assert_formats(net, (X,), snapshot=str(file))


def test_a_failure_names_call_formats_rule_with_its_place_and_the_model_s_line(net, held, tmp_path, updating):
    """And leaves the file as it is; an update then writes what is."""
    policy, before = tmp_path / "mine.toml", held.read_text()
    policy.write_text(POLICY)
    with pytest.raises(AssertionError) as caught:
        assert_formats(net, (X,), under=str(policy), snapshot=held)
    text = str(caught.value)
    line = Block.forward.__code__.co_firstlineno + 1
    assert text.startswith(f"formats: Net on cpu differs from {held}: 2 changed (9 calls)\n\nchanged  ")
    assert (
        "changed  blocks.0.dense aten.linear.default #1\n"
        f"  was    fp32 -> bf16 -> bf16 | lower: input, weight, bias    {held}:12\n"
        "  now    fp32 -> fp32 -> fp32 | full\n"
        f"  rule   aten.linear in blocks.0: full ({policy}:5)\n"
        "         because long inputs overflow\n"
        f"  at     {__file__}:{line}\n"
    ) in text
    assert "follows  blocks.0 aten.matmul.default #1\n" in text and "builtin/native_cpu.toml:" in text
    assert re.search(r"the policy was native \(\w{8}\) and is mine \(\w{8}\)", text)
    assert "pytest --narrowcast-update" in text.splitlines()[-1]
    assert held.read_text() == before
    with updating():
        assert_formats(net, (X,), under=str(policy), snapshot=held)
    assert_formats(net, (X,), under=str(policy), snapshot=held)


def test_devices_that_this_machine_lacks_have_sections_of_their_own(net, held, updating):
    """Under their lists, in their low format; an update of one leaves the other."""
    with pytest.raises(SnapshotError, match="holds cpu with torch"):
        assert_formats(net, (X,), device="cuda", snapshot=held)
    with updating():
        assert_formats(net, (X,), device="cuda", snapshot=held)
    assert_formats(net, (X,), snapshot=held)
    assert_formats(net, (X,), device="cuda", snapshot=held)
    assert "blocks.0 aten.softmax.int #1 | fp16 -> fp32 -> fp32 | full_set_dtype: self" in lines(held)
    with pytest.raises(CheckError, match="the low format was fp16 and is bf16"):
        assert_formats(net, (X,), under="bf16", device="cuda", snapshot=held)


def test_versions_of_torch_for_which_a_snapshot_holds(net, held, tmp_path, updating):
    """A range is kept as given and checked; otherwise an update adds this version to those that are listed."""
    wide, text = tmp_path / "wide.txt", held.read_text()
    check_formats(net, (X,), snapshot=wide, torch_versions=">=2.11,<3", update=True)
    assert "\ntorch >=2.11,<3\n" in wide.read_text()
    assert_formats(net, (X,), snapshot=wide)
    with pytest.raises(SnapshotError, match="this is torch"):
        assert_formats(net, (X,), snapshot=wide, torch_versions="<2.11")
    held.write_text(re.sub(r"(?m)^torch .*", "torch 2.9", text))
    with pytest.raises(SnapshotError, match=r"holds cpu with torch 2\.9"):
        assert_formats(net, (X,), snapshot=held)
    with updating():
        assert_formats(net, (X,), snapshot=held)
    assert "\ntorch 2.9 or 2." in held.read_text(), "seen to be the same under this one, too"


def test_an_update_keeps_a_file_that_is_not_ours_or_broken(net, tmp_path, updating):
    """Even an update never overwrites a file whose first line is not that of a snapshot."""
    file = tmp_path / "notes.txt"
    file.write_text("shopping: milk\n")
    with updating(), pytest.raises(SnapshotError, match="begins with 'shopping"):
        assert_formats(net, (X,), snapshot=file)
    assert file.read_text() == "shopping: milk\n"


def test_a_table_in_the_test_or_another_model_is_held_too(net):
    """Ops, identities and patterns map to strings, dtypes or formats, and a snapshot may be passed itself."""
    table = {"aten.linear": "bf16", "blocks.1 aten.matmul.default #2": torch.bfloat16, "head aten.*": nc.formats.bf16}
    assert len(assert_formats(net, (X,), expected=table).calls) == 9
    with pytest.raises(CheckError, match=r"'head aten\.linear' is to compute in fp32: 1 call does not"):
        assert_formats(net, (X,), expected={"head aten.linear": "fp32"})
    with pytest.raises(CheckError, match="no call is one of these"):
        assert_formats(net, (X,), expected={"tail aten.linear": "bf16"})
    other = take_snapshot(Net(), (X,))
    assert assert_formats(net, (X,), expected=other) == other
    with pytest.raises(CheckError, match="differs from the snapshot of Net"):
        assert_formats(net, (X,), under="fp16", expected=other)


def test_what_cannot_be_held_is_said(net, held):
    """Missing or double expectations, models that raise and ones without floating tensors have errors of their own."""
    with pytest.raises(SnapshotError, match="neither is given"):
        assert_formats(net, (X,))
    with pytest.raises(SnapshotError, match="both are given"):
        assert_no_new_casts(net, (X,), snapshot=held, expected=take_snapshot(net, (X,)))
    with pytest.raises(RunError, match="a tuple of arguments"):
        assert_formats(net, 3.0, snapshot=held)

    class Mixes(torch.nn.Module):
        def forward(self, x):
            return torch.addmm(x @ x, x, x).lerp_(x, 0.5)

    with pytest.raises(CheckError, match="torch raises here under native, and not in fp32"):
        take_snapshot(Mixes(), (torch.ones(4, 4),))
    with pytest.raises(CheckError, match="no call with floating tensors was seen"):
        take_snapshot(lambda x: x.tolist(), (torch.ones(2, dtype=torch.long),))
    refusing = nc.Policy.native().with_rules(nc.Rule("aten.matmul", "refuse", reason="no products here"))
    with pytest.raises(CheckError, match="no products here"):
        take_snapshot(net, (X,), under=refusing)


def test_calls_that_are_alike_are_a_line_with_their_number():
    """A cell called three times in a loop has one line for its linear and one for its cast, each with 3."""

    class Cell(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).float()

    class Loop(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell(8, 8)

        def forward(self, x, times):
            for _ in range(times):
                x = self.cell(x)
            return x

    (linear, back) = take_snapshot(Loop(), ((X,), {"times": 3})).calls
    assert (linear.times, linear.casts, back.times, back.casts) == (3, ("input", "weight", "bias"), 3, ("self",))


def test_a_snapshot_needs_no_weights_and_leaves_the_model_as_it_is(net, held):
    """A model on the meta device has the same calls, and neither gradients nor random numbers are touched."""
    with torch.device("meta"):
        big = Net()
    assert take_snapshot(big, (X.to("meta"),)).calls == take_snapshot(net, (X,)).calls
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert_formats(net, (X,), snapshot=held)
    assert torch.rand(1) == expected and all(p.grad is None for p in net.parameters())


def test_new_casts_fail_and_fewer_do_not(net, held, tmp_path):
    """Another low format casts the same arguments; keeping the head in fp32 adds a cast of its low input."""
    fewer = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="head"))
    low = nc.Policy.native().with_rules(nc.Rule("aten.softmax", "full"))
    assert_no_new_casts(net, (X,), snapshot=held)
    with pytest.raises(CheckError, match="differs from"):
        assert_formats(net, (X,), under="fp16", snapshot=held)
    assert_no_new_casts(net, (X,), under="fp16", snapshot=held)
    with pytest.raises(CheckError, match="casts what it did not cast in") as caught:
        assert_no_new_casts(net, (X,), under=low, snapshot=held)
    assert "now    bf16 -> fp32 -> fp32 | full: self" in str(caught.value)
    with pytest.raises(CheckError, match=r"head aten\.linear"):
        assert_no_new_casts(net, (X,), under=fewer, snapshot=held), "its input comes low, and is cast up"


def test_a_conversion_that_the_model_makes_is_a_new_cast(net):
    """The `.float()` of a forward hook is reported as the `_to_copy` that it runs."""
    before = take_snapshot(net, (X,))
    net.head.register_forward_hook(lambda module, args, output: output.float())
    with pytest.raises(CheckError, match=r"head aten\._to_copy\.default #1"):
        assert_no_new_casts(net, (X,), expected=before)


# -- front ends --------------------------------------------------------------------------------------------------------


def test_all_front_ends_agree(net, fresh_dynamo):
    """compile, export and script each give eager's nine calls with equal formats, and none is left out."""
    found = assert_front_ends_agree(net, (X,), under="bf16")
    assert found.calls == {"compile": 9, "export": 9, "script": 9}
    assert not found.not_taken and not found.disagreements and not found.as_a_whole


def test_results_that_are_cast_back_are_results_all_the_same(fresh_dynamo):
    """In eager code by the call, in graphs and scripts by a conversion behind it."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Sigmoid(), torch.nn.ReLU())
    policy = nc.Policy.native().with_rules(nc.Rule("aten.sigmoid", "inside"))
    found = assert_front_ends_agree(model, (torch.randn(4, 16),), under=policy)
    assert found.calls == {"compile": 3, "export": 3, "script": 3} and not found.disagreements


class Elsewhere(Net):
    """Code that computes otherwise where it is compiled."""

    def forward(self, x):
        x = self.blocks[0](x)
        x = torch.sigmoid(x.float() if torch.compiler.is_compiling() else x)
        return self.head(x)


def test_a_front_end_that_computes_otherwise_is_named_with_the_call(fresh_dynamo):
    """A cast behind is_compiling() is reported with both formats, the rule and the source line."""
    with pytest.raises(CheckError) as caught:
        assert_front_ends_agree(Elsewhere(), (X,), front_ends=["compile"])
    line = Elsewhere.forward.__code__.co_firstlineno + 2
    assert str(caught.value).startswith("formats of Elsewhere: 1 of 6 calls compute otherwise in compile than in eager")
    assert (
        "aten.sigmoid.default #1\n"
        "  eager    bf16 -> bf16\n"
        "  compile  fp32 -> fp32\n"
        "  rule     no rule names this op: it follows its input dtype\n"
        f"  at       {__file__}:{line}"
    ) in str(caught.value)


def squared(x):
    return x @ x.T


def test_a_front_end_that_cannot_be_taken_says_so(fresh_dynamo):
    """With a warning where all are tried, as a failure where it was named or nothing is left."""
    with pytest.warns(CheckWarning, match=r"squared that were not compared: export: .*not a Module"):
        found = assert_front_ends_agree(squared, (X[0],))
    assert found.calls == {"compile": 1, "script": 1} and list(found.not_taken) == ["export"]
    with pytest.raises(CheckError, match="export cannot be taken"):
        assert_front_ends_agree(squared, (X[0],), front_ends=["export"])
    with pytest.raises(NarrowcastError, match="there is no front end 'fx'"):
        assert_front_ends_agree(squared, (X[0],), front_ends=["fx"])

    disabled = torch.compiler.disable(squared)

    def left_to_python(x):
        return disabled(x)

    with pytest.raises(CheckError, match=r"compile: .*ran as eager code"):
        assert_front_ends_agree(left_to_python, (X[0],), front_ends=["compile"])


# -- numbers -----------------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.dense, self.by = torch.nn.Linear(8, 8), by

    def forward(self, x):
        return self.dense(x) * self.by


def test_values_that_are_not_finite_are_found_with_who_made_them():
    """What overflows in fp16 passes in bf16, and gradients are looked at only if backward=True asks for it."""
    torch.manual_seed(0)
    assert_finite(Scaled(1e6), (X,), under="bf16", backward=True)
    with pytest.raises(CheckError, match=r"infinity made by aten\.mul\.Tensor #1") as caught:
        assert_finite(Scaled(1e6), (X,), under="fp16")
    line = Scaled.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in str(caught.value) and "in fp32, on the same inputs, it is finite" in str(
        caught.value
    )

    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return (x * self.scale).sqrt().sum()

    assert_finite(Root(), (X,))
    with pytest.raises(CheckError, match="backward"):
        assert_finite(Root(), (X,), backward=True)


def test_outputs_are_held_to_a_budget_and_the_calls_to_blame_are_named(net):
    """Errors within the budget are returned; beyond it, the calls that add most of the error are listed."""
    (error,) = assert_close_to(net, (X,), under="bf16", budget=0.05)
    assert 0 < error.relative_error < 0.05
    assert_close_to(net, (X,), under=nc.Policy("nothing", extends=()), budget=0)
    assert_close_to(net, (X,), budget=0.05, reference="fp64")
    with pytest.raises(CheckError, match="1 of 1 output is further off under policy native") as caught:
        assert_close_to(net, (X,), budget=1e-6)
    assert "what adds most of it:" in str(caught.value) and "aten.linear.default #1" in str(caught.value)
    with pytest.raises(CheckError, match=r"1e-06 of Net"):
        assert_close_to(net, (X,), budget=1e-6, reference=Net())


def test_a_budget_and_a_reference_that_make_no_sense_are_refused(net):
    """Negative, NaN and infinite budgets, unknown references and outputs without a partner raise errors."""
    for budget in (-1, float("nan"), float("inf")):
        with pytest.raises(NarrowcastError, match="no relative error"):
            assert_close_to(net, (X,), budget=budget)
    with pytest.raises(NarrowcastError, match="no such reference"):
        assert_close_to(net, (X,), budget=1, reference="fp8")
    with pytest.raises(CheckError, match="0 of 1 floating outputs have a partner"):
        assert_close_to(net, (X,), budget=1, reference=lambda x: x)
    with pytest.raises(CheckError, match="0 of 0 floating outputs"):
        assert_close_to(lambda x: x > 0, (X,), budget=1)


# -- pytest ------------------------------------------------------------------------------------------------------------

USERS_TEST = """
import pytest
import torch
from narrowcast.testing import assert_formats

class TestModel:
    @pytest.mark.parametrize("device_type", ["cpu", "cuda"])
    def test_formats(self, narrowcast_snapshot, device_type):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        assert_formats(model, (torch.ones(2, 4),), snapshot=narrowcast_snapshot, device=device_type)
"""


@pytest.fixture
def pytest_on(tmp_path, monkeypatch, capsys):
    """Run pytest, in this process, on a user's tests: exit code and what is printed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_users.py").write_text(USERS_TEST)

    def run(*arguments):
        options = [
            "-p",
            "narrowcast.testing.plugin",
            "-p",
            "no:cacheprovider",
            "--capture=no",
            "--import-mode=importlib",
        ]
        code = pytest.main([str(tmp_path), "-c", str(tmp_path / "pytest.ini"), *options, *arguments])
        return int(code), capsys.readouterr().out

    return run


def test_a_user_s_tests_fail_are_updated_and_hold(pytest_on, tmp_path):
    """An update writes one file per case, and a later mismatch is shown at the user's line without our frames."""
    code, out = pytest_on()
    assert code == 1 and "2 failed" in out and "Write it once with pytest --narrowcast-update" in out
    assert "narrowcast/testing/formats.py" not in out, "no frames of ours in the traceback"
    code, out = pytest_on("--narrowcast-update")
    assert code == 0 and "formats were not compared; snapshots that differ were rewritten" in out
    assert "NARROWCAST_UPDATE" not in os.environ
    written = sorted((tmp_path / "formats" / "test_users").iterdir())
    assert [file.name for file in written] == ["TestModel.test_formats-cpu.txt", "TestModel.test_formats-cuda.txt"]
    code, out = pytest_on()
    assert code == 0 and "2 passed" in out and "written again" not in out
    written[1].write_text(written[1].read_text().replace("fp32 -> fp16 -> fp16", "fp32 -> fp32 -> fp32"))
    code, out = pytest_on()
    assert code == 1 and "1 failed, 1 passed" in out
    assert "E         was    fp32 -> fp32 -> fp32 | lower: input, weight, bias    " in out
    assert f"{tmp_path / 'test_users.py'}:10" in out, "the line of the user's own"
    assert "narrowcast/testing/formats.py" not in out, "no frames of ours in the traceback"


def test_the_plugin_is_installed_and_imports_no_torch():
    """Nor does `import narrowcast` import this room."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = project["entry-points"]["pytest11"]["narrowcast"]
    assert importlib.import_module(name).pytest_addoption
    code = (
        f"import narrowcast, sys; assert 'narrowcast.testing' not in sys.modules; import {name}; "
        "assert not {'torch', 'numpy', 'scipy'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
