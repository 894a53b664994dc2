"""See that there is a browser for the tests of pages: install Chromium where apt-get may, else say what to do.

    python tools/browser.py

Exits with 0 in any case: without a browser the tests of pages are skipped, and fail where CI is set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/reports"))
from browser import where

TODO = "install Chromium (Debian's package is chromium), or name another in NARROWCAST_BROWSER"


def install() -> str:
    """Why Chromium could not be installed; empty if it was."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "only root can install one, with apt-get"
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(
                ["apt-get", "-qq", *arguments], env=quiet, capture_output=True, text=True, timeout=240, check=False
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {arguments[0]} did not end within 240 s"
        if done.returncode:
            return f"apt-get {arguments[0]}: {done.stderr.strip().splitlines()[-1:]}"
    return ""


def main() -> None:
    """Look for a browser, and install one if there is none."""
    if where() is not None:
        return
    why = install()
    if why or where() is None:
        print(f"No browser, so the tests of pages cannot run: {why or 'it is not on the path'}. To run them, {TODO}.")


if __name__ == "__main__":
    main()
