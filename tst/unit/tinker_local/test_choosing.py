"""Choosing tokens: exact points of the distribution, and the limits put on it."""

import numpy as np
import pytest
import torch

from tinker_local.choosing import choose, draw, logprobs_of, top
from tinker_local.operations import SamplingParams


def test_draw_finds_the_token_at_a_point_of_the_distribution():
    """Each uniform number falls on the token whose share of the cumulative sum holds it."""
    shares = torch.full((1, 700), 1 / 700)
    points = torch.tensor([0.0, 0.5 / 700, 256.5 / 700, 699.5 / 700])
    found = draw(shares.log().expand(4, -1), points)
    assert found.tolist() == [0, 0, 256, 699]


def test_draw_never_takes_a_token_of_weight_zero():
    """Ruled out tokens are not drawn, also at the very end of the distribution."""
    logits = torch.full((3, 300), float("-inf"))
    logits[:, 10] = 0.0
    assert draw(logits, torch.tensor([0.0, 0.5, 1.0 - 1e-12])).tolist() == [10, 10, 10]


def test_rows_keep_their_own_parameters():
    """Greedy, top-k and free rows in one batch each follow their own parameters."""
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(3, 1)
    params = [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=0.01)]
    chosen = choose(logits, params, [np.random.default_rng(seed) for seed in range(3)])
    assert chosen.tokens.tolist() == [1, 1, 1]
    assert chosen.logprobs.tolist() == pytest.approx([torch.log_softmax(logits, -1)[0, 1].item()] * 3)


def test_top_p_keeps_the_token_that_crosses_it():
    """With top_p 0.6 over shares 0.5, 0.3, 0.2 the first two can come, the third can't."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(400, 1)
    chosen = choose(logits, [SamplingParams(top_p=0.6)] * 400, [np.random.default_rng(seed) for seed in range(400)])
    assert set(chosen.tokens.tolist()) == {0, 1}


def test_logprobs_are_of_the_model_not_of_the_limits():
    """Temperature and top-k change what is chosen, not the logprob that is reported."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    chosen = choose(logits, [SamplingParams(temperature=0.1, top_k=1)], [np.random.default_rng(0)])
    assert chosen.logprobs.tolist() == logprobs_of(logits, torch.tensor([0])).tolist()


def test_top_lists_the_likeliest_first():
    """The K likeliest tokens come in order with their logprobs."""
    found = top(torch.tensor([[0.1, 0.6, 0.3]]).log(), 2)
    assert found.token_ids.tolist() == [[1, 2]]
    assert np.allclose(found.logprobs, np.log([[0.6, 0.3]]))
