"""The contract with agentenv-framework: the parts that framework.py uses, most of them not public, are where it looks.

When one of these fails after an upgrade, the message names the part; nothing else of this package touches it.
"""

import asyncio
import importlib
import inspect
import ssl
import threading

import httpx
import pytest
from stand_in.bundles import task, write_bundle
from stand_in.play import builder

from agentenv_tinker import framework

MOVED = "agentenv-framework has moved {part}, which src/agentenv_tinker/framework.py uses"

NAMES = [
    "agent_env.a2a_agent.protocol:poll_a2a_task",
    "agent_env.artifact:SkillArtifact",
    "agent_env.artifact.artifacts.skill:download_skill",
    "agent_env.bundle:BundleError",
    "agent_env.bundle:BundleKind.TASK",
    "agent_env.bundle:BundleKind.EVAL",
    "agent_env.bundle:parse_bundle",
    "agent_env.bundle:prepare_bundle",
    "agent_env.bundle.installed:locate_bundle",
    "agent_env.config.loader:_missing_extra",
    "agent_env.providers.sandbox_providers.local_sandbox:LOCAL_TRUST_DIR",
    "agent_env.providers.sandbox_providers.local_sandbox:LOCAL_TRUST_ENV",
    "agent_env.providers.sandbox_providers.local_sandbox:_EXTRA_HOSTS",
    "agent_env.providers.sandbox_providers.local_sandbox:_free_host_port",
    "agent_env.providers.sandbox_providers.local_sandbox:_host_ips",
    "agent_env.providers.sandbox_providers.local_sandbox:_local_sandbox_root_path",
    "agent_env.providers.sandbox_providers.local_sandbox:local_grant_trust",
    "agent_env.runner.runner:RunRecord",
    "agent_env.runner.runner:RunStatus.CANCELED",
    "agent_env.runner.runner:run_outcome",
    "agent_env.runner.store:insert_run",
    "agent_env.runner.store:set_running",
    "agent_env.runner.store:mark_terminal",
    "agent_env.store.routing:namespace_routing",
    "agent_env.store.routing:run_scope",
    "agent_env.task:EpisodeSpec.from_task",
    "agent_env.task:EpisodeSpec.start",
    "agent_env.task:EpisodeError",
    "agent_env.task.episode:Episode.next_turn",
    "agent_env.task.episode:Episode.result",
    "agent_env.task.episode:Episode.abandon",
    "agent_env.task.episode:Turn.record_model_call",
    "agent_env.task.teardown:recorded_sandboxes",
    "agent_env.task.episode:Turn.end",
    "agent_env.task.episode:Turn._checked",
    "agent_env.task.episode.run:TurnTools.call",
    "agent_env.task_step.task_steps.add_skills:AddSkillsTaskStep",
    "agent_env.task_step.task_steps.add_skills:Skill.to_skill_md",
    "agent_env.task_step.task_steps.deploy_agent:DeployAgentTaskStep",
    "agent_env.task_step.task_steps.deploy_agent:_skill_fields",
    "agent_env.task_step.task_steps.prompt_agent:PromptAgentTaskStep",
    "agent_env.task_step.task_steps.teardown_sandboxes:TORN_DOWN_KEY",
    "agentenv_protocol:ToolResult",
    "agentenv_protocol.a2a_agent:ProxyBashAction",
    "agentenv_protocol.a2a_agent:ProxyBashResult",
]

SIGNATURES = {
    "agent_env.bundle:prepare_bundle": {"root", "tasks", "evals", "sandbox", "id_root", "played"},
    "agent_env.bundle:parse_bundle": {"id_root"},
    "agent_env.task:EpisodeSpec.from_task": {"task", "trainer_agents", "turn_timeout"},
    "agent_env.task:EpisodeSpec.start": {"sandbox"},
    "agent_env.runner.runner:RunRecord": {
        *("run_id", "runner", "task_id", "task_version", "instance_id", "status", "error", "overrides"),
    },
    "agent_env.a2a_agent.protocol:poll_a2a_task": {"a2a_url", "task_id", "timeout_seconds", "poll_interval_seconds"},
    "agent_env.runner.runner:run_outcome": {"context", "exc"},
    "agent_env.runner.store:mark_terminal": {"run_id", "status", "error"},
    "agent_env.task.episode:Turn.tools": {"timeout"},
    "agent_env.task.episode:Turn.record_model_call": {"message", "model"},
    "agentenv_protocol.a2a_agent:ProxyBashAction": {"kind", "command", "timeout_seconds"},
}


