"""The only door to agentenv-framework, its non-public parts included; two of them are replaced in this process.

Written for the version range in pyproject.toml; tst/tinker/test_framework.py fails when one of the parts used here
moves. What leaves this module is ours or public there: prepared tasks, episode specs, episodes, turns.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import math
import os
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import httpx._transports.default as httpx_transports
from agent_env.a2a_agent import protocol
from agent_env.artifact import SkillArtifact
from agent_env.artifact.artifacts.skill import download_skill
from agent_env.bundle import BundleError as FrameworkBundleError
from agent_env.bundle import BundleKind, PreparedBundle, parse_bundle, prepare_bundle
from agent_env.bundle.installed import locate_bundle
from agent_env.config import get_config, loader
from agent_env.runner import store as run_index
from agent_env.runner.runner import RunRecord, RunStatus, run_outcome
from agent_env.store.routing import namespace_routing, run_scope
from agent_env.task import EpisodeError, EpisodeSpec, Task
from agent_env.task.episode import Episode, Turn
from agent_env.task.episode.run import TurnTools
from agent_env.task.store import task_instances
from agent_env.task.teardown import recorded_sandboxes
from agent_env.task_step.context import PromptResponse, TaskStepContext
from agent_env.task_step.task_step import TaskStep
from agent_env.task_step.task_steps.add_skills import AddSkillsTaskStep, Skill
from agent_env.task_step.task_steps.deploy_agent import DeployAgentTaskStep, _skill_fields
from agent_env.task_step.task_steps.prompt_agent import PromptAgentTaskStep
from agent_env.task_step.task_steps.teardown_sandboxes import TORN_DOWN_KEY
from agentenv_protocol import ToolResult  # type: ignore[import-untyped]
from agentenv_protocol.a2a_agent import ProxyBashAction, ProxyBashResult  # type: ignore[import-untyped]

__all__ = [
    "Episode",
    "EpisodeError",
    "EpisodeSpec",
    "FrameworkBundleError",
    "PreparedTask",
    "RecordedTurn",
    "RunStatus",
    "Task",
    "Turn",
    "TurnTools",
    "bundle_folder",
    "call_tool",
    "dead_envs",
    "end_turn",
    "ended",
    "episode_spec",
    "failed_step",
    "file_run",
    "file_run_end",
    "has_shell",
    "is_lost_agent",
    "prepare",
    "prompted_agents",
    "read_skill",
    "recorded_runs",
    "routing",
    "run_status",
    "sandbox_ids",
    "scores_of",
    "scoring_steps",
    "skill_names",
]

RUNNER = "agentenv-tinker"  # who filed a run, in the framework's run index
_POLL_SECONDS = 0.02  # between looks at a turn that was just ended
_WATCH_SECONDS = 20.0  # between looks at one that is open: its agent is ours, and each look costs 30 ms of CPU
_HEALTH_SECONDS = 10.0
_GONE = (404, 502, 503, 504)  # what the tunnel of a sandbox that is gone answers


@dataclass(frozen=True)
class PreparedTask:
    """One task of a prepared bundle."""

    name: str
    """The task's name in its bundle, such as `day-0001`."""
    task: Task
    """The framework's own task, ready to become an episode."""


@dataclass(frozen=True)
class RecordedTurn:
    """What an agent did in a turn of a run, as the framework recorded it."""

    calls: tuple[tuple[str, dict[str, Any]], ...]
    """The tool calls, by name and arguments, in order."""
    reply: str


@contextmanager
def routing() -> Iterator[None]:
    """Resolve `@local` ids in this process for the length of the block, as `agent-env run` does."""
    with namespace_routing():
        yield


def prepare(source: str, *, sandbox: str | None) -> dict[str, tuple[PreparedTask, ...]]:
    """Write and build what a bundle needs, as the framework's OpenEnv server does, and return its splits.

    The split `all` holds every task; each eval is a split of its own name, in the eval's order. The agent that the
    trainer plays need not exist. Blocks for seconds to minutes (image builds). Raises FrameworkBundleError.
    """
    _replace_parts()
    root, id_root = locate_bundle(source)
    entries = parse_bundle(Path(root), id_root=id_root).entries
    with routing():
        prepared = prepare_bundle(
            root,
            tasks=[entry.name for entry in entries if entry.kind is BundleKind.TASK],
            evals=[entry.name for entry in entries if entry.kind is BundleKind.EVAL],
            sandbox=sandbox,
            id_root=id_root,
            played=True,
        )
    return _splits(prepared)


def _replace_parts() -> None:
    """Put the replacements in place. They change what an episode costs, and nothing that it does or scores."""
    protocol.poll_a2a_task = _poll_until_ended
    loader._missing_extra = _missing_extra_once
    httpx_transports.create_ssl_context = _one_ssl_context  # type: ignore[attr-defined]


