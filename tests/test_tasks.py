"""tasks.py against python ints. Exact, but for the rate of noise, which gets 4 sigma."""

import pytest
import torch

from quads_min.tasks import HELD_OUT, ChainTask


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("prime", "steps"), [(3, 1), (13, 5), (41, 8)])
def test_answers_and_demonstrations_equal_a_python_loop(prime, steps):
    """At noise 0 a demonstration is the running results and EOS, and all of them are rewarded."""
    task = ChainTask(prime, steps)
    prompts = task.sample_prompts(300, rng())
    demos = task.demonstrations(prompts, 0.0, rng())
    assert task.rewards(prompts, demos, torch.full((300,), steps + 1)).eq(1).all()
    for prompt, demo in zip(prompts.tolist(), demos.tolist(), strict=True):
        results = prompt[:1]
        for op, x in zip(prompt[1:-1:2], prompt[2::2], strict=True):
            results += [{task.plus: results[-1] + x, task.times: results[-1] * x}[op] % prime]
        assert demo == [*results[1:], task.eos] and prompt[-1] == task.equals
    assert torch.equal(task.answers(prompts), demos[:, -2])


def test_noise_replaces_a_step_at_its_rate_and_the_rest_follows_from_it():
    """A random number is right by chance once in p: the rate seen is noise * (1 - 1/p)."""
    task, rate = ChainTask(13, 5), 0.12 * (1 - 1 / 13)
    prompts = task.sample_prompts(20_000, rng())
    demos = task.demonstrations(prompts, 0.12, rng(1))
    for i, before in enumerate(torch.cat([prompts[:, :1], demos], 1).T[:5]):
        op, x = prompts[:, 2 * i + 1], prompts[:, 2 * i + 2]
        wrong = demos[:, i] != torch.where(op == task.plus, before + x, before * x) % 13
        assert abs(wrong.float().mean() - rate) < 4 * (rate * (1 - rate) / 20_000) ** 0.5
    assert (demos[:, :-1] < 13).all() and (demos[:, -1] == task.eos).all()


def test_the_reward_reads_the_token_before_the_first_eos_and_nothing_else():
    task = ChainTask(41, 3)
    E, pad, prompt = task.eos, task.pad, [7, task.plus, 5, task.times, 3, task.plus, 1, task.equals]
    right = [
        [12, 36, 37, E],
        [1, 2, 37, E],  # only the last result counts
        [37, E, pad, pad],  # an early EOS after the answer
        [37, E, 5, E],  # garbage after the first EOS
    ]
    wrong = [
        [12, 36, 38, E],
        [12, 36, E, pad],  # an early EOS before the answer
        [12, 36, 37, 37],  # no EOS
        [E, 37, E, pad],  # EOS first, whatever follows
        [5, E, 37, E],
        [37, task.plus, E, pad],  # the answer is not the last token
    ]
    rows = right + wrong
    lengths = torch.tensor([row.index(E) + 1 if E in row else 4 for row in rows])
    rewards = task.rewards(torch.tensor([prompt] * len(rows)), torch.tensor(rows), lengths)
    assert rewards.tolist() == [1.0] * len(right) + [0.0] * len(wrong)


def test_training_never_meets_a_held_out_prompt():
    """A rule of the prompt alone, so it holds for any run length: 20,000 draws of each side."""
    task = ChainTask(13, 5)
    for held_out in (False, True):
        prompts = task.sample_prompts(20_000, rng(), held_out)
        rule = (prompts * torch.arange(1, 2 * task.prompt_len, 2)).sum(1) % HELD_OUT == 0
        assert prompts.shape == (20_000, 12) and rule.eq(held_out).all()
        assert torch.equal(task.is_held_out(prompts), rule)


@pytest.mark.parametrize(("prime", "steps"), [(3, 1), (3, 2), (5, 1), (7, 1), (13, 5), (41, 8)])
def test_both_sides_of_the_split_are_big_enough(prime, steps):
    """All prompts counted, by their sum mod 16: some held out in the smallest task, else sampling
    would not end; in the presets 1/16 within 1%, and 1,000 times the 1,024 of an evaluation."""
    task, ways = ChainTask(prime, steps), torch.eye(HELD_OUT, dtype=torch.float64)[0]
    for i in range(task.prompt_len - 1):
        tokens = (task.plus, task.times) if i % 2 else range(prime)
        ways = sum(ways.roll((2 * i + 1) * token) for token in tokens)
    held_out = ways.roll((2 * task.prompt_len - 1) * task.equals)[0]
    assert held_out >= 1 and len(task.sample_prompts(3, rng(), held_out=True)) == 3
    if prime >= 13:
        assert held_out > 1_024_000 and abs(HELD_OUT * held_out / ways.sum() - 1) < 0.01


def test_draws_depend_on_the_generator_alone():
    task, before = ChainTask(13, 5), torch.get_rng_state()
    first, again, other = (task.sample_prompts(50, rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    noisy = [task.demonstrations(first, 0.5, rng(seed)) for seed in (0, 0, 1)]
    assert torch.equal(*noisy[:2]) and not torch.equal(*noisy[1:])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [(2, 3), (1, 3), (9, 3), (25, 3), (-7, 3), (7, 0)])
def test_impossible_tasks_are_refused(size):
    with pytest.raises(ValueError, match=r"must be an odd prime|steps must be 1"):
        ChainTask(*size)
