"""The class that `narrowcast.autocast` is in scripts: facts to be read off, with no effect of its own."""

from __future__ import annotations

from functools import cache
from typing import Any, Optional

import torch

from narrowcast.frontends.scripts.region_facts import REGION
from narrowcast.runtime.torch_surface.jit import add_script_class


class autocast:  # noqa: N801 (in scripts it has this name)
    """A region in a script: device type, low format, enabled and cache, as TorchScript can hold them."""

    def __init__(
        self,
        device_type: str,
        dtype: Optional[int] = None,  # noqa: UP045  # what TorchScript reads
        enabled: bool = True,
        cache_enabled: Optional[bool] = None,  # noqa: UP045
        policy: str = "native",
    ) -> None:
        self.device = device_type
        low = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        self.fast_dtype = low
        # torch's own is off in any other format
        self._enabled = enabled and (policy != "" or dtype is None or low == 5 or low == 15)
        self.cached = -1 if cache_enabled is None else int(cache_enabled)  # as around it, or as its policy says
        self.narrowcast_policy = policy

    def __enter__(self):  # type: ignore[no-untyped-def]
        if self.cached > -2:  # where narrowcast.script has compiled it, no region is left to be entered
            raise RuntimeError(
                "narrowcast.autocast does nothing here: torch.jit.script compiled it, or __enter__ is called by hand. "
                "Write narrowcast.script(...) and with statements; a part of a script is converted by itself"
            )
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any):  # type: ignore[no-untyped-def]
        pass


@cache
def register_region(named: type) -> None:
    """Have TorchScript take this class where a script names `named`, which is `narrowcast.autocast`."""
    add_script_class(named, autocast, f"__torch__.{REGION}")
