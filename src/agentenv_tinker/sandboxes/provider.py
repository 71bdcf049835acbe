"""The framework's sandbox provider `pool`: env servers from the warm pool, everything else as the provider `local`.

It subclasses the framework's own local provider, since steps treat what it makes as containers on this machine.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from agent_env.providers.sandbox_providers import local_sandbox as local
from agent_env.providers.sandbox_providers.local_sandbox import LocalSandbox, LocalSandboxProvider
from agent_env.providers.sandbox_providers.sandbox import NetworkPolicy
from agent_env.providers.sandbox_providers.sandbox_provider import (
    SANDBOX_MODE_CONTAINER,
    SandboxNotFoundError,
    refuse_unenforceable_policy,
)

from agentenv_tinker.errors import ConfigError
from agentenv_tinker.sandboxes import verdicts
from agentenv_tinker.sandboxes.host import PREFIX, Host, Spec
from agentenv_tinker.sandboxes.limits import given_limits
from agentenv_tinker.sandboxes.pool import Pool
from agentenv_tinker.sandboxes.shelf import Lease

_pool: Pool | None = None
_making = threading.Lock()


def the_pool() -> Pool:
    """This process's pool, made at its first use; RECYCLE=0 in the environment has it use no container twice.

    Blocks. Raises SandboxError or ConfigError.
    """
    global _pool
    with _making:
        if _pool is None or _pool.closed or not _pool.here:
            _pool = Pool(Host(free_port=local._free_host_port, limits=given_limits()), recycle=_recycles())
            verdicts.listen(_pool.tell)
        return _pool


def _recycles() -> bool:
    value = os.environ.get("RECYCLE", "1")
    if value not in ("0", "1"):
        raise ConfigError(f"RECYCLE must be 0 or 1, not {value!r}")
    return value == "1"


class PooledSandbox(LocalSandbox):
    """A container of the pool's, for as long as one episode has it."""

    type = "pool"

    def __init__(self, pool: Pool, lease: Lease) -> None:
        container, port = lease.warm.container, lease.shelf.spec.port
        super().__init__(
            sandbox_id=lease.id,
            port_map={port: container.host_port},
            # made by who writes there, which steps on a server hardly ever do
            work_dir=local._local_sandbox_root_path() / f"agent-env-{lease.id}-work",
        )
        self.mode = SANDBOX_MODE_CONTAINER
        self.network_policy = NetworkPolicy()
        self._pool = pool
        self._container = container.name

    @property
    def container_name(self) -> str:
        return self._container

    @property
    def owns_container(self) -> bool:
        return True

    async def terminate(self) -> None:
        """Give the container back. It is seen to in the background."""
        self._pool.give_back(self.sandbox_id)


class PoolSandboxProvider(LocalSandboxProvider):
    """Selected by `sandbox="pool"`."""

    async def create_container(
        self,
        *,
        image_name: str,
        port: int,
        env: dict[str, str],
        network_policy: NetworkPolicy | None = None,
        **options: Any,
    ) -> LocalSandbox:
        """A container from the pool where it is to serve an env, and else a new one."""
        if "ENVIRONMENT_NAME" not in env:
            made = await super().create_container(
                image_name=image_name, port=port, env=env, network_policy=network_policy, **options
            )
            return _ours(made)
        refuse_unenforceable_policy(self, network_policy)
        pool, spec = await asyncio.to_thread(lambda: (the_pool(), _spec(image_name, port, env)))
        return PooledSandbox(pool, await pool.take(spec))

    async def create_vm(self, **options: Any) -> LocalSandbox:
        """As the local provider does: a gateway's containers are not pooled."""
        return _ours(await super().create_vm(**options))

    async def get_sandbox(self, sandbox_id: str) -> LocalSandbox:
        """The sandbox of that id. Raises SandboxNotFoundError for a pool's that is no episode's any more."""
        if not sandbox_id.startswith(PREFIX):
            return _ours(await super().get_sandbox(sandbox_id))
        lease = _pool.held(sandbox_id) if _pool is not None else None
        if _pool is None or lease is None:
            raise SandboxNotFoundError(f"no episode of this process has sandbox {sandbox_id!r}")
        return PooledSandbox(_pool, lease)


def _ours(sandbox: LocalSandbox) -> LocalSandbox:
    """A local sandbox under this provider's name, by which records find the provider again."""
    sandbox.type = "pool"
    return sandbox


def _spec(image_name: str, port: int, env: dict[str, str]) -> Spec:
    """What the local provider would run."""
    trust = local.local_grant_trust()
    trusted = {**local.LOCAL_TRUST_ENV, **env} if trust is not None else env
    return Spec(
        image=image_name,
        port=port,
        env=tuple(sorted(trusted.items())),
        extra_hosts=tuple(tuple(entry.split(":", 1)) for entry in local._EXTRA_HOSTS),  # type: ignore[misc]
        host_ips=local._host_ips(),
        trust=trust,
        trust_at=local.LOCAL_TRUST_DIR,
    )
