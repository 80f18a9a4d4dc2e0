"""grpo.py on numbers small enough to check by hand, or that hypothesis comes up with.

A value printed to n digits is compared to half of the last one; otherwise bit-equal, or `approx`:
1e-6 relative, 8 ulp.
"""

from math import e

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pytest import approx, mark, raises
from test_model import policy_of

from quads_min import grpo
from quads_min.modes import ARITHMETICS
from rollout import Engine

settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")


def test_both_sides_take_logprobs_at_the_sampling_temperature():
    """Logits [2, 0] at 0.5: log p(0) = -log(1 + e^-4) = -0.01815; token 1 at its rate (4 sigma)."""
    policy = policy_of(layers=1)
    for p, value in (policy.embed, 1), (policy.layers[0].out, 0), (policy.layers[0].down.weight, 0):
        p.data.fill_(value)  # without attention and experts norm(h) is 1 in bf16
    policy.head.data[:] = torch.tensor([2 / 32, 0.0] + [-99.0] * 16).unsqueeze(1)
    prompts, noise = torch.zeros(4000, 2, dtype=torch.int64), torch.Generator().manual_seed(0)
    out = Engine(policy, ARITHMETICS["bf16"]).generate(prompts, 1, 16, 17, 1, 0.5, noise)
    mine, _ = grpo.token_logprobs(policy(prompts, logits_from=1).logits, out.tokens, 0.5)
    want, p = torch.tensor([-0.01815, -4.01815])[out.tokens], 1 / (1 + e**4)
    for logprobs in mine, out.logprobs:
        torch.testing.assert_close(logprobs, want, rtol=0, atol=5e-6)
    assert abs(out.tokens.float().mean() - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_log_softmax_is_fp32_whatever_the_logits():
    """The third log-prob of [12, .3, -1.7] is -13.7000; a bf16 log-softmax gives -13.6875."""
    logits, third = torch.tensor([[12.0, 0.3, -1.7]]), torch.tensor([2])
    assert grpo.token_logprobs(logits, third, 1.0)[0].item() == approx(-13.7000, abs=5e-5)
    half = logits.bfloat16()
    assert torch.equal(*(grpo.token_logprobs(x, third, 1.0)[0] for x in (half, half.float())))
    p = np.exp([2, 4, 6]) / np.exp([2, 4, 6]).sum()
    entropy = grpo.token_logprobs(torch.tensor([[1.0, 2, 3]]), third, 0.5)[1]
    assert entropy.item() == approx(-(p * np.log(p)).sum())


REWARDS = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(2, 9)),
                 elements=st.integers(-80, 80).map(lambda i: i / 8))  # fmt: skip


@given(REWARDS, st.integers(-9, 9), st.sampled_from([0.25, 1, 8]))
def test_advantages_are_standardized_in_each_group_whatever_the_rewards_unit(r, shift, unit):
    """By the population std. Sixteenths are exact in fp32, so equal rewards stay equal; 1e-5: sums
    of nine numbers."""
    A, equal = grpo.group_advantages(torch.from_numpy(r)), torch.from_numpy(np.ptp(r, 1) == 0)
    assert (A[equal] == 0).all()
    torch.testing.assert_close(A.sum(1), torch.zeros(len(r)), atol=1e-5, rtol=0)
    torch.testing.assert_close(A.square().mean(1), (~equal).float())
    torch.testing.assert_close(grpo.group_advantages(torch.from_numpy(r) * unit + shift), A)


def test_rewards_are_of_any_dtype_and_of_groups():
    """0.35 * 7 / 7 rounds to another number than 0.35, yet equal rewards give exactly 0."""
    A = grpo.group_advantages
    assert A(torch.tensor([[1, 0, 0, 0]]))[0].tolist() == approx([3**0.5] + [-(3**-0.5)] * 3)
    assert not A(torch.full((1, 7), 0.35)).any() and not A(torch.tensor([[1, 1], [0, 0]])).any()
    for shape in (4, 1), (4, 0), (4,), (2, 2, 2):
        with raises(ValueError, match="G >= 2"):
            A(torch.ones(shape))


