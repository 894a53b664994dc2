"""`narrowcast capture`, `compare`, `diff`, `parity`, `watch`, `headroom` and `show`: runs, call by call."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

import narrowcast as nc
from narrowcast.cli import options
from narrowcast.cli.options import check_file, check_folder
from narrowcast.cli.policy import diff_policies
from narrowcast.cli.target import grad, load_case
from narrowcast.errors import NotFiniteError, Origin, TargetError
from narrowcast.output.files import save_result
from narrowcast.output.screen import LINES
from narrowcast.reports.results.verdicts import AT_FAULT, NOT_COMPARED, NOT_FINITE, VALUES_DIFFER

_SAVED = (".gz", ".json")


def capture_command(
    model: options.ModelOptions,
    result: options.ResultOptions,
    backward: options.BackwardOption = False,
    statistics: Annotated[str, typer.Option(help="sampled, or whole: from every element.")] = "sampled",
    checksums: Annotated[bool, typer.Option("--checksums", help="Keep a checksum of each tensor's bytes.")] = False,
    tensors: Annotated[
        Path | None, typer.Option(help="Write the tensors themselves into this folder.", callback=check_folder)
    ] = None,
    trace: options.TraceOption = None,
) -> None:
    """Run TARGET's model and record each call: formats, ranges, statistics, source lines.

    Exits with 1 if a call returned NaN or infinity.
    """
    case = load_case(model.target)
    with grad(backward, case):
        run = nc.capture(
            case, under=model.under, backward=backward, statistics=statistics, checksums=checksums,
            tensors=tensors, times=trace is not None,
        )  # fmt: skip
    options.show(run, result, trace=trace)
    _exit_by(run.verdict, (NOT_FINITE,))


def compare_command(
    model: options.ModelOptions,
    result: options.ResultOptions,
    backward: options.BackwardOption = False,
    reference: Annotated[str, typer.Option(help="fp32 or fp64.")] = "fp32",
    by: Annotated[str, typer.Option(help="What the first screen lists: op or module.")] = "op",
    isolate: Annotated[
        int | None, typer.Option(help="Number of trials of one op alone in its low format: 16, of large models fewer.")
    ] = None,
) -> None:
    """Compare TARGET's model with the same in fp32: which op adds which error.

    Exits with 1 if an op or a kernel is at fault, and with 2 if the reference computes in the same low formats.
    """
    if model.target.endswith(_SAVED):
        raise TargetError(f"compare {model.target}", "a saved run", advice="Give two: narrowcast diff RUN_A RUN_B.")
    case = load_case(model.target)
    with grad(backward, case):
        comparison = nc.compare(case, under=model.under, reference=reference, by=by, backward=backward, isolate=isolate)
    options.show(comparison, result)
    _exit_by(comparison.verdict, AT_FAULT)


def diff_command(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A saved run or explanation; or a policy: native, safe, ipex, native:DEVICE, or a file."
        ),
    ],
    b: Annotated[list[str], typer.Argument(metavar="B", help="The other one; or the saved runs of each of its ranks.")],
    result: options.ResultOptions,
    mapping: Annotated[
        Path | None,
        typer.Option(
            help="Which modules are which, of two runs: read if it exists, else written.", callback=check_file
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device type for which two policies are compared.")] = None,
) -> None:
    """Find where two saved runs differ, without running anything; or what changes between policies or explanations.

    Exits with 1 if values of the runs differ beyond round-off, or the policies differ, and with 2 if no values could be
    compared.
    """
    asked = f"diff {' '.join([a, *b])}"
    policies = [name for name in (a, *b) if not Path(name).is_file() or name.endswith(".toml")]
    policies = [name for name in policies if not name.endswith(_SAVED)]
    if policies and len(policies) < 1 + len(b):
        raise TargetError(asked, f"{policies[0]} is no saved run", advice="Give two saved runs, or two policies.")
    if policies:
        if len(b) > 1:
            raise TargetError(asked, "more than two policies", advice="Give two.")
        unused = {"--output": result.output, "--html": result.html, "--json": result.json, "--mapping": mapping}
        for flag in (flag for flag, value in unused.items() if value):
            raise TargetError(f"{asked} {flag}", "changes between policies are only printed", advice=f"Omit {flag}.")
        diff_policies(a, b[0], device, result.whole)
        return
    if device is not None:
        raise TargetError(f"{asked} --device", "runs have their devices", advice="Omit --device.")
    is_given = mapping is not None and mapping.exists()
    difference = nc.diff(a, b if len(b) > 1 else b[0], mapping=mapping if is_given else None)
    if isinstance(difference, tuple):  # of two ledgers
        typer.echo("\n".join(map(str, difference)) or "the same casts")
        raise typer.Exit(int(bool(difference)))
    if mapping is not None and not is_given:
        difference.mapping.save(mapping)
    notices = [f"{'read' if is_given else 'wrote'} {mapping}: correct it, and give it again"] if mapping else []
    options.show(difference, result, notices)
    _exit_by(difference.verdict, (VALUES_DIFFER,))


def parity_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A saved run, or a target as of capture.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    result: options.ResultOptions,
    under: options.UnderOption = None,
    max_nats: Annotated[
        float | None, typer.Option(help="The largest rms of differences of log-probabilities; else round-off.")
    ] = None,
    mapping: Annotated[Path | None, typer.Option(help="Which modules are which, as for diff.")] = None,
) -> None:
    """Find how far two programs of one model are apart, and why: a trainer and the engine that serves it.

    Exits with 1 if they are further apart than --max-nats, or than round-off, and with 2 if nothing could be compared.
    """
    sides = [side if side.endswith(_SAVED) else load_case(side) for side in (a, b)]
    names = Path(a).name, Path(b).name
    with grad(False):
        found = nc.parity(*sides, under=under, max_nats=max_nats, mapping=mapping, names=names)
    options.show(found, result)
    _exit_by(found.verdict, (found.verdict,) if found.is_over else ())


def _exit_by(verdict: str, findings: Collection[str]) -> None:
    if verdict == NOT_COMPARED:
        raise typer.Exit(2)
    if verdict in findings:
        raise typer.Exit(1)


def watch_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python script, run unchanged.")],
    result: options.ResultOptions,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its own arguments.")] = None,
    at: Annotated[
        str, typer.Option(help="Inspect results as each op ends (op), once a step (step), or as is cheap (auto).")
    ] = "auto",
    stop: Annotated[bool, typer.Option("--stop", help="Stop at the first finding.")] = False,
    every: Annotated[int, typer.Option(help="Inspect gradients every N steps.")] = 1,
    log: Annotated[
        Path | None, typer.Option(help="Write a JSON line for each finding and step there.", callback=check_file)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the first finding as a script of its own into this folder.", callback=check_folder),
    ] = None,
) -> None:
    """Run SCRIPT and name the call that makes the first NaN or infinity.

    Exits with 1 if there is one, else with 3 if the script fails. Options of narrowcast stand before SCRIPT, those of
    the script behind it.
    """
    if not script.is_file():
        raise TargetError(f"watch {script}", "no such file", (Origin(str(script)),), "Give a Python script.")
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *(arguments or [])]
    sys.path.insert(0, str(script.resolve().parent))
    watching = nc.watch(at=at, stop=stop, every=every, log=log)
    exited: int | str = 0
    raised: Exception | None = None
    interrupted = False
    try:
        with watching:
            runpy.run_path(str(script), run_name="__main__")
    except NotFiniteError:
        pass  # it is listed
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:
        raised = error
    except SystemExit as error:
        exited = error.code if isinstance(error.code, int) else 0 if error.code is None else f"1: {error.code}"
    finally:
        sys.argv, sys.path[:] = before, path
        options.show(watching.found, result, room=LINES - (save is not None))
    first = watching.found.first
    if first is not None and save is not None:
        typer.echo(f"python {first.save(save)} runs that call alone")
    if interrupted:
        typer.echo("interrupted: what was seen until then is above", err=True)
        raise typer.Exit(130)
    if exited:
        typer.echo(f"the script exited with {exited}", err=True)
    if raised is not None:
        typer.echo(f"the script raised; what was seen until then is above\n{_traceback(raised, script)}", err=True)
    if first is not None or exited or raised is not None:
        raise typer.Exit(1 if first is not None else 3)


def _traceback(error: Exception, script: Path) -> str:
    """Return the traceback of what a script raised, from its own first line on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [n for n, frame in enumerate(frames) if Path(frame.filename) == script]
    shown = traceback.StackSummary.from_list(frames[own[0] if own else 0 :]).format()
    return "".join(["Traceback (most recent call last):\n", *shown, *traceback.format_exception_only(error)]).rstrip()


