"""How fast tinker_local samples, beside transformers.generate and beside one request after another.

    python bench/sampling.py [--model NAME] [--rounds 3]

Both sides of a ratio run in turn, in one process, on one model; the printed ratio is of the medians.
"""

import argparse
import copy
import logging
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tinker_local import weights
from tinker_local.model import LanguageModel
from tinker_local.operations import Sample, SamplingParams
from tinker_local.sampling import Sampler

PROMPT_TOKENS = 300
NEW_TOKENS = 64
GROUP = 8
REQUESTS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=weights.DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    base = weights.load(options.model, progress=print)
    plain = copy.deepcopy(base.network)  # the service lays the network's weights out anew; its peer has them as loaded
    model = LanguageModel(base)
    prompt = prompt_of(base, PROMPT_TOKENS)

    print(f"{options.model}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    compare(
        f"a group of {GROUP} samples of one {PROMPT_TOKENS}-token prompt, {NEW_TOKENS} new tokens each",
        ("tinker_local", lambda: sample(model, base, [(prompt, GROUP)])),
        ("transformers.generate", lambda: generate(plain, prompt)),
        tokens=GROUP * NEW_TOKENS,
        rounds=options.rounds,
    )
    requests = [(prompt[index : index + 100], 1) for index in range(REQUESTS)]
    compare(
        f"{REQUESTS} requests of different 100-token prompts, {NEW_TOKENS // 4} new tokens each",
        ("at once", lambda: sample(model, base, requests, new_tokens=NEW_TOKENS // 4)),
        ("one after another", lambda: [sample(model, base, [each], new_tokens=NEW_TOKENS // 4) for each in requests]),
        tokens=REQUESTS * NEW_TOKENS // 4,
        rounds=options.rounds,
    )


def prompt_of(base: weights.BaseModel, length: int) -> np.ndarray:
    """Return the first `length` tokens of some running text."""
    text = " ".join(
        f"On day {day} the river rose by {day * 7 % 13} feet and the town moved uphill." for day in range(99)
    )
    return np.array(base.tokenizer.encode(text)[:length], dtype=np.int64)


def sample(
    model: LanguageModel,
    base: weights.BaseModel,
    requests: list[tuple[np.ndarray, int]],
    *,
    new_tokens: int = NEW_TOKENS,
) -> None:
    """Sample for all requests with nothing known from before."""
    sampler = Sampler(model, base.tokenizer.decode)
    params = SamplingParams(max_tokens=new_tokens, stop_tokens=frozenset())
    for index, (prompt, count) in enumerate(requests):
        sampler.submit(str(index), Sample("bench", prompt, count, params), None)
    while sampler.busy:
        sampler.step()


def generate(network: torch.nn.Module, prompt: np.ndarray) -> None:
    """Sample the group with transformers, given the same batch and its own attention."""
    batch = torch.from_numpy(prompt)[None].expand(GROUP, -1)
    with torch.inference_mode():
        network.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )


def compare(
    title: str,
    ours: tuple[str, Callable[[], object]],
    theirs: tuple[str, Callable[[], object]],
    *,
    tokens: int,
    rounds: int,
) -> None:
    """Time both in turn and print their tokens a second and the ratio."""
    seconds: dict[str, list[float]] = {ours[0]: [], theirs[0]: []}
    for _ in range(rounds):
        for name, run in (ours, theirs):
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    print(title)
    for name, rate in rates.items():
        print(f"  {name:24} {rate:8.1f} tokens/s")
    print(f"  {'ratio':24} {rates[ours[0]] / rates[theirs[0]]:8.2f}")


if __name__ == "__main__":
    main()
