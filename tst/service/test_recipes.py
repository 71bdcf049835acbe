"""The cookbook's recipes as one runs them: their commands, unchanged but for the service's address and the model."""

import json
import os
import subprocess
import sys

import pytest
from tinker_cookbook.recipes.rubric.generate_data import generate_dataset

CHAT = [
    {"messages": [{"role": "user", "content": f"n {n}"}, {"role": "assistant", "content": "yes yes"}]} for n in range(8)
]
SMALL = ("max_tokens=4", "learning_rate=1e-3")


@pytest.mark.parametrize(
    ("recipe", "options", "measure"),
    [
        (
            "chat_sl.train",
            ("dataset={data}/chat.jsonl", "batch_size=4", "eval_every=0", "save_every=1"),
            "train_mean_nll",
        ),
        ("math_rl.train", ("env=arithmetic", "groups_per_batch=2", *SMALL), "optim/kl_sample_train_v2"),
        (
            "math_rl.train",
            ("env=arithmetic", "groups_per_batch=2", "max_steps_off_policy=1", "loss_fn=ppo", *SMALL),
            "optim/kl_sample_train_v2",
        ),
        (
            "preference.shorter.train",
            ("batch_size=2", "group_size=2", "eval_every=0", *SMALL),
            "optim/kl_sample_train_v2",
        ),
        (
            "multiplayer_rl.guess_number.train",
            ("batch_size=2", "group_size=2", "eval_every=0", *SMALL),
            "env/all/turns_per_episode",
        ),
        (
            "rubric.train",
            (
                "train_jsonl_path={data}/example_rubric_train.jsonl",
                "test_jsonl_path={data}/example_rubric_test.jsonl",
                "grader_llm_name={model}",
                "grader_renderer_name=role_colon",
                "groups_per_batch=2",
                "train_group_size=2",
                "eval_every=0",
                *SMALL,
            ),
            "optim/kl_sample_train_v2",
        ),
    ],
    ids=["chat", "arithmetic", "arithmetic-async", "preference", "multi-turn", "model-graded"],
)
def test_a_recipe_runs_to_its_end(service, tmp_path, recipe, options, measure):
    """Its command ends well, after a step whose metrics it wrote, with a final checkpoint."""
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, CHAT)))
    generate_dataset(4, 2, 0, f"{tmp_path}/")
    model, log = str(service.data / "tokenizer"), tmp_path / "log"
    given = [option.format(data=tmp_path, model=model) for option in options]
    common = [f"model_name={model}", "renderer_name=role_colon", f"log_path={log}", "max_steps=1"]
    done = subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *common, *given],
        env={**os.environ, "TINKER_BASE_URL": service.url, "TINKER_API_KEY": "tml-test", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    checkpoints = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert any(measure in line for line in metrics), sorted(metrics[-1])
    assert checkpoints[-1]["name"] == "final"
