"""A sandbox provider of the framework that needs no Docker: `[sandbox.providers.in_process]`.

What deploys, runs and tears down on it is the framework's own code. An env's container is a thread of this process,
which serves the env of its ENVIRONMENT_NAME (servers.py); an agent's is a process with a home of its own (agents.py).
Killing one, as a crash would, closes its port and its open connections.
"""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
import threading
import uuid
from typing import Any

import uvicorn
from agent_env.providers.sandbox_providers.sandbox import Sandbox
from agent_env.providers.sandbox_providers.sandbox_provider import Accepts, SandboxNotFoundError, SandboxProvider

from stand_in.servers import SERVERS

LIVE: dict[str, "InProcessSandbox"] = {}
"""The sandboxes that are up, by id."""
LIFETIMES: list[int] = []
"""The seconds that each sandbox so far was asked to last."""


class InProcessSandbox(Sandbox):
    type = "in_process"
    mode = "container"
    vnc_url = None

    def __init__(self, port: int) -> None:
        self.sandbox_id = f"in-process-{uuid.uuid4().hex[:12]}"
        self.tunnel_urls = {}
        self._port = port

    def _up(self, port: int) -> None:
        self.tunnel_urls = {self._port: f"http://127.0.0.1:{port}"}
        LIVE[self.sandbox_id] = self

    def die(self) -> None:
        """Stop as a killed container does: at once, with every connection closed and nothing said."""
        raise NotImplementedError


class EnvSandbox(InProcessSandbox):
    def __init__(self, name: str, port: int) -> None:
        super().__init__(port)
        self.server = SERVERS[name]()
        self.server.sandbox = self
        app = self.server.create_app().streamable_http_app()
        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, name=self.sandbox_id, daemon=True)

    async def start(self) -> None:
        self._thread.start()
        async with asyncio.timeout(20):
            while not self._server.started:  # noqa: ASYNC110 - it is started in a thread of another loop
                await asyncio.sleep(0.005)
        [server] = self._server.servers
        self._loop = server.get_loop()
        self._up(server.sockets[0].getsockname()[1])

    def die(self) -> None:
        # In the thread of the server's own loop: closing it from here races with what it does, and may raise.
        asyncio.run_coroutine_threadsafe(self._die(), self._loop).result(10)

    async def _die(self) -> None:
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._server.force_exit = self._server.should_exit = True

    async def terminate(self) -> None:
        LIVE.pop(self.sandbox_id, None)
        self._server.force_exit = self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, 10)


class AgentSandbox(InProcessSandbox):
    async def start(self, name: str, env: dict[str, str]) -> None:
        self._home = tempfile.mkdtemp(prefix="stand-in-agent-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = {**env, "HOME": self._home, "A2A_PORT": str(port), "PYTHONPATH": os.environ["PYTHONPATH"]}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "stand_in.agents", name, cwd=self._home, env={"PATH": os.environ["PATH"], **own}
        )
        self._up(port)

    def die(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def terminate(self) -> None:
        LIVE.pop(self.sandbox_id, None)
        self.die()
        await self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)


class InProcessProvider(SandboxProvider):
    CONTAINER_ACCEPTS = Accepts.NAME_OR_CONTEXT

    async def create_sandbox(self, *, image_name: str, port: int, env: dict[str, str], **options: Any) -> Sandbox:
        LIFETIMES.append(options["timeout"])
        if "ENVIRONMENT_NAME" in env:
            server = EnvSandbox(env["ENVIRONMENT_NAME"], port)
            await server.start()
            return server
        agent = AgentSandbox(port)
        await agent.start(env.get("STAND_IN_AGENT", "proxy"), env)
        return agent

    async def get_sandbox(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in LIVE:
            raise SandboxNotFoundError(sandbox_id)
        return LIVE[sandbox_id]
