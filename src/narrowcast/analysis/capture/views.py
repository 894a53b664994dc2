"""The lines at which tensors are viewed, which are no calls: between the call that made a tensor and one that reads it
the parts that it reads are chosen there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from narrowcast.observation.statistics.by_storage import ByStorage, has_storage, where_it_lies
from narrowcast.reports.results.run_records import Lines
from narrowcast.runtime.sites.python_stack import loop_line

_MOST = 6
"""How many lines are kept of a tensor, the last ones."""


class Views:
    """The lines at which tensors were viewed, by how they lie in memory."""

    def __init__(self) -> None:
        self._lines: ByStorage[dict[tuple[object, ...], Lines]] = ByStorage()

    def viewed(self, source: torch.Tensor, results: Iterable[torch.Tensor]) -> None:
        """Note an op that has returned views of a tensor, or copies of it, at the line that is being run."""
        if not isinstance(source, torch.Tensor) or not has_storage(source):  # a number: `1j * x`
            return
        site, before = loop_line(), self.of(source)
        line = (site.file, site.line)
        lines = (*before, line)[-_MOST:] if line[0] and line not in before else before
        for result in results:
            if lines and has_storage(result) and where_it_lies(result) != where_it_lies(source):
                self._lines.setdefault(result, dict)[where_it_lies(result)] = lines

    def of(self, tensor: torch.Tensor) -> Lines:
        """Return the lines at which a tensor was viewed, in order."""
        known = self._lines.get(tensor)
        return known.get(where_it_lies(tensor), ()) if known else ()

    def of_all(self, tensors: Iterable[torch.Tensor], own: tuple[str, int]) -> Lines:
        """Return those of all that a call reads, which is at the line `own`."""
        return tuple(dict.fromkeys(line for tensor in tensors for line in self.of(tensor) if line != own))
