"""Every public way to open a region, in every place: a script has eager's dtypes and bits, or an error names the line.

The programs are written as source, a way (a with statement, a decorator, an object that is decorated) in a place (the
function itself, a helper, a method, a loop, behind an early return ...); nothing else may come of them.
"""

import importlib.util
import io
import itertools
import os
import subprocess
import sys

import pytest
import torch

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore")

HEADER = """
import contextlib, functools
from typing import List, Optional, Tuple

import torch
from torch import Tensor, amp, nn
from torch.amp import autocast as alias

import narrowcast as nc

LOW, DEVICE, ON = torch.float16, "cpu", True
REGION, OURS = torch.autocast("cpu", dtype=LOW), nc.autocast("cpu", LOW, policy="safe")
OTHER = torch.autocast("cpu", dtype=torch.bfloat16)
ARGUMENTS, KEYWORDS = ("cpu", LOW), {"dtype": LOW}
PARTIAL = functools.partial(torch.autocast, "cpu", dtype=LOW)
POLICY = nc.Policy.native().with_rules(nc.Rule("aten.softmax", "lower"), name="lower softmax")


class Holder:
    region = torch.autocast("cpu", dtype=LOW)


class Mine(torch.autocast):
    def __init__(self):
        super().__init__("cpu", dtype=LOW)


@contextlib.contextmanager
def opening():
    with torch.autocast("cpu", dtype=LOW):
        yield


def wrapping(function):
    @functools.wraps(function)
    def inner(*args):
        with torch.autocast("cpu", dtype=LOW):
            return function(*args)

    return inner


def hidden(function):
    @functools.wraps(function)
    def inner(*args):
        return enter_and_call(function, *args)

    return inner


def enter_and_call(function, *args):
    with contextlib.ExitStack() as stack:
        stack.enter_context(REGION)
        return function(*args)


class Decorator:
    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args):
        with alias("cpu", dtype=LOW):
            return self.__wrapped__(*args)


def product(x: Tensor, w: Tensor):
    return torch.softmax(torch.mm(x, w), -1)
"""