_poll: Callable[..., Awaitable[dict[str, Any]]] = protocol.poll_a2a_task
_ended: dict[str, asyncio.Event] = {}  # by the A2A task's id, which a turn has too: set once that turn was ended


async def _poll_until_ended(
    a2a_url: str, task_id: str, timeout_seconds: int, poll_interval_seconds: float = 10, **options: Any
) -> dict[str, Any]:
    """The framework's poll for a prompt's reply: rarely, and with no sleep left once the turn was ended by `end_turn`.

    A slot would be idle meanwhile, and 32 open turns would keep a CPU busy with being asked for each second.
    """
    until = time.monotonic() + timeout_seconds
    ended = _ended.setdefault(task_id, asyncio.Event())
    asked = functools.partial(_poll, a2a_url, task_id, **options)
    rarely = max(poll_interval_seconds, min(_WATCH_SECONDS, timeout_seconds / 10))
    slowly = asyncio.ensure_future(asked(timeout_seconds, rarely))
    hearing = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((slowly, hearing), return_when=asyncio.FIRST_COMPLETED)
        if slowly.done():
            return slowly.result()
    finally:
        del _ended[task_id]
        slowly.cancel()
        hearing.cancel()
        await asyncio.gather(slowly, hearing, return_exceptions=True)
    return await asked(math.ceil(until - time.monotonic()), _POLL_SECONDS)


async def end_turn(turn: Turn, reply: str | None) -> None:
    """Hand `turn` back with `reply`, and have the run go on at once. Raises EpisodeError."""
    await turn.end(reply)
    if ended := _ended.get(turn._task_id):
        ended.set()


_new_ssl_context: Callable[..., ssl.SSLContext] = httpx_transports.create_ssl_context  # type: ignore[attr-defined]
_ssl = threading.local()  # `contexts` is a thread's own: what connects sets a context up anew for each connection


def _one_ssl_context(
    verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True
) -> ssl.SSLContext:
    """httpx's certificates to trust, read once in a thread.

    httpx reads them for each client, for 25 ms, and the framework makes a client for each request to an agent.
    """
    trusted = tuple(map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR"))) if trust_env else ()
    known: dict[Any, ssl.SSLContext] = _ssl.__dict__.setdefault("contexts", {})
    key = (verify, cert, trust_env, *trusted)
    if key not in known:
        known[key] = _new_ssl_context(verify, cert, trust_env)
    return known[key]


_missing_extra = loader._missing_extra
_extras: dict[str, str | None] = {}


def _missing_extra_once(error: ImportError) -> str | None:
    """Which extra of the framework has a missing module, looked up once for each.

    For each URL of an episode it tries every sandbox provider, and those whose module is missing cost it 10 ms each.
    """
    if str(error) not in _extras:
        _extras[str(error)] = _missing_extra(error)
    return _extras[str(error)]


def bundle_folder(source: str) -> Path:
    """The folder of the bundle that `source` names, by its path or as an installed one. Raises FrameworkBundleError."""
    return Path(locate_bundle(source)[0]).expanduser()


def _splits(prepared: PreparedBundle) -> dict[str, tuple[PreparedTask, ...]]:
    by_id = {task.id: PreparedTask(entry.name, task) for entry, task in prepared.tasks}
    splits = {"all": tuple(by_id.values())}
    for planned in prepared.plan.evals:
        if planned.entry.name == "all":
            raise FrameworkBundleError(["eval 'all' has the name of the split that holds every task; rename it"])
        splits[planned.entry.name] = tuple(by_id[reference.id] for reference in planned.references)
    return splits


def prompted_agents(task: Task) -> tuple[str, ...]:
    """The agents that `task` prompts, in the order of their first prompts."""
    return tuple(dict.fromkeys(step.agent_name for step in task.steps if isinstance(step, PromptAgentTaskStep)))


def scoring_steps(task: Task) -> tuple[str, ...]:
    """The ids of the steps at which a run of `task` records a score, as the OpenEnv server finds them."""
    return tuple(step.id for step in task.steps if getattr(step, "verifier_id", None))


def skill_names(task: Task, agent: str) -> tuple[str, ...]:
    """The skills that `task` gives `agent`, whether as it is deployed or by an `add_skills` step."""
    return tuple(_skill_sources(task, agent))


def read_skill(task: Task, agent: str, name: str, path: str) -> str:
    """The file at `path` of the skill `name` that `task` gives `agent`. Blocks. Raises LookupError if none."""
    sources = _skill_sources(task, agent)
    if name not in sources:
        raise LookupError(f"there is no skill {name!r}; the skills are {', '.join(sources)}")
    files = _skill_files(task, sources[name])
    if path not in files:
        raise LookupError(f"skill {name!r} has no file {path!r}; its files are {', '.join(sorted(files))}")
    return files[path]


@dataclass(frozen=True)
class _SkillSource:
    """Where a skill's files are: its `SKILL.md` itself, or a folder of the object store."""

    skill_md: str | None
    object_url: str | None


def _skill_sources(task: Task, agent: str) -> dict[str, _SkillSource]:
    found: dict[str, _SkillSource] = {}
    for step in task.steps:
        if isinstance(step, DeployAgentTaskStep) and step.agent_name == agent:
            for fields in map(_skill_fields, step.skills):
                found[fields["name"]] = _SkillSource(fields["skill_md"], fields["object_url"])
        if isinstance(step, AddSkillsTaskStep) and step.agent_name == agent:
            found.update(map(_added_skill, step.skills))
    return found


def _added_skill(skill: Skill) -> tuple[str, _SkillSource]:
    if skill.skill_artifact_id is not None:
        with routing():
            artifact = SkillArtifact.get(skill.skill_artifact_id, skill.skill_artifact_version)
        return artifact.skill_name, _SkillSource(None, artifact.skill_object_url)
    return skill.name or "", _SkillSource(skill.to_skill_md() if skill.body else None, skill.object_url)


def _skill_files(task: Task, source: _SkillSource) -> dict[str, str]:
    if source.skill_md is not None:
        return {"SKILL.md": source.skill_md}
    if source.object_url is None:
        return {}
    with routing(), run_scope(task.id), download_skill(source.object_url) as folder:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_text(errors="replace") for path in files}


