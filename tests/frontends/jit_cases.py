"""The cases of PyTorch's own tests of autocast in TorchScript, on the cpu: programs with regions, models to trace.

A program is made for two regions, `on` and `off`, so that it can be had for autocast's own lists of the cpu, in each
format, and for cuda's lists, with which PyTorch's tests are written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast as nc

CUDA_LISTS = nc.Policy.native("cuda")


@dataclass(frozen=True, slots=True)
class Case:
    """A program, the formats of its arguments, and of its results by the cpu's lists and by cuda's."""

    name: str
    make: Callable
    arguments: str
    by_cpu: str
    by_cuda: str
    gradients: bool = True


# -- one region, one op


def minimal(on, off):
    def function(a, b):
        with on:
            x = torch.mm(a, b)
            return x, x.sum()

    return function


def linear(on, off):
    def function(a, b):
        with on:
            x = F.linear(a, b)
            return x, torch.sum(x, 0)

    return function


def minimal_off(on, off):
    def function(a, b):
        with off:
            return torch.mm(a, b)

    return function


def explicit_casts(on, off):
    def function(a, b, c, d):
        with on:
            e = torch.mm(a.double(), b.double()).float()
            f = torch.mm(c, d).double()
        return e, f, torch.mm(d.double(), f)

    return function


def duplicates(on, off):
    def function(a):
        with on:
            e = torch.mm(a, a)
            return e, torch.mm(e, e)

    return function


# -- what is raised, what is promoted, what gets a dtype


def raised(on, off):
    def function(a, b):
        with on:
            return torch.log(a), torch.prod(b, 1), torch.cdist(a, b)

    return function


def promoted(on, off):
    def function(a, b, c, d):
        with on:
            e = torch.mm(a, b)
            return e, torch.addcmul(e, c, d, value=0.25), torch.cat([c, e]), torch.stack([e, d]), torch.cat([e, e])

    return function


def promoted_alone(on, off):
    def function(a, b):
        with on:
            return torch.addcmul(a, a, b, value=0.25), torch.cat([a, b]), torch.stack([b, a])

    return function


def with_a_dtype(on, off):
    def function(a, b, c, d, kind: Optional[torch.dtype] = None):  # noqa: UP045
        with on:
            return (
                torch.softmax(a, 0),
                torch.softmax(b, 0, None),
                torch.softmax(c, 0, torch.float64),
                F.softmax(d, 0, dtype=kind),
            )

    return function


# -- branches


def branches(on, off):
    def function(a, b, c, d):
        with on:
            if a[0, 0] > 0.5:
                e, times = torch.mm(a, b), 1
            else:
                e, times = torch.mm(c, d), 2
            return e, torch.mm(d, e) * times

    return function


def formats_by_branch(on, off):
    def function(a, b, c, d):
        with on:
            if a[0, 0] > 0.5:
                e = torch.mm(a, b)
                f = torch.mm(b, c).float()
            else:
                e = torch.mm(c, d).float()
                f = torch.mm(d, a)
            g = torch.cat([e, f])
        return g, torch.mm(e.float(), f.float())

    return function


# -- regions in regions


def nested(on, off):
    def function(a, b, c, d):
        with off:
            e = torch.mm(a, b)
            with on:
                f = torch.mm(e, c)
                with torch.autocast("cpu", enabled=False):  # torch's `off` may not be entered inside itself
                    g = torch.mm(e, d)
        return e, f, g

    return function


def nested_in_one_line(on, off):
    def function(a, b):
        with off, on:
            x = torch.mm(a, b)
        with on, off:
            return x, torch.mm(b, a)

    return function


# -- callees


def callees(on, off):
    def product(a, b):
        return torch.mm(a, b)

    def function(a, b):
        with on:
            x = product(a, b)
            for _ in range(3):
                x = product(x, x)
            return product(x, b)

    return function


def callees_that_switch_on(on, off):
    def product(a, b):
        with on:
            return torch.mm(a, b)

    def function(a, b):
        with off:
            return product(a, b), torch.mm(b, a)

    return function


def callees_that_switch_off(on, off):
    def product(a, b):
        with off:
            return torch.mm(a, b)

    def function(a, b):
        with on:
            return product(a, b), torch.mm(b, a)

    return function


def written(on, off):
    """`out` and in-place ops stay as they are written."""

    def function(a, b, c):
        with on:
            x = torch.addmm(a, b, c, alpha=2)
            y = torch.addmm(a, c, b, out=a)
            return x, y, a.addmm_(b, c), torch.mm(a, b)

    return function


def added(on, off):
    def function(a, b, c):
        with on:
            return torch.addmm(a, b, c)

    return function


def one_value_twice(on, off):
    """What is no weight is cast for each product, and its gradients add up in its own format."""

    def function(a, b, c):
        x = a * 1.5
        with on:
            return torch.mm(x, b), torch.mm(x, c)

    return function


CASES = [
    Case("test_minimal", minimal, "fp32 fp32", "low low", "low fp32"),
    Case("test_linear_bf16", linear, "fp32 fp32", "low low", "low fp32"),
    Case("test_minimal_off", minimal_off, "fp32 fp32", "fp32", "fp32"),
    Case("test_explicit_casts", explicit_casts, "fp32 fp32 fp32 fp32", "fp32 fp64 fp64", "fp32 fp64 fp64"),
    Case("test_duplicate_inputs", duplicates, "fp32", "low low", "low low"),
    Case("test_fp32_policy", raised, "low low", "low fp32 fp32", "fp32 fp32 fp32"),
    Case("test_fp32_policy_with_fp64", raised, "fp64 fp64", "fp64 fp64 fp64", "fp64 fp64 fp64"),
    Case("test_promote_policy", promoted, "fp32 fp32 fp32 fp32", "low fp32 fp32 fp32 low", "low fp32 fp32 fp32 low"),
    Case("test_promote_policy_fp64", promoted_alone, "fp64 fp64", "fp64 fp64 fp64", "fp64 fp64 fp64"),
    Case("test_fp32_set_opt_dtype_policy", with_a_dtype, "low low low low", "low low fp64 low", "fp32 fp32 fp64 fp32"),
    Case("test_fp32_set_opt_dtype_policy_fp64", with_a_dtype, "fp64 fp64 fp64 fp64", "fp64 fp64 fp64 fp64",
         "fp64 fp64 fp64 fp64"),
    Case("test_control_flow", branches, "fp32 fp32 fp32 fp32", "low low", "low low"),
    Case("test_divergent_types", formats_by_branch, "fp32 fp32 fp32 fp32", "fp32 fp32", "fp32 fp32"),
    Case("test_nested_autocast", nested, "fp32 fp32 fp32 fp32", "fp32 low fp32", "fp32 low fp32"),
    Case("test_implicitly_nested_autocast", nested_in_one_line, "fp32 fp32", "low fp32", "low fp32"),
    Case("test_callees", callees, "fp32 fp32", "low", "low"),
    Case("test_callees_with_autocast_on", callees_that_switch_on, "fp32 fp32", "low fp32", "low fp32"),
    Case("test_callees_with_autocast_off", callees_that_switch_off, "fp32 fp32", "fp32 low", "fp32 low"),
    Case("test_inplace", written, "fp32 fp32 fp32", "low fp32 fp32 low", "low fp32 fp32 low", gradients=False),
]  # fmt: skip


# -- regions that the function makes for itself


def made_by_branch(a, b, c, d):
    """Outside of both, the product of what they gave is left as it came."""
    yes = torch.autocast("cpu", dtype=torch.bfloat16, enabled=True)
    no = torch.autocast("cpu", enabled=False)
    if a[0, 0] > 0.5:
        with yes:
            e = torch.mm(a, b)
    else:
        with no:
            e = torch.mm(c, d)
    return e, torch.mm(e, e)


def made_by_branch_with_a_policy(a, b, c, d):
    yes = nc.autocast("cpu", torch.float16, policy="safe")
    no = nc.autocast("cpu", enabled=False)
    if a[0, 0] > 0.5:
        with yes:
            e = torch.mm(a, b)
    else:
        with no:
            e = torch.mm(c, d)
    return e, torch.mm(e, e), torch.softmax(e, 0)


def taken_by_condition(a, b):
    yes = torch.autocast("cpu", dtype=torch.bfloat16)
    no = torch.autocast("cpu", enabled=False)
    with yes if a[0, 0] > 0.5 else no:
        x = torch.mm(a, b)
        return x, torch.cat([x, a]), F.mse_loss(x, b)


def taken_by_condition_with_a_policy(a, b):
    yes = nc.autocast("cpu", torch.float16, policy="safe")
    no = nc.autocast("cpu", torch.float16, enabled=False, policy="safe")
    with yes if a[0, 0] > 0.5 else no:
        x = torch.mm(a, b)
        return x, torch.cat([x, a]), torch.softmax(x, 0)


def made_with_a_policy_of_the_module(a, b):
    region = nc.autocast("cpu", torch.float16, policy=CUDA_LISTS)
    with region:
        x = torch.mm(a, b)
        return x, torch.softmax(x, 0)


def entered_again(a, b, c, d):
    """Ours: torch's own is left on by eager code where it is entered inside itself."""
    region = nc.autocast("cpu", torch.bfloat16)
    with region:
        e = torch.mm(a, b)
        with region:
            e = torch.mm(c, torch.mm(e, d))
            f = torch.mm(d, e)
        g = torch.mm(b, c)
    return e, f, g, torch.mm(e, f), torch.mm(a, c)


