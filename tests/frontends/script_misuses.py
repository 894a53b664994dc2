"""Regions in scripts, written as they should not be; what `nc.script` answers is in tests/golden/script-misuses.txt.

Each program gives a module's function or object `program`. They are read from files, one each, as TorchScript asks.
"""

HEADER = """import contextlib
import functools

import torch

import narrowcast as nc

"""
MISUSES = {
    "a region of ours entered by hand": """
def program(x):
    region = nc.autocast("cpu")
    region.__enter__()
    y = torch.mm(x, x)
    region.__exit__(None, None, None)
    return y
""",
    "a region of torch's entered by hand": """
def program(x):
    region = torch.autocast("cpu")
    region.__enter__()
    return torch.mm(x, x)
""",
    "a misspelt argument": """
def program(x):
    with torch.autocast("cpu", enable=False):
        return torch.mm(x, x)
""",
    "a misspelt argument of ours": """
def program(x):
    with nc.autocast("cpu", polcy="safe"):
        return torch.mm(x, x)
""",
    "too many arguments": """
def program(x):
    with torch.autocast("cpu", torch.bfloat16, True, True, "native"):
        return torch.mm(x, x)
""",
    "no device type": """
def program(x):
    with torch.autocast(dtype=torch.bfloat16):
        return torch.mm(x, x)
""",
    "a device type that does not exist": """
def program(x):
    with torch.autocast("gpu"):
        return torch.mm(x, x)
""",
    "a device with a number": """
def program(x):
    with nc.autocast("cuda:0"):
        return torch.mm(x, x)
""",
    "a dtype as text, for torch": """
def program(x):
    with torch.autocast("cpu", dtype="bf16"):
        return torch.mm(x, x)
""",
    "a format for torch": """
def program(x):
    with torch.autocast("cpu", dtype=nc.formats.bf16):
        return torch.mm(x, x)
""",
    "a format that does not exist": """
def program(x):
    with nc.autocast("cpu", "bf15"):
        return torch.mm(x, x)
""",
    "fp8": """
def program(x):
    with nc.autocast("cpu", torch.float8_e4m3fn):
        return torch.mm(x, x)
""",
    "fp8, for torch": """
def program(x):
    with torch.autocast("cpu", torch.float8_e4m3fn):
        return torch.mm(x, x)
""",
    "integers": """
def program(x):
    with torch.autocast("cpu", torch.int8):
        return torch.mm(x, x)
""",
    "fp64": """
def program(x):
    with nc.autocast("cpu", torch.float64):
        return torch.mm(x, x)
""",
    "a policy that does not exist": """
def program(x):
    with nc.autocast("cpu", policy="saef"):
        return torch.mm(x, x)
""",
    "a policy that an argument holds": """
def program(x, policy: str):
    with nc.autocast("cpu", policy=policy):
        return torch.mm(x, x)
""",
    "a policy that a condition chooses": """
def program(x, safe: bool):
    region = nc.autocast("cpu", policy="safe") if safe else nc.autocast("cpu")
    with region:
        return torch.mm(x, x)
""",
    "inner blocks by another word": """
def program(x):
    with nc.autocast("cpu", policy="safe", inner="ours"):
        return torch.mm(x, x)
""",
    "a cache of another kind": """
def program(x):
    with nc.autocast("cpu", cache_enabled="always"):
        return torch.mm(x, x)
""",
    "a region out of a list": """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.regions = [torch.autocast("cpu"), torch.autocast("cpu", torch.float16)]

    def forward(self, x, n: int):
        with self.regions[n]:
            return torch.mm(x, x)


program = Model()
""",
    "a region as an argument": """
def program(x, region: torch.autocast):
    with region:
        return torch.mm(x, x)
""",
    "a region made earlier, of the device of a tensor": """
def program(x):
    region = torch.autocast(x.device.type)
    with region:
        return torch.mm(x, x)
""",
    "a class of one's own": """
class Low(torch.autocast):
    def __init__(self):
        super().__init__("cpu", torch.bfloat16)


def program(x):
    with Low():
        return torch.mm(x, x)
""",
    "a context manager of one's own": """
@contextlib.contextmanager
def low():
    with torch.autocast("cpu"):
        yield


def program(x):
    with low():
        return torch.mm(x, x)
""",
    "a context manager as a decorator": """
@contextlib.contextmanager
def low():
    with torch.autocast("cpu"):
        yield


@low()
def program(x):
    return torch.mm(x, x)
""",
    "a decorator of one's own": """
def low(function):
    @functools.wraps(function)
    def inner(*args):
        with torch.autocast("cpu"):
            return function(*args)

    return inner


@low
def helper(x):
    return torch.mm(x, x)


def program(x):
    return helper(x) + 1
""",
    "an ExitStack": """
def program(x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu"))
        return torch.mm(x, x)
""",
    "a generator": """
@nc.autocast("cpu")
def program(x):
    yield torch.mm(x, x)
""",
    "a coroutine": """
@nc.autocast("cpu")
async def program(x):
    return torch.mm(x, x)
""",
    "a decorated module": """
program = torch.autocast("cpu")(torch.nn.Linear(4, 4))
""",
    "a part of a model that is decorated": """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.autocast("cpu")(torch.nn.Linear(4, 4))

    def forward(self, x):
        return self.part(x)


program = Model()
""",
    "a decorated class": """
@torch.autocast("cpu")
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.mm(x, x)


program = Model
""",
    "a lambda": """
program = torch.autocast("cpu")(lambda x: torch.mm(x, x))
""",
    "a partial function": """
program = functools.partial(nc.autocast("cpu")(torch.mm))
""",
    "a pin around a region": """
@nc.pin("fp32")
@nc.autocast("cpu")
def program(x):
    return torch.mm(x, x)
""",
    "a call into Python": """
@torch.jit.ignore
def python(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def program(x):
    with torch.autocast("cpu"):
        return python(x)
""",
    "enabled as text": """
def program(x):
    with torch.autocast("cpu", enabled="no"):
        return torch.mm(x, x)
""",
    "enabled as a tensor": """
def program(x):
    with torch.autocast("cpu", enabled=x.sum() > 0):
        return torch.mm(x, x)
""",
    "a dtype as text that an argument holds": """
def program(x, dtype: str):
    with nc.autocast("cpu", dtype):
        return torch.mm(x, x)
""",
    "a device in the place of its type": """
def program(x):
    with torch.autocast(torch.device("cpu")):
        return torch.mm(x, x)
""",
    "arguments that a list holds": """
def program(x, arguments: list[str]):
    with torch.autocast(*arguments):
        return torch.mm(x, x)
""",
    "a class of regions": """
def program(x):
    with torch.autocast:
        return torch.mm(x, x)
""",
    "no context manager": """
def program(x):
    with x:
        return torch.mm(x, x)
""",
    "autocast switched on by hand": """
def program(x):
    torch.set_autocast_enabled("cpu", True)
    return torch.mm(x, x)
""",
    "a function inside": """
def program(x):
    @torch.autocast("cpu")
    def inner(y):
        return torch.mm(y, y)

    return inner(x)
""",
    "a decorator that takes any arguments": """
def low(function):
    def inner(*args):
        with torch.autocast("cpu"):
            return function(*args)

    return inner


@low
def program(x):
    return torch.mm(x, x)
""",
    "a method of a class that torch compiled before": """
@torch.jit.script
class Part:
    def __init__(self, n: int):
        self.n = n

    @torch.autocast("cpu")
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)


def program(x):
    return Part(1).product(x)
""",
    "an interface of a class with a region": """
@torch.jit.interface
class Interface:
    def product_of(self, x: torch.Tensor) -> torch.Tensor:
        pass


@torch.jit.script
class Part:
    def __init__(self, n: int):
        self.n = n

    def product_of(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return torch.mm(x, x)


def call(part: Interface, x: torch.Tensor) -> torch.Tensor:
    return part.product_of(x)


def program(x):
    return call(Part(1), x)
""",
    "a script whose method is decorated": """
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.mm(x, x)


program = torch.jit.script(Model())
program.forward = torch.autocast("cpu")(program.forward)
""",
    "a forward without self": """
class Model(torch.nn.Module):
    def forward(self, x):
        return x


@torch.autocast("cpu")
def forward(x):
    return torch.mm(x, x)


program = Model()
program.forward = forward
""",
    "a method of another object": """
class Model(torch.nn.Module):
    def part(self, x):
        return torch.mm(x, x)

    def forward(self, x):
        return self.part(x)


program = Model()
program.part = torch.autocast("cpu")(Model().part)
""",
    "a method in Python that an object decorates": """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.autocast("cpu")(self.part)

    @torch.jit.ignore
    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    def forward(self, x):
        return self.part(x)


program = Model()
""",
    "a partial function in the place of a method": """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = functools.partial(torch.autocast("cpu")(self.part), 2)

    def part(self, n: int, x):
        return torch.mm(x, x) * n

    def forward(self, x):
        return self.part(x)


program = Model()
""",
    "a call that opens a region": """
class Model(torch.nn.Module):
    @nc.autocast("cpu")
    def __call__(self, x):
        return super().__call__(x)

    def forward(self, x):
        return torch.mm(x, x)


program = Model()
""",
    "a pin on an argument that may be None": """
from typing import Optional


@nc.pin("fp32")
def program(x: torch.Tensor, mask: Optional[torch.Tensor] = None):
    return torch.mm(x, x)
""",
    "an autograd function in a region": """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def program(x):
    with torch.autocast("cpu"):
        return Double.apply(x)
""",
    "another context manager that something leaves": """
def program(x, n: int):
    with torch.autocast("cpu"), torch.profiler.record_function("part"):
        if n > 1:
            return torch.mm(x, x)
    return x
""",
}
