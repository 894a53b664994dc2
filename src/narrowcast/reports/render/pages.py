"""The pages of results. Loaded when one is made."""

from __future__ import annotations

from narrowcast.output.collector import collector_paused
from narrowcast.reports.documents.read import page_of
from narrowcast.reports.render.html import page_html
from narrowcast.reports.render.notebook import notebook_html
from narrowcast.reports.results.result import Paged


def html_of(found: Paged) -> str:
    """Its page as one HTML file."""
    with collector_paused():
        return page_html(page_of(found.page_data()))


def notebook_of(found: Paged) -> str:
    """The compact form of its page."""
    with collector_paused():
        return notebook_html(page_of(found.page_data()))
