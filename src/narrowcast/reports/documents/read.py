"""Which page a saved result has: by its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.errors import RunError
from narrowcast.reports.documents.comparisons import comparison_page
from narrowcast.reports.documents.explanations import explanation_page
from narrowcast.reports.documents.fits import fit_page
from narrowcast.reports.documents.ledgers import ledger_page
from narrowcast.reports.documents.model import Page
from narrowcast.reports.documents.profiles import profile_page
from narrowcast.reports.documents.repairs import repair_page
from narrowcast.reports.documents.run_differences import run_differences_page
from narrowcast.reports.documents.runs import run_page, watch_page
from narrowcast.reports.documents.scales import scaler_page
from narrowcast.reports.documents.training import training_page

_PAGES: dict[str, Callable[[Mapping[str, Any]], Page]] = {
    "narrowcast.explanation/1": explanation_page,
    "narrowcast.run/1": run_page,
    "narrowcast.compare/1": comparison_page,
    "narrowcast.run-differences/1": run_differences_page,
    "narrowcast.watch/1": watch_page,
    "narrowcast.fit/1": fit_page,
    "narrowcast.ledger/1": ledger_page,
    "narrowcast.scaler/1": scaler_page,
    "narrowcast.training-check/1": training_page,
    "narrowcast.repair/1": repair_page,
    "narrowcast.profile/1": profile_page,
}


def page_of(data: Mapping[str, Any]) -> Page:
    """The page of a result, as its JSON has it. RunError for another schema, or a broken record."""
    schema = str(data.get("schema"))
    make = _PAGES.get(schema)
    if make is None:
        raise RunError(
            "a page of a saved result", f"schema {schema!r}, where these are known: {', '.join(_PAGES)}",
            advice="Write it anew with this version of Narrowcast.",
        )  # fmt: skip
    try:
        return make(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RunError(
            f"a page of a saved result, {schema}", f"a record is broken: {type(error).__name__}: {error}",
            advice="Write it anew.",
        ) from error  # fmt: skip
