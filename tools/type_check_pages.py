"""Check the types of the Python in the documents, as a user's editor would: one module for each page.

python tools/type_check_pages.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build/pages"
BLOCK = re.compile(r"^( *)(?:```python|<!-- invisible-code-block: python)\n(.*?)^\1(?:```|-->)", re.S | re.M)
# Documents show code without annotations, and do not ask whether a run has findings.
OPTIONS = [
    "--ignore-missing-imports",
    "--allow-redefinition",
    "--check-untyped-defs",
    "--disable-error-code=union-attr",
    "--config-file=",
]


def modules() -> dict[Path, str]:
    """The Python of each page, line for line where it stands in the page."""
    pages = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts)]
    found = {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        lines = [""] * (text.count("\n") + 1)
        for block in BLOCK.finditer(text):
            first, indent = text.count("\n", 0, block.start(2)), len(block[1])
            for number, line in enumerate(block[2].splitlines(), first):
                lines[number] = line[indent:]
        if any(lines):
            found[page] = "\n".join(lines) + "\n"
    return found


def main() -> int:
    """Write the modules and run mypy over them; its messages name the pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = {}
    for page, code in modules().items():
        name = str(page.relative_to(ROOT).with_suffix("")).replace("/", "__").replace("-", "_")
        (FOLDER / f"{name}.py").write_text(code, encoding="utf-8")
        names[name] = page
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *OPTIONS, *(str(FOLDER / f"{name}.py") for name in names)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    print(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
