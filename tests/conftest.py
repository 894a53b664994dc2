"""Shared: how many tests may be skipped, and what is there to test with."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared and may be slow: time is no reason for a law to fail.
settings.register_profile("narrowcast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("narrowcast")
ALLOWED_SKIPS = int(os.environ.get("NARROWCAST_ALLOWED_SKIPS", "0"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A run in which more tests were skipped than are known to be does not pass."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    skipped = len(reporter.stats.get("skipped", []))
    if skipped > ALLOWED_SKIPS and exitstatus == 0 and not session.config.option.collectonly:
        reporter.write_line(
            f"{skipped} tests skipped where {ALLOWED_SKIPS} are known: see -ra for the reasons", red=True
        )
        session.exitstatus = 1
