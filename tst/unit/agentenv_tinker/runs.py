"""The folder of a training run, as training leaves it, without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv_tinker.config import RunConfig
from agentenv_tinker.evaluation import Plan, Rollout, evaluation_of


def record(
    task: str,
    reward: float,
    *,
    group: int = 0,
    run: str = "r1",
    said: Sequence[dict[str, str]] = ({"prompt": "Go.", "assistant_content": "Done."},),
    **metrics: float,
) -> dict[str, Any]:
    """A line of the cookbook's record of rollouts: a step of 10 prompt and 4 sampled tokens for each of `said`."""
    last = {"score/s": reward, "messages": len(said), "tool_calls": 0, "tool_errors": 0, "cut": 0.0, **metrics}
    steps = [{"ob_len": 10, "ac_len": 4, "metrics": {}, "logs": dict(each)} for each in said]
    steps[-1]["metrics"] = {**last, "stop/completed": 1.0}
    steps[-1]["logs"] |= {"task": task, "task_id": f"id-{task}", "run": run}
    return {"group_idx": group, "total_reward": reward, "trajectory_metrics": {}, "steps": steps}


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluated(folder: Path, label: str, step: int, rewards: dict[str, float]) -> None:
    """An evaluation that played each of the tasks in `rewards` once, and its rollouts. An episode of each but the base
    model's failed."""
    rollouts = [
        Rollout(
            task=task,
            reward=reward,
            scores={"s": reward},
            flags={"cut": False, "parse_error": False, "tool_error": False},
            amounts={"messages": 1, "prompt_tokens": 10, "sampled_tokens": 4, "tool_calls": 0},
            stop_reason="completed",
        )
        for task, reward in rewards.items()
    ]
    tasks = (*rewards, "never-scored") if label != "base" else tuple(rewards)
    plan = Plan(label=label, step=step, model="m", checkpoint=None, split="held", tasks=tasks, thresholds=(0.2,))
    evaluation_of(plan, rollouts).write(folder / "evaluations" / f"{label}.json")
    records = [record(task, reward, run=f"{label}-{task}") for task, reward in rewards.items()]
    if label.startswith("step-"):
        write_lines(folder / f"iteration_{step:06d}" / "eval_test_rollout_summaries.jsonl", records)
    else:
        write_lines(folder / "evaluations" / f"{label}_rollout_summaries.jsonl", records)


def write_run(folder: Path, *, steps: int = 2, **settings: Any) -> Path:
    """A run that has made `steps` steps of 1 group of 2 rollouts, and was evaluated before; and after the last one."""
    folder.mkdir(parents=True)
    planned = {"steps": 2, "groups_per_batch": 1, "group_size": 2, **settings}
    config = RunConfig(bundle="b", runs=folder.parent, run=folder.name, **planned)
    (folder / "run.json").write_text(json.dumps({**config.to_dict(), "versions": {"torch": "2"}}))
    evaluated(folder, "base", 0, {"h1": 0.0, "h2": 0.0})
    evaluated(folder, "step-0", 0, {"h1": 0.25, "h2": 0.5})
    metrics, spans = [], []
    for step in range(steps):
        rewards = (0.25, 0.5 + step / 2)
        records = [record("t1", reward, run=f"{step}-{reward}") for reward in rewards]
        write_lines(folder / f"iteration_{step:06d}" / "train_rollout_summaries.jsonl", records)
        metrics.append(
            {
                "step": step,
                "progress/batch": step,
                "env/all/reward/total": sum(rewards) / 2,
                "optim/entropy": 0.5,
                "time/total": 10.0,
            }
        )
        spans.append({"step": step, "spans": [{"name": "train_step", "wall_start": 4.0, "wall_end": 10.0}]})
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "timing_spans.jsonl", spans)
    if steps == config.steps:
        evaluated(folder, "final", steps, {"h1": 1.0, "h2": 0.25})
        (folder / "summary.json").write_text("{}")
    return folder
