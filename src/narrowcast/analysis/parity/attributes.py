"""Attributes of modules that are others in another model's partners: an epsilon, a scale, a window, positions kept in a
buffer, a value of a configuration; and a model with these in their place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.analysis.parity.weights import apart_by, with_parameters
from narrowcast.output.words import sizes
from narrowcast.runtime.torch_surface.modules import tensors_held

_ATOMS = (bool, int, float, str, type(None))
_LEFT = frozenset(["inplace", "layer_idx", "name_or_path", "transformers_version", "use_cache", "call_super_init"])
"""Names that say nothing of what is computed."""
_ALIKE = (
    frozenset(
        ["eps", "epsilon", "variance_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps", "layer_norm_epsilon"]
    ),
    frozenset(["scale", "scaling", "softmax_scale", "attn_scale", "norm_factor"]),
)
"""What models of several authors call one attribute."""
_CONFIGURATION, _NUMBERS = "config", {bool, int, float, type(None)}
_INNER = (dict, list, tuple)
_IMPLEMENTATION = "_implementation"


@dataclass(slots=True)
class Other:
    """An attribute that is another in b: its name in b, the values in a and in b; in which modules of b, and with that
    of which modules of a. is_buffer: of tensors; in_b is then in words how they differ.
    """

    name: str
    in_a: Any
    in_b: Any
    modules: dict[str, Any] = field(default_factory=dict)
    is_buffer: bool = False

    @property
    def todo(self) -> str:
        """What makes it the same in b."""
        name = self.public_name.rpartition(".")[2]
        return f"give b the {name} of a" if self.is_buffer else f"set {name} of b to {self.in_a!r}"

    @property
    def public_name(self) -> str:
        """Its name, as the user set it: of `config._attn_implementation_internal`, `config.attn_implementation`."""
        owner, dot, name = self.name.rpartition(".")
        return f"{owner}{dot}{name.strip('_').removesuffix('_internal')}"

    @property
    def chooses_kernels(self) -> bool:
        """Whether it names one of several implementations of the same, as of attention."""
        return _IMPLEMENTATION in self.name

    @property
    def text(self) -> str:
        """What it is in a and in b, and where."""
        first, more = next(iter(self.modules)), len(self.modules) - 1
        where = f"{first or '(root)'}{f' and {more} more' if more else ''}"
        if self.is_buffer:
            return f"buffer {self.name} of {where}: {self.in_b}"
        return f"{self.public_name} {_text(self.in_a)} in a, {_text(self.in_b)} in b: {where}"


def _text(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def other_attributes(a: torch.nn.Module, b: torch.nn.Module, paths: Mapping[str, tuple[str, ...]]) -> list[Other]:
    """Return what differs in modules of which each is the other's only partner. paths: by those of b."""
    of_a, of_b = dict(a.named_modules()), dict(b.named_modules())
    found: dict[tuple[str, str, str], Other] = {}
    for path, partners in paths.items():
        if len(partners) != 1 or path not in of_b or partners[0] not in of_a:
            continue
        x, y = of_a[partners[0]], of_b[path]
        for name, in_a, in_b in _differing(_attributes(x), _attributes(y)):
            other = found.setdefault((name, repr(in_a), repr(in_b)), Other(name, in_a, in_b))
            other.modules[path] = partners[0]
        for name, in_a, in_b in _buffers(x, y):
            far = apart_by(in_a, in_b) if in_a.shape == in_b.shape else None
            if far != 0:
                apart = f"{far:.1e} apart" if far is not None else f"{sizes(in_a.shape)} in a, {sizes(in_b.shape)} in b"
                other = found.setdefault((name, "buffer", ""), Other(name, in_a, apart, is_buffer=True))
                other.modules[path] = partners[0]
    return list(found.values())


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the numbers, words and flags of a module, and of its configuration under `config.NAME`."""
    own = {name: value for name, value in vars(module).items() if _is_plain(name, value)}
    configuration = getattr(module, _CONFIGURATION, None)
    if isinstance(getattr(configuration, "__dict__", None), dict):
        values = vars(configuration).items()
        own |= {f"{_CONFIGURATION}.{k}": v for k, v in values if _is_plain(k.lstrip("_"), v)}
    return own


def _is_plain(name: str, value: Any) -> bool:
    if name in _LEFT or name.startswith("_"):
        return False
    if isinstance(value, _INNER):
        inner = value.values() if isinstance(value, dict) else value
        return all(isinstance(one, _ATOMS) for one in inner)
    return isinstance(value, _ATOMS)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, in_b in b.items():
        key = name if name in a else next((other for other in a if _is_alike(other, name)), None)
        kinds = {type(in_b), None if key is None else type(a[key])}
        if key is not None and (len(kinds) == 1 or kinds <= _NUMBERS) and a[key] != in_b:
            yield name, a[key], in_b


def _is_alike(one: str, other: str) -> bool:
    return any({one, other} <= names for names in _ALIKE)


def _buffers(x: torch.nn.Module, y: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the buffers of one name; other tensors that a module holds, too."""
    for name, in_b in (
        *tensors_held(y)[1].items(),
        *((k, v) for k, v in vars(y).items() if isinstance(v, torch.Tensor)),
    ):
        in_a = _held(x, name)
        if isinstance(in_a, torch.Tensor) and isinstance(in_b, torch.Tensor):
            yield name, in_a, in_b


def _held(module: torch.nn.Module, name: str) -> Any:
    """Return a buffer, or another tensor that the module holds; None without one."""
    return tensors_held(module)[1].get(name, vars(module).get(name))


@contextmanager
def with_attributes(model: torch.nn.Module, others: Iterable[Other], a: torch.nn.Module) -> Iterator[None]:
    """Have a model run with a's attributes. Configurations are copied, since the copy of a model may share them."""
    modules, held, of_a = dict(model.named_modules()), [], dict(a.named_modules())
    tensors: dict[str, torch.Tensor] = {}
    try:
        for other in others:
            for path, partner in other.modules.items():
                module = modules[path]
                if other.is_buffer:
                    value = _held(of_a[partner], other.name)
                    if other.name in (buffers := tensors_held(module)[1]):
                        tensors[f"{path}.{other.name}" if path else other.name] = value.to(buffers[other.name].dtype)
                        continue
                    held.append((module, other.name, vars(module)[other.name]))
                    setattr(module, other.name, value.clone())
                    continue
                prefix, _, name = other.name.rpartition(".")
                if prefix == _CONFIGURATION:
                    held.append((module, _CONFIGURATION, module.config))
                    module.config = copy.copy(module.config)
                    vars(module.config)[name if name in vars(module.config) else f"_{name}"] = copy.deepcopy(other.in_a)
                else:
                    held.append((module, name, getattr(module, name)))
                    setattr(module, name, copy.deepcopy(other.in_a))
        with with_parameters(model, tensors):
            yield
    finally:
        for owner, name, value in reversed(held):
            setattr(owner, name, value)
