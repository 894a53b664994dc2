"""Which parameters of one model are which of another, by value, through names, fused and transposed ones; and a model
with another's in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.trial import parameters_of
from narrowcast.runtime.torch_surface.modules import tensors_held, without_wrapper

_PREFIX = 16
"""How many elements of a row are compared to find it."""
Rows = Mapping[tuple[float, ...], "RowRange"]
Paths = Mapping[str, tuple[str, ...]]
"""By a module's path in b those of a that it is made of."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a parameter of a; of its transpose, if it is_transposed."""

    name: str
    start: int
    stop: int
    is_transposed: bool = False

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the rows."""
        tensor = tensors[self.name]
        return _turned(tensor, self.is_transposed)[self.start : self.stop] if tensor.dim() else tensor


@dataclass(frozen=True, slots=True)
class MadeOfRows:
    """What a parameter of b is made of: these rows one after the other, and the whole turned, if it is_turned."""

    pieces: tuple[RowRange, ...]
    is_turned: bool = False

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor that they make."""
        parts = [piece.of(tensors).detach() for piece in self.pieces]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.t() if self.is_turned else whole


def pair_weights(a: torch.nn.Module, b: torch.nn.Module, paths: Paths) -> dict[str, MadeOfRows]:
    """Return what parameters of b are made of, as far as it is known: by names, then by values, then by the modules
    that are pairs.
    """
    of_a, of_b = parameters_of(a), parameters_of(b)
    pairs = {name: _same(name, of_a[name], t) for name, t in of_b.items() if _is_same(of_a.get(name), t)}
    left = {name: tensor.detach() for name, tensor in of_b.items() if name not in pairs and tensor.dim()}
    if left:
        rows, used = _rows(of_a), frozenset[str]()
        for gaps in (0, 1):
            for name, tensor in left.items():
                found = None if name in pairs else _by_value(tensor, rows, of_a, gaps, used)
                if found is None and name not in pairs and tensor.dim() == 2:
                    turned = _by_value(tensor.t(), rows, of_a, gaps, used)
                    found = None if turned is None else MadeOfRows(turned.pieces, True)
                if found is not None:
                    pairs[name] = found
            used = frozenset(piece.name for source in pairs.values() for piece in source.pieces)
        for name, tensor in left.items():
            by_module = None if name in pairs else _by_module(name, tensor, of_a, paths, pairs)
            if by_module is not None:
                pairs[name] = by_module
    return pairs


def different(a: torch.nn.Module, b: torch.nn.Module, pairs: Mapping[str, MadeOfRows]) -> dict[str, float]:
    """Return the parameters of b that hold other values than a's, and by how much, relatively (L2): not those that are
    a's, rounded to the format of b, or the other way round.
    """
    of_a, of_b = parameters_of(a), parameters_of(b)
    apart = {name: apart_by(source.of(of_a), of_b[name].detach()) for name, source in pairs.items()}
    return {name: far for name, far in apart.items() if far}


