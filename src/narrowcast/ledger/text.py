"""A ledger as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.console import as_text, in_bytes, short_file, table
from narrowcast.ledger.records import Cast

if TYPE_CHECKING:
    from narrowcast.ledger.ledger import Ledger


def ledger_text(ledger: Ledger) -> str:
    """All casts and refusals as plain text."""
    casts = cast_table(f"{len(ledger.casts)} casts", ledger.casts)
    return as_text(
        [
            *(f"  {escape(note)}" for note in ledger.notes),
            totals_line(ledger),
            casts,
            *refusals(ledger),
            *advice_parts(ledger),
        ]
    )


def totals_line(ledger: Ledger) -> str:
    """One paragraph of sums."""
    t = ledger.totals()
    return (
        f"  {t.casts} casts ({t.copied} copied, {t.cached} from the weight cache, "
        f"{f'{t.shared} shared, ' if t.shared else ''}{t.inside} inside the op; "
        f"{t.forward} forward, {t.backward} backward)\n  {t.refusals} refusals, {t.calls} calls\n  "
        f"casts moved {in_bytes(t.cast_bytes)} of {in_bytes(t.cast_bytes + t.op_bytes)} ({t.share_of_casts:.1%})"
    )


def cast_table(title: str, casts: list[Cast]) -> RenderableType:
    """One line per cast."""
    made = table(title, "module", "op, argument", "line", "cast", ">bytes", "how", "rule")
    made.columns[0].ratio, made.columns[1].ratio = 5, 4
    for c in casts:
        made.add_row(
            escape(c.module_path or "(root)"),
            f"{c.op.removesuffix('.default')} {argument_text(c)}",
            escape(line_text(c)),
            f"{c.src} -> {c.dst}",
            in_bytes(c.moved_bytes),
            how_text(c),
            escape(c.action),
        )
    return made


def argument_text(cast: Cast) -> str:
    """`input, activation`; the kind is left out where it says the same."""
    return cast.argument if cast.kind == cast.argument else f"{cast.argument}, {cast.kind}"


def line_text(cast: Cast) -> str:
    """`model.py:12`."""
    return f"{short_file(cast.file)}:{cast.line}"


def how_text(cast: Cast) -> str:
    """copied, cached, inside, or again; and backward."""
    how = "again" if cast.repeated and cast.how == "copied" else cast.how
    return how if cast.direction == "forward" else f"{how}, backward"


def refusals(ledger: Ledger) -> list[RenderableType]:
    """A table of refused calls, if there are any."""
    if not ledger.refusals:
        return []
    made = table(f"{len(ledger.refusals)} refused calls", "op", "module", "line", "reason")
    for r in ledger.refusals:
        made.add_row(
            r.op, escape(r.module_path or "(root)"), escape(f"{short_file(r.file)}:{r.line}"), escape(r.reason)
        )
    return [made]


def advice_parts(ledger: Ledger) -> list[RenderableType]:
    """Each piece of advice with its line, if there is any."""
    parts: list[RenderableType] = []
    for found, times in ledger.advice.items():
        often = f" ({times} times)" if times > 1 else ""
        where = f"{short_file(found.file)}:{found.line}" if found.file else "?"
        inside = f" in {found.module_path}" if found.module_path else ""
        parts += [
            f"[bold yellow]advice[/]: {escape(found.kind)}{often}, {escape(where)}{escape(inside)}",
            f"  {escape(found.what)}",
            f"  {escape(found.todo)}",
        ]
    return [*parts, ""] if parts else []
