"""tasks.py against python ints. Exact, but for the rate of noise, which gets 4 sigma."""

import pytest
import torch

from quads_min.tasks import HELD_OUT, ChainTask


@pytest.mark.parametrize(("prime", "steps"), [(3, 1), (3, 2), (13, 5), (41, 8)])
def test_prompts_are_of_one_side_and_demonstrations_right_but_for_the_noise(prime, steps):
    """Training never meets a held-out prompt, by a rule of the prompt alone. Without noise
    demonstrations are the running results and EOS; with it a random number is right by chance."""
    task, rate = ChainTask(prime, steps), 0.12 * (1 - 1 / prime)
    rng = torch.Generator().manual_seed(0)
    for held_out in True, False:
        prompts = task.sample_prompts(20_000, rng, held_out)
        key = (prompts * torch.arange(1, 2 * task.prompt_len, 2)).sum(1)
        assert (key % HELD_OUT == 0).eq(held_out).all()
    demos, noisy = (task.demonstrations(prompts, noise, rng) for noise in (0.0, 0.12))
    assert task.rewards(prompts, demos, torch.full((20_000,), steps + 1)).eq(1).all()
    for prompt, demo in zip(prompts[:300].tolist(), demos.tolist(), strict=False):
        results = prompt[:1]
        for op, x in zip(prompt[1:-1:2], prompt[2::2], strict=True):
            results += [{task.plus: results[-1] + x, task.times: results[-1] * x}[op] % prime]
        assert demo == [*results[1:], task.eos] and prompt[-1] == task.equals
    for i, before in enumerate(torch.cat([prompts[:, :1], noisy], 1).T[:steps]):
        wrong = (noisy[:, i] != task.step(before, prompts, i)).float().mean()
        assert abs(wrong - rate) < 4 * (rate * (1 - rate) / 20_000) ** 0.5


RIGHT = "12 36 37 EOS", "1 2 37 EOS", "37 EOS PAD PAD", "37 EOS 5 EOS"
WRONG = "12 36 38 EOS", "12 36 EOS PAD", "12 36 37 37", "EOS 37 EOS PAD", "37 + EOS PAD"


@pytest.mark.parametrize("completion", RIGHT + WRONG)
def test_the_reward_reads_the_token_before_the_first_eos_and_nothing_else(completion):
    task, words = ChainTask(41, 3), f"7 + 5 * 3 + 1 = {completion}".split()
    token = {task.decode(torch.tensor([t])): t for t in range(task.vocab)}
    row = torch.tensor([[token[word] for word in words]])
    length = torch.tensor([words.index("EOS") - 7 if "EOS" in words else 4])
    assert task.rewards(row[:, :8], row[:, 8:], length).item() == (completion in RIGHT)


@pytest.mark.parametrize("size", [(2, 3), (2**61 - 1, 3), (1, 3), (9, 3), (25, 3), (-7, 3), (7, 0)])
def test_impossible_tasks_are_refused(size):
    with pytest.raises(ValueError, match=r"must be an odd prime|steps must be from 1"):
        ChainTask(*size)