def entered_again_by_name(a, b, c, d):
    with nc.autocast("cpu", torch.bfloat16) as region:
        e = torch.mm(a, b)
        with region:
            e = torch.mm(c, torch.mm(e, d))
            f = torch.mm(d, e)
        g = torch.mm(b, c)
    return e, f, g, torch.mm(e, f), torch.mm(a, c)


def enabled_by_an_argument(a, b, on: bool):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        x = torch.mm(a, b)
        return x, x.sum(), torch.stack([x, a])


def enabled_by_an_argument_with_cuda_lists(a, b, on: bool):
    with nc.autocast("cpu", torch.float16, enabled=on, policy=CUDA_LISTS):
        x = torch.mm(a, b)
        return x, x.sum(), torch.stack([x, a])


def enabled_by_a_choice(a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True if a[0, 0] > 0.5 else False):  # noqa: SIM210
        return torch.mm(a, b)


def enabled_by_a_value(a, b):
    with nc.autocast("cpu", torch.bfloat16, enabled=bool((a[0, 0] > 0.5).item())):
        return torch.mm(a, b)


MADE_INSIDE = {
    "test_runtime_autocast_state": [enabled_by_an_argument, enabled_by_an_argument_with_cuda_lists],
    "test_runtime_autocast_state_expr": [enabled_by_a_choice, enabled_by_a_value],
    "test_divergent_autocast": [made_by_branch, made_by_branch_with_a_policy],
    "test_conditional_autocast": [taken_by_condition, taken_by_condition_with_a_policy],
    "test_reused_autocast": [entered_again],
    "test_reused_autocast_expr": [entered_again_by_name],
}


