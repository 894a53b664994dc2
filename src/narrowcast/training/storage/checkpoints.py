"""What a checkpoint keeps of the weights of training: tensors of one that was read, or dtypes of one on disk."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch

from narrowcast.errors import RunError, reason_of

_SAFE, _DISTRIBUTED = ".safetensors", ".metadata"
_OF_METADATA = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_BESIDE = {"torch": ("Size",), "torch.serialization": ("_get_layout",), "collections": ("OrderedDict",)}
"""Modules all of whose classes, and others of which these names, the metadata of a distributed checkpoint consist of,
with paths and dtypes: nothing else in it is loaded.
"""


@dataclass(slots=True)
class Entry:
    """A tensor of a checkpoint. path: of keys, with dots between. value: None where only its file has it."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: torch.Tensor | None = None


def entries_of(checkpoint: Any) -> list[Entry]:
    """Return the tensors of a checkpoint: nested dicts and lists, or a file of torch.save, of safetensors, or a folder
    of torch.distributed.checkpoint. Raises RunError for a file that cannot be read.
    """
    if not isinstance(checkpoint, str | Path):
        return list(_nested(checkpoint, ""))
    path = Path(checkpoint)
    try:
        if path.is_dir():
            return list(_distributed(path))
        if path.suffix == _SAFE:
            return list(_nested(_safetensors(path), ""))
        return list(_nested(torch.load(path, map_location="cpu", weights_only=True, mmap=True), ""))
    except Exception as error:  # of whatever wrote it
        asked = f"check_storage(checkpoint={str(path)!r})"
        advice = "Give what you save, nested dicts of tensors, or its file."
        raise RunError(asked, reason_of(error), advice=advice) from None


def _nested(tree: Any, path: str) -> Iterator[Entry]:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            yield Entry(path, tuple(tree.shape), tree.dtype, tree)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _nested(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for n, value in enumerate(tree):
            yield from _nested(value, f"{path}.{n}" if path else str(n))


def _safetensors(path: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file  # where it is installed, as it is where such files are

    tensors: Mapping[str, torch.Tensor] = load_file(path)
    return tensors


class _Metadata(pickle.Unpickler):
    """Loads what describes a distributed checkpoint, and runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the known classes, or a dtype."""
        value = None if "." in name else getattr(sys.modules.get(module), name, None)
        is_of_metadata = module in _OF_METADATA and isinstance(value, type | Enum)
        is_path = isinstance(value, type) and issubclass(value, PurePath)
        is_dtype = module == "torch" and isinstance(value, torch.dtype)
        if is_of_metadata or is_path or is_dtype or name in _BESIDE.get(module, ()):
            return value
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no checkpoint needs")


def _distributed(path: Path) -> Iterator[Entry]:
    """Yield what the metadata of a folder of torch.distributed.checkpoint lists."""
    importlib.import_module("torch.distributed.checkpoint")  # the classes of its metadata
    with (path / _DISTRIBUTED).open("rb") as file:
        kept = _Metadata(file).load()
    for name, one in kept.state_dict_metadata.items():
        properties = getattr(one, "properties", None)
        if properties is not None and properties.dtype.is_floating_point:
            yield Entry(str(name), tuple(one.size), properties.dtype)


def of_weight(entries: Sequence[Entry], name: str, shape: tuple[int, ...]) -> Entry | None:
    """Return the tensor that a checkpoint keeps under a weight's name, whatever it calls the model."""
    own = [e for e in entries if e.shape == shape and (e.path == name or e.path.endswith(f".{name}"))]
    return min(own, key=lambda entry: len(entry.path), default=None)
