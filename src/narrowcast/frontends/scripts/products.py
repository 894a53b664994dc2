"""Ops of linear algebra that are made of products, and recurrent ones: in a script, written as what their kernels do.

In a region eager autocast casts the products inside them. The formulas are those of aten/src/ATen/native (Linear.cpp,
LinearAlgebra.cpp, Correlation.cpp, RNN.cpp) and in native/sparse (SparseTensorMath.cpp).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from narrowcast.frontends.scripts.region_facts import constant
from narrowcast.frontends.scripts.runtime import graph_of
from narrowcast.runtime.torch_surface.jit import INT, TENSOR, ListType, inserted


def tensordot(self: Tensor, other: Tensor, dims_self: list[int], dims_other: list[int]) -> Tensor:
    """Multiply over several dimensions of each. Those that one of the two lacks are summed away first."""
    a, b = self, other
    contracted = 1
    for i in range(len(dims_self)):
        if other.size(dims_other[i]) == 1:
            a = a.sum([dims_self[i]], True)
        elif self.size(dims_self[i]) == 1:
            b = b.sum([dims_other[i]], True)
        else:
            contracted *= self.size(dims_self[i])
    order_a: list[int] = []
    order_b: list[int] = list(dims_other)
    sizes: list[int] = []
    rows, columns = 1, 1
    for i in range(self.dim()):
        if i not in dims_self and i - self.dim() not in dims_self:
            order_a.append(i)
            rows *= a.size(i)
            sizes.append(a.size(i))
    order_a.extend(dims_self)
    for i in range(other.dim()):
        if i not in dims_other and i - other.dim() not in dims_other:
            order_b.append(i)
            columns *= b.size(i)
            sizes.append(b.size(i))
    a, b = a.permute(order_a), b.permute(order_b)
    if rows == 1 and columns == 1:
        if a.is_contiguous() and b.is_contiguous():
            return torch.dot(a.reshape([contracted]), b.reshape([contracted])).reshape(sizes)
        return (a.squeeze() * b.squeeze()).sum().reshape(sizes)
    return torch.mm(a.reshape([rows, contracted]), b.reshape([contracted, columns])).reshape(sizes)


def pad(self: Tensor, pad: list[int], mode: str, value: float | None) -> Tensor:
    """Pad in a mode that only the running script knows (PadNd.cpp): `reflect` and `replicate` are ops of their own."""
    rank = len(pad) // 2
    padded: Tensor = self
    if mode == "reflect" and rank == 1:
        padded = torch.ops.aten.reflection_pad1d(self, pad)
    elif mode == "reflect" and rank == 2:
        padded = torch.ops.aten.reflection_pad2d(self, pad)
    elif mode == "reflect" and rank == 3:
        padded = torch.ops.aten.reflection_pad3d(self, pad)
    elif mode == "replicate" and rank == 1:
        padded = torch.ops.aten.replication_pad1d(self, pad)
    elif mode == "replicate" and rank == 2:
        padded = torch.ops.aten.replication_pad2d(self, pad)
    elif mode == "replicate" and rank == 3:
        padded = torch.ops.aten.replication_pad3d(self, pad)
    else:
        padded = torch.ops.aten.pad(self, pad, mode, value)
    return padded


def inner(self: Tensor, other: Tensor) -> Tensor:
    """Multiply over the last dimension of each."""
    if self.dim() == 0 or other.dim() == 0:
        return self * other
    product: Tensor = torch.ops.aten.tensordot(self, other, [-1], [-1])
    return product


def linalg_multi_dot(tensors: list[Tensor]) -> Tensor:
    """Multiply several matrices, in the order that takes the fewest multiplications; of several formats the op itself
    decides, which refuses them, and to which a policy may give one format.
    """
    for other in tensors:
        if other.dtype != tensors[0].dtype:
            product: Tensor = torch.ops.aten.linalg_multi_dot(tensors)
            return product
    n = len(tensors)
    factors = list(tensors)
    sizes: list[int] = []
    if factors[0].dim() == 1:
        factors[0] = factors[0].unsqueeze(0)
    else:
        sizes.append(factors[0].size(0))
    if factors[n - 1].dim() == 1:
        factors[n - 1] = factors[n - 1].unsqueeze(-1)
    else:
        sizes.append(factors[n - 1].size(1))
    if n == 2:
        return torch.mm(factors[0], factors[1]).view(sizes)
    if n == 3:
        a, b, c, d = factors[0].size(0), factors[1].size(0), factors[2].size(0), factors[2].size(1)
        if a * c * (b + d) > b * d * (a + c):
            return torch.mm(factors[0], torch.mm(factors[1], factors[2])).view(sizes)
        return torch.mm(torch.mm(factors[0], factors[1]), factors[2]).view(sizes)
    p = [factor.size(0) for factor in factors]
    p.append(factors[n - 1].size(1))
    costs: list[int] = [0] * (n * n)
    splits: list[int] = [0] * (n * n)
    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            for k in range(i, j):
                cost = costs[i * n + k] + costs[(k + 1) * n + j] + p[i] * p[k + 1] * p[j + 1]
                if k == i or cost < costs[i * n + j]:
                    costs[i * n + j] = cost
                    splits[i * n + j] = k
    needed: list[int] = [n - 1]  # i * n + j of products of i to j, the whole first
    for at in range(2 * n):
        if at < len(needed):
            i, j = needed[at] // n, needed[at] % n
            if i < j:
                k = splits[i * n + j]
                needed.append(i * n + k)
                needed.append((k + 1) * n + j)
    products: dict[int, Tensor] = {}
    for at in range(len(needed)):
        index = needed[len(needed) - 1 - at]
        i, j = index // n, index % n
        if i == j:
            products[index] = factors[i]
        else:
            k = splits[index]
            products[index] = torch.mm(products[i * n + k], products[(k + 1) * n + j])
    return products[n - 1].view(sizes)


def chain_matmul(matrices: list[Tensor]) -> Tensor:
    """Compute multi_dot, under its old name."""
    if len(matrices) == 1:
        return matrices[0].clone()
    return linalg_multi_dot(matrices)


def linalg_matrix_power(self: Tensor, n: int) -> Tensor:
    """Return a power of a matrix, by squaring."""
    base, power = self, n
    if power == 0:
        return self.clone().copy_(torch.eye(self.size(-2), dtype=self.dtype, device=self.device))
    if power < 0:
        base = torch.linalg.inv(self)
        power = -power
    if power == 1:
        return base.clone() if n == 1 else base
    if power == 2:
        return torch.matmul(base, base)
    if power == 3:
        return torch.matmul(torch.matmul(base, base), base)
    square, result, has_result = base, base, False
    while power > 0:
        if power % 2 == 1:
            result = torch.matmul(result, square) if has_result else square
            has_result = True
        power = power // 2
        if power > 0:
            square = torch.matmul(square, square)
    return result


def cov(self: Tensor, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """Return the covariance of rows."""
    x = self.view([1, -1]) if self.dim() < 2 else self
    count = x.size(1)
    w: Tensor | None = None
    if fweights is not None:
        w = fweights if aweights is None else fweights * aweights
    elif aweights is not None:
        w = aweights
    if w is None:
        mean = x.sum([1]) / torch.scalar_tensor(count, dtype=torch.int64, device=x.device)
        norm = torch.scalar_tensor(count - correction, dtype=torch.int64, device=x.device)
    else:
        total = w.sum()
        mean = (x * w).sum([1]) / total
        norm = total - correction
        if aweights is not None and correction != 0:
            norm = total - (w * aweights).sum() * correction / total
    if bool(norm <= 0):
        norm = torch.zeros_like(norm)
    x = x - mean.unsqueeze(1)
    right = x if w is None else x * w
    return (torch.mm(x, right.t()) / norm).squeeze()


def corrcoef(self: Tensor) -> Tensor:
    """Return the correlation of rows."""
    c = torch.cov(self)
    if c.dim() == 0:
        return c / c
    deviation = torch.sqrt(c.diagonal())
    c = c / deviation.view([-1, 1])
    c = c / deviation.view([1, -1])
    return c.clamp(-1, 1)


def sparse_mm(sparse: Tensor, dense: Tensor) -> Tensor:
    """Multiply matrices of which one or both are sparse."""
    if sparse.layout == torch.sparse_coo and dense.layout == torch.sparse_coo:
        product: Tensor = torch.sparse.mm(sparse, dense)
        return product
    sizes = [sparse.size(0), dense.size(1)]
    if sparse.layout != torch.strided:
        zeros = torch.zeros(sizes, dtype=dense.dtype, device=dense.device)
        return torch.addmm(zeros, sparse, dense, beta=0, alpha=1)
    zeros = torch.zeros(sizes, dtype=sparse.dtype, device=sparse.device)
    return torch.addmm(zeros.t(), dense.t(), sparse.t(), beta=0, alpha=1).t()


def sparse_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Multiply a sparse matrix, and add."""
    return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)


