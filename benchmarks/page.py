"""What a page costs: to make, to carry, to open, and to open a module in it; what its result costs to save and load.

    python benchmarks/page.py

Captured runs of MiniLM (forward) and of GPTs (forward and backward), and a comparison of two runs, in the Chromium
that the tests use. Bounds: made in a second beyond the run, drawn within one second, a module opened within one; MiniLM
below 1 MB, more than 8,000 calls below 5 MB. Times in the browser are its own clock's: from the begin of the navigation
until all of the page stands in the document (a browser without a window paints nothing), and from an Enter on a module
until what is in it stands there.
"""

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import facts

import narrowcast as nc

ROOT = Path(__file__).parent.parent
ROUNDS = 5
DRAWN = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
OPEN = """(() => {
  const stage = document.querySelector('.stage');
  const press = (key) => stage.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  press('ArrowDown');
  while (!document.querySelector('.box.selected').matches('.fold, .module')) press('ArrowDown');
  const began = performance.now();
  press('Enter');
  document.querySelector('.canvas').getBoundingClientRect();
  return performance.now() - began;
})()"""


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs():
    """Each with its name."""
    gpt = load(ROOT / "tools/page_pictures.py").GPT
    tokens = torch.randint(0, 100, (2, 16))
    with torch.no_grad():
        yield (
            "MiniLM",
            nc.capture(load(ROOT / "examples/minilm.py").case(), under="native"),
        )
    for layers in (48, 180, 400):
        backward = nc.capture(gpt(layers), (tokens,), under="native", backward=True)
        yield f"GPT, {layers} layers, with backward", backward
    with torch.no_grad():
        one, other = (nc.capture(gpt(180), (tokens,), under=policy) for policy in ("native", "safe"))
    yield "two runs of a GPT, 180 layers", nc.diff(one, other)


def measure(browser, run, file):
    """Medians over ROUNDS, in milliseconds; bytes and calls."""
    made, drawn, opened, saved, loaded = [], [], [], [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run.save(file.with_suffix(".json"))
        saved.append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        nc.load(file.with_suffix(".json"))
        loaded.append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        text = run.to_html()
        made.append(1000 * (time.perf_counter() - began))
        file.write_text(text, encoding="utf-8")
        browser.open(file)
        browser.until(f"{DRAWN} > 0")
        drawn.append(browser.value(DRAWN))
        opened.append(browser.value(OPEN))
    times = {"made": made, "drawn": drawn, "a module opened": opened, "saved": saved, "loaded": loaded}
    medians = {f"{name}, ms": round(statistics.median(values), 1) for name, values in times.items()}
    calls = len(run.calls) if hasattr(run, "calls") else len(run.rows)
    return {"calls": calls, "bytes": len(text.encode()), **medians}


def main():
    driver = load(ROOT / "tests/reports/browser.py")
    browser = driver.Browser(driver.where())
    found = {"machine": facts(), "rounds": ROUNDS, "pages": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in runs():
            found["pages"][name] = measure(browser, run, Path(folder) / "page.html")
    browser.close()
    (Path(__file__).parent / "results/page.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found["pages"], indent=1) + "\n")


if __name__ == "__main__":
    main()
