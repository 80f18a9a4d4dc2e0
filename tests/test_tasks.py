"""tasks.py against python ints. Exact, but for the rate of noise, which gets 4 sigma."""

import pytest
import torch

from quads_min.tasks import HELD_OUT, ChainTask


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("prime", "steps"), [(3, 1), (13, 5), (41, 8)])
def test_demonstrations_equal_a_python_loop_but_for_the_noise(prime, steps):
    """Without noise they are the running results and EOS, and all are rewarded. With noise a random
    number is right by chance once in `prime`: the rate seen is noise * (1 - 1/prime)."""
    task, rate = ChainTask(prime, steps), 0.12 * (1 - 1 / prime)
    prompts = task.sample_prompts(20_000, rng())
    demos, noisy = (task.demonstrations(prompts, noise, rng(1)) for noise in (0.0, 0.12))
    assert task.rewards(prompts, demos, torch.full((20_000,), steps + 1)).eq(1).all()
    assert torch.equal(noisy, task.demonstrations(prompts, 0.12, rng(1)))
    for prompt, demo in zip(prompts[:300].tolist(), demos.tolist(), strict=False):
        results = prompt[:1]
        for op, x in zip(prompt[1:-1:2], prompt[2::2], strict=True):
            results += [{task.plus: results[-1] + x, task.times: results[-1] * x}[op] % prime]
        assert demo == [*results[1:], task.eos] and prompt[-1] == task.equals
    for i, before in enumerate(torch.cat([prompts[:, :1], noisy], 1).T[:steps]):
        wrong = noisy[:, i] != task.step(before, prompts, i)
        assert abs(wrong.float().mean() - rate) < 4 * (rate * (1 - rate) / 20_000) ** 0.5


PROMPT = "7 + 5 * 3 + 1 ="
RIGHT = "12 36 37 EOS", "1 2 37 EOS", "37 EOS PAD PAD", "37 EOS 5 EOS"
WRONG = "12 36 38 EOS", "12 36 EOS PAD", "12 36 37 37", "EOS 37 EOS PAD", "37 + EOS PAD"


@pytest.mark.parametrize("completion", RIGHT + WRONG)
def test_the_reward_reads_the_token_before_the_first_eos_and_nothing_else(completion):
    """7 + 5 * 3 + 1 = 37 modulo 41, whatever stands before it or after the EOS."""
    task, words = ChainTask(41, 3), completion.split()
    token = {task.decode(torch.tensor([t])): t for t in range(task.vocab)}
    prompt = torch.tensor([[token[word] for word in PROMPT.split()]])
    length = torch.tensor([words.index("EOS") + 1 if "EOS" in words else 4])
    reward = task.rewards(prompt, torch.tensor([[token[word] for word in words]]), length)
    assert reward.item() == (completion in RIGHT)


@pytest.mark.parametrize(("prime", "steps"), [(3, 1), (3, 2), (5, 1), (13, 5)])
def test_training_never_meets_a_held_out_prompt(prime, steps):
    """A rule of the prompt alone, so it holds for any run length, and no side is ever empty."""
    task = ChainTask(prime, steps)
    for held_out in (False, True):
        prompts = task.sample_prompts(2_000, rng(), held_out)
        weights = torch.arange(1, 2 * task.prompt_len, 2)
        assert ((prompts * weights).sum(1) % HELD_OUT == 0).eq(held_out).all()
        assert torch.equal(prompts, task.sample_prompts(2_000, rng(), held_out))


@pytest.mark.parametrize("size", [(2, 3), (1, 3), (9, 3), (25, 3), (-7, 3), (7, 0)])
def test_impossible_tasks_are_refused(size):
    with pytest.raises(ValueError, match=r"must be an odd prime|steps must be 1"):
        ChainTask(*size)
