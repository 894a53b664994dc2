"""Check the types of the Python in the documents, as users' editors would, by mypy and by pyright: one module for each
page; and of tests/checkers/as_users_write.py.

python tools/type_check_pages.py
"""

from __future__ import annotations

import json
import re
import shutil
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


# The same for pyright. What a page's loop leaves bound is bound there.
SETTINGS = {
    "include": ["."], "reportMissingImports": False, "reportMissingModuleSource": False,
    "reportOptionalMemberAccess": False, "reportPossiblyUnboundVariable": False,
}  # fmt: skip


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
    """Write the modules and run both over them; their messages name the pages."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    names = {}
    for page, code in modules().items():
        name = str(page.relative_to(ROOT).with_suffix("")).replace("/", "__").replace("-", "_")
        (FOLDER / f"{name}.py").write_text(code, encoding="utf-8")
        names[name] = page
    shutil.copy(ROOT / "tests/checkers/as_users_write.py", FOLDER)
    (FOLDER / "pyrightconfig.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    mypy = ["-m", "mypy", *OPTIONS, *(str(FOLDER / f"{name}.py") for name in names)]
    codes = []
    for command, where in ((mypy, ROOT), (["-m", "pyright", "--pythonpath", sys.executable], FOLDER)):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=where)
        print(done.stdout + done.stderr)
        codes.append(done.returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
