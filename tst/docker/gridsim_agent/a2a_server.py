"""An agent with no model: it reads the day and submits the schedules that scripts.json lists for that reading."""

import json
from pathlib import Path

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

SCRIPTS = json.loads(Path(__file__).with_name("scripts.json").read_text(encoding="utf-8"))


class ScriptedConfig(AgentConfig):
    system_prompt: str | None = None


@a2a_agent(
    identity=AgentIdentity(name="scripted", description="Submits the schedules it was given.", version="1.0.0"),
    config=ScriptedConfig,
    extensions=(MCP_CONFIG_V1,),
)
class ScriptedAgent(AgentEnvAgent):
    async def run(self, request: TaskRequest[ScriptedConfig]) -> TaskResult:
        [server] = request.mcp_servers.values()
        async with ToolSession(mcp_url=server["url"], headers=server.get("headers")) as session:
            reading = (await session.call_tool("read_day")).text
            for schedule in SCRIPTS[reading]:
                await session.call_tool("submit_schedule", {"schedule": schedule})
        return TaskResult.text("Done.")


if __name__ == "__main__":
    ScriptedAgent().serve()
