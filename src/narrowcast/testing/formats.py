"""The formats of a model's calls, held against a file that is reviewed, or against a table in the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from narrowcast.analysis.explain.explain import explain
from narrowcast.core.policy import installed_torch
from narrowcast.errors import CheckError, Origin, SnapshotError
from narrowcast.formats import parse_format
from narrowcast.frontends.eager.asked import Under, asked_or_around, asked_region
from narrowcast.output.files import is_there
from narrowcast.runtime.devices.abilities import slow_note
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs
from narrowcast.testing.snapshot import Snapshot, Snapshots, check_versions, minor_of, snapshot_of
from narrowcast.testing.snapshot_changes import SnapshotCheck, check_text, compare_snapshots, unmet, unmet_text
from narrowcast.testing.snapshot_text import load_snapshots, save_snapshots, snapshots_text
from narrowcast.testing.updating import is_updating

Model = Callable[..., Any] | Case
Expected = TypeVar("Expected")
ANEW = (
    "If intended, write it again and commit the difference: pytest --narrowcast-update, or narrowcast check --update."
)


def take_snapshot(model: Model, inputs: Inputs = (), *, under: Under = None, device: str | None = None) -> Snapshot:
    """Return the formats of each call of the model, forward, on fake tensors where these carry it.

    model:  a Module, a callable, or a Case (then without inputs). It is left as it is; weights may be meta tensors.
    inputs, under, device: as for `explain`: a device that this machine lacks is stood in for. On a machine that has it
            the formats are the same as long as the model itself is on the cpu.

    CheckError for a model that raises under the policy and not in fp32, or of which the policy refuses a call.
    """
    asked_region("take_snapshot", under)  # before another names itself in what it refuses
    explanation = explain(model, inputs, under=under, device=device)
    asked = f"the formats of {explanation.subject} on {explanation.device_type}"
    if explanation.failure is not None:
        where = (Origin(explanation.failure.file, explanation.failure.line),) if explanation.failure.file else ()
        raise CheckError(asked, explanation.failure.text, where, "Fix the model, or name a policy that runs it.")
    if explanation.ledger.refusals:
        refusal = explanation.ledger.refusals[0]
        refused = f"policy {refusal.policy} refuses {refusal.op}: {refusal.reason}"
        where = (Origin(refusal.file, refusal.line, refusal.module_path),)
        raise CheckError(asked, refused, where, "Fix the model, or the policy.")
    if not any(kind.input_formats or kind.result for kind in explanation.ledger.calls):
        raise CheckError(asked, "no call with floating tensors was seen", advice="Give inputs on which it computes.")
    policy = asked_or_around("take_snapshot", under, explanation.device_type).policy.resolve(explanation.device_type)
    snapshot = snapshot_of(explanation, policy.rules, minor_of(installed_torch()), torch.is_grad_enabled())
    slow = slow_note(explanation.device_type, parse_format(explanation.low))  # of this machine, and of no format
    return replace(snapshot, notes=explanation.note.removeprefix(slow).strip())


def assert_formats(
    model: Model,
    inputs: Inputs = (),
    *,
    snapshot: str | Path | None = None,
    expected: Mapping[str, Any] | Snapshot | None = None,
    under: Under = None,
    device: str | None = None,
    torch_versions: str = "",
) -> Snapshot:
    """Assert that each call of the model computes in the formats that were agreed on.

    snapshot: a text file with a line for each call, which `pytest --narrowcast-update` (or NARROWCAST_UPDATE=1) writes.
            A relative path is one from the current folder; the fixture `narrowcast_snapshot` gives one beside the test.
    expected: or a table in the test, `{"aten.linear": "bf16", "head.* aten.softmax": "fp32"}`: what a rule could name,
            with the formats in which these calls compute; or another model's snapshot (`take_snapshot`).
    inputs, under, device: as for `take_snapshot`.
    torch_versions: for which what is written holds (`>=2.11,<2.16`); by default those on which it was seen.

    Returns what was found. CheckError, an AssertionError, if it is not so: with each call, what it was and is, the rule
    and its place, the line of the model. SnapshotError for a file that is missing, broken, or has nothing for this
    device or this torch.
    """
    __tracebackhide__ = True
    given: str | Path | Mapping[str, Any] | Snapshot = _one_of("assert_formats", snapshot, expected)
    asked: dict[str, Any] = {"under": under, "device": device}
    if isinstance(given, Mapping):
        snapshot_now = take_snapshot(model, inputs, **asked)
        wrong = unmet(snapshot_now, given)
        if wrong:
            text = f"formats: {len(wrong)} of {len(given)} expected entries do not hold for {snapshot_now.model} on "
            text += f"{snapshot_now.device_type}, policy {snapshot_now.policy}, low {snapshot_now.low}"
            advice = "A pattern is written as in a rule: [MODULE] OP, with globs; or a call's identity with its "
            raise CheckError(f"{text}\n\n{unmet_text(wrong)}\n", advice=f"{advice}#NUMBER.")
        return snapshot_now
    return _held(_check(model, inputs, given, asked, torch_versions))


def assert_no_new_casts(
    model: Model,
    inputs: Inputs = (),
    *,
    snapshot: str | Path | None = None,
    expected: Snapshot | None = None,
    under: Under = None,
    device: str | None = None,
    torch_versions: str = "",
) -> Snapshot:
    """Assert that no call of the model casts an argument that it did not cast before.

    The arguments are those of `assert_formats`, and so are the errors and the file. Other changes of formats, and fewer
    casts, are no failure. A conversion that the model's own code makes is a cast, too.
    """
    __tracebackhide__ = True
    given = _one_of("assert_no_new_casts", snapshot, expected)
    asked: dict[str, Any] = {"under": under, "device": device}
    return _held(_check(model, inputs, given, asked, torch_versions).new_casts())


def check_formats(
    model: Model,
    inputs: Inputs = (),
    *,
    snapshot: str | Path,
    under: Under = None,
    device: str | None = None,
    torch_versions: str = "",
    update: bool = False,
) -> SnapshotCheck:
    """Return what changed since the snapshot was written, as data; nothing is raised because of it.

    The arguments are those of `assert_formats`. update: write the file first, as a run of pytest with
    --narrowcast-update does. Raises SnapshotError as that does, and CheckError where no formats can be had.
    """
    asked: dict[str, Any] = {"under": under, "device": device}
    now = take_snapshot(model, inputs, **asked)
    check_versions(torch_versions, installed_torch())
    path = Path(snapshot)
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path  # what a reader is shown
    kept = load_snapshots(path) if not update or is_there(path) else Snapshots(file=str(path))
    if update:
        kept = kept.with_section(now, installed_torch(), torch_versions)
        if not is_there(path) or snapshots_text(kept) != path.read_text(encoding="utf-8"):
            save_snapshots(kept, path)
        kept = load_snapshots(path)
    return compare_snapshots(kept.needed(now.device_type, installed_torch()), now)


def _held(check: SnapshotCheck) -> Snapshot:
    __tracebackhide__ = True
    if check.is_same:
        return check.now
    notes = f"\n\n{check.now.notes}" if check.now.notes else ""
    raise CheckError(f"formats: {check_text(check)}{notes}\n", advice=ANEW if check.was.line else "")


def _check(
    model: Model, inputs: Inputs, given: str | Path | Snapshot, asked: Mapping[str, Any], torch_versions: str
) -> SnapshotCheck:
    __tracebackhide__ = True
    if not isinstance(given, Snapshot):
        update = is_updating()
        try:
            return check_formats(model, inputs, snapshot=given, torch_versions=torch_versions, update=update, **asked)
        except SnapshotError as error:  # a reader looks for the line of the test
            raise error.with_traceback(None) from None
    was = given if given.file else replace(given, file=f"the snapshot of {given.model}")
    return compare_snapshots(was, take_snapshot(model, inputs, **asked))


def _one_of(verb: str, snapshot: str | Path | None, expected: Expected | None) -> str | Path | Expected:
    """Return the file, or what is expected. Raise SnapshotError if it is neither, or both."""
    if snapshot is not None and expected is None:
        return snapshot
    if expected is not None and snapshot is None:
        return expected
    found = "neither is given" if snapshot is None else "both are given"
    raise SnapshotError(f"{verb} with a snapshot or with what is expected", found, advice="Give one of them.")
