"""The notes of a comparison: what was not judged, and what explains an error besides a kernel."""

from __future__ import annotations

from narrowcast.analysis.compare.reference import KeptCall
from narrowcast.core.ledger.identity import BACKWARD, FORWARD, CallId
from narrowcast.formats import Format
from narrowcast.observation.trial.output_errors import gradient_error, named_tensors, output_errors
from narrowcast.observation.trial.trial import Outcome
from narrowcast.output.words import counted, number_text
from narrowcast.reports.results import verdicts
from narrowcast.reports.results.differences import ANOTHER_MODEL, CallError, Differences
from narrowcast.runtime.torch_bridge import FORMATS, LOW

SAME_FORMATS = (
    "The reference computes in the same low formats, which the model brings with it: nothing is compared. Give "
    "reference=the model without them."
)
_CAST_AGAIN = (
    "Weights are written to inside of the region, which casts them again here. torch's own goes on with the old casts: "
    "open it around each forward."
)
FORMATS_MEET = (
    "narrowcast: this was the reference run, in which the region casts nothing: a cast that the code makes itself "
    "(x.to(torch.bfloat16)), and weights in a low format that a function holds, stay in it. Cast to the format of the "
    "weights where they are used, or give reference= a function that runs in fp32."
)
USE_FP32 = (
    "Use reference='fp32': functions that close over their weights, frozen scripts, and code that names dtypes keep "
    "the formats that they have."
)
NOTHING_IS_CAST = "No call computes in another format than in the reference: the policy casts nothing of the model."
ABOUT_BLIND_ROWS = (
    "Some queries see no key, and kernels of attention differ about what such rows give: they are compared as zeros."
)

_LOW = frozenset(str(FORMATS[dtype]) for dtype in LOW)


def about_shapes(expected: Outcome, result: Differences) -> str:
    """Return a sentence naming an output of another model that has another shape here, or is missing; or nothing."""
    compared = {row.name for row in result.outputs}
    numbers = [pair for pair in named_tensors(expected.output) if pair[1].is_floating_point() or pair[1].is_complex()]
    left = [(name, tensor) for name, tensor in numbers if name not in compared]
    if result.reference != ANOTHER_MODEL or not left:
        return ""
    name, tensor = left[0]
    return f"In the reference {name} is of shape {list(tensor.shape)}, and here of another: it is not compared."


def about_old_casts(seen: Outcome, unseen: Outcome) -> list[str]:
    """Return the note that torch's cache keeps casts of weights that were written to since, if that changes outputs
    or gradients. seen: the run in which they were made again.
    """
    errors = [error.relative_error for error in output_errors(seen.output, unseen.output)]
    both = seen.gradients.keys() & unseen.gradients.keys()
    errors += [gradient_error(seen.gradients[name], unseen.gradients[name]) for name in both]
    return [_CAST_AGAIN] if any(errors) else []


def about_low_reference(rows: list[CallError]) -> list[str]:
    """Return a note on calls of the forward whose code asks for a low format, which the reference has, too."""
    forward = [row for row in rows if row.id.direction == FORWARD and row.computes == row.reference]
    calls = [row for row in forward if row.computes in _LOW]
    if not calls:
        return []
    first, are = calls[0], "are" if len(calls) > 1 else "is"
    return [
        f"{counted(len(calls), 'call')} {are} in {first.computes} in the reference, too, since the code asks for it: "
        f"what that costs is not seen here. The first is {first.id} ({first.file}:{first.line})."
    ]


def about_shaky(rows: list[CallError]) -> list[str]:
    """Return a note on calls that differ between two runs of the reference, if there are any."""
    shaky = [row for row in rows if row.verdict == verdicts.NONDETERMINISTIC]
    if not shaky:
        return []
    first = shaky[0]
    return [
        f"{counted(len(shaky), 'call', 'differ')} between two runs of the reference with the same random state, the "
        f"first is {first.id} ({first.file}:{first.line}): the policy is not to blame."
    ]


def about_draws(expected: Outcome, actual: Outcome, reference: str) -> str:
    """Return a note where two runs have drawn other random numbers, as `randn_like` does in another format; empty
    without.
    """
    if expected.random_state == actual.random_state:
        return ""
    return (
        f"The model draws other random numbers in {reference}, in the format of a tensor (randn_like): nothing can be "
        "said of what is computed from them."
    )


def about_unseen(unseen: list[CallId], are_in_threads: bool = False) -> str:
    """Return a note on calls whose results are not compared; empty without one."""
    if are_in_threads:
        return (
            "Functions were carried to threads of the model's own (nc.carry), whose calls are not seen: how far their "
            "rounding carries to the output is not known."
        )
    if not unseen:
        return ""
    return (
        f"{counted(len(unseen), 'call')} returned nested or sparse tensors, which are not compared "
        f"(first {unseen[0]}): how far their rounding carries to the output is not known."
    )


def about_underflow(rows: list[CallError], format: Format) -> str:
    """Return a note that values below the range of a format explain the error, with the first call, and what helps."""
    lost = next((row for row in rows if row.underflow >= 0.01 and row.is_low), None)
    where, advice = "", "Use bf16; in a backward scale the loss (nc.Scaler)."
    if lost is not None:
        where = f", first in {lost.id} ({lost.file}:{lost.line}; {lost.underflow:.0%} become zero)"
        in_backward = lost.id.direction == BACKWARD
        advice = "Scale the loss (nc.Scaler), or use bf16." if in_backward else "Keep that call in fp32, or use bf16."
    return (
        f"Underflow: values near {number_text(format.smallest)}, where {format} ends, explain what is off by more than "
        f"round-off{where}. {advice}"
    )


def unmatched(kept: KeptCall, why: str) -> str:
    """Return the text about a call that one side alone made."""
    site, identity = kept.call.site, kept.call.id
    return f"{identity}{f' ({site.file}:{site.line})' if site.file else ''}: {why}"


def about_unmatched(unmatched: list[str], in_scripts: bool) -> str:
    """Return a note about calls that one side alone made."""
    first = f"{counted(len(unmatched), 'call', 'have')} no partner, the first is {unmatched[0]}: "
    if in_scripts:
        return first + (
            "a script that TorchScript casts itself makes other calls than in fp32, and is judged by what it gives. "
            "Call by call: nc.compare(nc.script(script, under=...), inputs, "
            "reference=nc.script(script, under=nc.Policy('fp32', extends=())))."
        )
    return first + "modules compute by other ops here than in the reference, and are judged by what they give."
