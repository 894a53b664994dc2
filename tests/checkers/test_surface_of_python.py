"""The public surface: its names, what its functions take, what the command line imports."""

import inspect
import json
import subprocess
import sys

import pytest

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
    "repair",
    "check_training",
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
    assert sorted(nc.__all__) == sorted(NAMES) and len(NAMES) == 31
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
