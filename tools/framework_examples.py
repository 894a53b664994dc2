"""Run the plugins in the frameworks themselves: examples, refusals and the pages that show them.

    python tools/framework_examples.py                 with the newest versions and with the oldest
    python tools/framework_examples.py --only oldest   with one of the two

Versions are pinned in constraints-frameworks.txt and constraints-frameworks-oldest.txt. Each environment is made in
build/frameworks, and made again when its pins change.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINS = {"newest": "constraints-frameworks.txt", "oldest": "constraints-frameworks-oldest.txt"}
FRAMEWORKS = (
    "lightning", "pytorch-lightning", "lightning-fabric", "transformers", "accelerate", "pytorch-ignite",
)  # fmt: skip
BESIDES = ("scikit-learn", "pytest", "pytest-timeout", "hypothesis", "sybil")
TESTS = ("tests/frameworks", "tests/docs/test_pages.py")


def environment(pins: Path, folder: Path) -> Path:
    """The interpreter of an environment with these versions; made if it is not there, or was made of others."""
    python, ready = folder / "bin/python", folder / "made-of.txt"
    if ready.exists() and ready.read_text(encoding="utf-8") == pins.read_text(encoding="utf-8"):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(pins)]
    subprocess.run([*pip, "torch", "numpy"], check=True)  # first and alone: what comes later finds it there
    subprocess.run([*pip, *FRAMEWORKS, *BESIDES, "--editable", str(ROOT)], check=True)
    ready.write_text(pins.read_text(encoding="utf-8"), encoding="utf-8")
    return python


def main() -> int:
    """How many of the environments failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PINS)
    only = parser.parse_args().only
    failed = 0
    for name in [only] if only else PINS:
        python = environment(ROOT / PINS[name], ROOT / "build/frameworks" / name)
        print(f"== {name}: {PINS[name]}", flush=True)
        settings = {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "frameworks", *TESTS]
        failed += subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
