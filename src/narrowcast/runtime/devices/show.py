"""Profiles side by side."""

from __future__ import annotations

import statistics

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from narrowcast.errors import Origin, ProfileError
from narrowcast.output.screen import Part, first_screen
from narrowcast.output.words import counted
from narrowcast.reports.results.profile import Profile


def comparison_screen(a: Profile, b: Profile, width: int) -> str:
    """Return at most 25 lines of `width` columns: b over a by family and format. Errors as of `comparison_parts`."""
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(*comparison_parts(a, b), sep="\n")
    whole = captured.get().rstrip("\n")
    return first_screen([Part(whole.split("\n"))], lambda: whole)


def comparison_parts(a: Profile, b: Profile) -> list[RenderableType]:
    """Return parts that compare two profiles on their common calls: by family and format, b over a.

    Raises ProfileError if they have no call in common.
    """
    common = [key for key in a.samples if key in b.samples]
    if not common:
        raise ProfileError(
            asked=f"comparing {a.device} with {b.device}", found="they have no call in common",
            where=tuple(Origin(str(p.path)) for p in (a, b) if p.path), advice="Run `narrowcast profile` on both.",
        )  # fmt: skip
    groups: dict[tuple[str, str], list[float]] = {}
    for key in common:
        sample = a.samples[key]
        groups.setdefault((sample.family, sample.format), []).append(b.samples[key].ns / sample.ns)
    table = Table(
        title=f"time of B over A, {counted(len(common), 'call')} in common",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("family", "format"):
        table.add_column(column, overflow="fold")
    for column in ("calls", "median", "least", "most"):
        table.add_column(column, justify="right", no_wrap=True, overflow="fold")
    for (family, name), times in sorted(groups.items()):
        table.add_row(
            family, name, str(len(times)), f"{statistics.median(times):.2f}", f"{min(times):.2f}", f"{max(times):.2f}"
        )
    return [f"A  {escape(str(a.device))}\nB  {escape(str(b.device))}\n", table]
