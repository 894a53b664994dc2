"""The command line, as a user runs it: exit codes, messages, no tracebacks."""

import json
import re
import subprocess
import sys

import pytest

from narrowcast.cli import main

SUBJECT = """
import torch
import narrowcast as nc

def case():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    return nc.Case(model, (torch.ones(2, 8),), evaluate=lambda m: float(m(torch.ones(2, 8)).sum()), name="tiny")

def other():
    return 3

def leaving():
    raise SystemExit(3)

def no_model():
    return nc.Case(5)

def failing():
    raise KeyError("weights")
"""


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "tiny.py"
    file.write_text(SUBJECT)
    return file


def test_explain_shows_ops_casts_and_totals(cli, target):
    """The main job."""
    code, out, err = cli("explain", target, "--all")
    assert code == 0 and err == ""
    for word in ("model: tiny", "policy: native", "aten.linear", "aten.gelu", "lower", "no rule", "3 casts move "):
        assert word in out


def test_explain_run_compares(cli, target):
    """--run adds outputs, metric and cost."""
    code, out, _ = cli("explain", target, "--run", "--under", "fp16", "--all")
    assert code == 0
    assert "SQNR" in out and "metric" in out and "fp16" in out


@pytest.mark.parametrize("command", ["explain", "compare", "capture"])
def test_a_model_of_torchs_modules_alone_has_no_place(cli, tmp_path, command):
    """What called the command is no line of the user's: neither typer's, nor the console script's."""
    made = "nc.Case(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1)), (torch.ones(2, 8),))"
    file = tmp_path / "alone.py"
    file.write_text(f"import torch\nimport narrowcast as nc\n\ndef case():\n    return {made}\n")
    output = ["-o", tmp_path / "run.json"] if command == "capture" else []
    for every in ([], ["--all"]):
        code, out, err = cli(command, file, *output, *every)
        assert code == 0, err
        assert not re.search(r"\.py:\d|:0\b|\?", out), out


def test_explain_for_another_device_and_policy_as_json(cli, target, tmp_path):
    """--json to a file and to the terminal."""
    code, out, _ = cli("explain", target, "--device", "cuda", "--under", "safe", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["device_type"] == "cuda" and data["policy"] == "safe"
    code, out, _ = cli("explain", target, "-o", tmp_path / "e.json", "--all")
    assert code == 0 and json.loads((tmp_path / "e.json").read_text())["subject"] == "tiny"
    assert "Each cast: who asked for it" in out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.py", "no such file"),
        ("no.such.module", "No module named"),
        ("{}:other", "returned int"),
        ("{}:failing", "KeyError"),
        ("{}:missing", "defines no function missing()"),
        ("{}:leaving", "SystemExit"),
        ("{}:no_model", "cannot be called"),
        ("json", "defines no function case()"),
    ],
)
def test_a_bad_target_is_said_in_four_parts(cli, target, name, said):
    """Exit code 2, no traceback."""
    code, out, err = cli("explain", name.format(target))
    assert code == 2 and out == ""
    assert err.startswith("TargetError: target ") and said in err
    assert ("TARGET is a file" in err or "no such file" in err) and "Traceback" not in err
    assert len(err.splitlines()) >= 3


