"""The page as one HTML file: the data, the script and the style that were built from web/, and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from pathlib import Path

from narrowcast.reports.documents.model import Document

BUILT = Path(__file__).parent / "built"


def page_html(page: Document) -> str:
    """Return the whole file. What comes from the user is JSON in a block that browsers do not run, then text."""
    script, style = built("page.js"), built("page.css")
    allowed = f"script-src {_digest(script)}; style-src {_digest(style)}"
    rules = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    data = json.dumps(page.data(), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("\u2028", "\\u2028")):
        data = data.replace(character, escaped)
    title, verdict = html.escape(page.title), html.escape(page.verdict)
    rest = "The rest of this page is drawn by its script, which is switched off."
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{rules}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Narrowcast</title>
<style>{style}</style>
</head>
<body>
<noscript><h1>{title}</h1><p>{verdict}</p><p>{rest}</p></noscript>
<div id="page"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


@cache
def built(name: str) -> str:
    """Return a file that `make page` built."""
    return (BUILT / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the source expression that allows this text alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