def part(name):
    """The part of the framework that `name` names, as `module:attribute`."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            pytest.fail(MOVED.format(part=name))
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_where_it_was(name):
    """It can be imported."""
    part(name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_takes_what_it_is_given(name):
    """By the same names."""
    parameters = set(inspect.signature(part(name)).parameters)
    missing = SIGNATURES[name] - parameters
    assert not missing, MOVED.format(part=f"the parameters {sorted(missing)} of {name}")


async def test_a_live_episode_holds_what_is_read_of_it(tmp_path):
    """The parts that exist only on objects of a run."""
    bundle = write_bundle(tmp_path / "b", {"one": task("Go.")})
    train, _ = await builder(bundle)()
    settings = train.get_batch(0)[0].settings
    [playable] = settings.playable().split("all")
    episode = await playable.spec.start(sandbox="in_process")
    try:
        turn = await episode.next_turn()
        async with turn.tools() as tools:
            held = {
                "Episode._context.metadata": (episode._context, "metadata"),
                "Episode._context.deployed_envs": (episode._context, "deployed_envs"),
                "Episode._context.deployed_envs[0].environment_card_url": (
                    episode._context.deployed_envs[0],
                    "environment_card_url",
                ),
                "Episode._context.deployed_envs[0].sandbox_id": (episode._context.deployed_envs[0], "sandbox_id"),
                "Episode._abandoned": (episode, "_abandoned"),
                "Episode._run": (episode, "_run"),
                "Turn.skills": (turn, "skills"),
                "Turn._proxy.act": (turn._proxy, "act"),
                "Turn._task_id": (turn, "_task_id"),
                "TurnTools._turn": (tools, "_turn"),
                "TurnTools._servers": (tools, "_servers"),
            }
            missing = [name for name, (holder, attribute) in held.items() if not hasattr(holder, attribute)]
            assert not missing, MOVED.format(part=missing)
            assert set(tools._servers) == {tool.name for tool in tools.list()}
        assert framework.ended(episode) is None
        assert await framework.dead_envs(episode) == []
        await turn.end("done")
        assert await episode.next_turn() is None
        assert framework.ended(episode) == (framework.RunStatus.COMPLETED, None)
        assert await framework.scores_of(episode, playable.prepared.task) == {"score": 0.0}
    finally:
        await episode.abandon("the test is over")


async def test_a_run_goes_on_as_its_turn_is_ended_however_seldom_it_asks(tmp_path):
    """Where the poll that `framework._replace_parts` replaces has moved, the run would sleep for an hour."""
    bundle = write_bundle(tmp_path / "b", {"one": task({"prompt": "Go.", "poll_interval_seconds": 3600}, "On.")})
    [playable] = builder(bundle).playable().split("all")
    episode = await playable.spec.start(sandbox="in_process")
    try:
        async with asyncio.timeout(60):
            for prompt in ("Go.", "On."):
                turn = await episode.next_turn()
                assert turn.prompt == prompt
                await framework.end_turn(turn, "done")
            assert await episode.next_turn() is None
        assert framework._ended == {}
    finally:
        await episode.abandon("the test is over")


def test_certificates_are_read_once_in_a_thread(tmp_path, monkeypatch):
    """Not for each of the framework's clients; other ones, where the environment names others."""
    builder(write_bundle(tmp_path / "b", {"one": task("Go.")})).playable()
    read = []
    monkeypatch.setattr(framework, "_new_ssl_context", lambda *_: read.append(1) or ssl.create_default_context())
    monkeypatch.setattr(framework, "_ssl", threading.local())
    for _ in range(3):
        httpx.AsyncClient()
    assert len(read) == 1
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    httpx.AsyncClient()
    assert len(read) == 2


def test_a_missing_module_is_looked_up_once(tmp_path):
    """The framework's own answer is given again."""
    builder(write_bundle(tmp_path / "b", {"one": task("Go.")})).playable()
    error = ImportError("No module named 'daytona'", name="daytona")
    assert part("agent_env.config.loader:install_hint")(error) == part("agent_env.config.loader:install_hint")(error)
    assert framework._extras[str(error)] == framework._missing_extra(error) == "daytona"
