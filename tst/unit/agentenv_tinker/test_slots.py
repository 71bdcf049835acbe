"""Slots: who has one, who waits, and who gives way to whom."""

import asyncio

import pytest

from agentenv_tinker.slots import Slots


async def settle():
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_asks_comes_before_who_starts_ahead():
    """Whatever the order in which they came."""
    slots, had = Slots(1), []

    async def wait(name, taking):
        await taking
        had.append(name)

    held = await slots.take()
    waiting = [asyncio.create_task(wait("ahead", slots.take_ahead(lambda: None)))]
    await settle()
    waiting.append(asyncio.create_task(wait("asked", slots.take())))
    await settle()
    held.give_back()
    await settle()
    assert had == ["asked"]
    waiting[0].cancel()


async def test_an_unused_holder_is_told_to_give_way_once_for_each_who_asks():
    """The last one to come goes first, and a claimed one not at all."""
    slots, told = Slots(3), []
    early = [await slots.take_ahead(lambda name=name: told.append(name)) for name in "abc"]
    assert early[2].claim()
    asking = [asyncio.create_task(slots.take()) for _ in range(2)]
    await settle()
    assert told == ["b", "a"]
    assert [early[0].claim(), early[1].claim()] == [False, False]
    for slot in early[:2]:
        slot.give_back()
    await asyncio.gather(*asking)


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_slot_that_comes_to_one_who_is_cancelled_goes_to_the_next(ahead):
    """None is lost."""
    slots = Slots(1)
    held = await slots.take()
    first = asyncio.create_task(slots.take_ahead(lambda: None) if ahead else slots.take())
    second = asyncio.create_task(slots.take())
    await settle()
    if ahead:
        second.cancel()
        await settle()
    held.give_back()
    first.cancel()
    await settle()
    assert first.cancelled()
    free = await asyncio.wait_for(slots.take() if ahead else second, 1)
    free.give_back()
    await asyncio.wait_for(slots.take(), 1)


async def test_no_slot_is_made_or_lost_by_what_gives_way():
    """After any of it, there are as many as there were."""
    slots = Slots(2)
    leaving = []

    def give_way(place):
        leaving.append(asyncio.create_task(vacate(place)))

    async def vacate(place):
        await asyncio.sleep(0)
        early[place].give_back()

    early = [await slots.take_ahead(lambda place=place: give_way(place)) for place in range(2)]
    asked = await asyncio.wait_for(asyncio.gather(slots.take(), slots.take()), 5)
    waiting = asyncio.create_task(slots.take())
    await settle()
    assert not waiting.done()
    for slot in asked:
        slot.give_back()
    await asyncio.wait_for(asyncio.gather(waiting, slots.take()), 5)
    assert len(leaving) == 2
