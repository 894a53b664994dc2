"""`nc.check_training` leaves the variables that a step assigns as it found them, wherever they are."""

import importlib
import itertools
import random
import textwrap
from array import array
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import narrowcast as nc

NUMBER = 0
TRACE = {"last": None}


def parts():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 1e-2), torch.arange(8.0).view(2, 4) / 8


def trained(model, optimizer, x):
    optimizer.zero_grad()
    with nc.autocast("cpu", "bf16"):
        y = model(x)
    loss = y.float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def of_cells():
    """Numbers, a tensor that is bound again, and what containers hold."""
    (model, optimizer, x), number, state, seen = (
        parts(),
        0,
        torch.zeros(2),
        {"step": 0, "kept": deque([1.0, 2.0], maxlen=2)},
    )

    def step():
        nonlocal number, state
        number += 1
        seen["step"] += 1
        seen["kept"].append(number)
        state = state + 1
        return trained(model, optimizer, x * number)

    return step, lambda: (number, state.tolist(), seen["step"], list(seen["kept"]))


def of_a_function_inside():
    """The step calls another function, whose variables these are."""
    (model, optimizer, x), number = parts(), 0

    def count():
        nonlocal number
        number += 1
        return number

    return lambda: trained(model, optimizer, x * count()), lambda: number


def of_globals():
    """Those of the file."""
    model, optimizer, x = parts()

    def step():
        global NUMBER
        NUMBER += 1
        TRACE["last"] = NUMBER
        return trained(model, optimizer, x)

    return step, lambda: (NUMBER, TRACE["last"])


def of_numpy():
    """A replay buffer in an array, written in place, and generators of their own."""
    (model, optimizer, x), rewards = parts(), np.zeros(8)
    draw = {"numpy": np.random.default_rng(0), "old": np.random.RandomState(0), "python": random.Random(0)}

    def step():
        rewards[int(draw["numpy"].integers(8))] += draw["old"].rand() + draw["python"].random()
        return trained(model, optimizer, x * (1 + float(rewards.sum())))

    def now():
        old, python = draw["old"].get_state(), draw["python"].getstate()
        return rewards.tolist(), draw["numpy"].bit_generator.state, old[2], old[1].tolist(), python

    return step, now


class Trainer:
    """What a trainer counts, and a part of it that counts, too."""

    def __init__(self):
        self.parts, self.number, self.hooks = parts(), 0, [Meter()]

    def step(self, factor=1.0):
        self.number += 1
        loss = trained(*self.parts[:2], self.parts[2] * factor)
        for hook in self.hooks:
            hook.add(float(loss))
        return loss


class Meter:
    def __init__(self):
        self.sum, self.values = 0.0, [0.0, 0.0]

    def add(self, value):
        self.sum += value
        self.last = value
        self.values[int(self.sum) % 2] = value


def of_an_object(bound=lambda trainer: trainer.step):
    trainer = Trainer()
    meter = trainer.hooks[0]
    return bound(trainer), lambda: (trainer.number, meter.sum, list(meter.values), hasattr(meter, "last"))


class Slotted:
    """What a class counts, and an object without a dictionary."""

    __slots__ = ("number",)
    made = 0

    def __init__(self):
        self.number = 0

    def add(self):
        self.number += 1
        Slotted.made += 1
        return self.number


def of_other_kinds():
    """Namespaces, a set, arrays of Python; slots, attributes of a class; a dict that only a hook names."""
    (model, optimizer, x), slotted, counts = parts(), Slotted(), {"steps": 0, "calls": 0}
    asked, seen, numbers, flags = SimpleNamespace(step=0), {0}, array("d", [0.0]), bytearray(2)
    optimizer.register_step_post_hook(lambda *_: counts.update(steps=counts["steps"] + 1))
    model.register_forward_hook(lambda *_: counts.update(calls=counts["calls"] + 1))

    def step():
        asked.step += 1
        seen.add(asked.step)
        numbers[0] += 1
        flags[0] += 1
        return trained(model, optimizer, x * slotted.add())

    return step, lambda: (asked.step, set(seen), numbers[0], flags[0], slotted.number, Slotted.made, *counts.values())