def mv(self: Tensor, vec: Tensor) -> Tensor:
    """Multiply by a vector; a sparse matrix as by a matrix."""
    if self.layout == torch.sparse_coo:
        return torch.matmul(self, vec.unsqueeze(-1)).squeeze(-1)
    return torch.mv(self, vec)


# -- recurrent ops whose kernels call ops that lists name, with other work between them --------------------------------


def lstm_cell(
    input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute one step of an LSTM: the hidden and the cell state."""
    gates = linear(hx[0], w_hh, b_hh).add_(linear(input, w_ih, b_ih))
    chunks = gates.unsafe_chunk(4, 1)
    into, forget, cell, out = chunks[0].sigmoid_(), chunks[1].sigmoid_(), chunks[2].tanh_(), chunks[3].sigmoid_()
    state = (forget * hx[1]).add_(into * cell)
    return out * state.tanh(), state


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Compute one step of a GRU."""
    return _gru_step(linear(input, w_ih, b_ih), hx, w_hh, b_hh)


def _gru_step(inputs: Tensor, hx: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    from_input = inputs.unsafe_chunk(3, 1)
    from_hidden = linear(hx, w_hh, b_hh).unsafe_chunk(3, 1)
    reset = from_hidden[0].add_(from_input[0]).sigmoid_()
    update = from_hidden[1].add_(from_input[1]).sigmoid_()
    new = from_input[2].add(from_hidden[2].mul_(reset)).tanh_()
    return (hx - new).mul_(update).add_(new)


def rnn_tanh_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Compute one step of a plain recurrent net."""
    return linear(hx, w_hh, b_hh).add_(linear(input, w_ih, b_ih)).tanh()


def rnn_relu_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Compute one step of a plain recurrent net with another activation."""
    return linear(hx, w_hh, b_hh).add_(linear(input, w_ih, b_ih)).relu()


def _gru_steps(
    inputs: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """Compute one direction of one layer: all steps' states, and the last one."""
    from_inputs = linear(inputs, w_ih, b_ih).unbind(0)
    states: list[Tensor] = []
    count = len(from_inputs)
    for step in range(count):
        hx = _gru_step(from_inputs[count - 1 - step if backwards else step], hx, w_hh, b_hh)
        states.append(hx)
    if backwards:
        states.reverse()
    return torch.stack(states, 0), hx


def _rows_first(x: Tensor, batch_first: bool) -> Tensor:
    return x.transpose(0, 1) if batch_first else x


def _between(x: Tensor, dropout: float, train: bool) -> Tensor:
    return torch.dropout(x, dropout, True) if dropout != 0.0 and train else x


def insert_einsum(graph: Any, node: Any) -> list[Any] | None:
    """Insert an einsum before its node that sums each operand over the labels that it alone has before it multiplies,
    as the kernel does. None if there are none, or the equation is not known.
    """
    equation, tensors = constant(node.inputsAt(0)), node.inputsAt(1).node()
    if not isinstance(equation, str) or "->" not in equation or tensors.kind() != "prim::ListConstruct":
        return None
    inputs, _, output = equation.replace(" ", "").replace("...", ".").partition("->")
    operands, values = inputs.split(","), list(tensors.inputs())
    counts = Counter(label for operand in operands for label in set(operand)) + Counter(output)
    lefts = ["".join(label for label in operand if label == "." or counts[label] > 1) for operand in operands]
    if len(values) < 2 or lefts == operands:
        return None

    def einsum(equation: str, values: list[Any]) -> Any:
        listed = inserted(graph, "prim::ListConstruct", values, ListType(TENSOR))
        written = graph.insertConstant(equation.replace(".", "..."))
        return inserted(graph, "aten::einsum", [written, listed, *list(node.inputs())[2:]], TENSOR)

    for n, (operand, left) in enumerate(zip(operands, lefts, strict=True)):
        if left == operand:
            continue
        labels = "".join(dict.fromkeys(operand))
        if labels != operand:  # a label that stands twice: a diagonal
            values[n] = einsum(f"{operand}->{labels}", [values[n]])
        alone = [label for label in labels if label not in left]
        before = labels.partition(".")[0]
        places = [labels.index(label) - (0 if label in before else len(labels)) for label in alone]
        dims = inserted(graph, "prim::ListConstruct", [*map(graph.insertConstant, places)], ListType(INT))
        values[n] = next(iter(graph.insertGraph(graph_of(_summed), [values[n], dims])))
        lefts[n] = "".join(dict.fromkeys(left))
    return [einsum(f"{','.join(lefts)}->{output}", values)]


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims)


def insert_gru(graph: Any, node: Any) -> list[Any] | None:
    """Insert all layers of a GRU as on the cpu, before its node: multiplications are cast, the state keeps its format.

    Layer by layer, so that each weight is one value, which is cast once. None if the number of layers is not known.
    """
    x, hx, params, has_biases, layers, dropout, train, both_ways, batch_first = node.inputs()
    known = [constant(value) for value in (has_biases, layers, both_ways)]
    if None in known:
        return None

    def call(function: Callable[..., Any], *inputs: Any) -> list[Any]:
        return list(graph.insertGraph(graph_of(function), list(inputs)))

    def joined(op: str, values: list[Any], dimension: int) -> Any:
        listed = inserted(graph, "prim::ListConstruct", values, ListType(TENSOR))
        return inserted(graph, op, [listed, graph.insertConstant(dimension)], TENSOR)

    def element(values: Any, number: int) -> Any:
        if values.node().kind() == "prim::ListConstruct":
            return values.node().inputsAt(number)
        return inserted(graph, "aten::__getitem__", [values, graph.insertConstant(number)], TENSOR)

    directions, each = 2 if known[2] else 1, 4 if known[0] else 2
    (x,) = call(_rows_first, x, batch_first)
    before = inserted(graph, "aten::unbind", [hx, graph.insertConstant(0)], ListType(TENSOR))
    last = []
    for layer in range(known[1]):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = [element(params, number * each + n) for n in range(each)]
            weights += [graph.insertConstant(None) for _ in range(4 - each)]
            backwards = graph.insertConstant(direction == 1)
            (pair,) = call(_gru_steps, x, element(before, number), *weights, backwards)
            unpack = graph.insertNode(graph.create("prim::TupleUnpack", [pair], 2))
            output, state = unpack.outputs()
            outputs.append(output)
            last.append(state)
        x = joined("aten::cat", outputs, -1) if directions == 2 else outputs[0]
        if layer < known[1] - 1:
            (x,) = call(_between, x, dropout, train)
    return [*call(_rows_first, x, batch_first), joined("aten::stack", last, 0)]