def test_masks_come_from_lengths():
    """[7, EOS, PAD, PAD] and [7, 8, PAD, PAD] without EOS, both of length 2: the same mask."""
    mask = grpo.token_mask(torch.tensor([2, 1, 4, 0]), 4)
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_importance_weights_compare_old_with_rollout_and_carry_no_gradient():
    """Rollout -2, old -1, current -0.5: min(e^1, C), never e^1.5; mis masks what is above C."""
    old, engine = torch.tensor([[-1.0, -2, -2]]).requires_grad_(), torch.tensor([[-2.0, -2, -1]])
    first = {("tis", 2): 2, ("tis", 9): e, ("mis", 2): 0, ("mis", 9): e, ("mis", 1): 0}
    for (correction, cap), want in first.items():  # at the cap, e^0 = 1, mis keeps a token
        w = grpo.importance_weights(old, engine, correction, cap)
        assert w[0].tolist() == approx([want, 1, 1 / e]) and not w.requires_grad
    assert grpo.importance_weights(old, engine, "none", 2.0).eq(1).all()
    with raises(ValueError, match="none, tis, mis, got 'is'"):
        grpo.importance_weights(old, engine, "is", 2.0)


@given(st.integers(1, 6), st.integers(1, 7), st.floats(0.05, 0.5), st.integers(0, 2**31))
def test_the_loss_is_the_clipped_term_over_real_tokens_whatever_the_padding(B, T, clip, seed):
    """Loss, its gradient and the share of clipped tokens against numpy; garbage in the padding has
    no gradient."""
    rng = np.random.default_rng(seed)
    new, old, w, A = (rng.normal(size=s) for s in ((B, T), (B, T), (B, T), (B, 1)))
    mask = np.arange(T) < rng.integers(1, T + 1, (B, 1))
    plain, clipped = np.exp(new - old) * A, np.clip(np.exp(new - old), 1 - clip, 1 + clip) * A
    slope = np.where(mask & (plain <= clipped), -w * plain / mask.sum(), 0)
    new[~mask] = 80.0
    logprobs, *rest = map(torch.from_numpy, (new, old, A[:, 0], mask))
    loss, share = grpo.policy_loss(logprobs.requires_grad_(), *rest, clip, torch.from_numpy(w))
    loss.backward()
    np.testing.assert_allclose(loss.item(), -(w * np.minimum(plain, clipped))[mask].mean())
    np.testing.assert_allclose(share.item(), (clipped < plain)[mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(logprobs.grad, slope)


@mark.parametrize("B", [3, 40])  # fewer and more than 100 tokens
def test_mismatch_equals_numpy_over_real_tokens(B):
    """p99 is the smallest |gap| that at least 99% do not exceed. Padding is poisoned with 50. KL at
    d = -0.1 is 0.0048374; d of the other sign would give 0.0051709."""
    assert grpo.kl_k3(torch.zeros(1), torch.tensor([-0.1])).item() == approx(0.0048374, abs=5e-8)
    rng = np.random.default_rng(0)
    mask = np.arange(9) < rng.integers(1, 10, (B, 1))
    old, engine = (-rng.random((B, 9)).astype(np.float32) for _ in range(2))
    d = (old - engine)[mask].astype(np.float64)
    old[~mask] += 50
    got = grpo.mismatch(*map(torch.from_numpy, (engine, old, mask)))
    p99 = np.percentile(np.abs(d), 99, method="inverted_cdf")
    want = [np.abs(d).mean(), p99, np.abs(d).max(), (np.exp(d) - 1 - d).mean()]
    assert [got[k].item() for k in ("gap_mean", "gap_p99", "gap_max", "kl")] == approx(want)


def test_choices_are_compared_as_sets_and_gaps_sorted_by_both_signs_over_real_tokens():
    """Two layers of three tokens, the last not read: 2 of 4 differ. Four rows of two tokens, the
    last of the last row padding: 7 count."""
    ours = torch.tensor([[[[0, 1], [2, 3], [0, 1]], [[0, 1], [2, 3], [0, 1]]]])
    theirs = torch.tensor([[[[1, 0], [2, 1], [2, 3]], [[0, 3], [3, 2], [2, 3]]]])
    assert grpo.choice_mismatch(ours, theirs, torch.tensor([[True, True, False]])) == 2 / 4
    old = torch.tensor([[0.7, -1.4], [2.1, -2.8], [3.5, -3.5], [4.2, 9.0]])
    mask, A = grpo.token_mask(torch.tensor([2, 2, 2, 1]), 2), torch.tensor([1.0, -0.5, 0, -2])
    found = grpo.gap_by_advantage(torch.zeros(4, 2), old, A, mask)
    want = {"mass_pos_pos": 0.1, "mass_pos_neg": 0.2, "mass_neg_pos": 0.9, "mass_neg_neg": 0.4}
    assert {k: v.item() for k, v in found.items()} == approx(want)
