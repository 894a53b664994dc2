"""The files and folders that what is kept of a stored training was saved to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import RunError, reason_of
from narrowcast.runtime.torch_bridge import with_part
from narrowcast.training.storage.as_tensors import only_one
from narrowcast.training.storage.slots import StoredParameter

SAVED = "Give what state_dict() returned, or where it was saved."


def read(path: Path, key: str | None, slots: Sequence[StoredParameter]) -> dict[str, Any]:
    """Return what a file or a folder has of what is stored, under this name, or whichever it was saved under."""
    try:
        if path.is_dir():
            return _read_folder(path, key, slots)
        if path.suffix == ".safetensors":
            found: Any = importlib.import_module("safetensors.torch").load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except RunError:
        raise
    except BaseException as error:  # of whatever wrote it: torch.distributed.checkpoint's is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
            raise
        advice = "Give a file of torch.save or safetensors, or a folder of torch.distributed.checkpoint."
        reason = reason_of(error) if isinstance(error, Exception) else "it is damaged, or not whole"
        raise RunError(f"load_state_dict({str(path)!r})", reason, advice=advice) from None
    if not isinstance(found, Mapping):
        raise RunError(f"load_state_dict({str(path)!r})", f"a {type(found).__name__} is in it", advice=SAVED)
    inside = {str(name): value for name, value in found.items() if isinstance(value, Mapping)}
    own = {name: one for name, one in {"": found, **inside}.items() if "digest" in one or "param_groups" in one}
    return dict(own.get(only_one(path, [*own], key), found))


def _read_folder(path: Path, key: str | None, slots: Sequence[StoredParameter]) -> dict[str, Any]:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    kept = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    ends = [name.removesuffix("digest") for name in kept if name == "digest" or name.endswith(".digest")]
    chosen = only_one(path, [end.removesuffix(".") for end in ends], key)
    prefix, own = f"{chosen}." if chosen else "", {slot.name: slot for slot in slots}
    target: dict[str, Any] = {}
    for name, one in kept.items():
        if name.startswith(prefix) and hasattr(one, "properties"):
            slot = own.get(name.removeprefix(prefix).partition("/")[0])
            dtype, size = one.properties.dtype, tuple(one.size)
            whole = slot is not None and size == tuple(slot.parameter.shape)
            shape = slot.weight.shape if slot is not None and whole else size
            empty = torch.zeros(shape, dtype=dtype, device="cpu" if slot is None else slot.weight.device)
            target[name] = with_part(slot.parameter.detach(), empty) if slot is not None and whole else empty
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    dcp.load(target, checkpoint_id=path, no_dist=alone)
    return {name.removeprefix(prefix): value for name, value in target.items()}
