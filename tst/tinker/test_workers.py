"""Groups played in other processes: the same rewards, a worker that dies, and one that is stopped."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from stand_in.model import register
from test_training import bundle, filed, rewards, stand_in_service, trained  # noqa: F401

from agentenv_tinker.errors import EpisodeFailedError
from agentenv_tinker.workers import TRIES, RayWorkers, WorkerPool


@pytest.fixture
def pool():
    workers = WorkerPool(2)
    yield workers
    workers.shutdown(cancel_futures=True)


def die_once(mark: Path) -> str:
    """Die, unless it was done before."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "played"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise EpisodeFailedError("the verifier broke")


def wait_for_ever(begun: Path, ended: Path) -> None:
    begun.touch()
    try:
        asyncio.run(asyncio.sleep(600))
    finally:
        ended.touch()


def test_the_group_of_a_worker_that_dies_is_played_by_another(pool, tmp_path):
    """It is played anew, and nothing else is lost."""
    others = [pool.submit(abs, -n) for n in range(4)]

    assert pool.submit(die_once, tmp_path / "mark").result(60) == "played"
    assert [other.result(60) for other in others] == [0, 1, 2, 3]


def test_a_group_that_kills_every_worker_fails(pool):
    """It is an error of that group, and the workers go on."""
    with pytest.raises(EpisodeFailedError, match=rf"rollout worker \d+ died, at try {TRIES} of {TRIES}"):
        pool.submit(die).result(120)
    assert pool.submit(abs, -1).result(60) == 1


def test_a_failed_group_says_why_it_failed_there(pool):
    """The error of a worker is that of the group, with where it came from."""
    with pytest.raises(EpisodeFailedError, match="the verifier broke") as failed:
        pool.submit(fail).result(60)
    assert "in fail" in failed.value.__notes__[0]


def test_stopping_tears_down_what_is_played(tmp_path):
    """What a worker plays is cancelled, not killed, and what waits is dropped."""
    pool = WorkerPool(1)
    playing = pool.submit(wait_for_ever, tmp_path / "begun", tmp_path / "ended")
    waiting = pool.submit(abs, -1)
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert not playing.done()
        assert time.monotonic() < until
        time.sleep(0.05)
    pool.shutdown(cancel_futures=True)

    assert (tmp_path / "ended").exists()
    assert playing.done()
    assert waiting.cancelled()


class StandInPool(WorkerPool):
    """Workers that know the stand-in renderer and tokenizer."""

    def submit(self, fn, /, *args, **kwargs):
        return super().submit(registered, fn, *args, **kwargs)


def registered(fn, *args, **kwargs):
    register()
    return fn(*args, **kwargs)


async def test_workers_train_on_the_same_rewards(bundle, tmp_path):  # noqa: F811
    """Each prepares the bundle itself, and files what it plays under the right step."""
    await trained(bundle, tmp_path / "here", "ours-here")
    await trained(bundle, tmp_path / "workers", "ours-workers", executor=StandInPool(2))

    assert rewards(tmp_path / "workers") == rewards(tmp_path / "here")
    assert filed("ours-workers") == filed("ours-here")


@pytest.fixture(scope="module")
def ray():
    workers = RayWorkers("local")
    yield workers
    workers.shutdown()


def test_a_ray_cluster_plays_groups_and_plays_those_of_a_dead_worker_anew(ray, tmp_path):
    """As the processes of this machine do, and an error is the group's own."""
    assert ray.submit(abs, -1).result(300) == 1
    assert ray.submit(die_once, tmp_path / "mark").result(300) == "played"
    with pytest.raises(EpisodeFailedError, match="the verifier broke"):
        ray.submit(fail).result(300)
