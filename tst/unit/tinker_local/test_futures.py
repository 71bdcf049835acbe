"""Futures: waiting for outcomes, once, for a bounded time."""

import asyncio

import pytest

from tinker_local.errors import ServiceError
from tinker_local.futures import Futures
from tinker_local.operations import ModelUnloaded


async def test_a_waiter_gets_the_outcome_when_it_comes():
    """Waiting ends with the outcome, also for several waiters."""
    futures = Futures()
    futures.open("t")
    waiters = [asyncio.create_task(futures.wait("t", seconds=10)) for _ in range(2)]
    await asyncio.sleep(0)
    futures.finish("t", ModelUnloaded("m"))
    assert await asyncio.gather(*waiters) == [ModelUnloaded("m")] * 2


async def test_waiting_is_bounded():
    """Without an outcome waiting ends with None and can be tried again."""
    futures = Futures()
    futures.open("t")
    assert await futures.wait("t", seconds=0) is None
    assert "t" in futures


async def test_the_first_outcome_counts():
    """A ticket keeps the outcome it got first."""
    futures = Futures()
    futures.open("t")
    futures.finish("t", ModelUnloaded("first"))
    futures.finish("t", ModelUnloaded("second"))
    assert await futures.wait("t", seconds=0) == ModelUnloaded("first")


async def test_an_unknown_ticket_is_a_key_error():
    """A ticket that was never given has no outcome to wait for."""
    with pytest.raises(KeyError):
        await Futures().wait("t", seconds=0)


async def test_all_open_tickets_can_be_failed():
    """When nothing can run any more, every waiter is told."""
    futures = Futures()
    futures.open("a")
    futures.open("b")
    futures.finish("a", ModelUnloaded("m"))
    error = ServiceError("gone")
    futures.fail_all(error)
    assert await futures.wait("b", seconds=0) is error
    assert await futures.wait("a", seconds=0) == ModelUnloaded("m")
    assert futures.open_count == 0
