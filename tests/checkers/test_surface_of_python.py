"""The public surface: its names, what its functions take, what the command line imports."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import narrowcast as nc
import narrowcast.results
import narrowcast.testing

NAMES = [
    "autocast",
    "pin",
    "unpin",
    "carry",
    "custom_fwd",
    "custom_bwd",
    "Policy",
    "Rule",
    "Goal",
    "compile",
    "export",
    "script",
    "trace",
    "record",
    "watch",
    "capture",
    "explain",
    "compare",
    "diff",
    "parity",
    "check_invariance",
    "repair",
    "check_training",
    "check_storage",
    "store",
    "Scaler",
    "Case",
    "load",
    "Result",
    "Ledger",
    "Run",
    "Explanation",
    "errors",
    "formats",
    "__version__",
]
VERBS = ("capture", "explain", "compare", "repair", "export", "check_training")
TAKE_UNDER = (*VERBS[:5], "compile", "script", "trace")
MOST = 10


def test_the_names_are_these():
    """Each is there, and `dir` lists no other; what is found is in `narrowcast.results`."""
    assert sorted(nc.__all__) == sorted(NAMES) and len(NAMES) == 35
    assert all(getattr(nc, name) is not None for name in NAMES)
    assert all(issubclass(getattr(narrowcast.results, name), object) for name in narrowcast.results.__all__)
    with pytest.raises(AttributeError, match="autocst"):
        nc.autocst


def public():
    """Name and function of all that users call: of the package and of `narrowcast.testing`; methods of both."""
    for room in (nc, narrowcast.testing):
        for name in room.__all__:
            found = getattr(room, name)
            if inspect.isfunction(found):
                yield name, found
            elif inspect.isclass(found) and not found.__module__.startswith(
                ("narrowcast.reports", "narrowcast.testing")
            ):
                yield from ((f"{name}.{n}", f) for n, f in inspect.getmembers(found, inspect.isfunction) if n[0] != "_")


def parameters(function):
    return inspect.signature(function).parameters


def test_no_function_has_more_than_ten_parameters():
    """But torch's own: the scaler's, and what has a field for each thing that a rule or a policy says."""
    long = {name: len(parameters(function)) for name, function in public() if len(parameters(function)) > MOST}
    assert long == {}
    assert len(parameters(nc.Scaler)) == 11 and len(parameters(nc.autocast)) <= MOST


def test_a_region_is_given_in_one_way_and_nothing_of_the_model_s_is_swallowed():
    """`under=`, never policy, dtype, device_type or region; no verb takes keywords that might be a model's."""
    for name, function in public():
        found = parameters(function)
        if name not in ("custom_fwd", "custom_bwd") and "." not in name:
            assert not {"dtype", "policy", "device_type", "region"} & set(found), name
        variadic = [p for p in found.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        assert not variadic or name == "trace" or "." in name, name
    for name in TAKE_UNDER:
        assert "under" in parameters(getattr(nc, name)), name
    for name in VERBS:
        assert list(parameters(getattr(nc, name)))[1] == "inputs", name


def test_the_command_line_imports_no_torch_until_it_runs_a_model():
    """Help, the version, a policy that is shown."""
    for arguments in (["--help"], ["compare", "-h"], ["--version"], ["policy", "show", "safe"]):
        code = (
            "import json, sys\nfrom narrowcast.cli.app import main\n"
            f"try:\n    main({arguments!r})\nexcept SystemExit as stop:\n    assert not stop.code\n"
            "print(json.dumps([m for m in ('torch', 'numpy', 'scipy', 'cattrs') if m in sys.modules]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
        assert json.loads(done.stdout.splitlines()[-1]) == [], arguments


def test_a_rule_says_what_it_is():
    """In an editor, in a list of rules, in a failed assertion."""
    rule = nc.Rule("aten.linear", "full", module="head", call=2, reason="logits")
    assert repr(rule) == "<Rule aten.linear call 2 in head: full>"


def test_policies_scalers_and_cases_say_what_they_are():
    """A built-in list is named; else how many rules it adds, to what."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.mm", "full"))
    assert repr(nc.Policy.native()).startswith("<Policy 'native', built in, ")
    assert repr(policy).startswith("<Policy 'native+', 1 rule of its own, extends native, ")
    assert "Scaler" in repr(nc.Scaler("cpu")) and "Linear" in repr(nc.Case(torch.nn.Linear(2, 2), torch.ones(1, 2)))


# What ours have beside torch's public names, each because a plugin, a loop or another front end calls it.
OF_SCALER = """
    backward begin_iteration clip_grad_norm_ findings first_scale forget_states gradients_checked history loss_scales
    make_scale name_by process_group scale_tensor set_floor state_of states
"""
OF_AUTOCAST = "again asked policy prepared with_eager_policy"


@pytest.mark.parametrize(
    ("ours", "torchs", "wanted"),
    [
        (nc.Scaler, torch.amp.GradScaler, OF_SCALER),
        (nc.autocast, torch.autocast, OF_AUTOCAST),
    ],
)
def test_names_beside_torchs_are_these(ours, torchs, wanted):
    """A name more is one that somebody relies on: it is added here, or begins with an underscore."""
    names = [{name for name in dir(kind("cpu")) if name[0] != "_"} for kind in (ours, torchs)]
    assert names[0] - names[1] == set(wanted.split())


SKIPS = {"src": 243, "tests": 301, "benchmarks": 40, "tools": 16, "examples": 6}


@pytest.mark.parametrize("folder", SKIPS)
def test_code_is_formatted_by_one_tool(folder):
    """ruff format. `# fmt: skip` is for what it would write as a column of one word a line; there may be fewer."""
    files = (Path(nc.__file__).parent.parent.parent / folder).rglob("*.py")
    count = sum(file.read_text(encoding="utf-8").count("  # fmt: skip") for file in files)
    assert count <= SKIPS[folder]
