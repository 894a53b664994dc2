"""Build the wheel, install it into an empty .venv with the torch of constraints.txt, and run the README's quickstart.

Nothing of the clone is on the path then: what the wheel lacks is found here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str, **options: object) -> None:
    """Run a command; what it says comes with the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:200]}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def main() -> None:
    """Build, install, run."""
    quickstart = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
        run(*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv/bin/python")
        install = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        run(*install, *constraints, torch.group(), "numpy")
        run(*install, *constraints, str(wheel))
        script = folder / "quickstart.py"
        script.write_text(quickstart, encoding="utf-8")
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        clean["NARROWCAST_CACHE_DIR"] = str(folder / "cache")
        run(python, str(script), cwd=folder, env=clean)
        run(str(folder / "venv/bin/narrowcast"), "diff", "native", "safe", cwd=folder, env=clean)
        made = "import narrowcast; print(len(narrowcast.Ledger().to_html()))"  # the built page is in the wheel
        run(python, "-c", made, cwd=folder, env=clean)
    sys.stdout.write("the wheel installs alone, and its quickstart runs\n")


if __name__ == "__main__":
    main()
