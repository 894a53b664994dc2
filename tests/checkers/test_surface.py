"""torch's private names have one owner, and every assumption about them is a named check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from narrowcast.errors import SurfaceError
from narrowcast.runtime.torch_surface import probes

SOURCE = Path(__file__).parents[2] / "src/narrowcast"
OWNER = ("runtime", "torch_surface")
# The source of what TorchScript compiles: it has no names but torch's own ops.
EXEMPT = {"frontends/scripts/runtime.py"}
# Python's own, and attributes of ours on objects of others.
OURS = ("_narrowcast_", "_getframe", "_current_frames", "_replace", "_make", "_fields")


def private_names(text):
    """(line, name) of each private name that a file uses and does not define itself."""
    tree = ast.parse(text)
    defined = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            defined |= {t.id for t in targets if isinstance(t, ast.Name)}
            defined |= {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            if base.startswith("torch") or (node.attr not in defined and base not in ("self", "cls")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("narrowcast"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(map(is_private, parts)) and node.module != "__future__":
                yield node.lineno, f"from {node.module} import {', '.join(a.name for a in node.names)}"
        elif isinstance(node, ast.Import) and any(is_private(p) for a in node.names for p in a.name.split(".")):
            yield node.lineno, f"import {node.names[0].name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch._"):
            yield node.lineno, node.value


def is_private(name):
    return name.startswith("_") and not name.startswith(("__", *OURS))


def test_private_names_stand_in_the_surface_alone():
    """Attributes of objects included (`op._opname`, `script._c`)."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE)
        if path.parts[:2] != OWNER and str(path) not in EXEMPT:
            names = private_names(file.read_text(encoding="utf-8"))
            if path.parts[0] == "integrations":  # each file the owner of its framework's names
                names = [(line, name) for line, name in names if "torch" in name]
            found += [f"{path}:{line}: {name}" for line, name in names]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C._jit_pass_inline(g)",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils import _pytree as pytree",
        "import torch._dynamo",
        "def name(op):\n    return op._opname",
        "def names(script):\n    return script._c.names()",
        "sys.modules.get('torch._dynamo')",
    ],
)
def test_each_kind_of_private_name_is_seen(text):
    """The check above rejects these."""
    assert list(private_names(text))


def test_own_private_names_are_nobody_s_business():
    """What a file defines itself, and Python's."""
    text = "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other):\n        return other._x\n"
    assert not list(private_names(text + "import sys\nsys._getframe(1)\npoint._replace(x=1)\n"))


@pytest.mark.parametrize("asked", probes.all_probes(), ids=lambda p: p.says)
def test_every_assumption_about_torch_holds(asked):
    """For the torch that is installed, whichever it is."""
    assert asked.ask() is None


def test_a_broken_assumption_says_which_and_of_which_version(monkeypatch):
    """And what would go wrong; once it has raised it raises again."""
    import torch
    import torch.utils.checkpoint

    monkeypatch.delattr(torch.utils.checkpoint, "_get_autocast_kwargs")
    probes.require.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(SurfaceError, match="_get_autocast_kwargs") as raised:
                probes.require("checkpoints ask for autocast's state")
            assert torch.__version__ in str(raised.value) and "native" in str(raised.value)
    finally:
        probes.require.cache_clear()


def test_a_probe_that_raises_is_an_assumption_that_does_not_hold():
    """Not an error of another kind."""

    @probes.probe("nothing is amiss", "nothing")
    def fails():
        raise KeyError("x")

    try:
        assert "KeyError" in fails()
    finally:
        probes._probes.pop("nothing is amiss")


def test_a_torch_that_the_tests_do_not_run_with_is_asked_everything(monkeypatch):
    """If all holds it works, with a warning; else the error says which assumption of which version broke."""
    import torch

    probes.check_version()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    try:
        probes.check_version.cache_clear()
        with pytest.warns(UserWarning, match=r"2\.99\.0 is not one that it is tested with \(2\.11 to 2\.15\)"):
            probes.check_version()
        probes.check_version.cache_clear()
        monkeypatch.delattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_pre_hook")
        with pytest.raises(SurfaceError, match=r"2\.99\.0 in which optimizers have hooks for all"):
            probes.check_version()
    finally:
        probes.check_version.cache_clear()


def test_a_name_that_a_later_torch_no_longer_has_is_a_readable_error():
    """Already at the import of what uses it; an error of another kind stays what it is."""
    code = (
        "import torch; del torch._C._DisableAutocast\n"
        "import narrowcast as nc\n"
        "try: nc.autocast\n"
        "except nc.errors.SurfaceError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert torch_version() in said and "_DisableAutocast" in said and "2.11 to 2.15" in said


def torch_version():
    from narrowcast.core.policy import installed_torch

    return installed_torch()