def episode_spec(
    prepared: PreparedTask, *, agent: str | None, turn_seconds: float, sandbox_seconds: int
) -> EpisodeSpec:
    """`prepared` as an episode in which `agent` is played, or the task's only prompted agent.

    `turn_seconds` replaces the deadline of the played prompts, and `sandbox_seconds` is the least that its sandboxes
    live. Raises EpisodeError where the task can't run as one.
    """
    task = prepared.task
    steps = [_outliving(step, sandbox_seconds) for step in task.steps]
    return EpisodeSpec.from_task(
        Task(id=task.id, version=task.version, steps=steps),
        trainer_agents=None if agent is None else [agent],
        turn_timeout=turn_seconds,
    )


def _outliving(step: TaskStep, sandbox_seconds: int) -> TaskStep:
    """`step` with a lifetime that outlives a rollout, where it has one."""
    if not hasattr(step, "ttl_seconds"):
        return step
    outliving: Any = copy.copy(step)
    outliving.ttl_seconds = max(step.ttl_seconds or 0, sandbox_seconds)
    return cast(TaskStep, outliving)


def has_shell(tools: TurnTools) -> bool:
    """Whether a turn offers the `bash` of its agent's sandbox, and not only an env's tool of that name."""
    return None in tools._servers.values()


async def call_tool(tools: TurnTools, name: str, arguments: dict[str, Any], *, seconds: float) -> ToolResult:
    """A tool's answer. `seconds` bounds the sandbox's own `bash` too, which `TurnTools.call` leaves at an
    hour. Raises EpisodeError for a call that the turn can't make."""
    if tools._servers.get(name, "") is not None:
        return await tools.call(name, arguments)
    turn = tools._turn
    action = ProxyBashAction(kind="bash", command=arguments["command"], timeout_seconds=seconds)
    result = await turn._checked(turn._proxy.act(turn._task_id, action))
    assert isinstance(result, ProxyBashResult)
    if result.timed_out:
        return _text_result(f"error: the command timed out after {seconds:g}s", is_error=True)
    text = result.stdout + result.stderr
    if result.exit_code == 0:
        return _text_result(text, is_error=False)
    lines = filter(None, (text.removesuffix("\n"), f"exit code {result.exit_code}"))
    return _text_result("\n".join(lines), is_error=True)


def _text_result(text: str, *, is_error: bool) -> ToolResult:
    return ToolResult(content=[{"type": "text", "text": text}], isError=is_error)


def is_lost_agent(error: BaseException) -> bool:
    """Whether `error` is of the way to the played agent's proxy: where it has a sandbox, that one died."""
    return isinstance(error, httpx.TransportError)


def sandbox_ids(episode: Episode) -> list[str]:
    """The ids of every sandbox that a run was given, those of steps that were tried again included."""
    return [sandbox.sandbox_id for sandbox in recorded_sandboxes(episode._context)]


