"""The text form of a program: one line per step, byte-stable, nothing left out: tests read it back.

```
program forward
region 0: cpu bf16 enabled cached session 0 policy native:5d41402a
block main(%0: fp32[8, 4] cpu grad weight, %1: fp32[2, 4] cpu) {
  %2: bf16[2, 4] cpu = cast(self=%1) in 0 at 0: encoder.0, model.py:12
  %3: bf16[2, 8] cpu grad = aten.linear.default(input=%2, weight=%4) in 0 at 0: encoder.0, model.py:12
  return %3
}
site 0: {"file": "/home/me/model.py", "line": 12, "module_path": "encoder.0"}
```

`!` behind an operand: it is written to. `~1` : the result may share the memory of operand 1. `#2`: it is the second
call of the op in its module's call (`#0`: nobody knows). What stands after the number of a site is for the reader.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import PurePath

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.programs.program.model import Block, Program, Step, Value


def print_program(program: Program) -> str:
    """Return the program as text."""
    sites: dict[Site, int] = {}
    lines = [f"program {program.name}"]
    for n, region in enumerate(program.regions):
        r = region.facts
        state = f"{'enabled' if r.enabled else 'disabled'} {'cached' if r.cache else 'uncached'}"
        line = f"region {n}: {r.device_type} {r.low} {state} session {region.session} policy {region.policy or '-'}"
        lines.append(line + (f" open {','.join(region.open)}" if region.open else ""))
    _print_block(program.body, "", sites, lines)
    for site, n in sites.items():
        lines.append(f"site {n}: {json.dumps({k: v for k, v in asdict(site).items() if v}, sort_keys=True)}")
    return "\n".join(lines) + "\n"


def _print_block(block: Block, margin: str, sites: dict[Site, int], lines: list[str]) -> None:
    lines.append(f"{margin}block {block.name}({', '.join(_print_value(v) for v in block.parameters)}) {{")
    for step in block.steps:
        lines.append(f"{margin}  {_print_step(step, sites)}")
        for inner in step.blocks:
            _print_block(inner, margin + "    ", sites, lines)
    lines.append(f"{margin}  return {', '.join(f'%{v}' for v in block.returns)}".rstrip())
    lines.append(f"{margin}}}")


def _print_value(value: Value) -> str:
    text = f"%{value.id}: {value.type}"
    if value.shape is not None:
        text += json.dumps(list(value.shape))
    if value.device:
        text += f" {value.device}"
    return text + " grad" * value.gradient + " weight" * value.weight


def _print_step(step: Step, sites: dict[Site, int]) -> str:
    operands = ", ".join(f"{o.name}=%{o.value}{'!' if o.written else ''}" for o in step.operands)
    facts = (
        step.constants and f"with {json.dumps(step.constants)}",
        step.given and f"given {','.join(sorted(step.given))}",
        step.computes and "computes",
        step.direction != "forward" and step.direction,
        not step.grad_mode and "nograd",
        step.aliases and f"~{','.join(map(str, step.aliases))}",
        step.effects and f"effects {','.join(step.effects)}",
        step.region is not None and f"in {','.join(map(str, (step.region, *step.others)))}",
        step.number != 1 and f"#{step.number}",
    )
    text = " ".join([f"{_print_value(step.value)} = {step.op}({operands})", *(str(fact) for fact in facts if fact)])
    if step.site != NOWHERE:
        number = sites.setdefault(step.site, len(sites))
        line = f"{PurePath(step.site.file).name}:{step.site.line}"
        note = step.site.module_path or "(root)"
        note += f", {line}" if step.site.file else ""
        text += f" at {number}: {''.join(c if c.isprintable() else '?' for c in note)}"
    return text
