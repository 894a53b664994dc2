"""`narrowcast capture`, `compare`, `diff`, `watch`, `headroom` and `show`: runs, call by call."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import narrowcast as nc
from narrowcast.cli.policy import diff_policies
from narrowcast.cli.target import (
    AllOption,
    Target,
    TraceOption,
    UnderOption,
    check_folder,
    grad,
    load_case,
    write_page,
    write_trace,
)
from narrowcast.errors import NotFiniteError, Origin, TargetError
from narrowcast.output.console import print_text
from narrowcast.output.files import save_result
from narrowcast.output.screen import LINES, columns, shortened
from narrowcast.reports.results.verdicts import AT_FAULT, NOT_COMPARED, VALUES_DIFFER

_SAVED = (".gz", ".json")
BackwardOption = Annotated[bool, typer.Option("--backward", help="Differentiate, too.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write a page there that shows it all.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write JSON there ('-': to the terminal).")]


def capture_command(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the run is saved (.json.gz).")],
    under: UnderOption = None,
    backward: BackwardOption = False,
    statistics: Annotated[str, typer.Option(help="sampled, or whole: look at every element.")] = "sampled",
    checksums: Annotated[bool, typer.Option("--checksums", help="One of each tensor's bytes.")] = False,
    tensors: Annotated[Path | None, typer.Option(help="A folder to write the tensors themselves into.")] = None,
    every_call: AllOption = False,
    html: HtmlOption = None,
    trace: TraceOption = None,
) -> None:
    """Run TARGET's model and save what each call computes: formats, ranges, statistics, places."""
    check_folder("--output", output)
    check_folder("--html", html)
    check_folder("--trace", trace)
    with grad(backward):
        run = nc.capture(
            load_case(target), under=under, backward=backward, statistics=statistics, checksums=checksums,
            tensors=tensors, times=trace is not None,
        )  # fmt: skip
    saved = run.save(output)
    write_page(run, html)
    write_trace(run, trace)
    kept = f"saved in {saved} ({saved.stat().st_size / 1024:.0f} KiB); narrowcast show shows it again"
    show(run, every_call, notices=[kept])


