"""`narrowcast capture`, `compare`, `diff`, `watch`, `headroom` and `show`, as a user runs them."""

import json

import pytest

SUBJECT = """
import torch
import narrowcast as nc

def case():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    return nc.Case(model, (torch.randn(4, 8),), name="tiny")

def wide():
    made = case()
    with torch.no_grad():
        made.model[0].weight.mul_(1e6)
    return made
"""

TRAINING = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
x = torch.randn(8, 4)
if __name__ == "__main__":
    for _ in range(25):
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        optimizer.step()
"""


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "tiny.py"
    file.write_text(SUBJECT)
    return file


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TRAINING)
    return file


def test_a_captured_run_is_shown_saved_and_shown_again(cli, target, tmp_path):
    """`show` prints the saved run as `capture` did, and accepts `--all`."""
    code, out, err = cli("capture", target, "-o", tmp_path / "run", "--under", "bf16", "--backward")
    assert (code, err) == (0, "") and "VERDICT: Every value is finite" in out and "0 aten.linear #1" in out
    code, again, _ = cli("show", tmp_path / "run.json.gz")
    assert code == 0 and again.strip() in out
    assert len(cli("show", tmp_path / "run.json.gz", "--all")[1]) > 0


def test_a_comparison_says_its_verdict_and_writes_json(cli, target, tmp_path):
    """The first screen fits 25 lines, `show` repeats it from the file, and the last line says where that is."""
    code, out, err = cli("compare", target, "--under", "bf16", "-o", tmp_path / "c.json", "--isolate", "1")
    assert (code, err) == (0, "") and out.startswith("model: tiny; ") and "VERDICT: Round-off: " in out
    assert len(out.splitlines()) <= 25
    assert json.loads((tmp_path / "c.json").read_text())["verdict"] == "round-off"
    assert [*cli("show", tmp_path / "c.json")[1].splitlines(), out.splitlines()[-1]] == out.splitlines()
    assert out.splitlines()[-1].startswith(f"saved in {tmp_path / 'c.json'} (")


def test_a_model_that_overflows_is_a_finding_with_exit_code_one(cli, target):
    """Weights scaled by 1e6 do not fit fp16, and `--by module` groups the calls by module."""
    code, out, _ = cli("compare", f"{target}:wide", "--under", "fp16", "--by", "module")
    assert code == 1 and "VERDICT: Not finite: " in out and "Each module: its own calls" in out


def test_a_script_is_watched_unchanged(cli, script, tmp_path):
    """The script's own arguments reach it; where it diverges, the exit code is 1 and a reproducer is saved."""
    code, out, _ = cli("watch", script, "--lr", "1e-3")
    assert code == 0 and "VERDICT: No NaN or infinity was made" in out
    code, out, _ = cli("watch", "-o", tmp_path / "w.json", "--save", tmp_path / "repro", script, "--lr", "100")
    assert code == 1 and "infinity, step " in out and "train.py:" in out
    assert (tmp_path / "repro" / "repro.py").is_file()
    assert cli("show", tmp_path / "w.json")[1].splitlines()[0] == out.splitlines()[0]
    code, out, _ = cli("watch", "--stop", script, "--lr", "100")
    assert code == 1 and "1 call made a NaN or an infinity" in out


def test_options_behind_a_script_are_the_scripts(cli, tmp_path):
    """Also those that narrowcast has, too; an unknown one before it is an error."""
    script = tmp_path / "argv.py"
    script.write_text("import sys; print(sys.argv[1:])")
    asked = ["--save", "kept", "--every", "10", "--log", "run.log", "--stop", "-o", "out", "--all", "--help"]
    code, out, _ = cli("watch", script, *asked)
    assert code == 0 and repr(asked) in out
    assert cli("watch", "--epochs", "3", script)[0] == 2


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("raise KeyboardInterrupt", 130, "interrupted: what was seen until then is above"),
        ("raise SystemExit(130)", 3, "the script exited with 130"),
        ("raise SystemExit('no data')", 3, "the script exited with 1: no data"),
        ("raise SystemExit", 0, ""),
    ],
)
def test_how_a_watched_script_ends_is_told_apart(cli, tmp_path, line, code, said):
    """Only an interrupt is one; a script's own exit code, 130 too, is told as that."""
    file = tmp_path / "ends.py"
    file.write_text(f"import torch\n\ntorch.ones(2) + 1\n{line}\n")
    ended, out, err = cli("watch", file)
    assert ended == code and "VERDICT: No NaN or infinity was made" in out and err.strip() == said


