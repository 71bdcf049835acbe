"""Tasks with skills, with a shell and with several agents."""

import asyncio
import functools

import pytest
from stand_in.bundles import helper_agent, task, verifier, write_bundle
from stand_in.model import Script, call
from stand_in.play import builder, play

from agentenv_tinker import framework
from agentenv_tinker.episode import Deadlines
from agentenv_tinker.errors import EpisodeFailedError

SKILL_MD = "---\nname: {0}\ndescription: How to {0}.\n---\nSay {0} twice."


def skill(name):
    """A skill as `deploy_agent` takes it."""
    return {"name": name, "description": f"How to {name}.", "skill_md": SKILL_MD.format(name)}


def add_skills(*names, folder=None):
    """A step that brings skills: each written in the step itself, and one that the bundle has as a folder."""
    inline = [{"name": name, "description": f"How to {name}.", "body": f"Say {name} twice."} for name in names]
    stored = [{"skill_artifact_id": folder}] if folder is not None else []
    return {"id": "add", "type": "add_skills", "skills": [*inline, *stored]}


NO_SHELL = {"env_vars": {"STAND_IN_AGENT": "no_shell"}}
TASKS = {
    "deployed-with-skills": task(
        "First.", "Second.", agent={"skills": [skill("greet")]}, between={1: [add_skills("wave", "nod")]}
    ),
    "skills-of-the-bundle": task("First.", between={0: [add_skills("wave", folder="tidy")]}),
    "no-shell": task("First.", "Second.", agent=NO_SHELL, between={1: [add_skills("wave")]}),
    "two-agents": [
        *task({"prompt": "Go.", "agent_name": "solver"}, scores=(), agent={"agent_name": "solver", **helper_agent()}),
        {"id": "agent-2", "type": "deploy_agent", "agent_name": "second", "env_ids": ["desk"], **helper_agent()},
        {"id": "ask", "type": "prompt_agent", "agent_name": "second", "prompt": "Help."},
        verifier("score"),
    ],
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundle") / "b"
    (root / "skills" / "tidy").mkdir(parents=True)
    (root / "skills" / "tidy" / "SKILL.md").write_text(SKILL_MD.format("tidy"))
    (root / "skills" / "tidy" / "more.md").write_text("Tidy more.")
    return write_bundle(root, TASKS, evals={f"only-{name}": [name] for name in TASKS})


async def test_skills_are_shown_in_the_first_message_of_the_turn_that_brings_them_and_read_with_bash(bundle):
    """Each with its name, description and path, and each once."""
    commands = [call("bash", command=command) for command in ("cat ~/skills/greet/SKILL.md", "ls ~/skills")]
    script = Script(commands[0], "ok", commands[1], "ok")
    played = await play(bundle, script, train_split="only-deployed-with-skills")
    first, second = [content for role, content in played.conversation if role == "user"]
    home = first.split("(")[1].split("/skills")[0]
    how = "You have these skills; read a skill's SKILL.md with bash before you use it:\n"
    assert first == f"{how}- greet: How to greet. ({home}/skills/greet)\n\nFirst."
    assert second == (
        f"{how}- wave: How to wave. ({home}/skills/wave)\n- nod: How to nod. ({home}/skills/nod)\n\nSecond."
    )
    assert played.answers == [SKILL_MD.format("greet"), "greet\nnod\nwave\n"]


async def test_where_there_is_no_shell_a_tool_serves_the_skills(bundle):
    """It reads a file of a skill, and says what there is where there is none."""
    asked = [{"skill": "wave"}, {"skill": "wave", "path": "SKILL.md"}, {"skill": "nap"}, {"skill": "wave", "path": "x"}]
    script = Script("ok", "".join(call("read_skill", **arguments) for arguments in asked), "ok")
    played = await play(bundle, script, train_split="only-no-shell")
    assert "\nread_skill: Read a file of a skill." in played.messages[0]["content"]
    _, second = [content for role, content in played.conversation if role == "user"]
    how = "You have these skills; read a skill's SKILL.md with read_skill before you use it:\n"
    assert second.startswith(f"{how}- wave: How to wave. (")
    skill_md = "---\nname: wave\ndescription: How to wave.\n---\n\nSay wave twice."
    assert played.answers == [
        skill_md,
        skill_md,
        "Error: there is no skill 'nap'; the skills are wave",
        "Error: skill 'wave' has no file 'x'; its files are SKILL.md",
    ]
    assert (played.metrics["tool_calls"], played.metrics["tool_errors"]) == (4, 2)


async def test_a_skill_of_the_bundle_is_read_with_all_its_files(bundle):
    """Whether the bundle has it as a folder or the step itself writes it."""
    playable = await asyncio.to_thread(builder(bundle).playable)
    [task] = playable.split("only-skills-of-the-bundle")
    assert task.skills == ("wave", "tidy")
    read = functools.partial(framework.read_skill, task.prepared.task, task.agent)
    assert read("tidy", "more.md") == "Tidy more."
    assert read("tidy", "SKILL.md") == SKILL_MD.format("tidy")
    with pytest.raises(LookupError, match=r"skill 'tidy' has no file 'x'; its files are SKILL\.md, more\.md"):
        read("tidy", "x")


async def test_bash_runs_in_the_agents_sandbox_and_its_failures_are_errors_that_the_model_reads(bundle):
    """A failing command, one that isn't there, and one that takes too long."""
    script = Script(
        call("bash", command="echo out; echo err >&2; exit 3"),
        call("bash"),
        call("bash", command="sleep 60"),
        call("bash", command="echo fine"),
        "ok",
    )
    played = await play(bundle, script, train_split="only-deployed-with-skills", deadlines=Deadlines(call=1.0))
    assert played.answers == [
        "Error: out\nerr\nexit code 3",
        "Error: the argument 'command' is missing",
        "error: the command timed out after 1s",
        "fine\n",
    ]


async def test_an_agents_sandbox_that_died_is_a_failed_episode(bundle, sandboxes):
    """Its shell has nothing to say then."""

    async def kill(said):
        if said == 1:
            [agent] = [sandbox for sandbox in sandboxes.values() if not hasattr(sandbox, "server")]
            agent.die()

    script = Script(call("bash", command="true"), call("bash", command="true"), "ok", before=kill)
    with pytest.raises(EpisodeFailedError, match="the sandbox of agent 'default-agent' died"):
        await play(bundle, script, train_split="only-deployed-with-skills")
    assert sandboxes == {}


async def test_one_of_several_prompted_agents_is_played_and_the_others_run_as_the_bundle_says(bundle):
    """The helper's note counts as much as the model's own."""
    script = Script(call("note", text="mine"), "done")
    played = await play(bundle, script, train_split="only-two-agents", trainer_agents=("solver",))
    assert played.conversation[0] == ("user", "Go.")
    assert played.reward == 0.2
