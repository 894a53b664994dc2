"""What takes long says so, where somebody sees it, and leaves nothing behind."""

import io
import threading
import time
from types import SimpleNamespace

import pytest

from narrowcast.output import progress


class Terminal(io.StringIO):
    """A standard error that is one."""

    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))  # pytest sets its own for each phase
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return found


def shown(found, text):
    """Whether it is there before long: the line is another thread's."""
    until = time.monotonic() + 20
    while text not in found.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    return text in found.getvalue()


def ends(before):
    """Whether no more threads than before are left before long."""
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    return threading.active_count() == before


def test_a_line_says_what_is_done_and_goes(stderr):
    """Which part it is of how many, and no thread is left when it ends."""
    before = threading.active_count()
    with progress.long_work("compiling", 3) as step:
        step("compiling placed", done=False)
        step()
        assert shown(stderr, "narrowcast: compiling placed")
        assert shown(stderr, "1 of 3")
    assert stderr.getvalue().endswith("\x1b[2K")  # it erases itself
    assert ends(before)


def test_an_error_ends_it(stderr):
    """What the work raises comes out, and the line is gone."""
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), progress.long_work("compiling", 3):
        shown(stderr, "compiling")
        raise ZeroDivisionError
    assert ends(before)


def test_short_work_says_nothing(stderr, monkeypatch):
    """Three seconds are its length."""
    monkeypatch.setattr(progress, "AFTER_SECONDS", 60.0)
    with progress.long_work("compiling", 3) as step:
        step()
    assert not stderr.getvalue()


@pytest.mark.parametrize(("setting", "is_terminal", "wanted"), [
    ("", True, True), ("", False, False), ("0", True, False), ("1", False, True), ("1", True, True), 
    ("no", False, False),
])  # fmt: skip
def test_it_is_for_terminals_and_can_be_switched(stderr, monkeypatch, setting, is_terminal, wanted):
    """By one variable."""
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv(progress.VARIABLE, setting)
    assert progress._is_wanted() is wanted


def test_no_standard_error_is_no_terminal(monkeypatch):
    """As under pythonw."""
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=None))
    with progress.long_work("compiling", 1) as step:
        step("x")
