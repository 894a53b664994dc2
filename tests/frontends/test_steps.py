"""Regions around code that runs in steps, and in threads: they hold while it runs, and nothing is left between."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st

import narrowcast as nc
from narrowcast.errors import RegionError

BF, FP, HALF = torch.bfloat16, torch.float32, torch.float16
POLICY = nc.Policy.native().with_rules(nc.Rule("aten.softmax", "full"), nc.Rule("aten.relu", "lower"))
x = torch.ones(2, 2)


def now():
    """The dtypes of mm, softmax and relu: which region holds, and whether it is native or POLICY's."""
    y = x @ x
    return y.dtype, torch.softmax(y, -1).dtype, torch.relu(x).dtype


OFF, NATIVE, OURS = (FP, FP, FP), (BF, BF, FP), (BF, FP, BF)


def ours():
    return nc.autocast("cpu", BF, policy=POLICY)


# -- generators


def test_a_generator_is_cast_while_it_runs():
    """Before, between and after its steps nothing is cast."""

    @ours()
    def generator():
        yield now()
        yield now()
        return now()

    made = generator()
    assert inspect.isgeneratorfunction(generator) and now() == OFF
    for _ in range(2):
        assert next(made) == OURS and now() == OFF
    with pytest.raises(StopIteration) as stop:
        next(made)
    assert stop.value.value == OURS and now() == OFF


def test_what_is_sent_and_thrown_goes_in():
    """As without the region; and close runs the finally clauses inside it."""
    seen = []

    @ours()
    def generator():
        got = None
        try:
            while True:
                try:
                    got = yield got, now()
                except KeyError as error:
                    got = error.args[0]
        finally:
            seen.append(now())

    made = generator()
    assert next(made) == (None, OURS) and made.send(1) == (1, OURS) and made.throw(KeyError(2)) == (2, OURS)
    made.close()
    assert seen == [OURS] and now() == OFF


def test_two_generators_do_not_see_each_other():
    """Interleaved, with regions of their own, in a region of the caller."""

    @ours()
    def one():
        while True:
            yield now()

    @nc.autocast("cpu", enabled=False)
    def two():
        while True:
            yield now()

    a, b = one(), two()
    with torch.autocast("cpu", BF):
        for _ in range(3):
            assert next(a) == OURS and next(b) == OFF and now() == NATIVE
    assert next(a) == OURS and now() == OFF


# -- async


def test_coroutines_are_cast_while_they_run():
    """Others of the same loop are not, whatever they wait for."""
    seen = []

    @ours()
    async def inside():
        for _ in range(3):
            seen.append(("inside", now()))
            await asyncio.sleep(0)
        return now()

    async def outside():
        for _ in range(3):
            seen.append(("outside", now()))
            await asyncio.sleep(0)

    async def run():
        return (await asyncio.gather(inside(), outside(), inside()))[0]

    assert inspect.iscoroutinefunction(inside)
    assert asyncio.run(run()) == OURS and now() == OFF
    assert {found for who, found in seen if who == "inside"} == {OURS}
    assert {found for who, found in seen if who == "outside"} == {OFF}


def test_asynchronous_generators():
    """Values in and out, exceptions, aclose."""
    seen = []

    @ours()
    async def generator():
        try:
            got = yield now()
            await asyncio.sleep(0)
            yield got, now()
        finally:
            await asyncio.sleep(0)
            seen.append(now())

    async def run():
        made = generator()
        assert await made.asend(None) == OURS and now() == OFF
        assert await made.asend(5) == (5, OURS) and now() == OFF
        with pytest.raises(KeyError):
            await made.athrow(KeyError())
        made = generator()
        async for found in made:
            assert found == OURS
            break
        await made.aclose()

    assert inspect.isasyncgenfunction(generator)
    asyncio.run(run())
    assert seen == [OURS, OURS] and now() == OFF


def test_a_cancelled_coroutine_leaves_nothing():
    """The exception is thrown into a step."""

    @ours()
    async def inside():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            assert now() == OURS
            raise

    async def run():
        task = asyncio.ensure_future(inside())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert now() == OFF


# -- threads


def in_thread(function):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def test_threads_do_not_inherit_regions_and_carry_brings_them():
    """Ours and native ones; outside of regions it brings that there are none."""
    with ours():
        assert in_thread(now) == OFF and in_thread(nc.carry(now)) == OURS
    with torch.autocast("cpu", BF):
        assert in_thread(nc.carry(now)) == NATIVE
    carried = nc.carry(now)
    with ours():
        assert carried() == OFF and now() == OURS
    with ours():
        carried = nc.carry(now)
    with torch.autocast("cpu", HALF):
        assert carried() == OURS and now() == (HALF, HALF, FP)
    assert carried() == OURS and now() == OFF


