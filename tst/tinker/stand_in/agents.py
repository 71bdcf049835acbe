"""The agents that a sandbox of these tests runs, each as a process of its own: `python -m stand_in.agents NAME`.

`proxy` is what the framework plays a sandboxed agent through; `no_shell` is one that keeps skills and runs no commands;
`helper` is an agent that isn't played: it writes a note.
"""

import contextlib
import shutil
import sys

from agentenv_protocol import ToolSession
from agentenv_protocol.a2a_agent import (
    MCP_CONFIG_V1,
    AgentConfig,
    AgentEnvAgent,
    AgentIdentity,
    TaskRequest,
    TaskResult,
    a2a_agent,
)
from agentenv_protocol.a2a_agent.proxy import (
    EXTENSIONS,
    IDENTITY,
    SKILLS_DIR,
    ProxyAgent,
    ProxyConfig,
    stopping_actions,
)


@a2a_agent(identity=IDENTITY, config=ProxyConfig, extensions=EXTENSIONS, lifespan=stopping_actions)
class Proxy(ProxyAgent):
    pass


@a2a_agent(identity=IDENTITY, config=ProxyConfig, extensions=EXTENSIONS, lifespan=stopping_actions)
class NoShell(ProxyAgent):
    def __init__(self) -> None:
        super().__init__(shell=False)

    @contextlib.asynccontextmanager
    async def _skill_folder(self, name: str):
        folder = SKILLS_DIR / name
        folder.mkdir(parents=True)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder)
            raise


class HelperConfig(AgentConfig):
    system_prompt: str | None = None


@a2a_agent(
    identity=AgentIdentity(name="helper", description="Writes a note.", version="1.0.0"),
    config=HelperConfig,
    extensions=(MCP_CONFIG_V1,),
)
class Helper(AgentEnvAgent):
    async def run(self, request: TaskRequest[HelperConfig]) -> TaskResult:
        [server] = request.mcp_servers.values()
        async with ToolSession(mcp_url=server["url"], headers=server.get("headers")) as session:
            await session.call_tool("note", {"text": "helped"})
        return TaskResult.text("helped")


AGENTS: dict[str, type[AgentEnvAgent]] = {"proxy": Proxy, "no_shell": NoShell, "helper": Helper}

if __name__ == "__main__":
    AGENTS[sys.argv[1]]().serve(host="127.0.0.1", log_level="critical")
