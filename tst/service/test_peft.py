"""A run beside the loop one would write with PEFT: same seed, same data, same losses."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tinker import types

from tinker_local import weights

TEXTS = [[72, 101, 108, 108, 111, 44, 32], [119, 111, 114, 108, 100], [72, 101, 121, 33, 10, 72, 105, 33]]
STEPS, RATE = 12, 1e-2


def plain_losses(seed: int) -> list[float]:
    """Train with PEFT and torch alone, one text after the other, and return the loss of every step."""
    network = weights.load("tiny", progress=print).network
    targets = [path for path, module in network.named_modules() if isinstance(module, torch.nn.Linear)]
    torch.manual_seed(seed)
    network = get_peft_model(network, LoraConfig(r=4, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        loss = torch.zeros(())
        for text in TEXTS:
            logits = network(input_ids=torch.tensor([text[:-1]])).logits[0]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # PEFT's, of this model
def test_its_losses_are_those_of_a_plain_peft_loop(client, datum, ready):
    """Initialisation, scaling, reduction and optimizer are PEFT's and torch's, so every step's loss is."""
    run = ready(client.create_lora_training_client("tiny", rank=4, seed=5))
    losses = []
    for _ in range(STEPS):
        passed = run.forward_backward([datum(text) for text in TEXTS], "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-12)).result(timeout=60)
        losses.append(passed.result(timeout=60).metrics["loss:sum"])
    assert losses == pytest.approx(plain_losses(5), rel=1e-3)
    assert losses[-1] < 0.6 * losses[0]
    assert plain_losses(6)[1] != pytest.approx(losses[1], rel=1e-3)
