"""The pages of results. Loaded when one is made."""

from __future__ import annotations

from narrowcast.output.collector import collector_paused
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.render.html import page_html
from narrowcast.reports.render.notebook import notebook_html
from narrowcast.reports.results.result import Result


def html_of(found: Result) -> str:
    """Its page as one HTML file."""
    with collector_paused():
        return page_html(document_of(found))


def notebook_of(found: Result) -> str:
    """The compact form of its page."""
    with collector_paused():
        return notebook_html(document_of(found))
