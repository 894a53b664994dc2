"""`narrowcast profile ...`: measure what ops cost on a device, and show it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowcast.cli.options import AllOption, HtmlOption, OutputOption, interruptible, write_page
from narrowcast.errors import Origin, ProfileError
from narrowcast.output.console import print_text
from narrowcast.output.screen import LINES, Part, columns, first_screen, wrapped
from narrowcast.output.words import counted

if TYPE_CHECKING:
    from narrowcast.reports.results.profile import Device, Profile

profile_app = typer.Typer(
    help="Measure what ops cost on a device, and show that.",
    epilog="Example: narrowcast profile --seconds 50 --html profile.html",
)
DeviceType = Annotated[str, typer.Option(help="Device type: cpu or cuda.")]
ProfileFile = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="A profile's file. Default: this device's own.")
]


@profile_app.callback(invoke_without_command=True)
def measure_command(
    context: typer.Context,
    device: DeviceType = "cpu",
    seconds: Annotated[float, typer.Option(help="Stop measuring after this many seconds.")] = 50.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard what was measured before.")] = False,
    output: OutputOption = None,
    html: HtmlOption = None,
) -> None:
    """Measure this device: every family of ops in every format, over sizes, forward and backward."""
    if context.invoked_subcommand is not None:
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from narrowcast.reports.documents.profiles import busy_note
    from narrowcast.reports.results.profile import Profile, load_profile, profile_path
    from narrowcast.runtime.devices.abilities import capabilities
    from narrowcast.runtime.devices.measure import machine_load, measure
    from narrowcast.runtime.devices.sweep import sweep

    here = _here(device)
    if not seconds > 0:
        raise ProfileError(f"--seconds {seconds}", "not a positive number of seconds", advice="Give 50, for example.")
    profile = Profile(here) if fresh else load_profile(here)
    if output is not None:
        profile.write(output)  # what is wrong with the file is said before a minute is spent
    groups = sweep(device)
    profile.load = machine_load()
    if profile.is_busy:
        typer.echo(f"{busy_note(profile)}.", err=True)
    start = time.perf_counter()
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task(f"measuring {here.name}", total=len(groups))
        with interruptible(lambda: f"what was measured is in {profile.write(output or profile_path(here))}"):
            count = measure(profile, groups, seconds, progress=lambda: bar.advance(task))
    asked = capabilities(device, backward=True)
    profile.abilities.update({ability.key: ability for ability in asked.abilities})
    path = profile.write(output or profile_path(here))
    write_page(profile, html)
    wanted = sum(len(group) for group in groups)
    missing = sum(call.signature.text not in profile.samples for group in groups for call in group)
    took = f"{time.perf_counter() - start:.1f} s"
    lines = [f"{counted(count, 'call')} measured in {took}; {wanted - missing} of {wanted} are known now: {path}"]
    if missing:
        lines.append(f"{missing} are left to interpolation: there was no more time, or the device does not know them.")
    print_text(first_screen([Part([line for one in lines for line in wrapped(one, width=columns())])]))


@profile_app.command()
def show(
    file: ProfileFile = None,
    device: DeviceType = "cpu",
    whole: AllOption = False,
    html: HtmlOption = None,
) -> None:
    """Show a profile as tables: which format is fastest, by how much, and the confidence."""
    profile = _profile(file, device)
    write_page(profile, html)
    print_text(profile.to_text(whole, columns(), LINES))


@profile_app.command()
def path(device: DeviceType = "cpu") -> None:
    """Print where this device's profile is kept."""
    from narrowcast.reports.results.profile import profile_path

    typer.echo(profile_path(_here(device)))


def _here(device: str) -> Device:
    from narrowcast.runtime.devices.device import device_now, is_here

    if not is_here(device):
        asked, found = f"the profile of device type {device!r}", "torch has no such device here"
        advice = "Measure on a machine that has it, and ship the file: narrowcast profile --output FILE."
        raise ProfileError(asked, found, advice=advice)
    return device_now(device)


def _profile(file: Path | None, device: str) -> Profile:
    from narrowcast.reports.results.profile import Profile, load_profile

    if file is not None:
        return Profile.read(file)
    profile = load_profile(_here(device))
    if not profile.samples:
        asked, where = f"the profile of {profile.device}", (Origin(str(profile.path)),)
        raise ProfileError(asked, "nothing was measured yet", where, "Run: narrowcast profile")
    return profile
