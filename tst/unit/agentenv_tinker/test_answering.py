"""A service that stops answering ends what uses it, even where the SDK holds up the event loop."""

import asyncio
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tinker.lib import internal_client_holder

from agentenv_tinker.answering import answering
from agentenv_tinker.errors import TrainingError

EVERY = 0.05


class Handler(BaseHTTPRequestHandler):
    """Answers with the server's status, or with the next of several."""

    def do_GET(self):
        self.server.asked.append(self.path)
        statuses = self.server.statuses
        self.send_response(statuses[len(self.server.asked) % len(statuses)])
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.statuses = [], [200]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def watched(server, *, tries):
    return answering(f"http://127.0.0.1:{server.server_port}/", "the service", tries=tries, every=EVERY)


async def asked(server, times):
    """Wait until the service was asked so many times."""
    while len(server.asked) < times:
        await asyncio.sleep(0.01)


async def test_a_service_that_answers_is_left_in_peace(server):
    """It is asked for its health alone."""
    async with watched(server, tries=1):
        await asked(server, 3)
    assert set(server.asked) == {"/api/v1/healthz"}


async def test_one_that_refuses_the_asker_answers_too(server):
    """Whoever may not ask knows at least that it is there."""
    server.statuses = [401]
    async with watched(server, tries=1):
        await asked(server, 3)


async def test_the_end_of_its_answers_ends_the_block(server):
    """Whatever the block waits for, and after it has had the time to give back what it holds."""
    given_back = []
    server.statuses = [503]
    with pytest.raises(TrainingError, match=r"^the service has not answered for 0.1 s$"):
        async with watched(server, tries=2):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                given_back.append(True)
    assert given_back == [True]


async def test_an_answer_in_between_starts_the_count_anew(server):
    """Only tries in a row count."""
    server.statuses = [503, 503, 200]
    async with watched(server, tries=3):
        await asked(server, 7)


async def test_a_call_of_the_sdk_that_holds_up_the_event_loop_is_dropped():
    """As that which tells a dead service of the end of a session: nothing on this loop could cancel it."""
    calls = internal_client_holder._internal_client_holder_thread_singleton.get_loop()
    with pytest.raises(TrainingError, match="has not answered"):
        async with answering("http://127.0.0.1:9", "the service", tries=1, every=EVERY):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            for _ in range(2):  # the second is made after the first was dropped
                with contextlib.suppress(BaseException):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(3600), calls).result()
            raise asyncio.CancelledError


async def test_the_blocks_own_errors_stay_what_they_are(server):
    """Of a service that answers."""
    with pytest.raises(KeyError):
        async with watched(server, tries=1):
            raise KeyError("x")