def headroom_command(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A saved run, or a target as of capture.")],
    result: options.ResultOptions,
    backward: options.BackwardOption = False,
    tolerance: Annotated[float, typer.Option(help="Share of a tensor's elements that may underflow.")] = 0.01,
    format: Annotated[str, typer.Option(help="Low format of the policy: fp16 or bf16.")] = "fp16",
    policy_out: options.PolicyOption = None,
) -> None:
    """Find what of an fp32 run exceeds the range of fp16, bf16 or fp8, and must stay in fp32."""
    if target.endswith(_SAVED):
        run = nc.load(target, nc.Run)
    else:
        case = load_case(target)
        with grad(backward, case):
            run = nc.capture(case, backward=backward, statistics="whole")
    headroom = run.headroom(tolerance)
    notices = []
    if policy_out is not None:
        policy = headroom.policy(format, policy_out.stem)
        save_result(policy_out, "a policy", policy.to_toml())
        count = len(policy.rules)
        verb = "rule keeps" if count == 1 else "rules keep"
        notices = [f"wrote {policy_out}: {count} {verb} in fp32 what does not fit {format}"]
    options.show(headroom, result, notices)


def show_command(
    saved: Annotated[Path, typer.Argument(metavar="FILE", help="What -o or save() of a result wrote.")],
    result: options.ResultOptions,
    trace: options.TraceOption = None,
) -> None:
    """Print a saved result again."""
    options.show(nc.load(saved), result, trace=trace)