def test_what_does_not_fit_becomes_a_policy(cli, target, tmp_path):
    """`headroom` writes a valid policy for layers that overflow fp16, and reads saved runs as well as models."""
    code, out, _ = cli("headroom", f"{target}:wide", "--policy-out", tmp_path / "fits.toml", "-o", tmp_path / "f.json")
    assert code == 0 and "VERDICT: 2 of 2 calls do not fit fp16" in out
    assert cli("policy", "check", tmp_path / "fits.toml")[0] == 0
    cli("capture", f"{target}:wide", "-o", tmp_path / "run")
    assert "does not fit fp16: " in cli("headroom", tmp_path / "run.json.gz")[1]


def test_two_saved_runs_are_compared_with_a_mapping_that_is_written_and_read(cli, target, tmp_path):
    """The mapping can be edited and read again, and a wrong module or a truncated run exits with 2."""
    for name, arguments in (("a", ()), ("b", ("--under", "bf16")), ("c", ())):
        which = f"{target}:wide" if name == "c" else target
        cli("capture", which, "-o", tmp_path / name, *arguments)
    a, b, c = (tmp_path / f"{name}.json.gz" for name in "abc")
    pairs = tmp_path / "pairs.txt"
    code, out, err = cli("diff", a, b, "--mapping", pairs, "-o", tmp_path / "d.json")
    assert (code, err) == (0, "") and "VERDICT: Formats differ: " in out and "2 compared" in out
    assert "0 = 0\n" in pairs.read_text() and out.splitlines()[-2] == f"wrote {pairs}: correct it, and give it again"
    assert cli("show", tmp_path / "d.json")[1].splitlines() == out.splitlines()[:-2]
    page = tmp_path / "page.html"
    assert "read" in cli("diff", a, b, "--mapping", pairs, "--html", page)[1].splitlines()[-1]
    assert has_page(page, "comparison of runs") and "0 = 0\\n" in page.read_text()
    assert cli("show", tmp_path / "d.json", "--html", page)[0] == 0 and "not in a saved comparison" in page.read_text()
    code, out, _ = cli("diff", a, c)
    assert code == 1 and "VERDICT: Values differ: " in out and "Give both runs the same weight in " in out
    assert cli("diff", a, c, "--all")[1].count("  call of a: ") >= 2
    pairs.write_text("0 = nowhere\n")
    code, _, err = cli("diff", a, b, "--mapping", pairs)
    assert code == 2 and f"{pairs}:1" in err and "run b has no calls in nowhere" in err
    (tmp_path / "cut.json.gz").write_bytes(a.read_bytes()[:-40])
    code, _, err = cli("diff", a, tmp_path / "cut.json.gz")
    assert code == 2 and "cut.json.gz" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "missing.json"), "missing.json"),
        (("watch", "missing.py"), "no such file"),
        (("capture", "TARGET", "-o", "/nowhere/run"), "folder does not exist"),
        (("compare", "TARGET", "--reference", "fp8"), "no such reference"),
        (("headroom", "missing.json.gz"), "missing.json.gz"),
        (("compare", "missing.json.gz"), "Give two"),
        (("diff", "missing.json.gz", "other.json.gz"), "missing.json.gz"),
        (("diff", "native", "safe", "ipex"), "Give two"),
    ],
)
def test_bad_input_is_said_without_a_traceback(cli, target, arguments, said):
    """Missing files, unknown options and wrong numbers of runs exit with 2 and a message."""
    code, _, err = cli(*(target if a == "TARGET" else a for a in arguments))
    assert code == 2 and said in err and "Traceback" not in err


def has_page(file, kind):
    text = file.read_text(encoding="utf-8")
    return text.startswith("<!doctype html>") and f'"schema":"narrowcast.page/1","kind":"{kind}"' in text