async def dead_envs(episode: Episode) -> list[str]:
    """The envs of a run whose sandbox no longer serves them, those that the task itself tore down left out.

    An env that is only slow to answer isn't dead: a tool may hold it busy.
    """
    context = episode._context
    torn_down = set(context.metadata.get(TORN_DOWN_KEY) or ())
    up = [env for env in context.deployed_envs if getattr(env, "sandbox_id", None) not in torn_down]
    async with httpx.AsyncClient(timeout=_HEALTH_SECONDS) as client:
        served = await asyncio.gather(*(_serves(client, env.environment_card_url) for env in up))
    return [env.mcp_server_name or env.env_id for env, alive in zip(up, served, strict=True) if not alive]


async def _serves(client: httpx.AsyncClient, url: str | None) -> bool:
    if url is None:
        return True
    try:
        return (await client.get(url)).status_code not in _GONE
    except httpx.TimeoutException:
        return True
    except httpx.TransportError:
        return False


async def scores_of(episode: Episode, task: Task) -> dict[str, float]:
    """The scores that a run of `task` recorded, by step id, once it has ended. Raises what made the run fail.

    A step of which a criterion scored NaN has NaN: the framework's own average makes a full score of one.
    """
    scores = await episode.result()
    steps = {getattr(step, "verifier_id", None): step.id for step in task.steps}
    for key, verification in (episode._context.metadata.get("verifications") or {}).items():
        rows = verification.get("results") or []
        criteria = [row.get("score") for row in rows if isinstance(row, dict)]
        if any(isinstance(score, float) and math.isnan(score) for score in criteria):
            scores[steps.get(key, key)] = math.nan
    return scores


def run_status(episode: Episode, error: BaseException | None = None) -> tuple[RunStatus, str | None]:
    """How an ended episode's run is recorded, by the framework's own rule, and why it failed if it did.

    `Episode.result()` alone would pay a run one of whose steps failed softly; this rule calls it FAILED.
    """
    return run_outcome(episode._context, error)


def ended(episode: Episode) -> tuple[RunStatus, str | None] | None:
    """How a run ended by itself, and why it failed if it did; None for one that was stopped, or goes on."""
    if episode._abandoned is not None or not episode._run.done() or episode._run.cancelled():
        return None
    return run_status(episode, episode._run.exception())


def failed_step(episode: Episode) -> str | None:
    """The step that failed an episode's run, with its error, or None while none has."""
    failures = [failure for failure in episode._context.metadata.get("failed_steps") or [] if isinstance(failure, dict)]
    fatal = [failure for failure in failures if failure.get("is_fatal") and not failure.get("retried")]
    if not fatal:
        return None
    last = fatal[-1]
    return f"step {last.get('step_id')!r} failed: {last.get('error_type')}: {last.get('error')}"


def recorded_runs(source: str) -> Iterator[tuple[str, list[RecordedTurn]]]:
    """The completed runs of a bundle's tasks in the framework's records, the newest of a task first: the task's name
    and the turns. Blocks. Raises FrameworkBundleError."""
    root, id_root = locate_bundle(source)
    for entry in parse_bundle(Path(root), id_root=id_root).entries:
        if entry.kind is BundleKind.TASK:
            with routing(), run_scope(entry.id):
                contexts = [run.context or {} for run in task_instances(entry.id) if run.status == "completed"]
                for context in map(TaskStepContext.from_dict, contexts):
                    yield entry.name, [_recorded_turn(response) for response in context.prompt_responses]


def _recorded_turn(response: PromptResponse) -> RecordedTurn:
    url = response.agent_trajectory_object_url
    spans = json.loads(get_config().get_object_store_at(url).get(url)) if url is not None else []
    said = [
        json.loads(span["attributes"].get("gen_ai.completion") or "{}").get("content") or []
        for span in spans
        if span["attributes"].get("gen_ai.operation.name") == "chat"
    ]
    calls = [(part["name"], part["input"]) for parts in said for part in parts if part.get("type") == "tool_use"]
    return RecordedTurn(tuple(calls), response.response)


def file_run(episode: Episode, task: Task, *, run_group: str) -> None:
    """List an episode in the framework's run index as running, under `run_group`. Blocks on the store."""
    record = RunRecord(
        run_id=episode.id,
        runner=RUNNER,
        task_id=task.id,
        task_version=task.version,
        instance_id=episode.id,
        overrides={"metadata": {"run_group_id": run_group}},
    )
    with routing(), run_scope(task.id):
        run_index.insert_run(record)
        run_index.set_running(record.run_id)


def file_run_end(episode: Episode, task: Task, status: RunStatus, error: str | None) -> None:
    """Mark an episode's run ended in the run index, unless it already is. Blocks on the store."""
    with routing(), run_scope(task.id):
        run_index.mark_terminal(episode.id, status, error)
