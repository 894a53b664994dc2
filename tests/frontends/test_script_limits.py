"""Each limitation that torch/csrc/jit/JIT-AUTOCAST.md lists: torch 2.13 shows it, Narrowcast does not have it.

Where torch is fixed one day, its half of a test fails: then docs/internals/torchscript.md changes.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.errors import ScriptError

_spec = importlib.util.spec_from_file_location("limits_scripts", Path(__file__).with_name("scripts.py"))
scripts = importlib.util.module_from_spec(_spec)
sys.modules["limits_scripts"] = scripts
_spec.loader.exec_module(scripts)

pytestmark = pytest.mark.filterwarnings("ignore")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def xw():
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


def dtypes(found):
    return [t.dtype for t in torch.utils._pytree.tree_leaves(found)]


def test_diagnostics(xw):
    """torch: an internal assertion without a place. Here it simply works."""
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        torch.jit.script(scripts.left_by_break)
    assert dtypes(nc.script(scripts.left_by_break)(*xw, 2)) == dtypes(scripts.left_by_break(*xw, 2))


def test_decorators(xw):
    """On the function, and on a helper."""
    for function in (scripts.decorated, scripts.helpers_outside):
        with pytest.raises(RuntimeError, match="decorator is not supported"):
            torch.jit.script(function)
        assert dtypes(nc.script(function)(*xw)) == dtypes(function(*xw))


def test_decorated_methods():
    """torch drops the decorator without a word."""
    torch.manual_seed(0)
    model, x = scripts.Block(), torch.randn(4, 4)
    assert model(x).dtype is BF16
    assert nc.script(model)(x).dtype is BF16

    class Decorated(nn.Module):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return torch.mm(x, x)

    assert torch.jit.script(Decorated())(x).dtype is FP32
    assert nc.script(Decorated())(x).dtype is BF16


@torch.autocast("cpu", dtype=torch.bfloat16)
class Built(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


def test_decorated_classes(xw):
    """In eager code the decorator holds while the module is made, not while it is called."""
    model = Built()
    assert model(xw[0]).dtype is nc.script(model)(xw[0]).dtype is FP32


@pytest.mark.parametrize("function, more", [(scripts.enabled_at_run_time, (True,)), (scripts.chosen, (True,))])
def test_arguments_that_are_no_constants(function, more, xw):
    """`enabled` of the running script, and a region chosen by a condition."""
    with pytest.raises(RuntimeError):
        torch.jit.script(function)(*xw, *more)
    assert dtypes(nc.script(function)(*xw, *more)) == dtypes(function(*xw, *more))


def test_uncommon_patterns(xw):
    """`as`, and what it names entered again."""
    with pytest.raises(RuntimeError, match="is not supported"):
        torch.jit.script(scripts.named)(*xw)
    assert dtypes(nc.script(scripts.named)(*xw)) == dtypes(scripts.named(*xw))


def adds(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        return y + y, torch.cat([y, y])


def test_promotion_neither_guesses_nor_bloats(xw):
    """Nothing is inserted where the formats are known. In torch 2.13 they are right here, too."""
    scripted = nc.script(adds)
    assert dtypes(scripted(*xw)) == dtypes(adds(*xw)) == [BF16, BF16]
    assert "aten::__getitem__" not in str(scripted.graph) and "prim::Loop" not in str(scripted.graph)


def mixed_add(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(x, w).add_(x), torch.mm(x, w) + x


def test_add_is_not_promoted(xw):
    """The document says that torch's pass promotes it; in 2.13 it does not, nor does ours."""
    assert dtypes(torch.jit.script(mixed_add)(*xw)) == dtypes(mixed_add(*xw))
    assert dtypes(nc.script(mixed_add)(*xw)) == dtypes(mixed_add(*xw))


def appended(x, w):
    with torch.autocast("cuda", dtype=torch.float16):
        return torch.mm(x, w).norm(2.0), torch.softmax(torch.mm(x, w), -1)


def test_missing_policies(xw):
    """cuda's full_append_dtype and full_set_dtype are in the graph, behind a look at the tensor's device."""
    graph = nc.script(appended).graph
    kinds = [n.schema() for n in graph.findAllNodes("aten::norm")]
    assert any("ScalarOpt_dtype" in k for k in kinds) and any("norm.Scalar(" in k for k in kinds)
    assert dtypes(nc.script(appended)(*xw)) == [FP32, FP32]


def helper_off(a, b):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(a, b) * 2.0


def test_scripts_that_call_traces(xw):
    """`autocast(False)` in the traced part: torch strips it. A trace with regions keeps it here."""
    kept, stripped = nc.trace(helper_off, xw), torch.jit.trace(helper_off, xw)

    def calls(which):
        def function(a, b):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return which(a, b)

        return function

    assert nc.script(calls(kept))(*xw).dtype is FP32
    assert nc.script(calls(stripped))(*xw).dtype is BF16
    assert "Enter" not in str(stripped.graph)


