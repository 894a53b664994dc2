"""Sound kernels, each in low formats at values of many sizes: none of them is to be named.

`cases` gives calls to make under a watching judge; `inspected` judges them. Sizes, shapes and values are drawn again.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from narrowcast.analysis.compare.kernel_bounds import Judged
from narrowcast.analysis.compare.reference import Keep

Case = tuple[str, Callable[[], object]]
FUNCTIONS = (
    F.gelu, F.silu, F.relu, F.softplus, F.mish, F.elu, F.leaky_relu, F.hardswish, F.logsigmoid, torch.exp, torch.tanh,
    torch.sigmoid, torch.sin, torch.cos, torch.square, torch.expm1, torch.neg, torch.abs,
)  # fmt: skip
OF_POSITIVES = (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log1p, torch.log2)


@contextmanager
def kernel(op: str, function: Callable[..., object]) -> Iterator[None]:
    """An op's kernel replaced, of the cpu or of the device that is the default."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(op, function, torch.get_default_device().type.upper())
    try:
        yield
    finally:
        library._destroy()


def inspected(function: Callable[[], object]) -> list[tuple[str, Judged | None]]:
    """The ops that a function calls, each with the judgement about its kernel."""
    keep = Keep((), 1 << 28, checksums=False, judges=True)
    with keep.observing():
        function()
    return [(identity.op, kept.judged) for identity, kept in keep.calls.items()]