EXPRESSIONS = {
    "torch": 'torch.autocast("cpu", dtype=LOW)',
    "torch, by position": 'torch.autocast("cpu", torch.float16)',
    "torch, no dtype": 'torch.autocast("cpu")',
    "torch, off": 'torch.autocast("cpu", enabled=False)',
    "torch, off by a name": 'torch.autocast("cpu", LOW, not ON)',
    "torch, fp32": 'torch.autocast("cpu", dtype=torch.float32)',
    "amp": 'amp.autocast("cpu", dtype=torch.bfloat16)',
    "torch.amp": 'torch.amp.autocast(device_type="cpu")',
    "cpu.amp": "torch.cpu.amp.autocast()",
    "cpu.amp, fp16": "torch.cpu.amp.autocast(True, LOW)",
    "alias": 'alias("cpu", LOW)',
    "ours": 'nc.autocast("cpu")',
    "ours, text": 'nc.autocast("cpu", "fp16")',
    "ours, format": 'nc.autocast("cpu", nc.formats.fp16)',
    "ours, policy": 'nc.autocast("cpu", policy=POLICY)',
    "ours, safe": 'nc.autocast("cpu", LOW, policy="safe")',
    "global": "REGION",
    "global of ours": "OURS",
    "attribute": "Holder.region",
    "named device": "torch.autocast(DEVICE, LOW)",
    "device of x": "torch.autocast(x.device.type, dtype=LOW)",
    "device of x, ours": "nc.autocast(device_type=x.device.type)",
    "starred": "torch.autocast(*ARGUMENTS)",
    "keywords": 'torch.autocast("cpu", **KEYWORDS)',
    "partial": "PARTIAL()",
    "chosen": "REGION if ON else OTHER",
    "run time": 'torch.autocast("cpu", dtype=LOW, enabled=x.dim() == 2)',
    "with no_grad around": 'torch.set_grad_enabled(True), torch.autocast("cpu", dtype=LOW)',
    "class": "Mine()",
    "context manager": "opening()",
    "null": "contextlib.nullcontext()",
    "list": "[REGION][0]",
    "fp8": 'torch.autocast("cpu", dtype=torch.float8_e4m3fn)',
    "text for torch": 'torch.autocast("cpu", "fp16")',
    "unknown device": 'torch.autocast("toaster")',
    "misspelt": 'torch.autocast("cpu", dtpe=LOW)',
}
WITH_PLACES = {
    "top": """
def program(x: Tensor, w: Tensor):
    with {e}:
        y = product(x, w)
    return y, torch.mm(x, w)
""",
    "returning": """
def program(x: Tensor, w: Tensor):
    with {e}:
        return product(x, w)
""",
    "helper": """
def helper(x: Tensor, w: Tensor):
    with {e}:
        return product(x, w)


def program(x: Tensor, w: Tensor):
    return helper(x, w), product(x, w)
""",
    "method": """
class Model(nn.Module):
    def part(self, x: Tensor, w: Tensor):
        with {e}:
            return product(x, w)

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "nested": """
def program(x: Tensor, w: Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with {e}:
            y = product(x * 1.5, w * 1.25)
        return y, product(x, w)
""",
    "off between": """
def program(x: Tensor, w: Tensor):
    with torch.autocast("cpu", dtype=LOW):
        with torch.autocast("cpu", enabled=False):
            z = product(x, w)
            with {e}:
                y = product(x * 1.5, w * 1.25)
        return y, z
""",
    "loop": """
def program(x: Tensor, w: Tensor):
    y = x
    for i in range(3):
        with {e}:
            y = product(y, w).float()
        if i == 1:
            break
    return y
""",
    "branch": """
def program(x: Tensor, w: Tensor):
    if x.dim() == 2:
        with {e}:
            y = product(x, w)
    else:
        y = x
    return y
""",
    "early return": """
def choose(x: Tensor, m: Optional[Tensor]):
    with {e}:
        if m is not None and m.dim() > 1 and torch.mm(x, m).dim() == 2:
            return product(x, m)
        y = x * 2
    return y


def program(x: Tensor, w: Tensor):
    return choose(x, w), choose(x, None), choose(x, w[0])
""",
    "class that is no module": """
class Part:
    def __init__(self, n: int):
        self.n = n

    def part(self, x: Tensor, w: Tensor):
        with {e}:
            if self.n == 1:
                return product(x, w)
        return torch.mm(w, x)


def program(x: Tensor, w: Tensor):
    return Part(1).part(x, w), Part(2).part(x, w)
""",
    "overload": """
@torch.jit._overload
def helper(x: Tensor, w: Tensor) -> Tensor:
    pass


@torch.jit._overload
def helper(x: Tensor, w: int) -> int:
    pass


def helper(x, w):
    with {e}:
        if isinstance(w, int):
            return w
        return product(x, w)


def program(x: Tensor, w: Tensor):
    return helper(x, w), product(x, w), helper(x, 1)
""",
    "closure": """
def make():
    from torch import autocast as local
    region, low, LOCAL = torch.autocast("cpu", dtype=LOW), torch.float16, {e0}

    def program(x: Tensor, w: Tensor):
        with LOCAL:
            y = product(x, w)
        with region:
            z = product(x, w)
        with local("cpu", dtype=low):
            return y, z, product(x, w)

    return program


program = make()
""",
}
DECORATED_PLACES = {
    "top": """
@{e}
def program(x: Tensor, w: Tensor):
    return product(x, w)
""",
    "helper": """
@{e}
def helper(x: Tensor, w: Tensor):
    return product(x, w)


def program(x: Tensor, w: Tensor):
    return helper(x, w), product(x, w)
""",
    "early return": """
@{e}
def helper(x: Tensor, w: Tensor, n: int):
    if n > 1 and x.dim() == 2:
        return product(x, w)
    return x


def program(x: Tensor, w: Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return helper(x, w, 1), helper(x, w, 2)
""",
    "forward": """
class Model(nn.Module):
    @{e}
    def forward(self, x: Tensor, w: Tensor):
        return product(x, w)


program = Model()
""",
    "method": """
class Model(nn.Module):
    @{e}
    def part(self, x: Tensor, w: Tensor):
        return product(x, w)

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "static method": """
class Model(nn.Module):
    @staticmethod
    @{e}
    def part(x: Tensor, w: Tensor):
        return product(x, w)

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "class method": """
class Model(nn.Module):
    @classmethod
    @{e}
    def part(cls, x: Tensor, w: Tensor):
        return product(x, w)

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "submodule": """
class Part(nn.Module):
    @{e}
    def forward(self, x: Tensor, w: Tensor):
        return product(x, w)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, w: Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.part(x * 1.5, w * 1.25), product(x, w)


program = Model()
""",
    "attribute": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = ({e})(product)

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "forward of an object": """
class Model(nn.Module):
    def forward(self, x: Tensor, w: Tensor):
        return product(x, w)


program = Model()
program.forward = ({e})(program.forward)
""",
    "method of an object": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = ({e})(self.part)

    def part(self, x: Tensor, w: Tensor):
        return product(x, w)

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "hooks": """
@{e}
def before(self, given: Tuple[Tensor, Tensor]) -> Tuple[Tensor, Tensor]:
    return product(given[0], given[1]).float(), given[1]


@{e}
def after(self, given: Tuple[Tensor, Tensor], result: Tensor) -> Tuple[Tensor, Tensor]:
    return result, product(given[0], given[1])


class Model(nn.Module):
    def forward(self, x: Tensor, w: Tensor):
        return product(x, w)


program = Model()
program.register_forward_pre_hook(before)
program.register_forward_hook(after)
""",
    "interface": """
@torch.jit.interface
class Interface(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        pass


class Part(nn.Module):
    @{e}
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return product(x, w)


class Model(nn.Module):
    part: Interface

    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


torch.jit.script(Model())
program = Model()
""",
    "class that is no module": """
class Part:
    def __init__(self, n: int):
        self.n = n

    @{e}
    def part(self, x: Tensor, w: Tensor):
        return product(x, w)


def program(x: Tensor, w: Tensor):
    return Part(1).part(x, w), product(x, w)
""",
    "class that torch compiled before": """
class Part:
    def __init__(self, n: int):
        self.n = n

    @{e}
    def part(self, x: Tensor, w: Tensor):
        return product(x, w)


torch.jit.script(Part)


def program(x: Tensor, w: Tensor):
    return Part(1).part(x, w), product(x, w)
""",
    "called": """
decorated = ({e})(product)


def program(x: Tensor, w: Tensor):
    y = decorated(x, w)
    for i in range(2):
        if i == 1:
            y = decorated(y.float(), w)
    return y, product(x, w)
""",
    "factory": """
def make(region):
    @region
    def program(x: Tensor, w: Tensor):
        return product(x, w)

    return program


program = make({e})
""",
    "factory of classes": """
def make(low, region):
    class Model(nn.Module):
        @region
        @torch.autocast("cpu", dtype=low)
        def forward(self, x: Tensor, w: Tensor):
            return product(x, w)

    return Model()


program = make(torch.bfloat16, {e})
""",
    "class": """
class Part(nn.Module):
    def forward(self, x: Tensor, w: Tensor):
        return product(x, w)


Part = ({e})(Part)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "object": """
class Part(nn.Module):
    def forward(self, x: Tensor, w: Tensor):
        return product(x, w)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = ({e})(Part())

    def forward(self, x: Tensor, w: Tensor):
        return self.part(x, w), product(x, w)


program = Model()
""",
    "stacked": """
@torch.autocast("cpu", dtype=torch.bfloat16)
@{e}
@torch.no_grad()
def helper(x: Tensor, w: Tensor):
    return product(x, w)


def program(x: Tensor, w: Tensor):
    return helper(x, w), product(x * 1.5, w * 1.25)
""",
}
DECORATORS = {
    **{way: e for way, e in EXPRESSIONS.items() if "x." not in e and way != "with no_grad around"},
    "wraps": "wrapping",
    "hidden": "hidden",
    "wrapping object": "Decorator",
}
WHOLE = "NARROWCAST_WAYS" in os.environ  # `make conformance`: every way in every place, in every front end


def some(ways, places):
    """Pairs of a way and a place: all, or this many that each way and each place occurs, other pairs for each way."""
    pairs = itertools.product(enumerate(ways), enumerate(places))
    return [(way, place) for (n, way), (m, place) in pairs if WHOLE or (n + m) % 4 == 0]


_numbers = itertools.count()


def load(text, folder):
    """The program of a module with this source, and its file."""
    file = folder / f"region_program_{next(_numbers)}.py"
    file.write_text(HEADER + text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module.program, file


def inputs():
    torch.manual_seed(0)
    return [torch.randn(4, 4).requires_grad_(), (torch.randn(4, 4) / 2).requires_grad_()]


def run(function):
    """Outputs and gradients."""
    leaves = inputs()
    found = [t for t in torch.utils._pytree.tree_leaves(function(*leaves)) if isinstance(t, torch.Tensor)]
    if any(t.requires_grad for t in found):
        sum(t.double().sin().sum() for t in found).backward()
    return [t.detach() for t in found], [leaf.grad for leaf in leaves]


def check(text, folder):
    """The script, or None where it was refused with the place."""
    try:
        program, file = load(text, folder)
        expected, gradients = run(program)
    except Exception:
        return None  # no program of eager code
    try:
        scripted = nc.script(program)
    except Exception as error:
        said = str(error)
        assert f"{file}:" in said or f'{file}", line' in said, f"no place: {type(error).__name__}: {said}\n{text}"
        return None
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    loaded = [torch.jit.load(io.BytesIO(buffer.getvalue())) for _ in range(2)]
    runs = [scripted, scripted, loaded[0], nc.script(loaded[1])]
    if WHOLE:
        runs.append(nc.compile(program, backend="aot_eager"))
    if WHOLE and "no_grad" not in text and "-> int" not in text:  # traces record no `no_grad`, and return no numbers
        runs.append(nc.trace(program, tuple(inputs()), check_trace=False))
    for ran in runs:
        found, its_gradients = run(ran)
        assert [t.dtype for t in found] == [t.dtype for t in expected], text
        assert all(map(torch.equal, found, expected)), text
        for a, b in zip(gradients, its_gradients, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-2, atol=1e-3)), text
    return scripted


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("way", "place"), some(EXPRESSIONS, WITH_PLACES))
def test_with_statements(way, place, tmp_path):
    """Eager's dtypes and bits, or the line."""
    e = EXPRESSIONS[way]
    check(WITH_PLACES[place].format(e=e, e0="OTHER" if "x." in e or "no_grad" in way else e), tmp_path)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("way", "place"), some(DECORATORS, DECORATED_PLACES))
def test_decorators(way, place, tmp_path):
    """Eager's dtypes and bits, or the line."""
    check(DECORATED_PLACES[place].format(e=DECORATORS[way]), tmp_path)


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("way", ["torch", "ours", "global", "attribute", "partial", "ours, policy"])
@pytest.mark.parametrize("place", ["top", "forward", "called", "factory", "method of an object", "hooks"])
def test_what_decorates_holds(way, place, tmp_path):
    """These are scripts, and no errors."""
    assert check(DECORATED_PLACES[place].format(e=DECORATORS[way]), tmp_path) is not None


@pytest.mark.parametrize("way", ["context manager", "class", "wraps", "hidden", "wrapping object"])
def test_what_cannot_be_carried_is_refused(way, tmp_path):
    """Where the function is, and where it is called."""
    for place in ("top", "helper", "method", "static method"):
        assert check(DECORATED_PLACES[place].format(e=DECORATORS[way]), tmp_path) is None


def test_what_torch_compiles_itself_is_as_it_was(tmp_path):
    """A function that a script of ours called is compiled again."""
    text = WITH_PLACES["branch"].format(e=EXPRESSIONS["torch, by position"]).replace("program", "helper")
    program, _ = load(f"{text}\n\ndef program(x: Tensor, w: Tensor):\n    return helper(x, w)\n", tmp_path)
    expected = run(nc.script(program))[0]
    assert all(map(torch.equal, run(torch.jit.script(program))[0], expected))


def test_in_another_process(tmp_path):
    """Saved scripts run in plain torch, as they ran here."""
    here = []
    for n, (way, place) in enumerate([("torch", "factory"), ("partial", "method"), ("attribute", "called")]):
        scripted = check(DECORATED_PLACES[place].format(e=DECORATORS[way]), tmp_path)
        torch.jit.save(scripted, str(tmp_path / f"{n}.pt"))
        here.append(run(scripted)[0])
    torch.save([inputs(), here], tmp_path / "here.pt")
    code = (
        "import sys, torch; inputs, here = torch.load('here.pt')\n"
        "found = [torch.utils._pytree.tree_leaves(torch.jit.load(f'{n}.pt')(*inputs)) for n in range(3)]\n"
        "assert 'narrowcast' not in sys.modules\n"
        "assert all(a.dtype is b.dtype and torch.equal(a, b) for f, h in zip(found, here) for a, b in zip(f, h))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_the_check_sees_a_region_that_is_dropped(tmp_path, monkeypatch):
    """What torch does with a decorated method."""
    monkeypatch.setattr(nc, "script", torch.jit.script)
    with pytest.raises(AssertionError):
        check(DECORATED_PLACES["forward"].format(e=EXPRESSIONS["torch"]), tmp_path)