# -- how regions are written


def generic(a, b):
    with torch.amp.autocast(device_type="cpu"):
        x = torch.mm(a, b)
        return x, torch.sum(x)


def generic_by_position(a, b):
    with torch.amp.autocast("cpu", torch.bfloat16):
        x = torch.mm(a, b)
        return x, torch.sum(x)


def of_the_package(a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.mm(a, b)
        return x, torch.sum(x)


def of_the_cpu(a, b):
    with torch.cpu.amp.autocast():
        x = torch.mm(a, b)
        return x, torch.sum(x)


def of_ours(a, b):
    with nc.autocast("cpu"):
        x = torch.mm(a, b)
        return x, torch.sum(x)


def without_a_dtype(a, b):
    with torch.autocast("cpu"):
        x = torch.mm(a, b)
        return x, torch.sum(x)


def half_of_the_package(a, b):
    with torch.autocast("cpu", dtype=torch.half):
        return torch.mm(a, b)


def half_of_the_cpu(a, b):
    with torch.cpu.amp.autocast(dtype=torch.float16):
        return torch.mm(a, b)


def for_cuda(a, b):
    with torch.autocast("cuda", dtype=torch.half):
        return torch.mm(a, b)


def for_cuda_without_a_dtype(a, b):
    with torch.autocast("cuda"):
        return torch.mm(a, b)


def for_cuda_generic(a, b):
    with torch.amp.autocast(device_type="cuda"):
        return torch.mm(a, b)


def of_cuda(a, b):
    with torch.cuda.amp.autocast():
        return torch.mm(a, b)


BF16_SPELLINGS = [generic, generic_by_position, of_the_package, of_the_cpu, of_ours, without_a_dtype]
FP16_SPELLINGS = [half_of_the_package, half_of_the_cpu]
CUDA_SPELLINGS = [for_cuda, for_cuda_without_a_dtype, for_cuda_generic, of_cuda]


def two_devices(a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):  # noqa: SIM117 (nested as it is)
        with torch.autocast("cuda", dtype=torch.float16):
            x = torch.mm(a, b)
    with torch.autocast("cuda", torch.float16), torch.autocast("cpu", torch.bfloat16):
        return x, torch.mm(b, a)


def two_devices_off(a, b):
    """The inner region is of another device type: it switches nothing off here."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.mm(a, b)
        with torch.autocast("cuda", enabled=False):
            return x, torch.mm(x, x)


def one_weight_in_regions_of_two_devices(a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.mm(a, b)
        with torch.autocast("cuda", enabled=False):
            return torch.mm(b, x)


@torch.autocast("cpu", dtype=torch.bfloat16, enabled=True)
def decorated(a, b):
    return torch.mm(a, b)


def softmax(a):
    with torch.cpu.amp.autocast():
        return F.softmax(a, dim=0)


def softmax_with_cuda_lists(a):
    with nc.autocast("cpu", torch.float16, policy=CUDA_LISTS):
        return F.softmax(a, dim=0)


# -- programs without a region of their own


def product(a, b):
    return torch.mm(a, b)


def products(a, b):
    return torch.mm(a, b), torch.mm(b, a).relu()


def product_and_relu(a, b):
    return torch.mm(a, b).relu()


def scaled(a, b):
    return torch.mm(a, b) * 2.0


def scaled_outside(a, b):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(a, b) * 2.0


def partly_outside(a, b):
    with torch.autocast("cpu", enabled=False):
        x = torch.mm(a, b)
    return torch.mm(x, b), x


# -- code that asks


def asks(a):
    if torch.is_autocast_cpu_enabled():
        return a.relu()
    return a.sin()


def asks_for_cuda(a):
    if torch.is_autocast_enabled():
        return a.relu()
    return a.sin()


def asks_for_cuda_inside(a):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if torch.is_autocast_enabled():
            y = a.relu()
        else:
            y = a.sin()
    with torch.autocast("cuda"):
        if torch.is_autocast_cpu_enabled():
            return y, a.relu()
        return y, a.cos()


def asks_before(a):
    """What was asked outside is not moved into the region."""
    if torch.is_autocast_cpu_enabled():
        on = True
    else:
        on = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.mm(a, a)
    return on, x, torch.is_autocast_cpu_enabled()


def asks_everywhere(a, b) -> Tuple[Tensor, bool, Tensor, bool, Tensor, bool]:  # noqa: UP006
    outside = torch.is_autocast_cpu_enabled()
    x = torch.mm(a, b)
    with torch.cpu.amp.autocast(enabled=True):
        inside = torch.is_autocast_cpu_enabled()
        y = torch.mm(b, a)
        with torch.cpu.amp.autocast(enabled=False):
            within = torch.is_autocast_cpu_enabled()
            z = torch.mm(a, a)
    return x, outside, y, inside, z, within


# -- modules


class Weighted(nn.Module):
    """A parameter used as it is, and a submodule."""

    def __init__(self, rows=2, columns=3):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows, columns))
        self.linear = nn.Linear(rows, columns)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
            return self.linear(torch.mv(self.weight, x)), torch.matmul(self.weight, x)


class Product(nn.Module):
    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(x, y)


class ProductWithAConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.rand(3, 4)

    def forward(self, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(self.x, y)


@torch.jit.interface
class Multiplies(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pass


class Multiplier(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, y)


class CallsAnInterface(nn.Module):
    part: Multiplies

    def __init__(self):
        super().__init__()
        self.part = torch.jit.script(Multiplier())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = torch.mm(x, y)
            return self.part.forward(z, x)


class CallsAnInterfaceOutside(CallsAnInterface):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = torch.mm(x, y)
        return self.part.forward(z.float(), x)


class CallsAModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Multiplier()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = torch.mm(x, y)
            return self.part.forward(z, x)


class Concatenated(nn.Module):
    def forward(self, a, b):
        return torch.cat([a, b], 0)


# -- models that are traced


class Digits(nn.Module):
    """A small network for pictures of digits, as in torch's examples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, kernel_size=5), nn.Conv2d(4, 8, kernel_size=5)
        self.dropout = nn.Dropout2d()
        self.hidden, self.last = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.first(x), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.second(x)), 2))
        x = F.relu(self.hidden(x.reshape(-1, 32)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.last(x), dim=1)


class Normed(nn.Module):
    """A convolution that batch norm follows: freezing makes one of them."""

    def __init__(self, bias=True, **options):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 7, stride=2, bias=bias, **options), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x))


