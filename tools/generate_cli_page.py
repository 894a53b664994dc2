"""Write docs/reference/cli.md from the help texts of the `narrowcast` command.

python tools/generate_cli_page.py          writes the page
python tools/generate_cli_page.py --check  exits 1 if the page is not what would be written
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/reference/cli.md"
HEAD = """\
# Command line

<!-- Written by tools/generate_cli_page.py from the help texts; do not edit. -->

Exit codes: 0 nothing was found, 1 findings, 2 wrong use or nothing to compare, 3 the model or Narrowcast raised, 130
interrupted. An error says what was asked, what was found, where, and what to do; `narrowcast --traceback ...` shows
Python's traceback as well. A file to write is checked before anything runs for it.

`-o FILE` saves the result (`narrowcast show FILE` prints it again, except what `check` wrote), `--html FILE` writes its
page, `--json` prints it as JSON, `--all` everything; a policy is written by `--policy-out FILE`.

```bash
narrowcast policy show native --all         # all rules, the one that wins first
narrowcast diff native safe --device cuda
narrowcast profile path                     # where this device's profile is kept
```

"""


def page() -> str:
    """The Markdown, from typer's own; without HTML's escapes."""
    command = [sys.executable, "-m", "typer", "narrowcast.cli.app", "utils", "docs", "--name", "narrowcast"]
    text = html.unescape(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    text = text[text.index("**Usage**") :]
    text = re.sub(r"```console\n\$ (.*)\n```", r"`\1`", text)
    text = re.sub(r"^\*\*(Usage|Options|Arguments|Commands)\*\*:", r"**\1**", text, flags=re.M)
    text = re.sub(r"^(#+) `(.*)`$", r"\1 \2", text, flags=re.M)
    return HEAD + _with_summaries(text).strip() + "\n"


def _with_summaries(text: str) -> str:
    """Write out the summaries that typer cuts: each is the first sentence below the command's own heading."""
    summaries = dict(re.findall(r"^#+ (narrowcast [\w -]+)\n\n(.+?[.])(?= |\n)", text, flags=re.M))
    group, lines = "narrowcast", []
    for line in text.splitlines():
        if heading := re.fullmatch(r"#+ (narrowcast [\w -]+)", line):
            group = heading[1]
        if cut := re.fullmatch(r"\* `([\w-]+)`: .*[.]{3}", line):
            line = f"* `{cut[1]}`: {summaries[f'{group} {cut[1]}']}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Write or check the page."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/reference/cli.md is not what the help texts say; run: make docs")
    return 1


if __name__ == "__main__":
    sys.exit(main())
