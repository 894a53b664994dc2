"""A region around a function, also around one that runs in steps: generators, coroutines, asynchronous generators.

The region holds while a step runs and not between steps, so what runs meanwhile, on the same thread, never sees it, and
nothing is left behind by a generator that is not finished. (torch.autocast leaves such functions uncast, silently.)
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

Region = Callable[[], AbstractContextManager[Any]]


def run_inside(function: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """Return the function, whose body runs inside what `region()` opens; of the same kind as it was."""
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, region)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _awaited(function(*args, **kwargs), region)

        return coroutine
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from run_in_steps(function(*args, **kwargs), region))

        return generator

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with region():
            return function(*args, **kwargs)

    return plain


def runs_in_steps(function: Callable[..., Any]) -> bool:
    """Return whether a function is a generator, a coroutine or an asynchronous generator."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_one(function) for is_one in kinds)


def _async_generator(function: Callable[..., Any], region: Region) -> Callable[..., Any]:
    @functools.wraps(function)
    async def async_generator(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        value, raised = None, None
        while True:
            step = inner.asend(value) if raised is None else inner.athrow(raised)
            try:
                item = await _awaited(step, region)
            except StopAsyncIteration:
                return
            value, raised = None, None
            try:
                value = yield item
            except GeneratorExit:
                await _awaited(inner.aclose(), region)
                raise
            except BaseException as error:
                raised = error

    return async_generator


def run_in_steps(inner: Any, region: Region) -> Generator[Any, Any, Any]:
    """Drive a generator or a coroutine: what is sent and thrown goes in, what it gives comes out (PEP 380)."""
    value: Any = None
    raised: BaseException | None = None
    while True:
        with region():
            try:
                item = inner.send(value) if raised is None else inner.throw(raised)
            except StopIteration as stop:
                return stop.value
        value, raised = None, None
        try:
            value = yield item
        except GeneratorExit:
            with region():
                inner.close()
            raise
        except BaseException as error:
            raised = error


_awaited = types.coroutine(run_in_steps)  # the same, for `await`
