"""Take the pictures of docs/reference/page.md, with the Chromium that the tests use: python tools/page_pictures.py."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

import narrowcast as nc

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs/pictures"
GRAPH = (
    "document.querySelector('#graph').scrollIntoView(); document.querySelector('.stage').focus({preventScroll: true})"
)


def load(path: Path) -> Any:
    """A file of Python as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Block(torch.nn.Module):
    """A layer of a small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the two products."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class GPT(torch.nn.Module):
    """A stack of layers; a third one has weights with which fp16 overflows."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(100, 64)
        self.layers = torch.nn.ModuleList(Block(64) for _ in range(layers))
        self.head = torch.nn.Linear(64, 100)
        for layer in self.layers[2:3]:
            layer.mlp[1].weight.data.mul_(1e5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model: GPT) -> Any:
    """Twenty steps in fp16 with a scaler, watched: nothing goes wrong, but for the first steps, which it skips."""
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), nc.Scaler("cpu", init_scale=2.0**21)
    with nc.watch() as watched:
        for _ in range(20):
            tokens = torch.randint(0, 100, (4, 33))
            optimizer.zero_grad()
            with nc.autocast("cpu", "fp16"):
                logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return watched


def pages() -> dict[str, str]:
    """The HTML of each example, by the name of its picture."""
    torch.manual_seed(0)
    minilm = load(ROOT / "examples/minilm.py")
    case = minilm.case()
    with torch.no_grad():
        slow = nc.explain(case, under="bf16", run=True).to_html()
        placed = nc.explain(case, under="bf16", front_end="export", goal="fast").to_html()
        run = nc.capture(case, under="native")
        written_out = AutoModel.from_pretrained(minilm.WEIGHTS, attn_implementation="eager").eval()
        other = nc.capture(written_out, case.inputs, under="native")
        pair = nc.diff(run, other, names=("MiniLM, fused attention", "MiniLM, written out")).to_html()
        overflow = nc.compare(GPT(4), (torch.randint(0, 100, (2, 16)),), under="fp16").to_html()
    made = {"overview": slow, "placement": placed, "graph": run.to_html(), "pair": pair, "nan": overflow}
    made["watch"] = train(GPT(2)).to_html()
    return {name: html.replace(f"{ROOT}/", "") for name, html in made.items()}


def main() -> None:
    """A picture of each page."""
    driver, html = load(ROOT / "tests/reports/browser.py"), pages()
    browser = driver.Browser(driver.where())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(html["overview"], encoding="utf-8")
        browser.open(file, width=1300, height=780)
        browser.picture(PICTURES / "page-overview.png")
        file.write_text(html["placement"], encoding="utf-8")
        browser.open(file, width=1300, height=780)
        browser.picture(PICTURES / "page-placement.png")
        file.write_text(html["graph"], encoding="utf-8")
        browser.open(file, width=1300, height=860)
        browser.value(GRAPH)
        browser.press("/", *"layer.0 query", "Enter", "Backspace", "i")
        browser.value(GRAPH)
        browser.picture(PICTURES / "page-graph.png")
        file.write_text(html["pair"], encoding="utf-8")
        browser.open(file, width=1300, height=900)
        browser.press("/", *"layer.0 query", "Enter")
        browser.value(GRAPH)
        browser.picture(PICTURES / "page-pair.png")
        file.write_text(html["nan"], encoding="utf-8")
        browser.open(file, width=1300, height=860)
        browser.value(GRAPH)
        browser.press("n")
        browser.value(GRAPH)
        browser.picture(PICTURES / "page-nan.png")
        file.write_text(html["watch"], encoding="utf-8")
        browser.open(file, width=1300, height=860)
        browser.value("document.querySelector('#plots').scrollIntoView()")
        browser.picture(PICTURES / "page-watch.png")
    browser.close()
    sys.stdout.write(f"wrote {PICTURES}/page-*.png\n")


if __name__ == "__main__":
    main()
