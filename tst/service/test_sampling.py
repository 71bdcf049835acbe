"""Sampling through the SDK: what a request can ask for, and many requests at once."""

import math
import pickle

import pytest
import torch
from tinker import types

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture
def base(client, ready):
    return ready(client.create_sampling_client(base_model="tiny"))


def test_a_seed_fixes_the_samples(base, sample):
    """The same seed gives the same samples, all different from each other; another seed gives others."""
    first, again, other = (
        [sequence.tokens for sequence in sample(base, PROMPT, 3, seed=seed, stop=[]).sequences] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert len({tuple(tokens) for tokens in first}) == 3


def test_a_seed_fixes_the_samples_whatever_runs_beside_them(base, sample):
    """Requests that run at once do not change each other's samples."""
    params = types.SamplingParams(max_tokens=12, seed=4, stop=[])
    alone = sample(base, PROMPT, seed=4, max_tokens=12, stop=[]).sequences[0].tokens
    prompts = [types.ModelInput.from_ints(PROMPT[: 1 + index % 5]) for index in range(20)]
    futures = [base.sample(prompt, 1, params) for prompt in prompts]
    found = [future.result(timeout=60).sequences[0].tokens for future in futures]
    assert [tokens for prompt, tokens in zip(prompts, found, strict=True) if prompt.length == 5] == [alone] * 4


def test_temperature_zero_takes_the_likeliest(base, sample):
    """Greedy sampling gives the top token of every position."""
    response = base.sample(
        types.ModelInput.from_ints(PROMPT), 2, types.SamplingParams(max_tokens=6, temperature=0, stop=[]),
        topk_sample_logprobs=1,
    ).result(timeout=60)  # fmt: skip
    for sequence in response.sequences:
        assert [pairs[0][0] for pairs in sequence.topk_logprobs] == sequence.tokens
        assert [pairs[0][1] for pairs in sequence.topk_logprobs] == pytest.approx(sequence.logprobs, abs=1e-5)


def test_top_k_and_top_p_of_one_token_are_greedy(base, sample):
    """top_k=1 and a tiny top_p leave only the likeliest token."""
    greedy = sample(base, PROMPT, temperature=0, stop=[]).sequences[0].tokens
    assert sample(base, PROMPT, top_k=1, stop=[]).sequences[0].tokens == greedy
    assert sample(base, PROMPT, top_p=1e-6, stop=[]).sequences[0].tokens == greedy


def test_samples_follow_the_models_distribution(base, sample):
    """Over many samples the first token comes as often as its probability says."""
    response = sample(base, PROMPT, 2000, max_tokens=1, seed=0, stop=[])
    tokens = [sequence.tokens[0] for sequence in response.sequences]
    chances = {sequence.tokens[0]: math.exp(sequence.logprobs[0]) for sequence in response.sequences}
    for token, chance in chances.items():
        spread = 5 * math.sqrt(chance * (1 - chance) / len(tokens)) + 2 / len(tokens)
        assert abs(tokens.count(token) / len(tokens) - chance) < spread


def test_stop_tokens_end_a_sample_and_belong_to_it(base, sample):
    """A sample ends with the first stop token, which is its last token."""
    plain = sample(base, PROMPT, temperature=0, stop=[], max_tokens=8).sequences[0].tokens
    stopped = sample(base, PROMPT, temperature=0, stop=[plain[3]], max_tokens=8).sequences[0]
    assert stopped.tokens == plain[: plain.index(plain[3]) + 1]
    assert stopped.stop_reason == "stop"


def test_stop_strings_end_a_sample(base, training, sample):
    """A sample ends with the token that completes a stop string."""
    tokenizer = training.get_tokenizer()
    plain = sample(base, PROMPT, seed=3, stop=[], max_tokens=40).sequences[0].tokens
    text = tokenizer.decode(plain)
    stop = text[4:6]
    stopped = sample(base, PROMPT, seed=3, stop=[stop], max_tokens=40).sequences[0]
    assert stopped.stop_reason == "stop"
    assert tokenizer.decode(stopped.tokens) == text[: text.index(stop) + 2]


def test_a_sample_that_runs_out_says_so(base, sample):
    """Without a stop a sample has max_tokens tokens and ends by length."""
    sequence = sample(base, PROMPT, stop=[], max_tokens=7).sequences[0]
    assert (len(sequence.tokens), len(sequence.logprobs), sequence.stop_reason) == (7, 7, "length")


def test_prompt_scores_agree_with_each_other(base, sample):
    """Logprobs, top tokens and chosen tokens of the prompt all describe one distribution."""
    targets = torch.full((4, 2), -1)
    targets[1] = torch.tensor([PROMPT[2], 9])
    response = base.sample(
        types.ModelInput.from_ints(PROMPT),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=265,
        target_prompt_logprobs=types.TensorData.from_torch(targets),
        prompt_alt_tokens_k=3,
    ).result(timeout=60)
    tables = [None if row is None else dict(row) for row in response.topk_prompt_logprobs]
    assert response.prompt_logprobs[0] is None
    assert tables[0] is None
    for position in range(1, 5):
        assert sum(math.exp(value) for value in tables[position].values()) == pytest.approx(1, abs=1e-4)
        assert response.prompt_logprobs[position] == pytest.approx(tables[position][PROMPT[position]], abs=1e-5)
    found = response.target_prompt_logprobs.tolist()
    assert found[1] == pytest.approx([tables[2][PROMPT[2]], tables[2][9]], abs=1e-5)
    assert [found[0], found[2], found[3]] == [[0.0, 0.0]] * 3
    tokens, values = response.prompt_alt_tokens.tokens.tolist(), response.prompt_alt_tokens.logprobs.tolist()
    for row in range(4):
        assert values[row] == pytest.approx([tables[row + 1][token] for token in tokens[row]], abs=1e-5)


def test_only_the_last_prompt_tokens_are_scored_where_asked(base):
    """prompt_logprobs_last_n leaves the tokens before without a logprob."""
    whole = base.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result(timeout=60)
    last = base.compute_logprobs(types.ModelInput.from_ints(PROMPT), 2).result(timeout=60)
    assert last[:3] == [None, None, None]
    assert last[3:] == pytest.approx(whole[3:], abs=1e-5)


def test_sparse_targets_come_back_sparse(base, sample):
    """The answer to a sparse target_prompt_logprobs has its layout."""
    targets = torch.full((4, 64), -1)
    targets[2, 5] = 11
    asked = types.TensorData.from_torch_sparse(targets, pad_value=-1)
    params = types.SamplingParams(max_tokens=1)
    response = base.sample(types.ModelInput.from_ints(PROMPT), 1, params, target_prompt_logprobs=asked).result(
        timeout=60
    )
    found = response.target_prompt_logprobs
    assert (found.shape, found.sparse_crow_indices, found.sparse_col_indices) == ([4, 64], [0, 0, 0, 1, 1], [5])
    assert found.data[0] < 0


def test_a_group_computes_its_prompt_once(base, sample):
    """A prompt that was computed lately is not computed again."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    first, second = (sample(base, prompt, 4, max_tokens=2) for _ in range(2))
    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens) == (0, len(prompt) - 1)


def test_the_next_turn_of_many_conversations_computes_what_is_new_alone(base):
    """All at once: each goes on from its own beginning, and its tokens' log-probabilities are those of the whole."""
    params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
    common = list(range(40, 60))
    first = [[*common, 100 + i] for i in range(6)]
    turns = [base.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in first]
    replies = [turn.result(timeout=60).sequences[0].tokens for turn in turns]
    second = [[*prompt, *reply, 9, 200 + i] for i, (prompt, reply) in enumerate(zip(first, replies, strict=True))]

    turns = [base.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in second]

    for prompt, turn in zip(second, turns, strict=True):
        response = turn.result(timeout=60)
        assert response.prompt_cache_hit_tokens == len(common) + 1 + 3  # the last token of a reply is not read by then
        (played,) = response.sequences
        whole = base.compute_logprobs(types.ModelInput.from_ints([*prompt, *played.tokens])).result(timeout=60)
        assert played.logprobs == pytest.approx(whole[len(prompt) :], abs=1e-4)


def test_a_pickled_client_samples_the_same(base, sample):
    """A client that crossed to another process joins the same sampler."""
    clone = pickle.loads(pickle.dumps(base))
    expected = sample(base, PROMPT, seed=8, stop=[]).sequences[0]
    found = sample(clone, PROMPT, seed=8, stop=[]).sequences[0]
    assert found.tokens == expected.tokens
    assert found.sequence_id != expected.sequence_id


def test_every_sample_has_its_own_id(base, sample):
    """Sequence ids differ within a request and between requests."""
    responses = [sample(base, PROMPT, 3) for _ in range(2)]
    assert len({sequence.sequence_id for response in responses for sequence in response.sequences}) == 6


def test_a_sampler_keeps_its_weights_while_training_goes_on(training, ready):
    """A saved sampler answers with the weights of its save, not with later ones."""
    sampler = ready(training.save_weights_and_get_sampling_client())
    before = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result(timeout=60)
    data = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]),
        loss_fn_inputs={"target_tokens": PROMPT[1:], "weights": [1.0] * 4},
    )
    training.forward_backward([data], "cross_entropy").result(timeout=60)
    training.optim_step(types.AdamParams(learning_rate=0.05)).result(timeout=60)
    later = ready(training.save_weights_and_get_sampling_client())
    assert sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result(timeout=60) == before
    assert later.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result(timeout=60) != before
