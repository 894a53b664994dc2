"""What a checkpoint keeps of the weights of training: tensors of one that was read, or dtypes of one on disk."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch

from narrowcast.core.ledger import Advice
from narrowcast.core.policy.storage import FP32
from narrowcast.errors import RunError, reason_of
from narrowcast.output.words import and_more
from narrowcast.runtime.torch_bridge import FORMATS, values_of
from narrowcast.training.storage.masters import MASTER, Master, units_apart
from narrowcast.training.storage.slots import RESTS

NO_MASTERS, NARROWER, READ_LOWER = (
    "a checkpoint without masters",
    "a checkpoint in a lower format",
    "a checkpoint read into a lower format",
)
_MOST = 0.5
"""A tensor of which a larger share is apart from a weight is not its master."""
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
        return list(_nested(checkpoint, "", frozenset()))
    path = Path(checkpoint)
    try:
        if path.is_dir():
            return list(_distributed(path))
        if path.suffix == _SAFE:
            return list(_nested(_safetensors(path), "", frozenset()))
        kept = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return list(_nested(kept, "", frozenset()))
    except Exception as error:  # of whatever wrote it
        asked = f"check_storage(checkpoint={str(path)!r})"
        advice = "Give what you save, nested dicts of tensors, or its file: of torch.save, of safetensors; or a "
        advice += "folder of torch.distributed.checkpoint, with its .metadata."
        others = "it holds other objects than tensors, which are not loaded"
        found = others if isinstance(error, pickle.UnpicklingError) else reason_of(error).partition("\n")[0]
        raise RunError(asked, found, advice=advice) from None


def _nested(tree: Any, path: str, around: frozenset[int]) -> Iterator[Entry]:
    """Yield the tensors inside. around: the containers that this is in, which it may hold itself."""
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point() or path.endswith(tuple(RESTS.values())):
            yield Entry(path, tuple(tree.shape), tree.dtype, tree)
        return
    is_sequence = isinstance(tree, Sequence) and not isinstance(tree, str | bytes)
    rows = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if is_sequence else ()
    for key, value in rows if id(tree) not in around else ():
        yield from _nested(value, f"{path}.{key}" if path else str(key), around | {id(tree)})


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
        if properties is not None and (properties.dtype.is_floating_point or name.endswith(tuple(RESTS.values()))):
            yield Entry(str(name), tuple(one.size), properties.dtype)


def of_weight(entries: Sequence[Entry], name: str, shape: tuple[int, ...]) -> Entry | None:
    """Return the tensor that a checkpoint keeps under a weight's name, whatever it calls the model."""
    names = {name, name.removeprefix("module.")}  # as DDP calls what it wraps, and as that is saved
    own = [e for e in entries if e.shape == shape and any(f".{e.path}".endswith(f".{one}") for one in names)]
    return min(own, key=lambda entry: len(entry.path), default=None)


def losses_of(
    entries: Sequence[Entry],
    weights: Mapping[str, torch.Tensor],
    masters: Mapping[str, Master],
    ways: Mapping[str, str],
    notes: list[str],
) -> Iterator[Advice]:
    """Yield what a checkpoint loses of what is trained, or a model of what it reads: the first weight of each kind.
    ways: how nc.store keeps what it keeps besides some weights. Notes say what it does not hold.
    """
    if not entries:
        found, advice = "it holds no tensors of floating dtypes", "Give what you save, with model.state_dict() in it."
        raise RunError("check_storage(checkpoint=...)", found, advice=advice)
    lost: dict[str, list[tuple[str, str]]] = {}
    missing = []
    for name, weight in weights.items():
        if not (weight.requires_grad and weight.is_floating_point()):
            continue
        entry, master = of_weight(entries, name, tuple(weight.shape)), masters.get(name)
        if entry is None:
            missing.append(name)
        if name in ways:
            rest = f"{name}/{RESTS[ways[name]]}"
            there = next((one for one in entries if f".{one.path}".endswith(f".{rest}")), None)
            if there is not None and ways[name] == FP32 and there.dtype is not torch.float32:
                lost.setdefault(NARROWER, []).append((f"{name}/master", f"{_format(there.dtype)}, not fp32"))
            elif there is None:
                lost.setdefault(NO_MASTERS, []).append((name, RESTS[ways[name]]))
        elif master is not None:
            if not any(_holds(one, name, weight, master) for one in entries):
                lost.setdefault(NO_MASTERS, []).append((name, _format(master.value.dtype)))
        elif entry is not None and _digits(entry.dtype) < _digits(weight.dtype):
            lost.setdefault(NARROWER, []).append((name, f"{_format(entry.dtype)}, not {_format(weight.dtype)}"))
        elif entry is not None and _digits(entry.dtype) > _digits(weight.dtype) and not _fits(entry, weight.dtype):
            lost.setdefault(READ_LOWER, []).append((name, f"{_format(entry.dtype)} into {_format(weight.dtype)}"))
    if len(missing) == len(weights):
        advice = f"Give one with the names of model.state_dict(): {missing[0]}."
        raise RunError("check_storage(checkpoint=...)", "it holds none of the model's weights", advice=advice)
    if missing:
        notes.append(f"The checkpoint does not hold {missing[0]}{and_more(len(missing) - 1, 'weight')}.")
    for kind, rows in lost.items():
        (name, formats), more = rows[0], and_more(len(rows) - 1, "weight")
        what, todo = _TEXTS[kind]
        yield Advice(kind, what.format(name=name + more, formats=formats), todo, name, "", 0)


_TEXTS = {
    NO_MASTERS: (
        "of {name} it holds no master ({formats}): what the weight's format cannot hold is lost with each resume",
        "Save the masters as well, by their weights' names, and copy them back after the model is loaded.",
    ),
    NARROWER: (
        "it keeps {name} in {formats}: a resume starts from rounded weights",
        "Save model.state_dict() as it is; convert a copy for inference.",
    ),
    READ_LOWER: (
        "it is read {formats} without a word: {name}",
        "Load it into a model in the checkpoint's format, or keep masters and copy its values into them.",
    ),
}
"""Of each kind of finding about a checkpoint what it is, and what to do."""


def _holds(entry: Entry, name: str, weight: torch.Tensor, master: Master) -> bool:
    """Return whether a tensor of a checkpoint may be a weight's master: by its values, or, where only its name is
    known, by that.
    """
    if entry.shape != tuple(weight.shape) or _digits(entry.dtype) < _digits(master.value.dtype):
        return False
    if entry.value is None or entry.value.is_meta:
        is_named = MASTER in entry.path or of_weight([entry], name, entry.shape) is not None
        return is_named and (not master.where or entry.path.rpartition(".")[2] == master.where)
    here = values_of(weight.detach())
    there = values_of(entry.value.detach())
    return here.shape == there.shape and units_apart(there.to(here.device), here) < _MOST


def _fits(entry: Entry, dtype: torch.dtype) -> bool:
    """Return whether a format holds all values of a tensor, as far as they are known."""
    value = entry.value
    return value is not None and not value.is_meta and torch.equal(value.to(dtype).to(value.dtype), value)


def _digits(dtype: torch.dtype) -> float:
    return -math.log2(torch.finfo(dtype).eps)


def _format(dtype: torch.dtype) -> str:
    return str(FORMATS.get(dtype, dtype))
