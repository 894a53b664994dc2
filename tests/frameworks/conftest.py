"""What the tests of frameworks share."""

import os

import pytest


@pytest.fixture(autouse=True)
def environment_of_the_process():
    """Strategies of Lightning's set RANK and WORLD_SIZE for the whole process; Accelerate would join their group."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
