"""The worker: order, fairness, and what happens when work fails or the thread dies."""

import queue
from collections.abc import Generator

import pytest

from tinker_local.errors import InvalidRequestError, ServiceError, WorkerDiedError
from tinker_local.operations import (
    Finished,
    ForwardBackward,
    ModelUnloaded,
    Result,
    Sample,
    SampleOutput,
    SamplingParams,
    UnloadModel,
)
from tinker_local.worker import Worker


class FakeBackend:
    """A backend whose passes take three pieces and whose samples take three steps; it writes down what it did."""

    def __init__(self, failing: dict[str, BaseException] | None = None) -> None:
        self.done: list[str] = []
        self.failing = failing or {}
        self.samples: dict[str, int] = {}

    @property
    def sampling(self) -> bool:
        return bool(self.samples)

    def run(self, operation) -> Generator[None, None, Result]:
        pieces = 3 if isinstance(operation, ForwardBackward) else 1
        for piece in range(pieces):
            self.done.append(f"{operation.model_id}{piece}")
            if operation.model_id in self.failing:
                raise self.failing[operation.model_id]
            if piece < pieces - 1:
                yield
        return ModelUnloaded(operation.model_id)

    def sample(self, ticket: str, request: Sample) -> None:
        if ticket in self.failing:
            raise self.failing[ticket]
        self.samples[ticket] = 3

    def cancel(self, ticket: str) -> None:
        self.samples.pop(ticket, None)

    def step(self) -> list[Finished]:
        self.done.append("step")
        self.samples = {ticket: left - 1 for ticket, left in self.samples.items()}
        finished = [ticket for ticket, left in self.samples.items() if not left]
        for ticket in finished:
            del self.samples[ticket]
        return [Finished(ticket, SampleOutput(())) for ticket in finished]


class Running:
    """A worker on a fake backend, whose outcomes are waited for in the order they come."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.outcomes: queue.Queue = queue.Queue()
        self.deaths: queue.Queue = queue.Queue()
        self.worker = Worker(backend, lambda *outcome: self.outcomes.put(outcome), self.deaths.put)

    def next(self) -> tuple[str, Result | ServiceError]:
        return self.outcomes.get(timeout=10)


def passed(model_id: str) -> ForwardBackward:
    return ForwardBackward(model_id, (), "cross_entropy", {}, forward_only=False)


def asked() -> Sample:
    return Sample("s", None, 1, SamplingParams())


@pytest.fixture
def running():
    instance = Running(FakeBackend())
    yield instance
    assert instance.worker.stop(timeout=10)


def test_operations_of_one_run_keep_their_order(running):
    """The second pass of a run starts when the first is through."""
    for ticket in ("1", "2"):
        running.worker.submit(ticket, passed("a"))
    running.worker.start()
    assert [running.next()[0] for _ in range(2)] == ["1", "2"]
    assert running.backend.done == ["a0", "a1", "a2", "a0", "a1", "a2"]


def test_runs_take_turns(running):
    """A long pass of one run does not hold up another run's short operation."""
    running.worker.submit("long", passed("a"))
    running.worker.submit("short", UnloadModel("b"))
    running.worker.start()
    assert [running.next()[0] for _ in range(2)] == ["short", "long"]
    assert running.backend.done == ["a0", "b0", "a1", "a2"]


def test_sampling_goes_on_beside_training(running):
    """Steps of sampling come between the pieces of a pass."""
    running.worker.submit("pass", passed("a"))
    running.worker.submit("sample", asked())
    running.worker.start()
    assert {running.next()[0] for _ in range(2)} == {"pass", "sample"}
    done = running.backend.done
    assert sorted(done) == ["a0", "a1", "a2", "step", "step", "step"]
    assert done.index("step") < done.index("a2")


def test_a_failed_operation_is_its_own_outcome_only():
    """An error of one run is delivered to it, and the next run's operation is carried out."""
    running = Running(FakeBackend({"a": InvalidRequestError("no"), "b": RuntimeError("out of memory")}))
    for ticket in ("a", "b", "c"):
        running.worker.submit(ticket, UnloadModel(ticket))
    running.worker.start()
    outcomes = dict(running.next() for _ in range(3))
    assert (str(outcomes["a"]), outcomes["a"].category) == ("no", "user")
    assert str(outcomes["b"]) == "UnloadModel failed: RuntimeError: out of memory"
    assert outcomes["b"].category == "server"
    assert outcomes["c"] == ModelUnloaded("c")
    running.worker.stop(timeout=10)


def test_a_refused_sample_is_delivered():
    """A sample that the backend does not take in fails at once."""
    running = Running(FakeBackend({"t": InvalidRequestError("empty")}))
    running.worker.submit("t", asked())
    running.worker.start()
    ticket, error = running.next()
    assert (ticket, str(error)) == ("t", "empty")
    running.worker.stop(timeout=10)


def test_a_cancelled_sample_is_dropped(running):
    """A cancel that arrives behind its request leaves nothing to do."""
    running.worker.submit("t", asked())
    running.worker.cancel("t")
    running.worker.submit("u", UnloadModel("u"))
    running.worker.start()
    assert running.next()[0] == "u"
    assert running.backend.done == ["u0"]


def test_a_death_is_told_and_nothing_is_taken_in_after_it():
    """What kills the thread reaches whoever watches, and later submissions."""
    running = Running(FakeBackend({"a": SystemError("broken")}))
    running.worker.submit("t", UnloadModel("a"))
    running.worker.start()
    death = running.deaths.get(timeout=10)
    assert str(death) == "the service's worker died of SystemError: broken; restart the service"
    with pytest.raises(WorkerDiedError, match="died of SystemError"):
        running.worker.submit("u", UnloadModel("b"))
