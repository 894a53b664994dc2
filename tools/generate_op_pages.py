"""Write docs/reference/ops from the policy data: which ops autocast touches on each device type, and which never; and
what ipex says.

python tools/generate_op_pages.py          writes the pages
python tools/generate_op_pages.py --check  exits 1 if a page is not what would be written
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from narrowcast.core.policy import DEVICE_TYPES, Kind, Policy, Rule

FOLDER = Path(__file__).parent.parent / "docs/reference/ops"
SECTIONS = [
    (Kind.LOWER, "Computed in the low format", "All eligible tensor arguments are cast to the region's format."),
    (Kind.FULL, "Computed in fp32", "All eligible tensor arguments are cast to fp32."),
    (
        Kind.FULL_SET_DTYPE,
        "Computed in fp32 through the op's own dtype argument",
        "If the first argument is eligible and the caller passed no `dtype`, the op gets `dtype=torch.float32`.",
    ),
    (
        Kind.FULL_APPEND_DTYPE,
        "Computed in fp32 through an overload that takes a dtype",
        "If the first argument is eligible, the overload with a `dtype` argument is called with `torch.float32`.",
    ),
    (
        Kind.PROMOTE,
        "Computed in the widest format of the inputs",
        "Eligible arguments are cast to fp32 if one of them is fp32, else to the low format. A third format (fp16 in a "
        "bf16 region) that comes before the first fp32 argument raises.",
    ),
    (Kind.REFUSE, "Refused", "The call raises."),
]
NEVER = """\
## Never touched, and why

- **In-place ops and `out=` forms** (`add_`, `addmm_`, `mm.out`): the result must have the format of the tensor that it
  is written to, so casting is left to you. Mixed formats raise in some of them; the policy `safe` repairs those.
- **fp64 tensors**: a program that uses fp64 asked for that precision. They pass untouched through every listed op.
- **Integer, boolean and complex tensors**: they have no low floating format.
- **Tensors on another device type**: the region of `{device}` rules `{device}` tensors.
- **Views, copies and explicit conversions** (`view`, `t`, `to`, `clone`): they compute nothing, or say to what.
- **Every op that is not on this page**: it follows its input dtype. `add`, `mul`, `relu`, `gelu` of bf16 tensors
  compute in bf16; a bf16 and an fp32 tensor promote to fp32 by PyTorch's ordinary type promotion.
"""
IPEX = """\
# The policy `ipex`, op by op

<!-- Written by tools/generate_op_pages.py from the policy data; do not edit. -->

The op lists that Intel Extension for PyTorch documents for `torch.xpu.amp`. They differ from what torch itself
registers for xpu, and hold on every device type:

```python
import torch
import narrowcast as nc

model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
with nc.autocast("cpu", policy="ipex"):  # "xpu" on Intel's GPUs
    y = model(x)
```

- **Low format**: {low}, if the region names none, on every device type (torch's for xpu is fp16).
- **Inference** in bf16 and fp16; **training** in {training}. Eager and compiled code in a region in another low format
  gives a `RegionWarning` where gradients are recorded, with the line, and what to do: `dtype=torch.bfloat16`, or
  `torch.no_grad()` around inference.
- **Eligible** are floating tensors on the region's device type that are not fp64 and that the op does not write to.
- **Nothing lies below**: ops that native lists and `ipex` does not run as their inputs are. Where such an op calls
  listed ones, these are cast: `einsum` calls `bmm`, and `conv2d` with `padding="same"` calls `convolution`.
- **The weight cache** is {cache}, so that `torch.jit.trace` works in the region. A weight that is used n times in a
  region is cast n times.
- Left out: `_convolution_nogroup`, which Intel lists and no supported torch has.

`narrowcast diff native ipex --device xpu` prints the differences for the installed torch, and
`narrowcast policy show ipex` the rules. A policy of yours may start from it: `extends = "ipex"`.
"""


def short(text: str, indent: str = "") -> str:
    """The text in lines of at most 120 columns."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def rows(rules: list[Rule]) -> list[str]:
    """One line per op, with its torch versions if it is not in all."""
    return [f"- `{r.op}`" + (f" (torch {r.torch})" if r.torch else "") for r in sorted(rules, key=lambda r: r.op)]


def builtin(name: str) -> Policy:
    """A built-in policy with the rules of all torch versions, not only of the installed one."""
    file = Path(__file__).parent.parent / f"src/narrowcast/core/policy/builtin/{name}.toml"
    return Policy.parse(file.read_text(encoding="utf-8"), file.name)


def lists(policy: Policy) -> list[str]:
    """One section per action."""
    parts = []
    for kind, title, text in SECTIONS:
        found = [r for r in policy.rules if r.action.kind is kind]
        if found:
            parts.append(
                "\n".join([f"## {title} (`{kind.value}`): {len(found)}\n", f"{short(text)}\n", *rows(found)]) + "\n"
            )
    return parts


def page(device: str) -> str:
    """The Markdown of one device type."""
    policy = builtin(f"native_{device}")
    parts = [
        f"# Autocast on {device}, op by op\n",
        "<!-- Written by tools/generate_op_pages.py from the policy data; do not edit. -->\n",
        short(
            f"{policy.description}. {len(policy.rules)} ops have a rule. Eligible are floating tensors on a "
            f"{device} device that are not fp64."
        )
        + "\n\n"
        f"`narrowcast policy show native --device {device}` prints the same with file and line of each rule.\n",
        *lists(policy),
    ]
    safe = Policy.safe().rules
    lines = [short(f"- `{r.op}`: {r.action}. {r.reason[0].upper()}{r.reason[1:]} ({r.source}).", "  ") for r in safe]
    parts.append("\n".join(["## What the policy `safe` changes\n", *lines]) + "\n")
    parts.append(NEVER.format(device=device))
    return "\n".join(parts)


def ipex_page() -> str:
    """The Markdown of the policy `ipex`: what it does otherwise than native on xpu, and its lists."""
    policy, native = builtin("ipex"), builtin("native_xpu")
    changes = native.diff(policy)
    table = [f"## What differs from native on xpu: {len(changes)}\n", "| op | native | `ipex` |", "|---|---|---|"]
    for change in sorted(changes, key=lambda change: str(change.conditions[0])):
        rule = change.after or change.before
        versions = f" (torch {rule.torch})" if rule and rule.torch else ""
        actions = [f"`{r.action}`" if r else "as its inputs are" for r in (change.before, change.after)]
        table.append(f"| `{change.conditions[0]}`{versions} | {' | '.join(actions)} |")
    head = IPEX.format(low=policy.low, training=" and ".join(policy.training), cache=policy.cache)
    return "\n".join([head, "\n".join(table) + "\n", *lists(policy)])


def main() -> int:
    """Write or check every page."""
    check = "--check" in sys.argv
    wrong = []
    pages = {device: page(device) for device in DEVICE_TYPES} | {"ipex": ipex_page()}
    for name, text in pages.items():
        file = FOLDER / f"{name}.md"
        if check:
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                wrong.append(file.name)
        else:
            file.write_text(text, encoding="utf-8")
    if wrong:
        print(f"not what the policy data says: {', '.join(wrong)}; run: make docs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