def compare_command(
    target: Target,
    under: UnderOption = None,
    reference: Annotated[str, typer.Option(help="fp32 or fp64.")] = "fp32",
    by: Annotated[str, typer.Option(help="What the first screen lists: op or module.")] = "op",
    backward: BackwardOption = False,
    isolate: Annotated[int, typer.Option(help="How often single ops are tried low alone.")] = 16,
    every_call: AllOption = False,
    json_file: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Run TARGET's model in the reference and under a policy: which op adds which error; 1 if one is at fault,
    2 if the reference computes in the same low formats, so that nothing was compared.
    """
    check_folder("--json", json_file)
    check_folder("--html", html)
    if target.endswith(_SAVED):
        raise TargetError(f"compare {target}", "a saved run", advice="Give two: narrowcast diff RUN_A RUN_B.")
    with grad(backward):
        found = nc.compare(
            load_case(target), under=under, reference=reference, by=by, backward=backward, isolate=isolate
        )
    show(found, every_call, json_file, html)
    _exit_by(found.verdict, AT_FAULT)


def diff_command(
    a: Annotated[str, typer.Argument(help="A saved run; or a policy: native, safe, ipex, native:DEVICE, or a file.")],
    b: Annotated[list[str], typer.Argument(help="The other one; several saved runs: of its ranks.")],
    mapping: Annotated[Path | None, typer.Option(help="Of two runs: read if there is one, else written.")] = None,
    device: Annotated[str | None, typer.Option(help="Of two policies: for this type of device.")] = None,
    every_call: AllOption = False,
    json_file: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Where two saved runs differ, A and B, without running anything; 1 if values do beyond round-off, 2 if none could
    be compared. Of two policies, what changes from A to B, rule by rule.
    """
    if not a.endswith(_SAVED):
        if len(b) > 1:
            raise TargetError(f"diff {a} {' '.join(b)}", "more than two policies", advice="Give two.")
        diff_policies(a, b[0], device, every_call)
        return
    check_folder("--json", json_file)
    check_folder("--html", html)
    is_there = mapping is not None and mapping.exists()
    check_folder("--mapping", mapping)
    found = nc.diff(a, b, mapping=mapping if is_there else None)
    if mapping is not None and not is_there:
        found.mapping.save(mapping)
    kept = [f"{'read' if is_there else 'wrote'} {mapping}: correct it, and give it again"] if mapping else []
    show(found, every_call, json_file, html, kept)
    _exit_by(found.verdict, (VALUES_DIFFER,))


def _exit_by(verdict: str, findings: Collection[str]) -> None:
    """1 for a verdict that is among the findings, 2 where nothing was compared."""
    if verdict == NOT_COMPARED:
        raise typer.Exit(2)
    if verdict in findings:
        raise typer.Exit(1)


def watch_command(
    script: Annotated[Path, typer.Argument(help="A Python script, run unchanged.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    at: Annotated[str, typer.Option(help="Look as each op ends, or once a step: auto, op, step.")] = "auto",
    stop: Annotated[bool, typer.Option("--stop", help="Stop at the first finding.")] = False,
    every: Annotated[int, typer.Option(help="Look at gradients every N steps.")] = 1,
    log: Annotated[Path | None, typer.Option(help="A file of JSON lines, one for each finding and look.")] = None,
    save: Annotated[Path | None, typer.Option(help="A folder for the first finding as a script of its own.")] = None,
    every_finding: AllOption = False,
    json_file: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Run SCRIPT and say which call makes the first NaN or infinity; 1 if one does."""
    check_folder("--json", json_file)
    check_folder("--html", html)
    if not script.is_file():
        raise TargetError(f"watch {script}", "no such file", (Origin(str(script)),), "Give a Python script.")
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *(arguments or [])]
    sys.path.insert(0, str(script.resolve().parent))
    watching = nc.watch(at=at, stop=stop, every=every, log=log)
    try:
        with watching:
            runpy.run_path(str(script), run_name="__main__")
    except NotFiniteError:
        pass  # it is listed
    except SystemExit as error:
        if error.code not in (None, 0):
            typer.echo(f"the script left with {error.code}", err=True)
    finally:
        sys.argv, sys.path[:] = before, path
        show(watching.found, every_finding, json_file, html, room=LINES - (save is not None))
    first = watching.found.first
    if first is not None and save is not None:
        typer.echo(f"python {first.save(save)} runs that call alone")
    if first is not None:
        raise typer.Exit(1)


def headroom_command(
    target: Annotated[str, typer.Argument(help="A saved run, or a target as capture takes it.")],
    tolerance: Annotated[float, typer.Option(help="The share of a tensor that may underflow.")] = 0.01,
    backward: BackwardOption = False,
    format: Annotated[str, typer.Option(help="The low format of the policy: fp16 or bf16.")] = "fp16",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the policy there (.toml).")] = None,
    every: AllOption = False,
    json_file: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """What fp16, bf16 and fp8 would lose of each tensor of a run in fp32, and what must stay in fp32."""
    check_folder("--json", json_file)
    check_folder("--html", html)
    check_folder("--output", output)
    if target.endswith(_SAVED):
        run = nc.load(target, nc.Run)
    else:
        with grad(backward):
            run = nc.capture(load_case(target), backward=backward, statistics="whole")
    found = run.headroom(tolerance)
    notices = []
    if output is not None:
        policy = found.policy(format, output.stem)
        save_result(output, "a policy", policy.to_toml())
        notices = [f"wrote {output}: {len(policy.rules)} rules keep in fp32 what does not fit {format}"]
    show(found, every, json_file, html, notices)


def show_command(
    saved: Annotated[
        Path, typer.Argument(help="What explain --json, capture, compare, diff, watch, headroom, repair or save wrote.")
    ],
    every_call: AllOption = False,
    json_file: JsonOption = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
) -> None:
    """Show a saved result again."""
    check_folder("--json", json_file)
    check_folder("--html", html)
    check_folder("--trace", trace)
    found: Any = nc.load(saved)
    write_trace(found, trace)
    show(found, every_call, json_file, html)


def show(
    found: Any,
    every: bool,
    json_file: Path | None = None,
    html: Path | None = None,
    notices: Sequence[str] = (),
    room: int = LINES,
) -> None:
    """The first screen, or all of it; or its JSON in place of it or beside it; and the page. notices: what follows."""
    write_page(found, html)
    is_json = json_file is not None and str(json_file) == "-"
    width = columns()
    said = [shortened(notice, width) for notice in notices]
    if is_json:
        typer.echo(found.to_json(indent=1))
        for notice in said:
            typer.echo(notice, err=True)
        return
    if json_file is not None:
        found.save(json_file)
    text = found.to_text(every=True) if every else found.to_text(width=width, lines=room - len(said))
    print_text("\n".join([text.rstrip("\n"), *said]))
