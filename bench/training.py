"""How fast tinker_local trains, beside a plain PEFT loop over the padded batch, and what it keeps free meanwhile.

    python bench/training.py [--model NAME] [--rounds 3]

The data are shaped like reinforcement learning's: 16 trajectories of 4 groups, each group sharing its prompt. Both
sides run in turn, in one process, on the same data, rank and loss. Then the service itself is started, samples, and its
health is asked for while it trains; then it is left alone with its client for IDLE_SECONDS. The bench fails if the
service took more memory than MOST_GIB while it trained.
"""

import argparse
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker
import torch
from peft import LoraConfig, get_peft_model
from tinker import types

from tinker_local import training, weights
from tinker_local.model import LORA_ALPHA, LanguageModel
from tinker_local.operations import Datum, ForwardBackward, LoraSpec, OptimStep

GROUPS = 4
GROUP = 4
PROMPT_TOKENS = 390
TRAINED_TOKENS = 60
RANK = 32
MOST_GIB = 2.5
IDLE_SECONDS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=weights.DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = LanguageModel(weights.load(options.model, progress=print))
    data = trajectories(model.vocabulary)
    tokens = sum(len(datum.tokens) for datum in data)
    print(f"{options.model}, {torch.get_num_threads()} threads, {options.rounds} rounds")

    run = training.start(model, "bench", LoraSpec(RANK, seed=0))
    ours = [seconds(lambda: step(model, run, data)) for _ in range(options.rounds)]
    model.remove_adapter("bench")
    plain = PlainLoop(weights.load(options.model, progress=print).network)
    theirs = [seconds(lambda: plain.step(data)) for _ in range(options.rounds)]
    rates = [tokens / statistics.median(times) for times in (ours, theirs)]
    print(f"forward_backward and optim_step of {len(data)} trajectories, {tokens} tokens")
    print(f"  {'tinker_local':24} {rates[0]:8.1f} tokens/s")
    print(f"  {'plain PEFT loop':24} {rates[1]:8.1f} tokens/s")
    print(f"  {'ratio':24} {rates[0] / rates[1]:8.2f}")
    peak = measure_service(options.model, data)
    print(f"memory of the service while it trains: at most {peak:.2f} GiB, of {MOST_GIB} allowed")
    return int(peak > MOST_GIB)


def trajectories(vocabulary: int) -> list[Datum]:
    """Return the groups' trajectories; only the tokens behind the prompt have an advantage."""
    dice = np.random.default_rng(0)
    data = []
    for _ in range(GROUPS):
        prompt = dice.integers(3, vocabulary, PROMPT_TOKENS)
        for _ in range(GROUP):
            tokens = np.concatenate([prompt, dice.integers(3, vocabulary, TRAINED_TOKENS + dice.integers(-8, 8))])
            advantages = np.zeros(len(tokens) - 1, np.float32)
            advantages[PROMPT_TOKENS - 1 :] = dice.normal()
            inputs = {"target_tokens": tokens[1:], "logprobs": np.full(len(tokens) - 1, -10, np.float32)}
            data.append(Datum(tokens[:-1], {**inputs, "advantages": advantages}))
    return data


def step(model: LanguageModel, run: training.TrainingModel, data: list[Datum]) -> None:
    """One pass and one step of tinker_local."""
    for _ in training.forward_backward(
        model, run, ForwardBackward("bench", tuple(data), "importance_sampling", {}, forward_only=False)
    ):
        pass
    training.optim_step(model, run, OptimStep("bench", 1e-6, 0.9, 0.95, 1e-12, 0.0, 0.0))


class PlainLoop:
    """The loop one would write: PEFT on the same layers, the padded batch in pieces of a group each."""

    def __init__(self, network: torch.nn.Module) -> None:
        config = LoraConfig(r=RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self._network = get_peft_model(network, config)
        self._optimizer = torch.optim.AdamW([p for p in self._network.parameters() if p.requires_grad], lr=1e-6)

    def step(self, data: list[Datum]) -> None:
        """One pass over all data and one step."""
        longest = max(len(datum.tokens) for datum in data)
        for start in range(0, len(data), GROUP):
            piece = data[start : start + GROUP]
            columns = {key: padded([d.inputs[key] for d in piece], longest) for key in piece[0].inputs}
            tokens = padded([d.tokens for d in piece], longest)
            mask = padded([np.ones(len(d.tokens), np.int64) for d in piece], longest)
            logits = self._network(input_ids=tokens, attention_mask=mask).logits
            found = torch.log_softmax(logits, -1).gather(2, columns["target_tokens"][..., None])[..., 0]
            loss = -(torch.exp(found - columns["logprobs"]) * columns["advantages"]).sum()
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def padded(rows: list[np.ndarray], length: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.pad(row, (0, length - len(row))) for row in rows]))


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure_service(model: str, data: list[Datum]) -> float:
    """Start the service, sample and train on it, print how fast its health answered and return its memory in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "tinker_local",
            "--model",
            model,
            "--port",
            "0",
            "--data",
            folder,
            "--until-eof",
        ]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        url = process.stdout.readline().split()[-1]
        client = tinker.ServiceClient(base_url=url, api_key="tml-bench")
        run = client.create_lora_training_client(model, rank=RANK).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        prompts = [datum.tokens[:PROMPT_TOKENS].tolist() for datum in data[::GROUP]]
        params = types.SamplingParams(max_tokens=TRAINED_TOKENS, stop=[])
        for sampled in [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]:
            sampled.result()
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak counts from here
        passed = run.forward_backward([sdk_datum(datum) for datum in data], "importance_sampling")
        done = threading.Event()
        passed.future().add_done_callback(lambda _: done.set())
        answers = []
        while not done.is_set():
            answers.append(seconds(lambda: urllib.request.urlopen(f"{url}/api/v1/healthz").read()))
            done.wait(0.1)
        passed.result()
        run.optim_step(types.AdamParams(learning_rate=1e-6)).result()
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        busy = cpu_seconds(process.pid)
        time.sleep(IDLE_SECONDS)
        busy = cpu_seconds(process.pid) - busy
        process.stdin.close()
        process.wait(20)
    print(f"health during a pass: median {1000 * statistics.median(answers):.1f} ms of {len(answers)} answers")
    print(f"CPU of the idle service: {busy:.2f} s in {IDLE_SECONDS} s, its client's heartbeats included")
    return int(peak) / (1 << 20)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has had."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def sdk_datum(datum: Datum) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens.tolist()), loss_fn_inputs=dict(datum.inputs))


if __name__ == "__main__":
    sys.exit(main())
