"""Profiles side by side, and their plot."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from narrowcast.core.ops import FAMILIES
from narrowcast.errors import Origin, ProfileError
from narrowcast.output.screen import Part, first_screen
from narrowcast.output.words import counted
from narrowcast.reports.documents.words import without_format
from narrowcast.reports.results.profile import Profile, Sample

_ORDER = ("fp32", "bf16", "fp16")
Row = tuple[str, dict[str, Sample]]


def rows_of(profile: Profile) -> dict[str, list[Row]]:
    """Return the calls by family: the text without formats, and the sample in each format."""
    by_call: dict[tuple[str, str], dict[str, Sample]] = {}
    for text, sample in profile.samples.items():
        by_call.setdefault((sample.family, without_format(text, sample.format)), {})[sample.format] = sample
    rows: dict[str, list[Row]] = {}
    for (family, text), samples in by_call.items():
        rows.setdefault(family, []).append((text, samples))
    ordered = sorted(rows, key=lambda f: (FAMILIES.index(f) if f in FAMILIES else len(FAMILIES), f))
    return {f: sorted(rows[f], key=lambda row: next(iter(row[1].values())).elements) for f in ordered}


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


def plot_profile(profile: Profile, path: Path) -> None:
    """Plot time against work, one panel per family, one line per format; the file's ending says what kind it is.

    Raises ProfileError if matplotlib is not installed, or there is nothing to plot.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ProfileError(
            asked=f"a plot in {path}", found="matplotlib is not installed",
            advice='Install it: pip install "narrowcast[plot]"',
        ) from error  # fmt: skip
    rows = {f: calls for f, calls in rows_of(profile).items() if f in FAMILIES}
    if not rows:
        raise ProfileError(
            asked=f"a plot in {path}", found="the profile has no call of a family that is plotted",
            advice="Measure this device: narrowcast profile",
        )  # fmt: skip
    columns = 4
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines), layout="constrained")
    for number, (family, calls) in enumerate(rows.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        for name, color in zip(_ORDER, ("#2f6f4f", "#c8781e", "#7a4fa0"), strict=True):
            for backward, marker in ((False, "o"), (True, "^")):
                plotted = [s[name] for _, s in calls if name in s and s[name].backward == backward]
                points = sorted((max(s.flops, 1.0), s.ns / 1e3) for s in plotted)
                if points:
                    label = name + (", with backward" if backward else "")
                    axes.plot(*zip(*points, strict=True), marker, ms=4, color=color, alpha=0.75, label=label, ls="")
        axes.set(title=family, xscale="log", yscale="log", xlabel="operations", ylabel="microseconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    figure.suptitle(str(profile.device))
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ProfileError(
            asked=f"a plot in {path}", found=str(error), advice="Name a file that ends in .png, .svg or .pdf.",
        ) from error  # fmt: skip
