"""Modules of source texts: TorchScript reads code from files."""

import importlib.util
import itertools
import sys
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
NUMBERS = itertools.count()


def load(text):
    """The module of a source text, under a name of its own."""
    path = FOLDER / f"program_{next(NUMBERS)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
