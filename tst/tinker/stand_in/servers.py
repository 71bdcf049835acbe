"""The env servers that bundles of these tests deploy, by the name of their env."""

import time
from typing import Annotated, Any, Literal

import anyio
from agentenv_protocol import (
    AgentEnvEnvironment,
    AgentEnvError,
    DataPart,
    add_data,
    environment_card,
    extension,
    get_data,
    reset_data,
    tool,
)
from mcp.types import CallToolResult
from pydantic import BaseModel, Field

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # 1 x 1, PNG
SCORE_URI = "urn:stand-in:score/v1"


class Point(BaseModel):
    x: int
    label: str | None = None


@environment_card(name="desk")
class Desk(AgentEnvEnvironment):
    """A notebook: its score is what was asked of it, else what a call gave it, else a tenth per note."""

    tool_access = True  # so that a task can hide a tool between two turns

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._score: float | None = None
        self._calls: list[dict[str, Any]] = []
        self.busy = False

    @extension(SCORE_URI, description="Set the score that the verifier finds.")
    def preset(self, score: float) -> None:
        self._score = score

    @tool(structured_output=False)
    def note(self, text: str) -> str:
        """Write a note."""
        self._notes.append(text)
        return f"noted {text!r}"

    @tool(structured_output=False)
    def read(self) -> str:
        """Read the notes."""
        return "\n".join(self._notes) or "no notes"

    @tool(structured_output=False)
    def grade(self, score: float) -> str:
        """Set the score."""
        self._score = score
        return "graded"

    @tool(structured_output=False)
    def refuse(self, why: str) -> str:
        """Fail."""
        raise AgentEnvError("refused", why)

    @tool(structured_output=False)
    async def slow(self, seconds: float, then: str = "done") -> str:
        """Answer late."""
        self.busy = True
        await anyio.sleep(seconds)
        self._notes.append(then)
        return then

    @tool(structured_output=False)
    def long(self, length: int) -> str:
        """A long answer."""
        return "x" * length

    @tool(structured_output=False)
    def picture(self, caption: str = "", data: str = PIXEL) -> CallToolResult:
        """An image, with a caption where one is given."""
        image = {"type": "image", "data": data, "mimeType": "image/png"}
        text = [{"type": "text", "text": caption}] if caption else []
        return CallToolResult.model_validate({"content": [*text, image]})

    @tool(structured_output=False)
    def typed(
        self,
        code: str,
        count: int = 0,
        ratio: float = 0.0,
        flag: bool = False,
        maybe: str | None = None,
        either: int | str = 0,
        mode: Literal["fast", "020", "true"] = "fast",
        level: Annotated[Literal[1, 2], Field(description="1 or 2")] = 1,
        tags: list[str] | None = None,
        where: Point | None = None,
        rows: dict[str, list[int]] | None = None,
    ) -> str:
        """Every kind of argument; the answer is how each arrived."""
        arguments = {name: value for name, value in locals().items() if name != "self"}
        arguments["where"] = where.model_dump() if where else None
        self._calls.append(arguments)
        return repr(arguments)

    @tool(structured_output=False)
    def crash(self) -> str:
        """Kill the sandbox that this runs in, before it can answer."""
        self.sandbox.die()
        time.sleep(0.2)
        return "unreachable"

    @reset_data
    def reset(self) -> None:
        """Forget everything."""
        self.__init__()

    @add_data
    def add(self, parts: list) -> None:
        """Take nothing."""

    @get_data
    def outcome(self) -> list[DataPart]:
        """The notes, the score and the typed calls."""
        return [DataPart(data={"notes": self._notes, "score": self._score, "calls": self._calls})]


@environment_card(name="shelf")
class Shelf(AgentEnvEnvironment):
    """A second env, with one tool of its own and one that the desk has too."""

    @tool(structured_output=False)
    def fetch(self, title: str) -> str:
        """Fetch a book."""
        return f"fetched {title}"

    @get_data
    def outcome(self) -> list[DataPart]:
        return [DataPart(data={})]


SERVERS: dict[str, type[AgentEnvEnvironment]] = {"desk": Desk, "shelf": Shelf}
