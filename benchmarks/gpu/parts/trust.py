"""A sample of tests/conformance/trust on a real device: the kernels, the formats and the waiting are the device's.

Trials run in this process, one after the other (a process that is forked cannot use the device); one that ends it is
known by name to the next attempt, which goes on after it.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from context import Context, DeviceLost, Skip, is_lost, told

TRUST = Path(__file__).parents[3] / "tests/conformance/trust"
SEED, COMPOSED, MOST_S = 2028, 10, 30.0
STARTED = "started"


def run(context: Context, shard: int, shards: int) -> None:
    """The trials of one shard that earlier attempts have not made, as many as there is time for."""
    os.environ["TRUST_DEVICE"] = context.device
    sys.path.insert(0, str(TRUST))
    try:
        corpus = importlib.import_module("run")
    except ImportError as error:
        raise Skip(f"the corpus cannot be imported: {error}") from error
    corpus.verbs.SEED[0] = SEED
    trials = [*corpus.sound_trials(SEED, COMPOSED), *corpus.fault_trials(SEED)]
    random.Random(SEED).shuffle(trials)
    trials = trials[shard::shards][: 3 if context.small else None]
    broken = context.kept.pop(STARTED, None)
    if broken is not None:
        context.keep(broken, "broken")
        context.check(broken, "the process ended while it ran")
    for trial in trials:
        name = f"{trial.kind}: {trial.verb} | {trial.name} | {trial.format}"
        if name in context.kept:
            continue
        if context.left_s < MOST_S:
            break
        context.keep(STARTED, name)
        start = time.monotonic()
        said = _said(corpus, trial)
        del context.kept[STARTED]
        context.keep(name, said.word)
        if said.word not in (corpus.RIGHT, corpus.NOT_JUDGED):
            context.check(name, f"{said.word}: {said.why[:1500]}")
        if time.monotonic() - start > MOST_S / 2:
            context.say(f"{name}: {time.monotonic() - start:.0f} s")
    words = Counter(f"{name.partition(':')[0]}, {word}" for name, word in context.kept.items())
    context.data = {"trials": len(context.kept), "of": len(trials), "said": dict(words)}
    context.check(f"{len(context.kept)} trials of {len(trials)}: {dict(words)}")


def _said(corpus: Any, trial: Any) -> Any:
    """What a trial says, in the words of the corpus. DeviceLost if the device cannot be used after it."""
    try:
        return trial.ask()
    except corpus.verbs.NotSound as error:
        return corpus.Said(corpus.NOT_JUDGED, str(error))
    except corpus.verbs.Harmed as error:
        return corpus.Said(corpus.HARMED, str(error))
    except Exception as error:
        if is_lost(error):
            raise DeviceLost(told(error)) from error
        return corpus.Said(corpus.HARMED, traceback.format_exc()[-1500:])
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
