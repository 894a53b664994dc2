"""Compiled code is forgotten between tests that compile."""

import pytest
import torch


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
