"""What every result has: the page of it, and its compact form in notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class Shown(ABC):
    """A result that has a schema of its own. How pages are made is imported when one is: most programs make none."""

    __slots__ = ()

    @abstractmethod
    def data(self) -> Mapping[str, Any]:
        """What its JSON text says, as Python has it; parts of it may be the result's own: copy before you change."""

    def page_data(self) -> Mapping[str, Any]:
        """What its page is made of."""
        return self.data()

    def to_html(self) -> str:
        """One HTML file that needs nothing else: overview, graph, tables, plots (docs/reference/page.md)."""
        from narrowcast.output.collector import collector_paused
        from narrowcast.reports.documents.read import page_of
        from narrowcast.reports.render.html import page_html

        with collector_paused():
            return page_html(page_of(self.page_data()))

    def _repr_html_(self) -> str:
        from narrowcast.output.collector import collector_paused
        from narrowcast.reports.documents.read import page_of
        from narrowcast.reports.render.notebook import notebook_html

        with collector_paused():
            return notebook_html(page_of(self.page_data()))
