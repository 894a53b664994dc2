"""Which parameters of one model are which of another, by value, through names, fused and transposed ones; and a model
with another's in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.trial import parameters_of
from narrowcast.runtime.torch_surface.modules import tensors_held, without_wrapper

_PREFIX = 16
"""How many elements of a row are compared to find it."""
Paths = Mapping[str, tuple[str, ...]]
"""By a module's path in b those of a that it is made of."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a parameter of a; of its transpose, if it is_transposed."""

    name: str
    start: int
    stop: int
    is_transposed: bool = False

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the rows."""
        tensor = tensors[self.name]
        return (tensor.t() if self.is_transposed else tensor)[self.start : self.stop]


Pieces = tuple[Piece, ...]


def pair_weights(a: torch.nn.Module, b: torch.nn.Module, paths: Paths) -> dict[str, Pieces]:
    """Return what parameters of b are made of, as far as it is known: by names, then by values, then by the modules
    that are pairs.
    """
    of_a, of_b = parameters_of(a), parameters_of(b)
    pairs = {name: _whole(name, of_a[name]) for name, tensor in of_b.items() if _is_same(of_a.get(name), tensor)}
    left = {name: tensor for name, tensor in of_b.items() if name not in pairs}
    if left:
        rows = _rows(of_a)
        for name, tensor in left.items():
            found = _by_value(tensor, rows, of_a)
            if found:
                pairs[name] = found
        for name, tensor in left.items():
            found = () if name in pairs else _by_module(name, tensor, of_a, paths, pairs)
            if found:
                pairs[name] = found
    return pairs


def different(a: torch.nn.Module, b: torch.nn.Module, pairs: Mapping[str, Pieces]) -> dict[str, float]:
    """Return the parameters of b that hold other values than a's, and by how much, relatively (L2): not those that are
    a's, rounded to the format of b, or the other way round.
    """
    of_a, of_b = parameters_of(a), parameters_of(b)
    found = {}
    for name, pieces in pairs.items():
        x, y = assembled(pieces, of_a), of_b[name].detach()
        if torch.equal(x.to(y.dtype), y) or torch.equal(y.to(x.dtype), x):
            continue
        off, size = (x.double() - y.double()).norm(), x.double().norm()
        found[name] = float(off / size) if size else float(off)
    return found


def assembled(pieces: Pieces, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor that pieces make."""
    parts = [piece.of(tensors).detach() for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextmanager
def with_parameters(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Have a model use these in the place of its parameters and buffers, by name; tied ones in all places."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    replaced: dict[int, Any] = {}
    for path, module in model.named_modules():
        parameters, buffers = tensors_held(module)
        for name, tensor in (*parameters.items(), *buffers.items()):
            full = without_wrapper(f"{path}.{name}" if path else name)
            if tensor is not None and full in tensors:
                new = tensors[full].detach()
                replaced[id(tensor)] = torch.nn.Parameter(new, False) if name in parameters else new
    try:
        for own in (own for module in model.modules() for own in tensors_held(module)):
            for name, tensor in list(own.items()):
                if tensor is not None and id(tensor) in replaced:
                    held.append((own, name, tensor))
                    own[name] = replaced[id(tensor)]
        yield
    finally:
        for own, name, tensor in reversed(held):
            own[name] = tensor


def _is_same(x: torch.Tensor | None, y: torch.Tensor) -> bool:
    return x is not None and x.shape == y.shape


def _whole(name: str, tensor: torch.Tensor) -> Pieces:
    return (Piece(name, 0, tensor.shape[0] if tensor.dim() else 0),) if tensor.dim() else ()


def _key(row: torch.Tensor) -> tuple[float, ...]:
    return tuple(row[:_PREFIX].bfloat16().tolist())


def _rows(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[float, ...], Piece]:
    """Return where each row, and each row of the transpose, lies, by its first elements. Rows of zeros are none."""
    found: dict[tuple[float, ...], Piece] = {}
    for is_transposed in (True, False):  # rows themselves in the place of columns that begin alike
        for name, tensor in tensors.items():
            if tensor.dim() < 2 or not is_floating(tensor) or (is_transposed and tensor.dim() > 2):
                continue
            matrix = tensor.detach().t() if is_transposed else tensor.detach().flatten(1)
            for n, row in enumerate(matrix[:, :_PREFIX].bfloat16().tolist()):
                if any(row):
                    found[tuple(row)] = Piece(name, n, matrix.shape[0], is_transposed)
    return found


def _by_value(
    tensor: torch.Tensor, rows: Mapping[tuple[float, ...], Piece], of_a: Mapping[str, torch.Tensor]
) -> Pieces:
    """Return the rows of a that a parameter consists of, one after the other; nothing if some are nowhere."""
    if tensor.dim() < 2 or not is_floating(tensor):
        return ()
    found: list[Piece] = []
    done = 0
    while done < tensor.shape[0]:
        start = rows.get(_key(tensor[done].detach().flatten()))
        if start is None:
            return ()
        whole = of_a[start.name].t() if start.is_transposed else of_a[start.name]
        if whole.shape[1:] != tensor.shape[1:]:
            return ()
        stop = min(start.stop, start.start + tensor.shape[0] - done)
        found.append(Piece(start.name, start.start, stop, start.is_transposed))
        done += stop - start.start
    return tuple(found)


def _by_module(
    name: str, tensor: torch.Tensor, of_a: Mapping[str, torch.Tensor], paths: Paths, pairs: Mapping[str, Pieces]
) -> Pieces:
    """Return the parameters of the same name of the modules that are its module's partners: those of which its weight
    is made, if that is known.
    """
    path, _, leaf = name.rpartition(".")
    beside = next((pieces for other, pieces in pairs.items() if other.rpartition(".")[0] == path), ())
    modules = tuple(dict.fromkeys(piece.name.rpartition(".")[0] for piece in beside)) or paths.get(path, ())
    named = [f"{module}.{leaf}" if module else leaf for module in modules]
    if len(named) == 1 and named[0] not in of_a:  # under another name: the only one of its shape
        own = [one for one in of_a if one.rpartition(".")[0] == modules[0] and of_a[one].shape == tensor.shape]
        named = own if len(own) == 1 else named
    if not named or not all(one in of_a for one in named):
        return ()
    if tensor.dim() == 1 and beside and all(of_a[one].dim() == 1 for one in named):  # the rows that its weight has
        if sum(piece.stop - piece.start for piece in beside) == tensor.shape[0]:
            return tuple(Piece(f"{p.name.rpartition('.')[0]}.{leaf}", p.start, p.stop) for p in beside)
        return ()
    shapes = [of_a[one].shape for one in named]
    if sum(shape[0] for shape in shapes if shape) == (tensor.shape[0] if tensor.dim() else -1) and all(
        shape[1:] == tensor.shape[1:] for shape in shapes
    ):
        return tuple(Piece(one, 0, of_a[one].shape[0]) for one in named)
    if len(named) == 1 and tensor.dim() == 2 and of_a[named[0]].t().shape == tensor.shape:
        return (Piece(named[0], 0, tensor.shape[0], True),)
    return ()
