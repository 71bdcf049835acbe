"""Writes bundles: a folder of tasks whose envs are the servers of servers.py."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stand_in.servers import SCORE_URI, SERVERS

Step = dict[str, Any]

VERIFIER = """
import asyncio

from agentenv_protocol.client import get_data


async def verify(mcp_url):
    outcome = (await get_data(mcp_url.removesuffix("/mcp"))).parts[0].data
    score = outcome["score"]
    if score is None:
        score = min(len(outcome["notes"]) / 10, 1)
    if score == -3:
        await asyncio.sleep(30)
    if score == -4:
        await asyncio.sleep(1)
    if score in (-1, -4):
        raise RuntimeError("the verifier broke")
    return [{"id": "desk", "score": float(score if score != -2 else "nan"), "result": True, "description": "the desk"}]
"""


def write_bundle(
    root: Path, tasks: Mapping[str, Sequence[Step]], *, evals: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Write a bundle into `root` and return its path."""
    for name in SERVERS:
        folder = root / "envs" / name
        folder.mkdir(parents=True)
        (folder / "env.toml").write_text(f'env_provider_type = "server"\nenvironment_name = "{name}"\n')
        (folder / "Dockerfile").write_text("FROM scratch\n")
    for name in ("desk", "other"):
        verifier = root / "artifacts" / f"{name}-score"
        verifier.mkdir(parents=True)
        (verifier / "verify.py").write_text(VERIFIER)
    helper = root / "agents" / "helper"
    helper.mkdir(parents=True)
    (helper / "Dockerfile").write_text("FROM scratch\n")
    (helper / "a2a_server.py").write_text("")
    (root / "tasks").mkdir()
    for name, steps in tasks.items():
        (root / "tasks" / f"{name}.json").write_text(json.dumps(list(steps)))
    for name, members in (evals or {}).items():
        (root / "evals").mkdir(exist_ok=True)
        (root / "evals" / f"{name}.toml").write_text(f"tasks = {json.dumps(list(members))}\n")
    return str(root)


def task(
    *prompts: str | Step,
    system_prompt: str | None = "You keep a desk.",
    preset: float | None = None,
    between: Mapping[int, Sequence[Step]] | None = None,
    setup: Sequence[Step] = (),
    scores: Sequence[str] = ("score",),
    envs: Sequence[str] = ("desk",),
    agent: Step | None = None,
    last: Sequence[Step] = (),
) -> list[Step]:
    """A task that deploys `envs` and its agent, sends each prompt in turn and scores the desk at each of `scores`.

    `setup` runs before the agent is deployed, `between[n]` before prompt n, and `last` after the scores.
    """
    steps: list[Step] = [{"id": f"env-{env}", "type": "deploy_env", "env_id": env} for env in envs]
    if preset is not None:
        directive = {"environment": "desk", "uri": SCORE_URI, "args": {"score": preset}}
        steps.append({"id": "preset", "type": "apply_server_config", "env_id": "desk", "directives": [directive]})
    steps += setup
    deploy = {"id": "agent", "type": "deploy_agent", "env_ids": list(envs)}
    if system_prompt is not None:
        deploy["system_prompt"] = system_prompt
    steps.append({**deploy, **(agent or {})})
    for i, prompt in enumerate(prompts):
        steps += (between or {}).get(i, ())
        asked = {"prompt": prompt} if isinstance(prompt, str) else prompt
        steps.append({"id": f"prompt-{i}", "type": "prompt_agent", "poll_interval_seconds": 0.05, **asked})
    steps += [verifier(step) for step in scores]
    return in_order([*steps, *last])


def helper_agent(**more: Any) -> Step:
    """What makes a `deploy_agent` step deploy the helper of agents.py, which writes a note."""
    env_vars = {"STAND_IN_AGENT": "helper", "LITELLM_BASE_URL": "http://127.0.0.1:9", "LITELLM_API_KEY": "none"}
    return {"a2a_agent_id": "helper", "env_vars": env_vars, **more}


def verifier(id: str, **more: Any) -> Step:
    """A step that scores the desk."""
    return {
        "id": id,
        "type": "env_outcome_verifier",
        "env_id": "desk",
        "file_artifact_id": "desk-score",
        "verifier_id": id,
        "score_aggregator": "weighted_average",
        **more,
    }


def failing_config(id: str, **more: Any) -> Step:
    """A step that fails: no env advertises what it asks for."""
    directive = {"environment": "desk", "uri": "urn:stand-in:nothing/v1", "args": {}}
    return {"id": id, "type": "apply_server_config", "env_id": "desk", "directives": [directive], **more}


def in_order(steps: Sequence[Step]) -> list[Step]:
    """`steps`, each depending on the one before it unless it says otherwise."""
    return [
        {"depends_on": [steps[i - 1]["id"]], **step} if i and "depends_on" not in step else dict(step)
        for i, step in enumerate(steps)
    ]