class Residual(nn.Module):
    """One convolution twice, a sum, a concatenation, a part that stays out."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.narrow = nn.Conv2d(8, 2, 3, padding="same", bias=False)

    def forward(self, x):
        y = self.first(x)
        z = F.relu(self.twice(y)) + y
        z = torch.cat([self.twice(z), y], 1)
        return self.narrow(z), z.mean((2, 3))


class OutOfRegion(nn.Module):
    """A convolution of its own in fp32, between others."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            z = self.second(y.float())
        return self.third(z), z


class Functional(nn.Module):
    """Convolutions with weights that are computed."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 3, 3, 3) / 5), nn.Parameter(torch.rand(4, 1, 1, 1))

    def forward(self, x):
        y = F.conv2d(x, self.weight * self.scale, padding="same")
        return F.conv_transpose2d(y, self.weight, stride=2)


def _single(kind, *arguments, **options):
    return lambda: kind(*arguments, **options)


CONVOLUTIONS = {
    "conv1d": (_single(nn.Conv1d, 3, 4, 3), (2, 3, 9)),
    "conv2d": (_single(nn.Conv2d, 3, 4, 3), (2, 3, 8, 8)),
    "conv3d": (_single(nn.Conv3d, 3, 4, 3), (2, 3, 5, 5, 5)),
    "strided": (_single(nn.Conv2d, 3, 4, (3, 2), stride=(2, 1)), (2, 3, 8, 8)),
    "dilated": (_single(nn.Conv2d, 3, 4, 3, dilation=2), (2, 3, 8, 8)),
    "grouped": (_single(nn.Conv2d, 4, 8, 3, groups=2), (2, 4, 8, 8)),
    "depthwise": (_single(nn.Conv2d, 4, 4, 3, groups=4, bias=False), (2, 4, 8, 8)),
    "padded": (_single(nn.Conv2d, 3, 4, 3, padding=(1, 2)), (2, 3, 8, 8)),
    "padded with zeros": (_single(nn.Conv2d, 3, 4, 3, padding=1, padding_mode="zeros"), (2, 3, 8, 8)),
    "padded in a circle": (_single(nn.Conv2d, 3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 8, 8)),
    "padded by reflection": (_single(nn.Conv2d, 3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 8, 8)),
    "padded by replication": (_single(nn.Conv1d, 3, 4, 3, padding=1, padding_mode="replicate"), (2, 3, 9)),
    "same, 1d": (_single(nn.Conv1d, 3, 4, 3, padding="same"), (2, 3, 9)),
    "same, 2d": (_single(nn.Conv2d, 3, 4, 3, padding="same"), (2, 3, 8, 8)),
    "same, 3d": (_single(nn.Conv3d, 3, 4, 3, padding="same"), (2, 3, 5, 5, 5)),
    "same, uneven": (_single(nn.Conv2d, 3, 4, (2, 4), padding="same", bias=False), (2, 3, 8, 8)),
    "same, grouped and dilated": (_single(nn.Conv2d, 4, 4, 3, padding="same", groups=2, dilation=2), (2, 4, 8, 8)),
    "same by reflection": (_single(nn.Conv2d, 3, 4, 3, padding="same", padding_mode="reflect"), (2, 3, 8, 8)),
    "valid": (_single(nn.Conv2d, 3, 4, 3, padding="valid"), (2, 3, 8, 8)),
    "without a batch": (_single(nn.Conv2d, 3, 4, 3), (3, 8, 8)),
    "transposed, 1d": (_single(nn.ConvTranspose1d, 3, 4, 3), (2, 3, 9)),
    "transposed, 2d": (_single(nn.ConvTranspose2d, 3, 4, 3, stride=2, padding=1, output_padding=1), (2, 3, 6, 6)),
    "transposed, 3d": (_single(nn.ConvTranspose3d, 3, 4, 3, bias=False), (2, 3, 4, 4, 4)),
    "transposed, grouped": (_single(nn.ConvTranspose2d, 4, 4, 3, groups=2, dilation=2), (2, 4, 6, 6)),
}
NETWORKS = {
    "digits": (Digits, (2, 1, 20, 20)),
    "conv, norm": (Normed, (2, 3, 16, 16)),
    "conv without bias, norm": (lambda: Normed(bias=False), (2, 3, 16, 16)),
    "residual": (Residual, (2, 3, 8, 8)),
    "functional": (Functional, (2, 3, 6, 6)),
    "linear": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4, bias=False)), (3, 6)),
}


class CallsInBf16(nn.Module):
    """A region around a call of what it is given."""

    def __init__(self, called):
        super().__init__()
        self.called = called

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.called(x)


class CallsInFp16(CallsInBf16):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.called(x)


class CallsTwice(CallsInBf16):
    """Inside of a region and outside of it."""

    def forward(self, x):
        y = self.called(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y, self.called(x * 0.5)


def calling(called):
    """A function that calls one in a region."""

    def function(a, b):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
            return called(a, b)

    return function


def convolved(x, w):
    return F.conv2d(x, w, padding=1)


def convolved_same(x, w):
    return F.conv2d(x, w, padding="same")


def convolved_three_ways(x, w):
    y = F.conv2d(x, w, torch.ones(4), stride=2)
    return F.conv_transpose2d(y, w), F.conv1d(x[:, :, 0], w[:, :, 0], padding="valid", groups=1)
