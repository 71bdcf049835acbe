"""Serves the application on a socket: in the foreground of a command, or behind a context manager."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from tinker_local.app import make_app
from tinker_local.errors import StartupError
from tinker_local.service import Service

_STOP_SECONDS = 3.0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; port 0 takes a free one.

    Raises StartupError if the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StartupError(f"can't listen on {host}:{port}: {reason} (--port 0 takes a free port)") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the address at which a socket's server is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its owner and says when it answers."""

    def __init__(self, service: Service, started: Callable[[], None]) -> None:
        config = uvicorn.Config(
            make_app(service), log_level="critical", access_log=False, timeout_graceful_shutdown=1, lifespan="on"
        )
        super().__init__(config)
        self._service = service
        self._announce = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()


async def serve(
    service: Service, bound: socket.socket, *, started: Callable[[], None], stop: Callable[[Callable[[], object]], None]
) -> bool:
    """Serve until stopped, and tell whether the worker stopped in time.

    `started` is called once the service answers. `stop` is called before that, with a function that stops the service
    and can be called from the event loop's thread or any other.
    """
    server = _Server(service, started)

    def end() -> None:
        server.should_exit = True
        service.release()

    loop = asyncio.get_running_loop()
    stop(lambda: loop.call_soon_threadsafe(end))
    await server.serve(sockets=[bound])
    return await asyncio.to_thread(service.stop, timeout=_STOP_SECONDS)


@contextmanager
def running(service: Service, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve from a thread while the context lasts, and give the service's URL."""
    bound = bind(host, port)
    ready = threading.Event()
    stops: list[Callable[[], object]] = []

    def live() -> None:
        asyncio.run(serve(service, bound, started=ready.set, stop=stops.append))

    thread = threading.Thread(target=live, name="tinker_local server", daemon=True)
    thread.start()
    try:
        if not ready.wait(30):
            raise StartupError("the service did not answer within 30 seconds")
        yield url_of(bound)
    finally:
        for stop in stops:
            stop()
        thread.join(10)
