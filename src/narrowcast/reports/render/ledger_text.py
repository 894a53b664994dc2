"""A ledger as text."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.core.ledger.records import Cast, Tally
from narrowcast.output.console import WIDTH, as_text, in_bytes, short_place, table
from narrowcast.output.screen import Part, first_screen, shortened
from narrowcast.reports.documents.ledgers import ledger_document
from narrowcast.reports.documents.rules import alike_module
from narrowcast.reports.render.overview import overview_parts
from narrowcast.reports.results.ledger import Ledger

LEAST_OF_PATH = 12
"""So many letters of a module's path are shown, however narrow it is."""
LINES_SHOWN = 25
LINES = 1000
"""A ledger with more casts than these is printed by kind."""


def ledger_screen(ledger: Ledger, width: int, room: int) -> str:
    """All of a short ledger; of a longer one sums, and the kinds of casts that move most."""
    whole = ledger_text(ledger, width).strip("\n")
    if whole.count("\n") < room:
        return first_screen([Part(whole.split("\n"))], None, width, room)
    page = ledger_document(ledger)
    head = ", ".join(f"{name}: {value}" for name, value in page.facts)
    parts = overview_parts(page, head, [cast_part(ledger.kinds(), width)], width)
    return first_screen(parts, lambda: ledger_text(ledger), width, room)


def cast_part(kinds: Iterable[tuple[Cast, Tally]], width: int) -> Part:
    """Casts that are alike but for the number of their layer, those that move most first."""
    groups: dict[tuple[str, ...], list[tuple[Cast, Tally]]] = {}
    for c, tally in kinds:
        key = (alike_module(c.module_path), c.op, c.argument, c.site, c.src, c.dst)
        groups.setdefault(key, []).append((c, tally))
    ordered = sorted(groups.values(), key=lambda alike: -sum(tally.moved_bytes for _, tally in alike))
    lines = []
    for alike in ordered[:LINES_SHOWN]:
        c = alike[0][0]
        path = alike_module(c.module_path) if len({one.module_path for one, _ in alike}) > 1 else c.module_path
        moved, times = (sum(getattr(tally, name) for _, tally in alike) for name in ("moved_bytes", "calls"))
        figures = f"{in_bytes(moved):>10} {times:>5}  {c.src} -> {c.dst}  "
        rest = f" {short_op(c.op)} {c.argument}  {line_text(c)}"
        lines.append(figures + shortened(path or "(root)", max(width - len(figures) - len(rest), LEAST_OF_PATH)) + rest)
    return Part(["", f"{'bytes':>10} {'times':>5}  casts that move most", *lines] if lines else [], 3, 2, least=5)


def short_op(op: str) -> str:
    """`linear` of `aten.linear.default`."""
    return op.removeprefix("aten.").removesuffix(".default")


def ledger_text(ledger: Ledger, width: int = WIDTH) -> str:
    """All casts and refusals as plain text; of many casts each kind, those that move most."""
    count = ledger.cast_count
    if count <= LINES:
        casts = cast_table(f"{count} casts", ledger.casts)
    else:
        casts = kind_table(f"{count} casts, alike ones together", cast_kinds(ledger), LINES)
    return as_text(
        [
            *(f"  {escape(note)}" for note in ledger.notes),
            totals_line(ledger),
            casts,
            *refusals(ledger),
            *advice_parts(ledger),
        ],
        width,
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


Kind = tuple[str, str, str, str, str, str]


def cast_kinds(ledger: Ledger) -> list[tuple[Kind, Tally]]:
    """Casts that make the same line, how many there are, and the bytes that they move: most bytes first."""
    found: dict[Kind, Tally] = {}
    for cast, times in ledger.kinds():
        found.setdefault((*_cells(cast), how_text(cast), cast.action), Tally()).add(times)
    return sorted(found.items(), key=lambda row: -row[1].moved_bytes)


def kind_table(title: str, kinds: list[tuple[Kind, Tally]], most: int) -> RenderableType:
    """One line per kind of cast."""
    left = f"; the {most} of {len(kinds)} that move most" if len(kinds) > most else ""
    made = table(title + left, "module", "op, argument", "line", "cast", ">times", ">bytes", "how", "rule")
    for (module, op, line, formats, how, rule), tally in kinds[:most]:
        moved = in_bytes(tally.moved_bytes)
        made.add_row(escape(module), op, escape(line), formats, str(tally.calls), moved, how, escape(rule))
    return made


def _cells(cast: Cast) -> tuple[str, str, str, str]:
    op = f"{short_op(cast.op)} {argument_text(cast)}"
    return cast.module_path or "(root)", op, line_text(cast), f"{cast.src} -> {cast.dst}"


def cast_table(title: str, casts: list[Cast]) -> RenderableType:
    """One line per cast."""
    made = table(title, "module", "op, argument", "line", "cast", ">bytes", "how", "rule")
    for c in casts:
        module, op, line, formats = _cells(c)
        moved = in_bytes(c.moved_bytes)
        made.add_row(escape(module), op, escape(line), formats, moved, how_text(c), escape(c.action))
    return made


def argument_text(cast: Cast) -> str:
    """`input, activation`; the kind is left out where it says the same."""
    return cast.argument if cast.kind == cast.argument else f"{cast.argument}, {cast.kind}"


def line_text(cast: Cast) -> str:
    """`model.py:12`."""
    return short_place(cast.file, cast.line)


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
        made.add_row(r.op, escape(r.module_path or "(root)"), escape(short_place(r.file, r.line)), escape(r.reason))
    return [made]


def advice_parts(ledger: Ledger) -> list[RenderableType]:
    """Each piece of advice with its line, if there is any."""
    parts: list[RenderableType] = []
    for found, times in ledger.advice.items():
        often = f" ({times} times)" if times > 1 else ""
        where = short_place(found.file, found.line) or "?"
        inside = f" in {found.module_path}" if found.module_path else ""
        parts += [
            f"[bold yellow]advice[/]: {escape(found.kind)}{often}, {escape(where)}{escape(inside)}",
            f"  {escape(found.what)}",
            f"  {escape(found.todo)}",
        ]
    return [*parts, ""] if parts else []
