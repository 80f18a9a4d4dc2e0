"""grpo.py on rewards and log-probs that hypothesis comes up with."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quads_min import grpo

settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")
REWARDS = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(2, 9)),
                 elements=st.integers(-80, 80).map(lambda i: i / 8))  # fmt: skip


@given(REWARDS, st.integers(-9, 9), st.sampled_from([0.25, 1, 8]))
def test_advantages_are_standardized_in_each_group_whatever_the_rewards_unit(r, shift, unit):
    """Sixteenths are exact in fp32, so equal rewards stay equal; 1e-5: sums of nine numbers."""
    A, equal = grpo.group_advantages(torch.from_numpy(r)), torch.from_numpy(np.ptp(r, 1) == 0)
    assert (A[equal] == 0).all()
    torch.testing.assert_close(A.sum(1), torch.zeros(len(r)), atol=1e-5, rtol=0)
    torch.testing.assert_close(A.square().mean(1), (~equal).float())
    torch.testing.assert_close(grpo.group_advantages(torch.from_numpy(r) * unit + shift), A)


@given(st.integers(1, 6), st.integers(1, 7), st.floats(0.05, 0.5), st.integers(0, 2**31))
def test_the_loss_is_the_clipped_term_over_real_tokens_whatever_the_padding(B, T, clip, seed):
    """Loss and share of clipped tokens against numpy; garbage in the padding has no gradient."""
    rng = np.random.default_rng(seed)
    new, old, w, A = (rng.normal(size=s) for s in ((B, T), (B, T), (B, T), (B, 1)))
    mask = np.arange(T) < rng.integers(1, T + 1, (B, 1))
    plain, clipped = np.exp(new - old) * A, np.clip(np.exp(new - old), 1 - clip, 1 + clip) * A
    new[~mask] = 80.0
    logprobs, *rest, real = map(torch.from_numpy, (new, old, A[:, 0], mask))
    loss, share = grpo.policy_loss(
        logprobs.requires_grad_(), *rest, real, clip, torch.from_numpy(w)
    )
    loss.backward()
    np.testing.assert_allclose(loss.item(), -(w * np.minimum(plain, clipped))[mask].mean())
    np.testing.assert_allclose(share.item(), (clipped < plain)[mask].mean(), rtol=1e-6)
    assert not logprobs.grad[~real].any()