def test_traces_that_call_scripts(xw):
    """torch leaves the script uncast."""

    @torch.jit.script
    def callee(a, b):
        return torch.mm(a, b)

    def traced(a, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return callee(a, b)

    assert torch.jit.trace(traced, xw, check_trace=False)(*xw).dtype is not BF16
    assert nc.trace(traced, xw)(*xw).dtype is BF16


def product(a, b):
    return torch.mm(a, b)


def test_traces_of_forks(xw):
    """torch: the code around a fork cannot use a cast that was made in it. Here it runs in place."""

    def traced(a, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            forked = torch.jit.fork(product, a, b)
            with torch.autocast("cpu", enabled=False):
                other = torch.jit.fork(torch.autocast("cpu")(product), b, b)
            return torch.mm(a, b) + torch.jit.wait(forked) + torch.mm(b, b) + torch.jit.wait(other)

    xw = [x.detach().requires_grad_() for x in xw]
    assert torch.equal(nc.trace(traced, tuple(xw), check_trace=False)(*xw), traced(*xw))


def off(a, b):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(a, b)


def test_switching_eager_autocast_off(xw):
    """torch: still cast. Here the scope is off, and the caller's state is back after it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.jit.script(off)(*xw).dtype is BF16
        assert nc.script(off)(*xw).dtype is FP32
        assert torch.mm(*xw).dtype is BF16


def test_tracing_under_a_region_with_the_cache(xw):
    """#50231: a weight that was cast before cannot be traced by torch."""
    plain = """
import torch
model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    model(x)
    torch.jit.trace(model, x)
"""  # in a process of its own: where kernels of ours run, torch traces it, too
    found = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True)
    assert found.returncode and "Cannot insert a Tensor that requires grad as a constant" in found.stderr
    model, x = nn.Linear(4, 4), xw[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
        traced = nc.trace(model, x)
        assert torch.equal(traced(x), model(x))


def lists_of_cpu(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.softmax(torch.mm(x, w), -1), torch.mm(x, w).exp()


def test_lists_are_those_of_the_device(xw):
    """torch takes the old cuda lists for every device: exp in fp32, where the cpu's list leaves it in bf16."""
    assert dtypes(lists_of_cpu(*xw)) == [BF16, BF16]
    assert dtypes(torch.jit.script(lists_of_cpu)(*xw)) != [BF16, BF16]
    assert dtypes(nc.script(lists_of_cpu)(*xw)) == [BF16, BF16]


def given_out_and_read_in_a_loop(x, w, n: int):
    x, v = x * 1.5, x * 0.75
    for _i in range(n):
        x = x + w
        for _j in range(n):
            v = v + x
    return x, v


def listed_and_read_in_a_loop(x, w, n: int):
    x, v = x * 1.5, x * 0.75
    if n > 1:
        x = x + w
        for _i in range(n):
            v = v + x
        return [x, v]
    return [v, x]


@pytest.mark.parametrize("function", [given_out_and_read_in_a_loop, listed_and_read_in_a_loop])
def test_values_that_loops_inside_read_are_still_there(function, xw):
    """A fault of torch's interpreter: a value is dropped by the inner loop, though the outer one gives it out."""
    with torch.no_grad():
        plain = torch.jit.script(function)
        with pytest.raises(RuntimeError, match="Expected Tensor but got None"):
            for _ in range(3):
                plain(*xw, 2)
        scripted = nc.script(function, under="bf16")
        with nc.autocast("cpu"):
            expected = function(*xw, 2)
        for _ in range(3):
            assert all(map(torch.equal, scripted(*xw, 2), expected))


def with_integers(a, b):
    with torch.autocast("cpu", dtype=torch.int8):
        return torch.mm(a, b)


def test_a_region_in_a_format_that_does_not_float(xw):
    """An error with the line."""
    with pytest.raises(ScriptError, match="cannot use this dtype as its low format") as caught:
        nc.script(with_integers)
    assert "test_script_limits.py" in str(caught.value)


class FromList(nn.Module):
    """Keeps its regions in a list, of which it takes one while it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.regions = [torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16)]

    def forward(self, x, i: int):
        with self.regions[i]:
            return self.linear(x)


class FromAttribute(nn.Module):
    """Keeps its region."""

    def __init__(self):
        super().__init__()
        self.linear, self.region = nn.Linear(2, 2), torch.autocast("cpu", torch.bfloat16)

    def forward(self, x):
        with self.region:
            return self.linear(x)


def test_a_region_in_a_list_says_what_to_write():
    """With the place where it is known."""
    message = r"list or dict.*column 14.*with self.regions\[i\].*one with statement for each region, chosen by an if"
    with pytest.raises(ScriptError, match=f"(?s){message}"):
        nc.script(FromList(), under="bf16")


def test_a_region_that_an_object_keeps():
    """It is known when the object is scripted."""
    model, x = FromAttribute(), torch.randn(3, 2)
    assert torch.equal(nc.script(model)(x), model(x)) and model(x).dtype is BF16
