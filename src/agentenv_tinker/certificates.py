"""Loads the trusted certificates once for all HTTP clients of an episode, in place of once a client.

The framework makes a dozen httpx clients an episode, and each parses the whole certificate file, for 25 ms: with no
container to wait for, that is most of what an episode costs. Only clients made within `loaded_once` share a context.
"""

from __future__ import annotations

import functools
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx

transports: Any = httpx._transports.default
_sharing: ContextVar[bool] = ContextVar("_sharing", default=False)
_create: Callable[..., ssl.SSLContext] = transports.create_ssl_context
_lock = threading.Lock()


@contextmanager
def loaded_once() -> Iterator[None]:
    """Have the block's httpx clients, and those of the tasks that it starts, share one TLS context."""
    with _lock:
        if transports.create_ssl_context is not _shared:
            transports.create_ssl_context = _shared
    token = _sharing.set(True)
    try:
        yield
    finally:
        _sharing.reset(token)


def _shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is not True or cert is not None or not _sharing.get():
        return _create(verify=verify, cert=cert, trust_env=trust_env)
    return _context(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _context(trust_env: bool, file: str | None, folder: str | None) -> ssl.SSLContext:
    """One for each place that httpx would load them from."""
    return _create(verify=True, trust_env=trust_env)
