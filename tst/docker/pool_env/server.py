"""A notebook for the tests of the pool, which its agent can leave marks in, and around. Its name says how it resets."""

import os
import subprocess
import time
from pathlib import Path

from agentenv_protocol import AgentEnvEnvironment, DataPart, environment_card, get_data, reset_data, tool

KIND = os.environ["ENVIRONMENT_NAME"]
PLACES = [Path("/tmp"), Path("/dev/shm"), Path("/home/appuser")]
ballast = []


class Notebook(AgentEnvEnvironment):
    def __init__(self) -> None:
        self._notes: list[str] = []

    @tool(structured_output=False)
    def note(self, text: str) -> str:
        """Write a note."""
        self._notes.append(text)
        return "noted"

    @tool(structured_output=False)
    def put(self, path: str, text: str) -> str:
        """Write a file."""
        Path(path).write_text(text)
        return "written"

    @tool(structured_output=False)
    def spawn(self) -> str:
        """Start a process that stays."""
        subprocess.Popen(["sleep", "3600"])
        return "started"

    @tool(structured_output=False)
    def die(self) -> str:
        """Kill the server."""
        os._exit(1)

    @tool(structured_output=False)
    def look(self) -> str:
        """Every mark that there is."""
        files = [str(path) for place in PLACES for path in place.iterdir() if not path.name.startswith(".")]
        sleepers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep" in path.read_bytes()]
        return f"notes {self._notes} files {files} sleepers {len(sleepers)}"

    @get_data
    def contents(self) -> list[DataPart]:
        """The notes."""
        return [DataPart(data={"notes": self._notes})]


class Resettable(Notebook):
    @reset_data
    def reset(self) -> None:
        """Forget the notes, as well as this kind of notebook does."""
        if KIND == "crasher":
            os._exit(1)
        if KIND == "raiser":
            raise RuntimeError("no reset today")
        if KIND == "sleeper":
            time.sleep(300)
        if KIND == "dirty":
            del self._notes[1:]
        elif KIND == "leaky":
            self._notes.clear()
            ballast.append(b"x" * (300 << 20))
        elif KIND != "liar":
            self._notes.clear()


if __name__ == "__main__":
    if KIND == "slow":
        time.sleep(3)
    environment_card(name=KIND)(Notebook if KIND == "plain" else Resettable)().serve()
