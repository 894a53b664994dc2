"""Shared: how many tests may be skipped, what is there to test with, in which order, and with how many threads."""

import gc
import os
import random
import sys
import zlib

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared and may be slow: time is no reason for a law to fail.
settings.register_profile("narrowcast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("narrowcast")
# Workers share the cores: torch reads this when it is imported, which no conftest does.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
ALLOWED_SKIPS = int(os.environ.get("NARROWCAST_ALLOWED_SKIPS", "0"))


@pytest.fixture(autouse=True, scope="session")
def caches_are_folders_of_their_own(tmp_path_factory):
    """Tests neither read what a user has measured or compiled, nor write among it.

    Code that Inductor compiled under a limited instruction set, or for another number of threads, corrupts memory in a
    process that has other ones: its cache does not tell them apart (torch 2.13).
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folders = {
        "NARROWCAST_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "TORCHINDUCTOR_CACHE_DIR": str(shared / "inductor"),
    }
    given = {name: os.environ.get(name) for name in folders}
    os.environ.update(folders)
    yield
    for name, before in given.items():
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@pytest.fixture(autouse=True, scope="module")
def what_is_alive_is_frozen():
    """Python's collector passes over what earlier modules of tests have left; a million objects take half a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def guards_are_not_timed():
    """dynamo flushes the processor's caches to time each set of guards, for a line in its log: 29 ms a graph."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture
def process_group():
    """A process group of this process alone, without a network."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.fixture
def fresh_dynamo():
    """Compiled code is forgotten before and after a test that compiles."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a sweep most are slow. In another order, if NARROWCAST_SHUFFLE names one: none needs another."""
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep is not None and zlib.crc32(item.name.encode()) % sweep.kwargs["one_in"]:
            item.add_marker("slow")
    seed = os.environ.get("NARROWCAST_SHUFFLE")
    if seed:
        items.sort(key=lambda item: item.nodeid)  # the same on every worker
        random.Random(int(seed)).shuffle(items)


@pytest.fixture(autouse=True)
def autocast_is_left_as_it_was():
    """No test may leave autocast, gradients or the dispatch modes otherwise than it found them.

    A state that leaks fails some other test, far away; here it fails the one that lost it.
    """
    before = _ambient_state()
    yield
    assert before is None or _ambient_state() == before


def _ambient_state() -> dict | None:
    torch = sys.modules.get("torch")  # the pure half is tested without it
    if torch is None:
        return None
    devices = ("cpu", "cuda", "xpu", "mps", "ipu", "maia", "mtia")
    return {
        "nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "cache": torch.is_autocast_cache_enabled(),
        "enabled": [torch.is_autocast_enabled(device) for device in devices],
        "dtype": [torch.get_autocast_dtype(device) for device in devices],
        "gradients": torch.is_grad_enabled(),
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "script": torch._C._get_graph_executor_optimize(),
        "replaced": _held(),
    }


def _held() -> list:
    """What of torch stands replaced for a while: nothing between tests."""
    patches = sys.modules.get("narrowcast.runtime.torch_surface.patches")
    return [] if patches is None else [line for line in patches.standing() if line.holders]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A run in which more tests were skipped than are known to be does not pass."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    # Where no browser is, the page cannot be looked at; users have it built.
    skipped = sum("no browser" not in str(report.longrepr) for report in reporter.stats.get("skipped", []))
    if skipped > ALLOWED_SKIPS and exitstatus == 0 and not session.config.option.collectonly:
        reporter.write_line(
            f"{skipped} tests skipped where {ALLOWED_SKIPS} are known: see -ra for the reasons", red=True
        )
        session.exitstatus = 1
