"""The pytest plugin: `--narrowcast-update`, and a fixture that names a test's snapshot. It imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from narrowcast.testing.updating import VARIABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("narrowcast").addoption(
        "--narrowcast-update", action="store_true",
        help="write snapshots of formats (narrowcast.testing) again instead of holding runs against them",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Put the option into the environment, where the assertions, which know no pytest, find it."""
    if config.getoption("--narrowcast-update"):
        environment = pytest.MonkeyPatch()
        environment.setenv(VARIABLE, "1")
        config.add_cleanup(environment.undo)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report a run that wrote, which must not pass for one that compared."""
    if config.getoption("--narrowcast-update"):
        terminalreporter.write_line(
            "narrowcast: formats were not compared; snapshots that differ were rewritten, see git diff"
        )


@pytest.fixture
def narrowcast_snapshot(request: pytest.FixtureRequest) -> Path:
    """The file of this test's snapshot, beside the test's own: `formats/test_model/test_name.txt`."""
    name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
    owner = request.node.getparent(pytest.Class)
    return request.path.parent / "formats" / request.path.stem / f"{f'{owner.name}.' if owner else ''}{name}.txt"
