"""`narrowcast profile ...`: measure what ops cost on a device, show it, compare it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowcast.cli.runs import HtmlOption
from narrowcast.cli.target import AllOption, check_folder, write_page
from narrowcast.errors import Origin, ProfileError
from narrowcast.output.console import print_all, print_text, terminal
from narrowcast.output.screen import LINES, Part, columns, first_screen, shortened, wrapped

if TYPE_CHECKING:
    from narrowcast.reports.results.profile import Profile

profile_app = typer.Typer(help="Measure what ops cost on a device; show and compare profiles.")
DeviceType = Annotated[str, typer.Option(help="Device type to measure: cpu or cuda.")]
ProfileFile = Annotated[Path | None, typer.Argument(help="A profile's file. Default: this device's own.")]


@profile_app.callback(invoke_without_command=True)
def measure_command(
    context: typer.Context,
    device: DeviceType = "cpu",
    seconds: Annotated[float, typer.Option(help="Stop measuring after this many seconds.")] = 50.0,
    again: Annotated[bool, typer.Option("--again", help="Measure again what the profile has.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the profile there, to be shipped.")] = None,
    html: HtmlOption = None,
) -> None:
    """Measure this device: every family of ops in every format, over sizes, forward and backward."""
    if context.invoked_subcommand is not None:
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from narrowcast.reports.results.profile import Profile, load_profile, profile_path
    from narrowcast.runtime.devices.abilities import capabilities
    from narrowcast.runtime.devices.device import device_now
    from narrowcast.runtime.devices.measure import machine_load, measure
    from narrowcast.runtime.devices.sweep import sweep

    _check_here(device)
    check_folder("--html", html)
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        found = "it is a folder" if output.is_dir() else "its folder does not exist"
        raise ProfileError(f"--output {output}", found, advice="Name a file in a folder that is there.")
    if not seconds > 0:
        raise ProfileError(f"--seconds {seconds}", "that is no time to measure in", advice="Give 50, for example.")
    here = device_now(device)
    profile = Profile(here) if again else load_profile(here)
    if output is not None:
        profile.write(output)  # what is wrong with the file is said before a minute is spent
    groups = sweep(device)
    load = machine_load()
    if load > here.threads:
        typer.echo(f"The machine is busy (load {load:.1f}): times will be too long, and spread.", err=True)
    start = time.perf_counter()
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task(f"measuring {here.name}", total=len(groups))
        count = measure(profile, groups, seconds, progress=lambda: bar.advance(task))
    asked = capabilities(device, backward=True)
    profile.abilities.update({ability.key: ability for ability in asked.abilities})
    path = profile.write(output or profile_path(here))
    write_page(profile, html)
    wanted = sum(len(group) for group in groups)
    missing = sum(call.signature.text not in profile.samples for group in groups for call in group)
    took = f"{time.perf_counter() - start:.1f} s"
    said = [f"{count} calls measured in {took}; {wanted - missing} of {wanted} are known now: {path}"]
    if missing:
        said.append(f"{missing} are left to interpolation: there was no more time, or the device does not know them.")
    print_text(first_screen([Part([line for one in said for line in wrapped(one, width=columns())])], width=columns()))


@profile_app.command()
def show(
    file: ProfileFile = None,
    device: DeviceType = "cpu",
    every: AllOption = False,
    plot: Annotated[Path | None, typer.Option(help="Also write a plot there (.png, .svg, .pdf).")] = None,
    html: HtmlOption = None,
) -> None:
    """A profile as tables: which format wins, by how much, and how sure that is."""
    check_folder("--html", html)
    profile = _profile(file, device)
    write_page(profile, html)
    if plot is not None:
        if not plot.parent.is_dir() or plot.is_dir() or not plot.suffix:
            found = "its folder does not exist" if not plot.parent.is_dir() else "that names no file with an ending"
            raise ProfileError(f"--plot {plot}", found, advice="Name a file in a folder that is there: costs.png.")
        from narrowcast.runtime.devices.show import plot_profile

        plot_profile(profile, plot)
    print_text(profile.to_text(every, columns(), LINES - (plot is not None)))
    if plot is not None:
        print_text(shortened(f"plot written to {plot}", columns()))


@profile_app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A profile's file.")], second: ProfileFile = None,
    device: DeviceType = "cpu", every: AllOption = False,
) -> None:  # fmt: skip
    """Two profiles side by side, on the calls that both have."""
    from narrowcast.reports.results.profile import Profile
    from narrowcast.runtime.devices.show import comparison_parts, comparison_screen

    a, b = Profile.read(first), _profile(second, device)
    if every:
        print_all(terminal(), comparison_parts(a, b))
    else:
        print_text(comparison_screen(a, b, columns()))


@profile_app.command()
def path(device: DeviceType = "cpu") -> None:
    """Where this device's profile is kept."""
    from narrowcast.reports.results.profile import profile_path
    from narrowcast.runtime.devices.device import device_now

    _check_here(device)
    typer.echo(profile_path(device_now(device)))


def _check_here(device: str) -> None:
    from narrowcast.runtime.devices.device import is_here

    if not is_here(device):
        raise ProfileError(
            asked=f"the profile of device type {device!r}", found="torch has no such device here",
            advice="Measure on a machine that has it, and ship the file: narrowcast profile --output FILE.",
        )  # fmt: skip


def _profile(file: Path | None, device: str) -> Profile:
    from narrowcast.reports.results.profile import Profile, load_profile

    if file is not None:
        return Profile.read(file)
    from narrowcast.runtime.devices.device import device_now

    _check_here(device)
    found = load_profile(device_now(device))
    if not found.samples:
        raise ProfileError(
            asked=f"the profile of {found.device}", found="nothing was measured yet",
            where=(Origin(str(found.path)),), advice="Run: narrowcast profile",
        )  # fmt: skip
    return found
