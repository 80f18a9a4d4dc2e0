"""tasks.py against python ints: answers, rewards, the split, and the noise of demonstrations.

Everything here is exact but for two rates, which get four standard deviations.
"""

import pytest
import torch

from quads_min.tasks import HELD_OUT, ChainTask

SIZES = ((3, 1), (13, 5), (41, 8))  # (prime, steps)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def by_hand(task, prompt):
    """The running results of one prompt, a list of ints."""
    result, results = prompt[0], []
    for op, operand in zip(prompt[1:-1:2], prompt[2::2], strict=True):
        assert op in (task.plus, task.times) and 0 <= operand < task.prime
        result = (result + operand if op == task.plus else result * operand) % task.prime
        results.append(result)
    return results


@pytest.mark.parametrize(("prime", "steps"), SIZES)
def test_answers_and_demonstrations_equal_a_python_loop(prime, steps):
    """At noise 0 a demonstration is the running results and EOS, and all of them are rewarded."""
    task = ChainTask(prime, steps)
    prompts = task.sample_prompts(300, rng())
    want = [by_hand(task, prompt) for prompt in prompts.tolist()]
    assert task.answers(prompts).tolist() == [results[-1] for results in want]
    demos = task.demonstrations(prompts, 0.0, rng())
    assert demos.tolist() == [[*results, task.eos] for results in want]
    assert demos.shape[1] == task.max_new_tokens and prompts.shape[1] == task.prompt_len
    assert task.rewards(prompts, demos, torch.full((300,), steps + 1)).eq(1).all()
    specials = {task.plus, task.times, task.equals, task.eos, task.pad}
    assert specials == set(range(prime, task.vocab)) and prompts[:, -1].eq(task.equals).all()


def test_noise_replaces_a_step_at_its_rate_and_the_rest_follows_from_it():
    """A random number is right by chance once in p: the rate seen is noise * (1 - 1/p), 4 sigma."""
    task, noise = ChainTask(13, 5), 0.12
    prompts = task.sample_prompts(20_000, rng())
    demos = task.demonstrations(prompts, noise, rng(1))
    previous, wrong = prompts[:, 0], []
    for i in range(task.steps):
        op, operand = prompts[:, 2 * i + 1], prompts[:, 2 * i + 2]
        follows = torch.where(op == task.plus, previous + operand, previous * operand) % 13
        wrong.append(demos[:, i] != follows)
        previous = demos[:, i]
    wrong, rate = torch.stack(wrong).float(), noise * (1 - 1 / 13)
    assert (wrong.mean(1) - rate).abs().max() < 4 * (rate * (1 - rate) / 20_000) ** 0.5
    assert (demos[:, :-1] < 13).all() and (demos[:, -1] == task.eos).all()
    assert torch.equal(demos, task.demonstrations(prompts, noise, rng(1)))


def test_the_reward_reads_the_token_before_the_first_eos_and_nothing_else():
    task = ChainTask(41, 3)
    prompt = [7, task.plus, 5, task.times, 3, task.plus, 1, task.equals]  # 12, 36, 37
    E, pad = task.eos, task.pad
    cases = [
        ([12, 36, 37, E], 1),  # right
        ([12, 36, 38, E], 0),  # wrong
        ([1, 2, 37, E], 1),  # only the last result counts
        ([37, E, pad, pad], 1),  # an early EOS after the answer
        ([12, 36, E, pad], 0),  # an early EOS before it
        ([12, 36, 37, 37], 0),  # no EOS
        ([E, pad, pad, pad], 0),  # EOS first
        ([E, 37, E, pad], 0),  # ... whatever follows
        ([37, E, 5, E], 1),  # garbage after the first EOS
        ([5, E, 37, E], 0),  # ... even the answer
        ([37, task.plus, E, pad], 0),  # the answer is not the last token
    ]
    tokens = torch.tensor([tokens for tokens, _ in cases])
    lengths = torch.tensor([t.index(E) + 1 if E in t else 4 for t, _ in cases])
    prompts = torch.tensor([prompt] * len(cases))
    assert task.rewards(prompts, tokens, lengths).tolist() == [float(r) for _, r in cases]


def test_training_never_meets_a_held_out_prompt():
    """A rule of the prompt alone, so it holds for any run length: 20,000 draws of each side."""
    task = ChainTask(13, 5)
    for held_out in (False, True):
        prompts = task.sample_prompts(20_000, rng(), held_out)
        rule = (prompts * torch.arange(1, 2 * task.prompt_len, 2)).sum(1) % HELD_OUT == 0
        assert prompts.shape == (20_000, 12) and torch.equal(task.is_held_out(prompts), rule)
        assert rule.all() if held_out else not rule.any()


@pytest.mark.parametrize(("prime", "steps"), [(3, 1), (3, 2), (5, 1), (7, 1), (13, 5), (41, 8)])
def test_both_sides_of_the_split_are_big_enough(prime, steps):
    """Counted exactly, prompt by prompt in effect: held out is one in 16, and never none.

    In the presets the share is 1/16 within 1%, with 1,000 times the 1,024 evaluation prompts.
    """
    task, ways = ChainTask(prime, steps), {0: 1}  # weighted sum mod 16 -> prompts with it
    for i in range(task.prompt_len):
        odd = (task.plus, task.times) if i < task.prompt_len - 1 else (task.equals,)
        new = dict.fromkeys(range(HELD_OUT), 0)
        for total, count in ways.items():
            for token in odd if i % 2 else range(prime):
                new[(total + (2 * i + 1) * token) % HELD_OUT] += count
        ways = new
    assert sum(ways.values()) == prime ** (steps + 1) * 2**steps and ways[0] >= 1
    assert len(task.sample_prompts(3, rng(), held_out=True)) == 3
    if prime >= 13:
        assert ways[0] > 1_000 * 1_024
        assert abs(ways[0] * HELD_OUT / sum(ways.values()) - 1) < 0.01


def test_draws_depend_on_the_generator_alone():
    task = ChainTask(13, 5)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = (task.sample_prompts(50, rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    g = rng()
    assert not torch.equal(task.sample_prompts(50, g), task.sample_prompts(50, g))
    task.demonstrations(first, 0.5, g)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [(2, 3), (1, 3), (9, 3), (25, 3), (-7, 3), (7, 0)])
def test_impossible_tasks_are_refused(size):
    with pytest.raises(ValueError, match=r"prime must be|steps must be"):
        ChainTask(*size)
