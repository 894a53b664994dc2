"""A run as text: the verdict and what is worth a look first."""

from __future__ import annotations

from narrowcast.report.run import CallRecord, Run, TensorFacts

LISTED = 12


def run_text(run: Run, every_call: bool = False) -> str:
    """The run's first screen; or all of its calls."""
    bad = run.not_finite()
    lines = [_head(run), _verdict(run, bad)]
    formats: dict[str, int] = {}
    for call in run.calls:
        if not call.is_cast:
            formats[call.computes or "-"] = formats.get(call.computes or "-", 0) + 1
    lines.append("computed in: " + ", ".join(f"{name} {n}" for name, n in sorted(formats.items(), key=lambda p: -p[1])))
    lines += [f"note: {note}" for note in run.notes]
    shown = run.calls if every_call else _worth_a_look(run)
    if shown:
        lines += ["", "call" + ("" if every_call else ", largest values first")]
        lines += [call_line(run, call) for call in shown]
    if not every_call and len(run.calls) > len(shown):
        lines.append(f"... {len(run.calls) - len(shown)} more calls: --all lists them")
    return "\n".join(lines)


def _head(run: Run) -> str:
    facts = run.environment
    policy = facts.get("policy") or {}
    under = f", policy {policy['name']} in {policy['low']}" if policy else ""
    backward = sum(call.id.direction == "backward" for call in run.calls)
    return f"{len(run.calls)} calls ({backward} backward) on {facts.get('device', '?')}{under}"


def _verdict(run: Run, bad: list[CallRecord]) -> str:
    if not bad:
        return "every value is finite"
    made = next((c for c in bad if all(run.tensors[n].is_finite for _, n in c.inputs)), None)
    if made is None:
        return f"{len(bad)} calls are not finite; their inputs were not, either"
    return f"{len(bad)} calls are not finite; the first made of finite inputs: {made.id} ({made.file}:{made.line})"


def _worth_a_look(run: Run) -> list[CallRecord]:
    def largest(call: CallRecord) -> float:
        return max((run.tensors[n].largest for _, n in call.outputs), default=0.0)

    return sorted(run.calls, key=largest, reverse=True)[:LISTED]


def call_line(run: Run, call: CallRecord) -> str:
    """One call: identity, formats, the ranges of what it gave, its place."""
    gave = ", ".join(tensor_text(run.tensors[n]) for _, n in call.outputs if run.tensors[n].fits())
    formats = call.computes or call.came or "-"
    return f"  {call.id}  {formats}  {gave}  {_short(call.file)}:{call.line}"


def tensor_text(tensor: TensorFacts) -> str:
    """`fp16 [2, 8] -3.1..4.2 rms 0.9, 3 % infinite`."""
    parts = [f"{tensor.format} {list(tensor.shape)} {tensor.low:.3g}..{tensor.high:.3g} rms {tensor.rms:.3g}"]
    for name in ("nan", "infinite", "subnormal", "saturated"):
        share = getattr(tensor, name)
        if share:
            parts.append(f"{share:.2g} {name}")
    return ", ".join(parts)


def _short(file: str) -> str:
    return "/".join(file.split("/")[-2:])