def apart_by(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return how far y is from x, relatively (L2); 0 where one is the other, rounded to its format."""
    if torch.equal(x.to(y.dtype), y) or torch.equal(y.to(x.dtype), x):
        return 0.0
    off, size = (x.double() - y.double()).norm(), x.double().norm()
    return float(off / size) if size else float(off)


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
                new = tensors[full].detach().clone()  # which a forward may write to
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


def _same(name: str, x: torch.Tensor, y: torch.Tensor) -> MadeOfRows:
    """Return the parameter of the same name and shape; turned, if it is square and far nearer so."""
    source = MadeOfRows((RowRange(name, 0, x.shape[0] if x.dim() else 0),))
    if x.dim() != 2 or x.shape[0] != x.shape[1] or torch.equal(x, y):
        return source
    straight, turned = ((one.double() - y.double()).norm() for one in (x.detach(), x.detach().t()))
    return replace(source, is_turned=True) if turned < straight / 2 else source


def _keys(matrix: torch.Tensor) -> list[tuple[float, ...]]:
    """Return what each row begins with."""
    rows = matrix.detach().flatten(1) if matrix.dim() > 1 else matrix.detach()[:, None]
    return [tuple(row) for row in rows[:, :_PREFIX].bfloat16().tolist()]


def _rows(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[float, ...], RowRange]:
    """Return where each row, and each row of the transpose, lies, by its first elements. Rows of zeros are none."""
    found: dict[tuple[float, ...], RowRange] = {}
    for is_transposed in (True, False):  # rows themselves in the place of columns that begin alike
        for name, tensor in tensors.items():
            if tensor.dim() < 2 or not is_floating(tensor) or (is_transposed and tensor.dim() > 2):
                continue
            matrix = _turned(tensor, is_transposed)
            for n, row in enumerate(_keys(matrix)):
                if any(row):
                    found[row] = RowRange(name, n, matrix.shape[0], is_transposed)
    return found


def _by_value(
    tensor: torch.Tensor, rows: Rows, of_a: Mapping[str, torch.Tensor], gaps: int, used: Collection[str]
) -> MadeOfRows | None:
    """Return the rows of a that a parameter consists of, one after the other; None if some are nowhere. As many parts
    of it as there may be gaps hold other values, where one parameter of a fits that is not used yet.
    """
    if tensor.dim() < 2 or not is_floating(tensor):
        return None
    found: list[RowRange] = []
    done, keys = 0, _keys(tensor)
    while done < tensor.shape[0]:
        start = rows.get(keys[done])
        if start is not None and _turned(of_a[start.name], start.is_transposed).shape[1:] == tensor.shape[1:]:
            theirs = _keys(_turned(of_a[start.name], start.is_transposed)[start.start : start.stop])
            together = list(zip(keys[done:], theirs, strict=False))
            count = next((n for n, (mine, its) in enumerate(together) if mine != its and mine in rows), len(together))
            found.append(RowRange(start.name, start.start, start.start + count, start.is_transposed))
            done += count
            continue
        if gaps == 0 or start is not None:
            return None
        end = next((n for n in range(done + 1, tensor.shape[0]) if keys[n] in rows), tensor.shape[0])
        after = rows.get(keys[end]) if end < tensor.shape[0] else None
        gap = _in_gap(end - done, tensor.shape[1:], found[-1] if found else after, of_a, used)
        if gap is None:
            return None
        found.append(gap)
        done, gaps = end, gaps - 1
    return MadeOfRows(tuple(_in_order(found, of_a)))


def _in_order(pieces: Sequence[RowRange], of_a: Mapping[str, torch.Tensor]) -> Iterator[RowRange]:
    """Yield pieces; those beside each other that are one whole parameter, in another order, as that: its rows were
    moved.
    """
    for (name, is_transposed), together in groupby(pieces, key=lambda piece: (piece.name, piece.is_transposed)):
        group, size = list(together), _turned(of_a[name], is_transposed).shape[0]
        is_whole = len(group) > 1 and sum(piece.stop - piece.start for piece in group) == size
        yield from [RowRange(name, 0, size, is_transposed)] if is_whole else group


def _in_gap(
    count: int, columns: Sequence[int], beside: RowRange | None, of_a: Mapping[str, torch.Tensor], used: Collection[str]
) -> RowRange | None:
    """Return the one unused parameter of a of this shape, as its neighbour is turned, in a module beside that."""
    if beside is None:
        return None
    parent, fitting = beside.name.rpartition(".")[0].rpartition(".")[0], []
    for name, tensor in of_a.items():
        is_beside = name.rpartition(".")[0].rpartition(".")[0] == parent and name != beside.name and name not in used
        if is_beside and tensor.dim() >= 2 and tuple(_turned(tensor, beside.is_transposed).shape) == (count, *columns):
            fitting.append(name)
    return RowRange(fitting[0], 0, count, beside.is_transposed) if len(fitting) == 1 else None


def _turned(tensor: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    return tensor.t() if is_transposed and tensor.dim() == 2 else tensor


def _by_module(
    name: str, tensor: torch.Tensor, of_a: Mapping[str, torch.Tensor], paths: Paths, pairs: Mapping[str, MadeOfRows]
) -> MadeOfRows | None:
    """Return the parameters of the modules that are its module's partners: of those of which its weight is made, if
    that is known. Under its own name, or as the only ones of their shape.
    """
    path, _, leaf = name.rpartition(".")
    beside = next((source.pieces for other, source in pairs.items() if other.rpartition(".")[0] == path), ())
    modules = tuple(dict.fromkeys(piece.name.rpartition(".")[0] for piece in beside)) or paths.get(path, ())
    named = {module: _named(module, leaf, tensor, of_a) for module in modules}
    if not named or not all(named.values()):
        return None
    tensors = [of_a[one] for one in named.values()]
    if tensor.dim() == 1 and beside and all(one.dim() == 1 for one in tensors):  # the rows that its weight has
        pieces = [RowRange(named[p.name.rpartition(".")[0]], p.start, p.stop) for p in beside]
        return MadeOfRows(tuple(pieces)) if sum(p.stop - p.start for p in pieces) == tensor.shape[0] else None
    for turned in (False, True) if tensor.dim() == 2 else (False,):
        whole = _turned(tensor, turned)
        fits = all(one.shape[1:] == whole.shape[1:] for one in tensors)
        if fits and sum(one.shape[0] for one in tensors if one.dim()) == whole.shape[0]:
            return MadeOfRows(tuple(RowRange(one, 0, of_a[one].shape[0]) for one in named.values()), turned)
    return None


def _named(module: str, leaf: str, tensor: torch.Tensor, of_a: Mapping[str, torch.Tensor]) -> str:
    """Return the parameter of a module with this name; or the only one with as many dimensions; empty without one."""
    full = f"{module}.{leaf}" if module else leaf
    own = [one for one in of_a if one.rpartition(".")[0] == module and of_a[one].dim() == tensor.dim()]
    return full if full in of_a else own[0] if len(own) == 1 else ""
