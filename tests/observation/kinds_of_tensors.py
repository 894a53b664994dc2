"""Small programs, each with tensors of one kind: what they give must not depend on who looks on."""

import io
import random
import weakref

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class Holder(torch.Tensor):
    """A tensor that is made of another, as those of DTensor and of quantized weights are: it has no memory itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda v: v.inner if isinstance(v, Holder) else v, (args, kwargs or {}))
        return tree_map(lambda v: Holder(v) if isinstance(v, torch.Tensor) else v, func(*args, **kwargs))


class Counting(torch.Tensor):
    """A tensor that counts how often torch asks its class."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counting.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class CountingMode(TorchFunctionMode):
    """The same of a mode."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.asked += 1
        return func(*args, **(kwargs or {}))


def numbers(*shape):
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape) / 3


def backward(y, *leaves):
    y.sum().backward()
    return y.detach(), *(leaf.grad for leaf in leaves)


def scalar():
    x = torch.tensor(0.5, requires_grad=True)
    return *backward((x * 2).log().neg().log(), x), torch.zeros(()) / torch.zeros(())


def empty():
    x = numbers(0).requires_grad_()
    return *backward((x * 2).exp(), x), torch.empty(0, 3) @ numbers(3, 2), torch.ones(2, 0) @ torch.ones(0, 2)


def of_one():
    x = numbers(1).requires_grad_()
    return backward(torch.log(x - x), x)


def expanded():
    x = numbers(3).requires_grad_()
    wide = x.expand(4, 3)
    return backward(wide * wide / (wide - wide), x)


def complex_numbers():
    x = torch.complex(numbers(3), numbers(3)).requires_grad_()
    return *backward((x.conj() * x / 0).abs(), x), x.detach().conj().imag * 2


def sparse_coo():
    s = torch.eye(4).to_sparse().requires_grad_()
    torch.sparse.mm(s, numbers(4, 2)).sum().backward()
    return (s.grad.to_dense(),)


def sparse_csr():
    s = torch.eye(4).to_sparse_csr()
    return s @ numbers(4, 2), (s * 2).to_dense(), s.clone().values()


def booleans():
    chosen = numbers(4) > 0.5
    return chosen.logical_not(), chosen.sum(), torch.where(chosen, numbers(4), numbers(4) / 0), numbers(4)[chosen]


def integers():
    i = torch.arange(4)
    return i * 2, i / 3, i // 2, i.float() / 0, (i / 0).nan_to_num()


def eight_bits():
    x = numbers(4, 4).to(torch.float8_e4m3fn)
    too_large = (numbers(4) * 1000).to(torch.float8_e4m3fn)
    return x.float() * 2, too_large.float(), x.clone().view(torch.uint8), x[1:].t().contiguous().view(torch.uint8)


def quantized():
    q = torch.quantize_per_tensor(numbers(4, 4), 0.1, 3, torch.quint8)
    return q.dequantize() / 0, q.int_repr(), q.clone().relu().int_repr(), q.t().contiguous().int_repr()


def nested():
    n = torch.nested.nested_tensor([numbers(2, 3), numbers(1, 3)], layout=torch.jagged, requires_grad=True)
    return backward((n * 2).values().log())


def nested_strided():
    return ((torch.nested.nested_tensor([numbers(2, 3), numbers(1, 3)]) * 2).to_padded_tensor(0.0),)


def without_memory():
    return (nn.Linear(4, 4, device="meta")(torch.empty(2, 4, device="meta")).shape,)


def parameters_of_a_class():
    w = nn.Parameter(numbers(3, 3).as_subclass(Counting))
    before = Counting.asked
    y = F.linear(numbers(2, 3), w) / 0
    y.sum().backward()
    torch.optim.SGD([w], lr=0.1).step()
    return *(t.detach().as_subclass(torch.Tensor) for t in (y, w.grad, w)), Counting.asked - before


def made_of_others():
    h = Holder(numbers(3, 3))
    y = h @ h
    z = (y / 0) + numbers(3, 3).sum()
    z.mul_(2)
    z[0] = 1
    return z.inner, y.inner


def parameters_made_of_others():
    w = nn.Parameter(Holder(numbers(3, 3)))
    y = F.linear(Holder(numbers(2, 3)), w)
    y.sum().backward()
    torch.optim.Adam([w], lr=0.1).step()
    return tuple(t.detach().inner for t in (y, w.grad, w))


def vmapped():
    drawn = torch.vmap(lambda row: row + torch.rand(2), randomness="different")(numbers(3, 2))
    return torch.vmap(lambda row: torch.log(row - row) + row.sum())(numbers(3, 2)), drawn


def transformed():
    return (
        torch.func.grad(lambda row: torch.log(row - row + 1e-9).sum())(numbers(3)),
        torch.func.hessian(lambda row: (row**3).sum())(numbers(3)),
        torch.func.jvp(torch.log, (numbers(3),), (numbers(3),))[1],
    )


def fake():
    with FakeTensorMode():
        return (nn.Linear(3, 3)(torch.randn(2, 3)).log().shape,)


def drawn():
    x = numbers(8).requires_grad_()
    return *backward(F.dropout(x) / 0, x), torch.rand(3), random.random(), np.random.rand()


def written_to():
    x, w, kept = numbers(4), numbers(4).requires_grad_(), torch.zeros(4)
    x[1:].mul_(2)
    x.data.add_(1)
    x[0] = float("nan")
    kept.copy_(x.clamp_(0, 1))
    with torch.no_grad():
        w.add_(1)
        torch._foreach_mul_([w, kept], 2.0)
        torch._foreach_copy_([kept], [w])
    return *backward(w * 2, w), x, kept, [t._version for t in (x, kept, w)]


def given_memory():
    """As torch.load rebuilds tensors of its old format, before it reads what is in them."""
    storage = torch.full((10,), float("nan")).untyped_storage()
    given = torch.empty(0).set_(storage, 0, (10,), (1,))
    size = storage.nbytes()
    file = io.BytesIO()
    torch.save([numbers(3) for _ in range(20)], file, _use_new_zipfile_serialization=False)
    file.seek(0)
    return size, given.fill_(1), *torch.load(file)


def resized():
    x = numbers(4)
    y, w = x * 2, nn.Parameter(numbers(3))
    for tensor, values in ((y, x), (w.data, numbers(3))):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        _ = tensor * 1
        storage.resize_(0)  # as FSDP does with what it has gathered
        storage.resize_(size)
        tensor.copy_(values)
    x.resize_(6).fill_(1)
    freed = (y + 1).untyped_storage()
    freed.resize_(0)
    return x, y, w.detach(), freed.nbytes()


def overflowing():
    x = numbers(4).half().requires_grad_()
    loss = (x * 60000 * 60000).sum()
    loss.backward()
    return loss.detach(), x.grad, F.layer_norm(numbers(2, 4).half() * 60000, (4,))


def ignored_labels():
    x = numbers(3, 4).requires_grad_()
    return backward(F.cross_entropy(x, torch.full((3,), -100)), x)


def lists():
    parameter = nn.Parameter(numbers(2))
    parameter.grad = torch.full((2,), float("inf"))
    norm = nn.utils.clip_grad_norm_([parameter], 1.0)
    foreach = torch._foreach_mul([numbers(2), numbers(0), torch.tensor(3.0)], 2.0)
    return *foreach, *torch.split(numbers(4) / 0, 2), torch.cat([numbers(0), numbers(2)]), norm


def inference():
    with torch.inference_mode():
        y = torch.log(numbers(3) - numbers(3)).add_(1)
    return (y.clone(),)


def trained():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            loss = model(numbers(4, 3)).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return *(t.detach().clone() for t in model.state_dict().values()), scaler.get_scale()


def sparse_gradients():
    layer = nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1, 1])).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return (layer.weight.detach().clone(),)


def seen_by_a_mode():
    w = nn.Parameter(numbers(3))
    optimizer = torch.optim.SGD([w], lr=0.1)
    with CountingMode() as mode:
        y = (w / 0).log()
        y.sum().backward()
        optimizer.step()
    return y.detach(), mode.asked


def other_default_device():
    with torch.device("meta"):
        return (torch.log(numbers(3).new_zeros(3, device="cpu") * 2), torch.ones(3).add(1).shape)


def dead():
    living = []

    def run():
        x = numbers(5)
        y = torch.log(x - x)
        made = [y, y * 0, x.half() * 60000 * 60000, (x - 1 / 3).reciprocal(), x.exp()]
        living.extend(weakref.ref(t.untyped_storage()) for t in made)
        living.extend(weakref.ref(t) for t in made)

    run()
    return ([reference() is not None for reference in living],)


PROGRAMS = [
    scalar, empty, of_one, expanded, complex_numbers, sparse_coo, sparse_csr, booleans, integers, eight_bits, quantized,
    nested, nested_strided, without_memory, parameters_of_a_class, made_of_others, parameters_made_of_others, vmapped,
    transformed, fake, drawn, written_to, given_memory, resized, overflowing, ignored_labels, lists, inference, trained,
    sparse_gradients, seen_by_a_mode, other_default_device, dead,
]  # fmt: skip