def cases(seed: int, often: int = 1) -> Iterator[Case]:
    """The calls, `often` times each with other values."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(often):
        for dtype in (torch.bfloat16, torch.float16):
            small = 1e-6 if dtype is torch.float16 else 1e-38  # subnormals
            huge = 60.0 if dtype is torch.float16 else 1e15
            for size, shift in ((1.0, 0.0), (1.0, 30.0), (1e-3, 0.0), (small, 0.0), (huge, 0.0), (0.0, 0.0)):
                for name, function in _Drawn(dtype, size, shift, draw).all():
                    yield f"{name}, {dtype}, size {size} + {shift}", function


class _Drawn:
    """Calls on values of one format and size."""

    def __init__(self, dtype: torch.dtype, size: float, shift: float, draw: random.Random) -> None:
        self._dtype, self._size, self._shift, self._draw = dtype, size, shift, draw

    def _x(self, *shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * self._size + self._shift).to(self._dtype)

    def _w(self, *shape: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * size).to(self._dtype)

    def all(self) -> Iterator[Case]:
        """All kinds."""
        for kind in (self._products, self._sums, self._convolutions, self._norms, self._attention, self._elements,
                     self._moves):  # fmt: skip
            yield from kind()

    def _products(self) -> Iterator[Case]:
        k = self._draw.choice([1, 7, 128, 300, 1024, 4096])
        yield f"mm of {k}", lambda: self._x(33, k) @ self._w(k, 40)
        yield f"bmm of {k}", lambda: torch.bmm(self._x(3, 5, k), self._w(3, k, 6))
        yield f"baddbmm of {k}", lambda: torch.baddbmm(self._w(3, 5, 6), self._x(3, 5, k), self._w(3, k, 6), beta=0.5)
        yield f"mv of {k}", lambda: self._x(33, k) @ self._w(k)
        yield f"einsum of {k}", lambda: torch.einsum("ij,kj->ik", self._x(5, k), self._w(6, k))
        by = self._w(40, k, size=k**-0.5), self._w(40, 12, size=0.2)
        yield f"einsum of three, {k}", lambda: torch.einsum("ij,kj,kl->il", self._x(5, k), *by)
        yield f"linear of {k}", lambda: _back(F.linear, self._x(3, 17, k), self._w(40, k, size=0.1), self._w(40))

    def _sums(self) -> Iterator[Case]:
        k = self._draw.choice([1, 7, 128, 300, 1024, 4096])

        def reduced() -> None:
            x = self._x(9, k)
            for f in (torch.sum, torch.mean, torch.amax, torch.cumsum, *((torch.var, torch.std) if k > 1 else ())):
                f(x, -1)
            x.sum(), x.mean(0), x.norm()

        yield f"reductions of {k}", reduced
        yield f"softmax of {k}", lambda: _back(lambda x: x.softmax(-1), self._x(39, k))
        yield f"log_softmax of {k}", lambda: _back(lambda x: x.log_softmax(-1), self._x(39, k))
        labels = torch.randint(0, k, (39,))
        yield f"cross_entropy of {k}", lambda: _back(lambda x: F.cross_entropy(x, labels), self._x(39, k))

    def _convolutions(self) -> Iterator[Case]:
        i, o, size, groups = self._draw.choice([(3, 8, 3, 1), (16, 8, 1, 1), (16, 16, 3, 16), (16, 32, 3, 2)])
        w = self._w(o, i // groups, size, size, size=0.2)
        yield (
            f"conv2d {i, o, size, groups}",
            lambda: _back(
                lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=groups), self._x(4, i, 9, 9), w, self._w(o)
            ),
        )
        turned = self._w(i, o // groups, size, size, size=0.2)
        yield (
            f"conv_transpose2d {i, o, size, groups}",
            lambda: _back(
                lambda x, w, b: F.conv_transpose2d(x, w, b, groups=groups), self._x(4, i, 9, 9), turned, self._w(o)
            ),
        )

    def _norms(self) -> Iterator[Case]:
        k = self._draw.choice([7, 128, 300, 1024])
        yield (
            f"layer_norm of {k}",
            lambda: _back(lambda x, w, b: F.layer_norm(x, (k,), w, b), self._x(39, k), self._w(k), self._w(k)),
        )
        yield f"rms_norm of {k}", lambda: F.rms_norm(self._x(9, k), (k,), self._w(k))
        yield (
            "group_norm",
            lambda: _back(lambda x, w, b: F.group_norm(x, 4, w, b), self._x(4, 16, 9, 9), self._w(16), self._w(16)),
        )
        yield "batch_norm", lambda: _back(
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), self._x(4, 16, 9, 9), self._w(16),
            self._w(16),
        )  # fmt: skip

    def _attention(self) -> Iterator[Case]:
        width, length = self._draw.choice([(8, 5), (64, 33), (64, 200)])
        q, k, v = self._x(2, 3, length, width), self._w(2, 3, length, width), self._w(2, 3, length, width)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        infinite = torch.zeros(length, length, dtype=self._dtype).masked_fill(later, float("-inf"))
        lowest = infinite.clamp(min=torch.finfo(self._dtype).min)

        def fused() -> None:
            F.scaled_dot_product_attention(q, k, v)
            _back(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
            for mask in (infinite, lowest, ~later):
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)

        def composed() -> None:
            scores = q @ k.transpose(-1, -2)
            for masked in (scores + infinite, scores + lowest, scores.masked_fill(later, torch.finfo(q.dtype).min)):
                masked.softmax(-1) @ v, masked.log_softmax(-1)

        yield f"attention of {width, length}", fused
        yield f"composed attention of {width, length}", composed

    def _elements(self) -> Iterator[Case]:
        x, y = self._x(40, 65), self._w(40, 65)
        f, g = self._draw.choice(FUNCTIONS), self._draw.choice(OF_POSITIVES)
        yield f"{f.__name__}", lambda: _back(f, self._x(40, 65))
        yield f"{g.__name__}", lambda: g(x.abs())
        yield "gelu by tanh", lambda: _back(lambda x: F.gelu(x, approximate="tanh"), self._x(40, 65))

        def two() -> None:
            x + y, x - y, x * y, x / y, x * 2.5, x / 3, x + 1e-5, 1 - x, x.pow(2), x.pow(3), x.abs().pow(0.3)
            torch.add(x, y, alpha=0.3), torch.addcmul(x, y, y, value=0.1), torch.lerp(x, y, 0.3), torch.hypot(x, y)
            torch.where(x > 0, x, y), torch.maximum(x, y), x.clamp(-1, 1), torch.atan2(x, y), torch.logaddexp(x, y)
            (
                x.clone().add_(y),
                x.clone().mul_(y),
                x.clone().relu_(),
                x.clone().div_(3),
                x.clone().masked_fill_(x > 0, -9),
            )

        yield "arithmetic", two

        def alike() -> None:  # one value many times: a rounding that goes one way there is no sign
            z = torch.zeros(40, 65, dtype=self._dtype) + self._draw.random()
            F.gelu(z), F.silu(z), z.exp(), z.softmax(-1), F.layer_norm(z, (65,)), z.sum()

        yield "one value", alike

    def _moves(self) -> Iterator[Case]:
        x, y = self._x(40, 65), self._w(200, 65)
        rows = torch.randint(0, 40, (200,))
        places = rows[:, None].expand(200, 65)

        def moved() -> None:
            torch.cat([x, y]), torch.stack([x, x]), x[rows], x.gather(0, places), F.embedding(rows, x), x.roll(1, 0)
            F.max_pool2d(x[None], 2), F.avg_pool2d(x[None], 2), F.pad(x, (1, 1)), x.flip(0), x.tril()

        def added() -> None:
            x.index_add(0, rows, y), x.scatter_add(0, places, y), x.index_put((rows,), y, accumulate=True)

        def reduced() -> None:
            x.logsumexp(-1), (x - x.max()).logsumexp(0), x.prod(-1), (1 + y[:7] / 64).prod(0), x[:, :1].logsumexp(-1)
            torch.erf(x), torch.erf(x * 1e-3), _back(torch.sigmoid, y), _back(torch.sigmoid, 4 * x)

        def lost() -> None:
            values, wanted = y.float().log_softmax(-1).to(self._dtype), torch.randint(0, 65, (200,))
            F.nll_loss(values, wanted), F.nll_loss(values, wanted, reduction="sum"), F.nll_loss(values[:3], wanted[:3])
            F.nll_loss(values, wanted, weight=torch.rand(65).to(self._dtype))

        def bilinear() -> None:
            w = self._w(4, 65, 65)
            F.bilinear(x[:9], y[:9], w), F.bilinear(x[:9, :8], y[:9], w[:, :8], self._w(4))

        yield "reduced", reduced
        yield "losses", lost
        yield "bilinear", bilinear
        yield "moves", moved
        yield "scattered sums", added
        yield "embedding", lambda: _back(lambda w: F.embedding(rows, w), self._x(40, 65))


def _back(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
    """The function, and its backward."""
    result = function(*(t.detach().requires_grad_() for t in tensors))
    result.backward(torch.randn_like(result))
