"""Run one part, in the process that `run.py` starts for it; its results go into the file that is named.

python benchmarks/gpu/one_part.py --facts [--device cuda]
python benchmarks/gpu/one_part.py --part NAME --into FILE --device cuda --seconds 480 [--small] [--parts FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import results
from context import FAILED, Context, DeviceLost, Skip, told
from parts_list import load_parts

LAST_WORDS_S = 8
"""So long before it is killed, a part says where it is."""


def main() -> int:
    """Run the part; the exit status says only whether the process came to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", action="store_true")
    parser.add_argument("--part")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", type=Path)
    options = parser.parse_args()
    if options.facts:
        import facts

        print("FACTS " + json.dumps(facts.facts(options.device), default=str), flush=True)
        return 0
    _die_with_parent()
    if options.seconds > 2 * LAST_WORDS_S:
        last_words = threading.Timer(options.seconds - LAST_WORDS_S, _say_where_it_is)
        last_words.daemon = True
        last_words.start()
    part = next(p for p in load_parts(options.parts) if p.name == options.part)
    result = results.read(options.into) or {}
    context = Context(
        options.device, options.small, time.monotonic() + options.seconds - LAST_WORDS_S, options.into.parent
    )
    context.kept, context.checks = result.get("kept", {}), result.get("checks", [])

    def save() -> None:
        result.update(kept=context.kept, checks=context.checks, data=context.data)
        results.write(options.into, result)

    context.save = save
    module, _, function = part.target.partition(":")
    try:
        if part.exact:
            _ask_for_equal_bits()
        warnings.simplefilter("ignore")
        getattr(importlib.import_module(module), function)(context, **part.arguments)
        failed = any(check["outcome"] == FAILED for check in context.checks)
        outcome, reason = results.FAILED if failed else results.PASSED, ""
        if context.is_unfinished:
            outcome, reason = results.UNFINISHED, "there was no more time; it goes on in the next run"
        elif context.checks and all(check["outcome"] == results.SKIPPED for check in context.checks):
            outcome, reason = results.SKIPPED, context.checks[0]["detail"]
    except Skip as why:
        outcome, reason = results.SKIPPED, str(why)
    except DeviceLost as error:
        outcome, reason = results.CRASHED, str(error)
    except Exception as error:
        traceback.print_exc()
        outcome, reason = results.FAILED, told(error)
    result.update(outcome=outcome, reason=reason)
    save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' own clean-up may hang where a device has failed, and nothing is left to be saved


def _ask_for_equal_bits() -> None:
    """Kernels that give the same bits in each run, where there are such; what has none is run all the same."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _say_where_it_is() -> None:
    """With Python's own means: faulthandler reads other threads' frames without the lock, and may end the process."""
    for number, frame in sys._current_frames().items():
        print(f"thread {number}:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """On Linux: a part whose runner was killed does not keep the device."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


if __name__ == "__main__":
    sys.exit(main())
