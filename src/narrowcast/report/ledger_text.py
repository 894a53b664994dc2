"""A ledger as text."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.ledger import Cast, Ledger
from narrowcast.report.console import as_text, in_bytes, short_file, table


def ledger_text(ledger: Ledger) -> str:
    """All casts and refusals as plain text."""
    return as_text([totals_line(ledger), cast_table(f"{len(ledger.casts)} casts", ledger.casts), *refusals(ledger)])


def totals_line(ledger: Ledger) -> str:
    """One paragraph of sums."""
    t = ledger.totals()
    return (
        f"  {t.casts} casts ({t.copied} copied, {t.cached} from the weight cache, {t.inside} inside the op; "
        f"{t.forward} forward, {t.backward} backward)\n  {t.refusals} refusals, {t.calls} calls\n  "
        f"casts moved {in_bytes(t.cast_bytes)} of {in_bytes(t.cast_bytes + t.op_bytes)} ({t.share_of_casts:.1%})"
    )


def cast_table(title: str, casts: list[Cast]) -> RenderableType:
    """One line per cast."""
    made = table(title, "op", "argument", "module", "line", "cast", ">bytes", "how", "rule")
    made.columns[2].ratio = 1
    for c in casts:
        how = "again" if c.repeated and c.how == "copied" else c.how
        made.add_row(
            c.op.removesuffix(".default"),
            c.argument if c.kind == c.argument else f"{c.argument}, {c.kind}",
            escape(c.module_path or "(root)"),
            escape(f"{short_file(c.file)}:{c.line}"),
            f"{c.src} -> {c.dst}",
            in_bytes(c.moved_bytes),
            how if c.direction == "forward" else f"{how}, backward",
            escape(c.action),
        )
    return made


def refusals(ledger: Ledger) -> list[RenderableType]:
    """A table of refused calls, if there are any."""
    if not ledger.refusals:
        return []
    made = table(f"{len(ledger.refusals)} refused calls", "op", "module", "line", "reason")
    for r in ledger.refusals:
        made.add_row(r.op, escape(r.module_path or "(root)"), escape(f"{short_file(r.file)}:{r.line}"), escape(r.reason))
    return [made]
