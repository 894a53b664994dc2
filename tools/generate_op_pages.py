"""Write docs/ops/DEVICE.md from the policy data: which ops autocast touches on each device type, and which never.

python tools/generate_op_pages.py          writes the pages
python tools/generate_op_pages.py --check  exits 1 if a page is not what would be written
"""

from __future__ import annotations

import sys
from pathlib import Path

from narrowcast.policy import DEVICE_TYPES, Kind, Policy, Rule

FOLDER = Path(__file__).parent.parent / "docs/ops"
SECTIONS = [
    (Kind.LOWER, "Computed in the low format", "All eligible tensor arguments are cast to the region's format."),
    (Kind.FULL, "Computed in fp32", "All eligible tensor arguments are cast to fp32."),
    (
        Kind.FULL_SET_DTYPE,
        "Computed in fp32 through the op's own dtype argument",
        "If the first argument is eligible and the caller gave no `dtype`, the op gets `dtype=torch.float32`.",
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
- **Every op that is not on this page**: it runs as its inputs are. `add`, `mul`, `relu`, `gelu` of bf16 tensors
  compute in bf16; a bf16 and an fp32 tensor promote to fp32 by PyTorch's ordinary type promotion.
"""


def rows(rules: list[Rule]) -> list[str]:
    """One line per op, with its torch versions if it is not in all."""
    return [f"- `{r.op}`" + (f" (torch {r.torch})" if r.torch else "") for r in sorted(rules, key=lambda r: r.op)]


def page(device: str) -> str:
    """The Markdown of one device type."""
    file = Path(__file__).parent.parent / f"src/narrowcast/policy/builtin/native_{device}.toml"
    policy = Policy.parse(file.read_text(encoding="utf-8"), file.name)  # all versions, not only the installed torch
    parts = [
        f"# Autocast on {device}, op by op\n",
        "<!-- Written by tools/generate_op_pages.py from the policy data; do not edit. -->\n",
        f"{policy.description}. {len(policy.rules)} ops have a rule. Eligible are floating tensors on a "
        f"{device} device that are not fp64.\n\n"
        f"`narrowcast policy show native --device {device}` prints the same with file and line of each rule.\n",
    ]
    for kind, title, text in SECTIONS:
        found = [r for r in policy.rules if r.action.kind is kind]
        if found:
            parts.append("\n".join([f"## {title} (`{kind.value}`): {len(found)}\n", f"{text}\n", *rows(found)]) + "\n")
    safe = Policy.safe().rules
    lines = [f"- `{r.op}`: {r.action}. {r.reason[0].upper()}{r.reason[1:]} ({r.source})." for r in safe]
    parts.append("\n".join(["## What the policy `safe` changes\n", *lines]) + "\n")
    parts.append(NEVER.format(device=device))
    return "\n".join(parts)


def main() -> int:
    """Write or check every page."""
    check = "--check" in sys.argv
    wrong = []
    for device in DEVICE_TYPES:
        file = FOLDER / f"{device}.md"
        text = page(device)
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
