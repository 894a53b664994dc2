"""The first screen of every command: at most 25 lines, none wider than the terminal, and `--all` has the rest."""

import re

import pytest
import torch

import narrowcast as nc
from narrowcast.cli.app import app, policy_app, profile_app
from narrowcast.reports.results.profile import Profile, Sample, profile_path
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.measure import measure
from narrowcast.runtime.devices.sweep import sweep
from narrowcast.testing import formats

LINES = 25
MODEL = """
import torch
import narrowcast as nc

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.an_attention_with_a_long_name = torch.nn.Linear(width, width)
        self.a_feed_forward_with_a_long_name = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        y = self.a_feed_forward_with_a_long_name(torch.relu(self.an_attention_with_a_long_name(x)))
        return self.norm(x + y)

class Stack(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.encoder_of_a_model_with_a_long_name = torch.nn.Sequential(*(Block(8) for _ in range(blocks)))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        return torch.softmax(self.head(self.encoder_of_a_model_with_a_long_name(x)), -1)

def case(blocks=12):
    torch.manual_seed(0)
    metric = lambda m: float(m(torch.ones(2, 8)).sum())
    return nc.Case(Stack(blocks).eval(), (torch.randn(4, 8),), evaluate=metric, name="a stack of some blocks")

def few():
    return case(2)

def wide(blocks=12):
    made = case(blocks)
    with torch.no_grad():
        for block in made.model.encoder_of_a_model_with_a_long_name:
            block.an_attention_with_a_long_name.weight.mul_(1e6)
    return made

def few_wide():
    return wide(2)
"""
SCRIPT = """
import torch
x = torch.zeros(4)
for n in range(12):
    with torch.no_grad():
        (x + n) / x
"""
RULES = "\n".join(
    f'[[rule]]\nop = "aten.{op}"\naction = "full"\nmodule = "a_module_that_is_nowhere.{n}"\nreason = "a reason {n}"'
    for n, op in enumerate(("linear", "relu", "softmax.int", "gelu", "layer_norm", "add.Tensor", "mm", "bmm") * 5)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands are given: a model, runs and a comparison of it, a ledger, policies, profiles, a snapshot."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "stack.py").write_text(MODEL)
    (folder / "nan.py").write_text(SCRIPT)
    (folder / "rules.toml").write_text(f'name = "rules"\nextends = "native"\n{RULES}\n')
    made = {}
    exec(MODEL, made)
    with torch.no_grad():
        for name, make, region in (("a", made["case"], {}), ("b", made["wide"], {"under": "bf16"})):
            nc.capture(make(), **region).save(folder / f"{name}.json.gz")
        nc.compare(made["case"](), under="bf16", isolate=0).save(folder / "compared.json")
        nc.diff(folder / "a.json.gz", folder / "b.json.gz").save(folder / "two.json")
        nc.load(folder / "b.json.gz").headroom().save(folder / "fit.json")
        with nc.record() as ledger, nc.autocast("cpu"):
            made["case"]().model(torch.randn(4, 8))
        ledger.save(folder / "ledger.json")
        with nc.watch() as watched:
            exec(SCRIPT, {})
        watched.save(folder / "watched.json")
        nc.parity(made["case"](), made["case"](), under=(None, "bf16")).save(folder / "parity.json")
        nc.check_invariance(made["case"]()).save(folder / "invariance.json")
        nc.repair(made["few_wide"](), under="fp16").save(folder / "repair.json")
    nc.testing.check_formats(made["wide"](), snapshot=folder / "formats.txt", under="native", update=True)
    profile = Profile(device_now("cpu"))
    measure(profile, sweep("cpu")[:2], 0.2)
    profile.samples.update({str(n): Sample("gemm", "fp32", False, 1.0, 1.0, 1, 5.0, 4.0, 6.0, 3) for n in range(40)})
    profile.write(folder / "profile.json")
    return folder


COMMANDS = {
    "explain": ("explain", "stack.py"),
    "explain rules": ("explain", "stack.py", "--under", "rules.toml", "--device", "cuda"),
    "explain --run": ("explain", "stack.py", "--run", "--under", "bf16"),
    "explain export": ("explain", "stack.py:few", "--front-end", "export"),
    "explain --goal": ("explain", "stack.py:few", "--front-end", "export", "--goal", "fast", "--backend", "eager"),
    "capture": ("capture", "stack.py", "-o", "new.json.gz", "--under", "bf16", "--backward"),
    "capture not finite": ("capture", "stack.py:wide", "-o", "new.json.gz", "--under", "fp16"),
    "compare": ("compare", "stack.py", "--under", "bf16", "--isolate", "2", "--backward"),
    "compare by module": ("compare", "stack.py:wide", "--under", "fp16", "--by", "module", "--isolate", "0"),
    "diff": ("diff", "a.json.gz", "b.json.gz", "--mapping", "pairs.txt"),
    "watch": ("watch", "--save", "alone", "nan.py"),
    "parity": ("parity", "stack.py", "stack.py", "--under", "bf16"),
    "headroom": ("headroom", "stack.py:wide", "--policy-out", "fits.toml"),
    "repair": ("repair", "stack.py:few_wide", "--under", "fp16", "--policy-out", "fixed.toml"),
    "check": ("check", "stack.py", "--snapshot", "formats.txt", "--under", "rules.toml"),
    "policy show": ("policy", "show", "native"),
    "policy show rules": ("policy", "show", "rules.toml"),
    "policy check": ("policy", "check", "rules.toml"),
    "diff of policies": ("diff", "native", "rules.toml", "--device", "cuda"),
    "profile show": ("profile", "show"),
    "show run": ("show", "a.json.gz"),
    "show comparison": ("show", "compared.json"),
    "show two runs": ("show", "two.json"),
    "show fit": ("show", "fit.json"),
    "show ledger": ("show", "ledger.json"),
    "show watch": ("show", "watched.json"),
    "show repair": ("show", "repair.json"),
    "show parity": ("show", "parity.json"),
    "show invariance": ("show", "invariance.json"),
}
SHORT = {"profile": ("profile", "--seconds", "0.1"), "profile path": ("profile", "path")}
COMPUTING = ("explain", "capture", "compare", "diff", "parity", "repair")
ALL = ("--all",)
MORE = re.compile(r"^(\d+) more lines? with --all", re.M)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def remembering(module, name):
    """The function, which computes once in a test: what is looked at is how the result is printed."""
    function, results = getattr(module, name), []

    def once(*args, **kwargs):
        if not results:
            results.append(function(*args, **kwargs))
        return results[0]

    return once


@pytest.fixture
def shown(cli, folder, tmp_path, monkeypatch):
    """What a command prints at a width, in a folder where all its files are."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    own = profile_path(device_now("cpu"))
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_bytes((folder / "profile.json").read_bytes())

    for name in COMPUTING:
        monkeypatch.setattr(nc, name, remembering(nc, name))
    monkeypatch.setattr(formats, "check_formats", remembering(formats, "check_formats"))

    def show(command, columns, *more, colour=False):
        (tmp_path / "pairs.txt").unlink(missing_ok=True)
        monkeypatch.setenv("COLUMNS", str(columns))
        (monkeypatch.setenv if colour else monkeypatch.delenv)("FORCE_COLOR", *(["1"] if colour else [False]))
        head = 2 if command[0] in ("policy", "profile") and not command[1].startswith("-") else 1
        code, out, err = cli(*command[:head], *more, *command[head:])
        assert code in (0, 1) and (
            code == 0 or command[0] in ("capture", "compare", "diff", "watch", "check", "policy")
        ), err
        return out

    return show


def test_every_command_is_looked_at():
    """One that is added is added here."""
    names = {command.name for command in app.registered_commands}
    groups = {"policy": policy_app, "profile": profile_app}
    for group, made in groups.items():
        names |= {f"{group} {command.name or command.callback.__name__}" for command in made.registered_commands}
    inspected = [*COMMANDS.values(), *SHORT.values()]
    assert names == {" ".join(c[:2]) if c[0] in groups else c[0] for c in inspected if c[1:2] != ("--seconds",)}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_screen_fits(shown, name):
    """At 60, 80 and 160 columns, plain and in colour, nothing cut; `--all` has what was counted."""
    command = COMMANDS[name]
    fits(shown(command, 60), 60)
    first = shown(command, 80)
    fits(first, 80)
    fits(shown(command, 160), 160)
    coloured = shown(command, 80, colour=True)
    assert ESCAPE.sub("", coloured) == first and "\x1b" not in first
    whole = shown(command, 80, *ALL)
    told = [line for line in first.splitlines() if "--all, or to_text" not in line]
    assert len(whole.split()) >= len(" ".join(told).split()), whole
    said = MORE.search(first)
    assert said is None or len(whole.splitlines()) > len(first.splitlines()), (first, whole)


def fits(text, columns):
    """Only a word that is wider than the screen, as a path is, and a rule to be copied pass its edge."""
    lines = text.splitlines()
    wide = [line for line in lines if len(line) > columns and len(line.split()) > 1 and " = " not in line]
    assert text.strip() and len(lines) <= LINES and not wide and not re.search(r"\w\.\.\.\w", text), (wide, text)


@pytest.mark.parametrize("name", SHORT)
def test_short_answers_have_no_rest(shown, name):
    """They have no `--all`; a path alone is whole, to be copied."""
    assert 0 < len(shown(SHORT[name], 80).splitlines()) <= LINES
