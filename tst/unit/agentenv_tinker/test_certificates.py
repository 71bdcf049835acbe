"""The clients of an episode share the certificates that they trust, and no other client is touched."""

import asyncio
import ssl

import httpx

from agentenv_tinker.certificates import loaded_once


def context_of(**options) -> ssl.SSLContext:
    """The TLS context of a new client."""
    with httpx.Client(**options) as client:
        return client._transport._pool._ssl_context


def test_clients_of_the_block_share_one_context_that_verifies():
    """They do in every block, and it checks names and certificates as httpx's own does."""
    with loaded_once():
        first = context_of()
    with loaded_once():
        second = context_of()
    assert first is second
    assert (first.verify_mode, first.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_a_client_outside_or_with_other_wishes_has_its_own():
    """Outside the block, or with verification off, nothing is shared."""
    with loaded_once():
        shared, unverified = context_of(), context_of(verify=False)
    outside = context_of()
    assert len({id(shared), id(unverified), id(outside)}) == 3
    assert (unverified.verify_mode, outside.verify_mode) == (ssl.CERT_NONE, ssl.CERT_REQUIRED)


async def test_tasks_started_in_the_block_share_it_and_their_starter_no_longer_does():
    """A task keeps to its block, after it too."""

    async def later() -> ssl.SSLContext:
        await asyncio.sleep(0)
        return context_of()

    with loaded_once():
        inside = context_of()
        task = asyncio.create_task(later())
    assert await task is inside
    assert context_of() is not inside


def test_other_certificates_in_the_environment_are_loaded(monkeypatch, tmp_path):
    """A change of where the certificates are is heeded."""
    with loaded_once():
        before = context_of()
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        assert context_of() is not before
