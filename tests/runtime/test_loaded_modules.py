"""What is imported when: a region is cheap to have, and what takes long waits until it is asked for."""

import subprocess
import sys

IMPORT = "import sys, torch\nbefore = set(sys.modules)\nimport narrowcast as nc\nnc.autocast, nc.record\n"
REGION = "with nc.autocast('cpu', torch.bfloat16): torch.mm(torch.ones(2, 2), torch.ones(2, 2))\n"
RULE = "policy = nc.Policy.native().with_rules(nc.Rule('aten.mm', 'full', reason='a rule'))\n"
FIRST = IMPORT + REGION + RULE + REGION.replace("bfloat16)", "bfloat16, policy=policy)")
FIRST += f"with nc.record() as ledger:\n    {REGION}assert len(ledger.casts) == 2\n"
FIRST += "with nc.record(), nc.autocast('cpu'): torch.nn.Linear(2, 2)(torch.ones(2, 2)).sum().backward()\n"
"""The import, the first region, the first with a policy, the first recordings: of ops, of a module and its backward."""
SLOW = ("scipy", "sympy", "torch._dynamo", "torch._inductor", "torch.onnx", "rich", "typer", "filelock", "jinja2")


def new_modules(code):
    """The names of the modules that a new process loads besides torch's import."""
    code += "print(*(set(sys.modules) - before))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return made.stdout.split()


def test_what_takes_long_to_import_waits():
    """Neither the import, the first regions, nor the first recording load scipy, Dynamo, sympy or the reports."""
    found = new_modules(FIRST)
    assert "narrowcast.frontends.eager.region" in found
    slow = [n for n in found if any(n == name or n.startswith(f"{name}.") for name in SLOW)]
    assert not slow
    assert not [
        n
        for n in found
        if n.startswith(("narrowcast.reports.documents", "narrowcast.reports.results.explan", "narrowcast.programs"))
    ]
    assert len(found) < 130


def test_a_plain_dispatch_mode_imports_dynamo():
    """Which is why ours are none; once torch does not, this fails, and ours may be."""
    code = IMPORT + (
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Mode(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        return func(*args, **(kwargs or {}))\n"
        "with Mode(): torch.ones(2)\n"
    )
    assert "torch._dynamo" in new_modules(code)