CASES = {
    "other kinds": of_other_kinds,
    "cells": of_cells,
    "a function inside": of_a_function_inside,
    "globals": of_globals,
    "numpy": of_numpy,
    "a method": of_an_object,
    "a partial": lambda: of_an_object(lambda trainer: partial(trainer.step, 2.0)),
    "a lambda": lambda: of_an_object(lambda trainer: lambda: trainer.step(2.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_variables_that_a_step_assigns_are_as_before(name):
    """And so two steps after the check give what two steps without it give."""
    step, now = CASES[name]()
    before = now()
    assert nc.check_training(step)
    assert now() == before
    after = [float(step()), float(step())]
    assert now() != before
    other, _ = CASES[name]()
    assert [float(other()), float(other())] == after


def test_they_are_restored_where_a_step_raises():
    """In its second round."""
    (model, optimizer, x), number = parts(), 0

    def step():
        nonlocal number
        number += 1
        trained(model, optimizer, x)
        if number == 2:
            raise KeyError("two")

    with pytest.raises(KeyError, match="two"):
        nc.check_training(step)
    assert number == 0


def test_an_iterator_goes_on_where_it_was_left():
    """What has been taken from it cannot be put back; nothing fails."""
    (model, optimizer, x), numbers = parts(), itertools.count(1)
    assert nc.check_training(lambda: trained(model, optimizer, x * next(numbers)))
    assert next(numbers) == 3


def test_what_a_step_adds_to_a_list_or_a_dict_stays_there():
    """A log of what has run: nothing that was there is lost. A buffer of which a step draws is what it was."""
    parts_of, seen, by_number, replayed, growing = parts(), [], {}, deque([1.0], maxlen=3), deque([2.0])

    def step():
        by_number[len(seen)] = True
        seen.append(trained(*parts_of))
        replayed.append(float(len(seen)))
        growing.appendleft(float(len(seen)))

    assert nc.check_training(step, steps=4)
    assert len(seen) == 4 and list(by_number) == [0, 1, 2, 3]
    assert list(replayed) == [1.0] and list(growing) == [2.0]


class Momentum:
    """An optimizer of one's own, whose states begin with its first step."""

    def __init__(self, model):
        self.parameters, self.means, self.seen = list(model.parameters()), {}, []

    @torch.no_grad()
    def step(self):
        for n, p in enumerate(self.parameters):
            self.means[n] = 0.9 * self.means[n] + p.grad if n in self.means else p.grad.clone()
            p -= 0.1 * self.means[n]
        self.seen.append(len(self.seen))


def test_states_that_begin_in_a_step_are_removed():
    """Of an object all that it holds, of a plain dict what has tensors: the next step begins without them."""
    model, x = nn.Linear(4, 1), torch.arange(8.0).view(2, 4) / 8
    own, averages = Momentum(model), {"weight": None}
    state = (model, own, {"step": 0})

    def step():
        model, optimizer, clock = state
        model.zero_grad()
        with nc.autocast("cpu", "bf16"):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        clock["step"] += 1
        averages["bias"] = [model.bias.detach().clone()]
        averages["steps"] = clock["step"]
        return loss.detach()

    before = [p.detach().clone() for p in model.parameters()]
    assert nc.check_training(step, steps=2)
    assert all(map(torch.equal, before, model.parameters()))
    assert state[2] == {"step": 0} and own.means == {} and own.seen == []
    assert averages == {"weight": None, "steps": 2}


def test_objects_and_functions_of_other_files_of_the_project_are_as_before(tmp_path, monkeypatch):
    """A trainer that is imported counts its steps, and a function of its file binds a variable of that."""
    source = """
        COUNT = 0

        def count():
            global COUNT
            COUNT += 1

        class Trainer:
            def __init__(self, step):
                self.inner, self.number, self.last = step, 0, None

            def step(self):
                self.number += 1
                self.last = self.inner()
                return self.last
    """
    (tmp_path / "own_trainer.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_trainer")
    inner = parts()
    trainer = own.Trainer(lambda: trained(*inner))

    def step():
        own.count()
        return trainer.step()

    assert nc.check_training(step, steps=2)
    assert (trainer.number, trainer.last, own.COUNT) == (0, None, 0)


def test_a_state_among_the_arguments_is_as_before():
    """Of a tuple, a dict."""
    model, optimizer, x = parts()
    clock = {"step": 0}

    def step(state, x):
        *rest, clock = state
        clock["step"] += 1
        return trained(*rest, x)

    assert nc.check_training(step, ((model, optimizer, clock), x), steps=2)
    assert clock == {"step": 0}