def test_each_command_writes_a_page_beside_what_it_says(cli, target, script, tmp_path):
    """And report writes that of a saved result."""
    page = tmp_path / "page.html"
    run = tmp_path / "run.json.gz"
    assert cli("capture", target, "-o", run, "--under", "bf16", "--html", page)[0] == 0 and has_page(page, "run")
    code, out, _ = cli("show", run, "--html", tmp_path / "again.html")
    assert code == 0 and "VERDICT: Every value is finite" in out
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()
    assert cli("compare", target, "--under", "bf16", "--html", page)[0] == 0 and has_page(page, "comparison")
    assert cli("headroom", target, "--html", page)[0] == 0 and has_page(page, "headroom")
    assert cli("watch", "--html", page, script, "--lr", "1e-3")[0] == 0 and has_page(page, "watch")
    code, out, _ = cli("explain", target, "--under", "bf16", "--html", page)
    assert code == 0 and "VERDICT" in out and has_page(page, "explanation")


def test_a_saved_explanation_is_shown_again(cli, target, tmp_path):
    """As text, as JSON and as the same page."""
    saved, page = tmp_path / "e.json", tmp_path / "page.html"
    code, out, _ = cli("explain", target, "--under", "bf16", "-o", saved, "--html", page)
    assert code == 0
    code, again, _ = cli("show", saved, "--html", tmp_path / "again.html")
    assert (code, again.splitlines()) == (0, out.splitlines()[:-1])
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()
    code, text, _ = cli("show", saved, "--json")
    assert code == 0 and json.loads(text) == json.loads(saved.read_text())
    saved.write_text(saved.read_text().replace("narrowcast.explanation/4", "narrowcast.explanation/0"))
    code, out, err = cli("show", saved)
    assert code == 2 and out == "" and "explanation/0" in err and "Write it again" in err


@pytest.mark.parametrize("command", ["capture", "compare", "headroom", "explain", "repair"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(cli, target, tmp_path, command):
    """As the other files are."""
    output = ("-o", tmp_path / "run") if command == "capture" else ()
    code, out, err = cli(command, target, *output, "--html", tmp_path / "no" / "page.html")
    assert code == 2 and out == "" and "--html" in err and "Make the folder" in err


def test_traces_and_node_data_are_written_beside_what_is_said(cli, target, tmp_path):
    """And report writes the trace of a run that was timed; what has none is refused."""
    trace, run, folder = tmp_path / "trace.json", tmp_path / "run.json.gz", tmp_path / "explorer"
    assert cli("capture", target, "-o", run, "--under", "bf16", "--trace", trace)[0] == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert "linear bf16" in {event["name"] for event in events}
    assert cli("show", run, "--trace", tmp_path / "again.json")[0] == 0
    assert (tmp_path / "again.json").read_text() == trace.read_text()
    code, out, _ = cli("explain", target, "--front-end", "export", "--model-explorer", folder, "--trace", trace)
    assert code == 0 and "VERDICT" in out
    assert {file.name for file in folder.iterdir()} == {"model.pt2", "formats.json", "costs.json"}
    assert json.loads(trace.read_text())["otherData"]["times"] == "predicted"
    code, _, err = cli("explain", target, "--model-explorer", folder)
    assert code == 2 and "--front-end export" in err
    cli("compare", target, "--under", "bf16", "--isolate", "0", "-o", tmp_path / "c.json")
    code, _, err = cli("show", tmp_path / "c.json", "--trace", trace)
    assert code == 2 and "no calls with times" in err


def test_saved_explanations_are_compared_by_their_casts(cli, target, tmp_path):
    """The same casts: 0; others: one line each, and 1."""
    files = [tmp_path / f"{low}.json" for low in ("bf16", "fp16")]
    for file in files:
        assert cli("explain", target, "--under", file.stem, "-o", file)[0] == 0
    assert cli("diff", files[0], files[0])[:2] == (0, "the same casts\n")
    code, out, _ = cli("diff", *files)
    assert code == 1 and "fp32 -> bf16: 1 -> 0" in out and "fp32 -> fp16: 0 -> 1" in out


STEP = """
import torch, narrowcast as nc

def case():
    net, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return nc.Case(step, ())
"""


@pytest.mark.parametrize("command", ["compare", "capture", "repair"])
def test_a_step_of_training_runs_with_gradients(cli, tmp_path, command):
    """A case of a function may take gradients inside, without `--backward`."""
    file = tmp_path / "step.py"
    file.write_text(STEP)
    code, said, _ = cli(command, file, "--under", "bf16")
    assert code == 0 and "VERDICT" in said
