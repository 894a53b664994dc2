"""Functions and modules that the tests of TorchScript compile: every form of a region, every form of a call."""

from typing import List, Optional  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast as nc

BF16 = torch.autocast("cpu", dtype=torch.bfloat16)
OURS = nc.autocast("cpu", torch.bfloat16, policy="safe")
UNCACHED = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
CUSTOM = nc.Policy.native().with_rules(
    nc.Rule("aten.softmax", "lower"),
    nc.Rule("aten.relu", "full"),
    nc.Rule("aten.layer_norm", "inside"),
    nc.Rule("aten.mm", "to(fp16)"),
    name="custom",
)


def scope(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
    return y


def scope_without_dtype(x, w):
    with torch.autocast("cpu"):
        return torch.mm(x, w)


def scope_cpu_amp(x, w):
    with torch.cpu.amp.autocast():
        return torch.mm(x, w)


def scope_cpu_amp_fp16(x, w):
    with torch.cpu.amp.autocast(True, torch.float16):
        return torch.mm(x, w)


def scope_cuda_amp(x, w):
    with torch.cuda.amp.autocast(enabled=False):
        return torch.mm(x, w)


def scope_ours(x, w):
    with nc.autocast("cpu", policy=CUSTOM):
        y = F.layer_norm(torch.relu(torch.softmax(torch.matmul(x, w), -1)), [4])
        return y, torch.mm(y, w)


def scope_ours_by_name(x, w):
    with nc.autocast("cpu", torch.bfloat16, policy="safe"):
        return torch.mm(x, w)


def nested(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        with torch.autocast("cpu", enabled=False):
            z = torch.mm(y.float(), w)
        with torch.autocast("cpu", dtype=torch.float16):
            v = torch.mm(y, w * 1)  # eager code would take the cast of w that the other region made
    return y, z, v, torch.mm(x, w)


def several(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        y = torch.mm(x, w)
    with torch.autocast("cpu"), torch.autocast("cuda"):
        return y, torch.mm(x, w), torch.softmax(torch.mm(x, w), -1), torch.cat([x, torch.mm(x, w)])


def made_earlier(x, w):
    region = nc.autocast("cpu", torch.bfloat16)  # torch's own may not be entered twice
    y = torch.mm(x, w)
    with region:
        z = torch.mm(x, w)
        with region:
            v = torch.mm(z, w)
    with region:
        return y, z, v, torch.mm(x, w)


def made_in_the_module(x, w):
    with BF16:
        y = torch.mm(x, w)
    with OURS:
        return y, torch.mm(x, w)


def named(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16) as region:
        y = torch.mm(x, w)
    with region:
        return y, torch.mm(x, w)


def chosen(x, w, first: bool):
    a = torch.autocast("cpu", dtype=torch.bfloat16)
    b = torch.autocast("cpu", dtype=torch.float16)
    with a if first else b:
        y = torch.mm(x, w)
    return y


def enabled_at_run_time(x, w, on: bool):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        y = torch.mm(x, w)
        return y, torch.cat([x, y]), torch.mm(y, w), F.mse_loss(y, x)


def enabled_by_an_expression(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.size(0) > 2 and bool(x.dim() == 2)):
        return torch.mm(x, w)


def dtype_at_run_time(x, w, dtype: torch.dtype):
    with torch.autocast("cpu", dtype=dtype):
        y = torch.mm(x, w)
        return y, torch.mm(y, w), torch.cat([x, y])


def entered_in_one_branch(x, w, on: bool):
    if on:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.mm(x, w)
    else:
        y = torch.mm(x, w)
    with torch.autocast("cpu"):
        return y, torch.cat([y, torch.mm(x, w)]), F.mse_loss(y, torch.mm(y, w))


def left_by_return(x, w, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n == 1:
            return torch.mm(x, w)
        y = torch.mm(x, w)
    return y + x


def left_before_anything(x, w, n: int):
    """Both products use one cast of w: the region is one, though it is left before them."""
    y = x * 1.5
    if n < 5:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if n == 1:
                return y
            y = torch.mm(torch.mm(y, w), w)
        y = torch.mm(y.float(), w)
    return torch.matmul(y, y)


def left_by_break(x, w, n: int):
    y = x
    for i in range(n):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if i == 3:
                break
            if i == 1:
                continue
            y = torch.mm(y, w)
            if torch.mm(y, w).sum() > 1e4:
                return y.float()
    return torch.mm(y.float(), w)


def left_by_exception(x, w, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n == 3:
            raise ValueError("three")
        y = torch.mm(x, w)
    return y


def without_cache(x, w):
    """Each use of a weight has a cast of its own, and its gradient adds up in fp32."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        y = torch.mm(torch.mm(x, w), w)
    region = torch.cpu.amp.autocast(True, torch.bfloat16, False)
    with region:
        y = torch.mm(torch.mm(y, w), w)
    with UNCACHED:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # as around it
            y = torch.mm(torch.mm(y, w), w)
        with nc.autocast("cpu", torch.bfloat16, policy="native"):
            y = torch.mm(torch.mm(y, w), w)
        return torch.mm(torch.mm(y, w), w), cached_by_nobody(y, w)


@torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
def cached_by_nobody(x, w):
    return torch.mm(torch.mm(x, w), w)


def asks(x, w):
    """Code that looks whether autocast is on, as torch.nn.Transformer does."""
    y = torch.mm(x, w) if torch.is_autocast_cpu_enabled() else torch.mm(x, w) * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = torch.mm(x, w) if torch.is_autocast_cpu_enabled() else torch.mm(x, w) * 2
        if torch.is_autocast_enabled():
            z = z * 3
        with torch.autocast("cpu", enabled=False):
            v = torch.mm(x, w) if torch.is_autocast_cpu_enabled() else torch.mm(x, w) * 2
    return y, z, v


def loops(x, w, n: int):
    y = x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        while n > 0:
            y = torch.mm(y, w) + x
            n -= 1
        if y.sum() > 0:
            z = torch.mm(x, w)
        else:
            z = x
        return y, z, torch.cat([y, z]), torch.stack([y, y])


def helper_off(x, w):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(x, w)


def helper_plain(x, w):
    return torch.mm(x, w)


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(x, w):
    """Everything in it."""
    return torch.mm(x, w)


@nc.autocast("cpu", policy=CUSTOM)
def decorated_by_ours(x, w):
    return torch.softmax(torch.matmul(x, w), -1)


@torch.autocast("cpu", dtype=torch.bfloat16)
@torch.autocast("cpu", enabled=False)
def decorated_twice(x, w):
    return torch.mm(x, w)


def helpers(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return helper_off(x, w), helper_plain(x, w), decorated(x, w), decorated_by_ours(x, w)


def helpers_outside(x, w):
    return helper_off(x, w), helper_plain(x, w), decorated(x, w), decorated_by_ours(x, w), decorated_twice(x, w)


def forked(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = torch.jit.fork(helper_plain, x, w)
        b = torch.jit.fork(helper_off, x, w)
        return torch.jit.wait(a), torch.jit.wait(b)


def lists(x, w, n: int):
    found: List[Tensor] = []  # noqa: UP006
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(n):
            found.append(torch.mm(x, w))
            found.append(x)
        return torch.cat(found), torch.stack([x, torch.mm(x, w)]), torch.cat([torch.mm(x, w), torch.mm(w, x)])


def optional(x, w, bias: Optional[Tensor] = None):  # noqa: UP045
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w, bias)


def indexed(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.index_put(x, [torch.tensor([0])], x[1]), torch.mm(x, w)[:, 0] + x[:, 1]


def untouched(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(x.double(), w.double()), x.long() + 1, torch.mm(x.half(), w), (x > 0).sum()


def full(x, w, p: float = 2.0):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        return F.mse_loss(y, x), torch.cdist(y, x), F.l1_loss(y, torch.mm(w, x)), torch.linalg.vector_norm(y), y.norm(p)


def composites(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        return torch.einsum("ij,jk->ik", x, w), F.cross_entropy(y, torch.tensor([0, 1, 2, 3])), F.layer_norm(y, [4])


def written_in_place(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        y += x
        z = x.clone()
        z.mul_(2.0)
        return y, torch.mm(z, w)


def reused(x, w):
    """The weight cache: w is a leaf that requires grad, cast once for all of them."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x
        for _ in range(6):
            y = torch.mm(y, w)
        return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.0))

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x, times: int = 2):
        y = self.norm(self.inner(x))
        for _ in range(times):
            y = self.inner(y)
        for step in self.steps:
            y = step(y) + x
        return self.seq(y)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def helper(self, x):
        with nc.autocast("cpu"):
            return self.block.inner(x)

    @torch.jit.export
    def other(self, x):
        return self.helper(x * 2)  # equal expressions would be one in a script

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            a = self.block.inner(x)
        return self.block(x) + a, self.block.seq(x), self.helper(x), self.other(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.lstm(x.unsqueeze(0))[0]


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h, c = self.lstm(x)
            h, c = self.lstm(x + 1, (h, c))
            return h, c, self.gru(x, c), self.rnn(x, c)


FUNCTIONS = [
    (scope, ()), (scope_without_dtype, ()), (scope_cpu_amp, ()), (scope_cpu_amp_fp16, ()), (scope_cuda_amp, ()),
    (scope_ours, ()), (scope_ours_by_name, ()), (nested, ()), (several, ()), (made_earlier, ()),
    (made_in_the_module, ()), (named, ()), (chosen, (True,)), (chosen, (False,)), (enabled_at_run_time, (True,)),
    (enabled_at_run_time, (False,)), (enabled_by_an_expression, ()), (dtype_at_run_time, (torch.bfloat16,)),
    (dtype_at_run_time, (torch.float16,)), (entered_in_one_branch, (True,)), (entered_in_one_branch, (False,)),
    (left_by_return, (1,)), (left_by_return, (2,)), (left_before_anything, (1,)),
    (left_before_anything, (2,)), (left_by_break, (3,)), (left_by_break, (5,)),
    (left_by_exception, (1,)), (asks, ()), (loops, (2,)), (loops, (0,)), (without_cache, ()), (decorated, ()),
    (decorated_by_ours, ()), (decorated_twice, ()), (helpers, ()), (helpers_outside, ()), (forked, ()), (lists, (2,)),
    (optional, ()), (indexed, ()), (untouched, ()), (full, ()), (composites, ()), (written_in_place, ()), (reused, ()),
]  # fmt: skip
EXACT_GRADIENTS = [
    scope, scope_without_dtype, scope_cpu_amp, scope_cpu_amp_fp16, scope_ours, scope_ours_by_name, made_in_the_module,
    chosen, enabled_by_an_expression, dtype_at_run_time, left_by_return, left_before_anything,
    left_by_break, loops, without_cache, decorated,
    decorated_by_ours, lists, optional, indexed, untouched, written_in_place, reused,
]  # fmt: skip
MODULES = [Block, Outer, Recurrent, Cells]
