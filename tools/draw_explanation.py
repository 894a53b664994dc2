"""Draw docs/pictures/explanation.svg, the README's picture: what nc.explain says of a small attention block.

python tools/draw_explanation.py           draws it
python tools/draw_explanation.py --check   exits 1 if it is not what would be drawn
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

import narrowcast as nc

PICTURE = Path(__file__).parent.parent / "docs/pictures/explanation.svg"
SHOWN = ("Each op:", "Each cast:")


class Attention(torch.nn.Module):
    """One head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Self-attention over x, (batch, tokens, 64)."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(-2, -1) / 8, -1) @ v)


def picture() -> str:
    """Explain, and draw the two tables that say most."""
    policy = nc.Policy.native("cpu").with_rules(
        nc.Rule("aten.softmax", "full", reason="exponents need fp32"),
        nc.Rule("aten.linear", "full", module="out", reason="the output in fp32"),
    )
    text = nc.explain(Attention(), (torch.randn(2, 16, 64),), under=policy).to_text(every=True, width=150)
    chosen = [part.rstrip() for part in re.split(r"\n\n(?=[A-Z])", text) if part.startswith(SHOWN)]
    console = Console(record=True, width=max(len(line) for table in chosen for line in table.splitlines()) + 1,
                      file=io.StringIO(), highlight=False)  # fmt: skip
    for table in chosen:
        title, _, rows = table.partition("\n")
        console.print(Text(title, style="bold"))
        text = Text(rows)
        text.highlight_words(["bf16"], "cyan")
        text.highlight_words(["fp32"], "yellow")
        text.highlight_regex("─+", "bright_black")
        console.print(text, end="\n\n" if table is not chosen[-1] else "\n")
    drawn = console.export_svg(
        title="print(nc.explain(model, x, under=policy).to_text(every=True))", theme=MONOKAI, unique_id="explain"
    )
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def main() -> int:
    """Write or check the picture."""
    drawn = picture()
    if "--check" not in sys.argv:
        PICTURE.write_text(drawn, encoding="utf-8")
        return 0
    if PICTURE.read_text(encoding="utf-8") == drawn:
        return 0
    print("docs/pictures/explanation.svg is not what nc.explain says; run: python tools/draw_explanation.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
