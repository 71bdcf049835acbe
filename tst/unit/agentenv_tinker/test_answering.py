"""A service that stops answering ends what uses it, even where the SDK holds up the event loop."""

import asyncio
import contextlib
import threading
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tinker.lib import internal_client_holder

from agentenv_tinker.answering import answering
from agentenv_tinker.errors import TrainingError

EVERY = 0.05
PATH = "/api/v1/healthz"


class Handler(BaseHTTPRequestHandler):
    """Answers with the server's statuses in turn."""

    def do_GET(self):
        statuses, times = self.server.statuses, len(self.server.paths)
        self.server.paths.append(self.path)
        self.send_response(statuses[times % len(statuses)])
        self.end_headers()
        self.server.asked.release()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.paths, server.statuses, server.asked = [], [200], threading.Semaphore(0)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def watched(server, *, tries):
    return answering(f"http://127.0.0.1:{server.server_port}/", "the service", tries=tries, every=EVERY)


async def asked(server, times):
    """Wait until the service was asked so many times."""
    for _ in range(times):
        await asyncio.to_thread(server.asked.acquire)


async def never(given_back):
    """Wait without end, and give something back."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        given_back.append(True)


async def within(block, work):
    async with block:
        await work


@pytest.mark.parametrize("status", [200, 401])
async def test_a_service_that_answers_is_left_in_peace(server, status):
    """It is asked for its health alone, and may refuse that."""
    server.statuses = [status]
    await within(watched(server, tries=1), asked(server, 3))
    assert set(server.paths) == {PATH}


async def test_the_end_of_its_answers_ends_the_block(server):
    """Whatever the block waits for, and after it has had the time to give back what it holds."""
    server.statuses, given_back = [503], []
    with pytest.raises(TrainingError, match=r"^the service has not answered for 0.1 s$"):
        await within(watched(server, tries=2), never(given_back))
    assert given_back == [True]


async def test_an_answer_in_between_starts_the_count_anew(server):
    """Only tries in a row count."""
    server.statuses = [503, 503, 200]
    await within(watched(server, tries=3), asked(server, 7))


async def test_a_call_of_the_sdk_that_holds_up_the_event_loop_is_dropped():
    """As that which tells a dead service of the end of a session: nothing on this loop could cancel it."""
    calls = internal_client_holder._internal_client_holder_thread_singleton.get_loop()

    async def held_up():
        for _ in range(2):  # the second is made once the first was dropped
            with contextlib.suppress(CancelledError):
                asyncio.run_coroutine_threadsafe(asyncio.sleep(3600), calls).result()
        await asyncio.Event().wait()

    with pytest.raises(TrainingError, match="has not answered"):
        await within(answering("http://127.0.0.1:9", "the service", tries=1, every=EVERY), held_up())


async def test_the_blocks_own_errors_stay_what_they_are(server):
    """Of a service that answers."""

    async def failing():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await within(watched(server, tries=1), failing())