def test_a_target_with_a_syntax_error_names_its_line(cli, tmp_path):
    """The user's file and line."""
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\ndef case(:\n")
    code, _, err = cli("explain", bad)
    assert code == 2 and "bad.py:2" in err and "SyntaxError" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[rule]]\nop = "aten.sofmax.int"\naction = "full"\n', ("UnknownOpError", "p.toml:2", "aten.softmax.int")),
        ('[[rule]]\nop = "aten.gelu"\naction = "ful"\n', ("PolicyError", "p.toml:3", "did you mean 'full'")),
        ('[[rule]]\nop = "aten.gelu"\naction = "full"\n' * 2, ("PolicyError", "duplicate", "p.toml:5", "p.toml:2")),
        ('[[rule]]\nop = "aten.gelu"\naction = "full"\n[[rule]]\nop = "aten.gelu"\naction = "lower"\n',
         ("PolicyConflictError", "p.toml:5", "p.toml:2", "override = true")),
        ('[[rule]]\nop = "nolib.pool"\naction = "full"\n', ("UnknownOpError", "p.toml:2", "import the library")),
    ],
)  # fmt: skip
def test_a_bad_policy_is_said_with_file_and_line(cli, target, tmp_path, text, said):
    """By explain and by policy check alike."""
    file = tmp_path / "p.toml"
    file.write_text(text)
    for command in (("explain", target, "--under", file), ("policy", "check", file)):
        code, _, err = cli(*command)
        assert code == 2, err
        assert all(word in err for word in said), err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "tpu"), "tpu"),
        (("--under", "float8_e4m3fn"), "8-bit formats need scales"),
        (("--under", "fp99"), "did you mean 'fp"),
        (("--under", "fastest"), "no format, built-in policy or .toml file"),
        (("--under", "none.toml"), "none.toml"),
        (("--device", "cuda", "--run"), "Omit --run"),
        (("--nonsense",), "No such option"),
        (("-o", "/nowhere/x.json"), "its folder does not exist"),
    ],
)
def test_bad_options_exit_with_2(cli, target, options, said):
    """And say what to do."""
    code, out, err = cli("explain", target, *options)
    assert code == 2 and said in err and "Traceback" not in err and out == ""


def test_traceback_on_request(target):
    """--traceback raises."""
    from narrowcast.errors import TargetError

    with pytest.raises(TargetError):
        main(["--traceback", "explain", "nothing.py"])


def test_policy_show_check_and_diff(cli, tmp_path):
    """Rules with reasons; findings; differences."""
    code, out, _ = cli("policy", "show", "--all", "native", "--device", "cuda")
    assert code == 0 and "aten.softmax.int: full_set_dtype" in out
    code, out, _ = cli("policy", "check", "safe")
    assert code == 0 and "0 findings" in out
    assert cli("diff", "native", "native")[0] == 0
    code, out, _ = cli("diff", "native", "safe")
    assert code == 1 and "aten.cat.default: promote -> align" in out and "weight cache native -> off" in out
    file = tmp_path / "p.toml"
    file.write_text('extends = "native"\n[[rule]]\nop = "aten.mm.default"\naction = "lower"\n')
    code, out, _ = cli("policy", "check", file)
    assert code == 1 and "changes nothing" in out


def test_help_and_no_arguments(cli):
    """A stranger's first two tries."""
    assert cli("--help")[0] == 0
    code, out, err = cli()
    assert code in (0, 2) and "explain" in out + err


def test_the_installed_command_runs():
    """python -m narrowcast, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "narrowcast", "explain", "nothing.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "no such file" in done.stderr


def test_errors_name_options_and_not_python_s_arguments(cli, target):
    """What Python writes as `run=True` is `--run` here."""
    code, _, err = cli("explain", target, "--goal", "fast")
    assert code == 2 and "--front-end compile" in err and "front_end=" not in err


def test_an_interrupted_command_says_what_is_kept(cli, tmp_path):
    """Nothing, or what the command noted; the exit code is the shell's."""
    file = tmp_path / "stops.py"
    file.write_text("def case():\n    raise KeyboardInterrupt\n")
    code, out, err = cli("explain", file)
    assert (code, out) == (130, "") and err.strip().endswith("interrupted: no result is saved")


def test_arguments_that_do_not_fit_are_explained(cli, tmp_path):
    """A tuple is the arguments: a model that takes one tuple is given a tuple of it."""
    file = tmp_path / "pair.py"
    body = "import narrowcast as nc, torch\nX = torch.ones(2, 2)\n\ndef take(pair):\n    return pair[0] @ pair[1]\n\n"
    file.write_text(
        body + "def case():\n    return nc.Case(take, (X, X))\n\ndef one():\n    return nc.Case(take, ((X, X),))"
    )
    for command in ("explain", "compare"):
        code, _, err = cli(command, file, "--under", "bf16")
        assert code == 3 and "((a, b),) one argument that is a tuple" in err
        assert cli(command, f"{file}:one", "--under", "bf16")[0] == 0


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", '{"schema": "other/1"}', "\x00\x01"])
def test_a_file_that_is_no_result_is_said_in_words(cli, tmp_path, content):
    """Whatever is in it."""
    file = tmp_path / "no.json"
    file.write_text(content)
    code, _, err = cli("show", file)
    assert code == 2 and "no.json" in err and "JSONDecodeError" not in err and "Traceback" not in err