def test_carry_takes_regions_as_they_are():
    """The innermost rules; the weight cache is off where it was off; generators are carried by steps."""
    with ours(), nc.autocast("cpu", HALF, cache_enabled=False):
        carried = nc.carry(lambda: (now()[0], torch.is_autocast_cache_enabled()))
    assert in_thread(carried) == (HALF, False)

    def generator():
        yield now()

    with ours():
        carried = nc.carry(generator)
    assert next(carried()) == OURS and now() == OFF


def test_carried_functions_run_on_many_threads_at_once():
    """One function, one region, as many threads as there are."""
    with ours():
        carried = nc.carry(lambda: [now() for _ in range(20)])
    found = []
    threads = [threading.Thread(target=lambda: found.append(carried()), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[OURS] * 20] * 4


def test_only_functions_are_carried():
    """Anything else is an error that says so."""
    with pytest.raises(RegionError, match="not callable"):
        nc.carry(3)


# -- any nesting

REGIONS = {
    "ours": (ours, OURS),
    "native": (lambda: torch.autocast("cpu", BF), NATIVE),
    "off": (lambda: nc.autocast("cpu", enabled=False), OFF),
}
PROGRAMS = st.recursive(
    st.just(("end",)),
    lambda inner: st.tuples(
        st.sampled_from(["with", "raise", "yield", "await", "thread", "carry", "abandon"]),
        st.sampled_from(list(REGIONS)),
        inner,
    ),
    max_leaves=8,
)


def perform(program, expected):
    """Run it where `expected` holds; whatever it does, that holds after it."""
    if program[0] == "end":
        assert now() == expected
        return
    kind, name, inner = program
    make, holds = REGIONS[name]
    if kind == "with":
        with make():
            perform(inner, holds)
    elif kind == "raise":
        with pytest.raises(KeyError), make():
            perform(inner, holds)
            raise KeyError
    elif kind == "yield":
        region = make() if name != "native" else nc.autocast("cpu", BF)

        @region
        def generator():
            perform(inner, holds)
            yield
            perform(inner, holds)

        for _ in generator():
            assert now() == expected
    elif kind == "abandon":
        region = make() if name != "native" else nc.autocast("cpu", BF)

        @region
        def endless():
            while True:
                yield perform(inner, holds)

        next(endless())
    elif kind == "await":
        region = make() if name != "native" else nc.autocast("cpu", BF)

        @region
        async def coroutine():
            perform(inner, holds)
            await asyncio.sleep(0)
            perform(inner, holds)

        in_thread(lambda: asyncio.run(coroutine()))  # a loop of its own: loops do not nest
    elif kind == "thread":
        in_thread(lambda: perform(inner, OFF))
    else:
        with make():
            carried = nc.carry(lambda: perform(inner, holds))
        carried()
        in_thread(carried)
    assert now() == expected


@settings(max_examples=150, deadline=None)
@given(PROGRAMS)
def test_any_nesting_leaves_the_state_as_it_was(program):
    """Enter, exception, yield, await, thread, abandoned generators, in any order, with native regions between."""
    perform(program, OFF)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("on_thread", [False, True])
def test_autograd_hooks_run_as_eager_autocast_runs_them(inside, on_thread):
    """In the state of whatever calls backward(), on whichever thread; a policy holds there as native lists do."""

    def formats(make, policy=None):
        found = []
        weight = torch.nn.Parameter(torch.ones(4, 4))

        def hook(grad):
            found.append((torch.mm(grad, grad).dtype, torch.nn.functional.gelu(grad.bfloat16()).dtype))

        weight.register_hook(hook)
        region = make("cpu") if policy is None else make("cpu", policy=policy)
        with region:
            loss = torch.mm(torch.ones(2, 4), weight).float().sum()
            if inside:
                run = nc.carry(loss.backward) if on_thread else loss.backward
                _on(on_thread, run)
        if not inside:
            _on(on_thread, loss.backward)
        return found

    expected = formats(torch.autocast)
    assert formats(nc.autocast) == expected
    changed = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"))
    ((product, activation),) = formats(nc.autocast, changed)
    assert product is expected[0][0] and activation is (torch.float32 if inside else torch.bfloat16)


def _on(thread, call):
    if not thread:
        call()
        return
    made = threading.Thread(target=call, daemon=True)
    made.start()
    made.join(60)
