"""The cookbook's own training loops, unchanged, against the service."""

import json

import pytest
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train as rl
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


@pytest.fixture(autouse=True)
def _service(service, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", service.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


def rl_config(service, folder, **changes):
    model = str(service.data / "tokenizer")
    options = {
        "learning_rate": 1e-3,
        "dataset_builder": ArithmeticDatasetBuilder(
            batch_size=2,
            model_name_for_tokenizer=model,
            renderer_name="role_colon",
            n_batches=2,
            include_fewshot=False,
            group_size=4,
        ),
        "model_name": model,
        "recipe_name": "test",
        "renderer_name": "role_colon",
        "max_tokens": 4,
        "log_path": str(folder),
        "eval_every": 0,
        "save_every": 1,
        "lora_rank": 4,
    }
    return rl.Config(**{**options, **changes})


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_config": rl.AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)},
        {"loss_fn": "ppo", "num_substeps": 2},
    ],
    ids=["sync", "async", "substeps"],
)
async def test_rl_runs_to_its_end(service, tmp_path, changes):
    """rl.train samples, trains and saves; on-policy samples have the logprobs of the training pass."""
    await rl.main(rl_config(service, tmp_path, **changes))
    checkpoints = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert checkpoints[-1]["name"] == "final"
    assert metrics(tmp_path)[0]["optim/kl_sample_train_v2"] == pytest.approx(0, abs=1e-6)


async def test_rl_resumes_from_its_log_folder(service, tmp_path):
    """A second run in the same folder goes on from the last checkpoint's state."""
    await rl.main(rl_config(service, tmp_path))
    await rl.main(rl_config(service, tmp_path, max_steps=3))
    assert len(metrics(tmp_path)) >= 2


async def test_supervised_training_lowers_the_loss(service, tmp_path):
    """supervised.train over a few conversations ends with a lower loss than it began with."""
    lines = [
        {"messages": [{"role": "user", "content": f"n {n}"}, {"role": "assistant", "content": "yes yes"}]}
        for n in range(16)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    model = str(service.data / "tokenizer")
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", max_length=128, batch_size=4
    )
    builder = FromConversationFileBuilder(common_config=common, file_path=str(tmp_path / "chat.jsonl"))
    await supervised.main(
        supervised.Config(
            log_path=str(tmp_path / "log"),
            model_name=model,
            recipe_name="test",
            renderer_name="role_colon",
            dataset_builder=builder,
            learning_rate=1e-2,
            lora_rank=4,
            num_epochs=4,
            eval_every=0,
            save_every=0,
        )
    )
    losses = [line["train_mean_nll"] for line in metrics(tmp_path / "log") if "train_mean_nll" in line]
    assert losses[-1] < 0.5 * losses[0]
