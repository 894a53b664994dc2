"""The compact form for notebooks: no script, no style sheet, so that it shows wherever HTML does."""

from __future__ import annotations

from html import escape

from narrowcast.core.policy.text import rule_text
from narrowcast.output.words import counted
from narrowcast.reports.documents.model import FIRST_TODOS, Bar, Document, Table, Todo
from narrowcast.reports.render.every import cell, first_rows, split_columns, telling_table

ROWS = 12
COLOURS = {"fp64": "#7a5cc4", "fp32": "#2f73b8", "bf16": "#d97f12", "fp16": "#c2407a"}
OTHER = "#7a828c"
DARK_LABELS = {COLOURS["bf16"], OTHER}  # white on these has a contrast of 3 and 4


def colours_of(name: str) -> tuple[str, str]:
    """Return a format's colour, and that of a label on it."""
    colour = COLOURS.get(name, OTHER)
    return colour, "#000000" if colour in DARK_LABELS else "#ffffff"


def notebook_html(page: Document) -> str:
    """Return verdict, figures, shares by format, recommendations, and one table."""
    figures = "".join(
        f"<td><b>{escape(f.value)}</b><br><small>{escape(f.name)}: {escape(f.detail)}</small></td>"
        for f in page.figures[:6]
    )
    parts = [f"<p><b>{escape(page.title)}</b>: {escape(page.verdict)}</p>", f"<table><tr>{figures}</tr></table>"]
    parts += [_bar(bar) for bar in page.bars]
    parts += [*map(_todo, page.todos[:FIRST_TODOS])]
    left = page.todos[FIRST_TODOS:]
    if left:
        more = f"<summary>{counted(len(left), 'more recommendation')}</summary>{''.join(map(_todo, left))}"
        parts.append(f"<details>{more}</details>")
    shown = telling_table(page)
    parts += [] if shown is None else [_table(shown)]
    parts.append("<p><small><code>to_html()</code> gives the whole page.</small></p>")
    return "".join(parts)


def _todo(todo: Todo) -> str:
    rule = f"<pre>{escape(rule_text(todo.rule))}</pre>" if todo.rule else ""
    return f"<details><summary>{escape(todo.what)}</summary><p>{escape(todo.why)}</p>{rule}</details>"


def _bar(bar: Bar) -> str:
    whole = sum(amount for _, amount in bar.parts) or 1
    shown = "".join(
        f'<span title="{escape(name)}" style="display:inline-block;background:{colour};color:{label};overflow:hidden;'
        f'white-space:nowrap;width:{100 * amount / whole:.2f}%">{escape(name)} {amount / whole:.0%}</span>'
        for name, amount in bar.parts
        for colour, label in [colours_of(name)]
    )
    return f'<div><small>{escape(bar.title)}</small><div style="max-width:40em;font-size:smaller">{shown}</div></div>'


def _table(table: Table) -> str:
    """Return its first rows; what is equal in all of them is said once, above."""
    rows = first_rows(table)
    cells = [[cell(v, c.kind) for v, c in zip(row, table.columns, strict=True)] for row in rows[:ROWS]]
    shown, alike = split_columns(table, cells)
    common = f"<p><small>all: {escape(alike)}</small></p>" if alike else ""
    head = "".join(f"<th>{escape(table.columns[n].name)}</th>" for n in shown)
    body = "".join(f"<tr>{''.join(f'<td>{escape(row[n])}</td>' for n in shown)}</tr>" for row in cells)
    more = f"<p>and {counted(len(rows) - ROWS, 'more row')}</p>" if len(rows) > ROWS else ""
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<p>{escape(table.title)}</p>{common}<div style="overflow-x:auto;white-space:nowrap">{whole}</div>{more}'
