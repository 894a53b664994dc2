"""What every result has: its JSON text and file, its first screen, its page, and its compact form in notebooks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from narrowcast.output.collector import collector_paused
from narrowcast.output.files import save_result
from narrowcast.output.lazy import imported
from narrowcast.output.screen import LINES


def renderer(name: str) -> Any:
    """Return a module of `reports.render`, which is above the results that it shows. Loaded by its name, when a result
    is shown: most programs show nothing.
    """
    return imported(f"narrowcast.reports.render.{name}")


def codec() -> Any:
    """Return the module that writes results and reads them, which knows all their classes. Loaded when one is saved."""
    return imported("narrowcast.reports.results.codec")


def _document(result: Result) -> Any:
    """Return the document of a result, made by a module above the results, too."""
    return imported("narrowcast.reports.documents.of_results").document_of(result)


class Result(ABC):
    """What a look at a model has found.

    WHAT: what it is, for errors. SCHEMA: of its file, with its version. INDENT: of the JSON that it is saved as.
    """

    __slots__ = ()
    WHAT: ClassVar[str]
    SCHEMA: ClassVar[str]
    INDENT: ClassVar[int | None] = 1

    @property
    @abstractmethod
    def verdict(self) -> str:
        """What was found, in a word or a few of `verdicts.VERDICTS`: what a test in CI compares."""

    @property
    def todos(self) -> list[Any]:
        """What is worth doing, most of all first: `what`, `why`, and the `rule` that does it, if one does."""
        return list(_document(self).todos)

    def data(self) -> dict[str, Any]:
        """Return what is written as JSON: the schema, and its fields; it may share parts: copy before you change."""
        return {"schema": self.SCHEMA, **codec().to_data(self)}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Self:
        """Return the result of such data. Raise one of `codec.BROKEN` for others."""
        return cast("Self", codec().of_data(cls, data, is_whole=True))

    def to_html(self) -> str:
        """Return one HTML file that needs nothing else: overview, graph, tables, plots (docs/reference/page.md)."""
        with collector_paused():
            return str(renderer("html").page_html(_document(self)))

    def _repr_html_(self) -> str:
        with collector_paused():
            return str(renderer("notebook").notebook_html(_document(self)))

    def to_text(self, every: bool = False, width: int | None = None, lines: int = LINES) -> str:
        """Return the first screen, at most this many lines and columns (80); or, with every, all that was found."""
        return str(renderer("texts").text_of(self, every, width, lines))

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        kind = next(kind for kind in type(self).__mro__ if not kind.__name__.startswith("_"))
        return f"<{kind.__name__}: {self.verdict}; print shows it>"

    def to_json(self, indent: int | None = None) -> str:
        """Return JSON text under a schema of its own (docs/reference/run.md)."""
        with collector_paused():
            return json.dumps(self.data(), indent=indent)

    def save(self, path: str | Path) -> Path:
        """Write the JSON text, replacing the file at once; compressed if its name ends with `.gz`.

        Returns the file that was written. Raises RunError if it cannot be.
        """
        save_result(Path(path), self.WHAT, self.to_json(indent=self.INDENT) + "\n")
        return Path(path)
