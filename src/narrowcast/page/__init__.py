"""The page that shows where a model spends its bits: results as data of a page, and that page as HTML."""

from narrowcast.page.html import page_html
from narrowcast.page.model import Page
from narrowcast.page.read import page_of
from narrowcast.page.shown import Shown

__all__ = ["Page", "Shown", "page_html", "page_of"]
