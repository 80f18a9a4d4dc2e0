"""Quantizer and objective on what hypothesis comes up with, subnormals and FLT_MAX included."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_nvfp4 import oracle, oracle_mask

from quads_min import grpo, nvfp4

settings.register_profile("here", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("here")
SHAPES = st.tuples(st.integers(1, 5), st.sampled_from([16, 32, 80]))
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(2.0**-30, 2.0**30, width=32).flatmap(lambda v: st.sampled_from([v, -v, 0.0]))


def tensors(elements):
    return arrays(np.float32, SHAPES, elements=elements, fill=elements)


@given(tensors(ANY), st.sampled_from(["row", "tensor"]))
def test_any_finite_tensor_has_the_oracles_bytes(x, outer):
    q = nvfp4.quantize(torch.from_numpy(x), outer)
    ours = [q.packed, q.scale.view(torch.uint8), q.global_scale, nvfp4.dequantize(q)]
    for mine, expected in zip(ours, oracle(x, outer), strict=True):
        assert mine.numpy().tobytes() == expected.astype(mine.numpy().dtype).tobytes()


@given(tensors(ANY), st.floats(0, 1), st.sampled_from([("block", 16), ("channel", 1)]), st.data())
def test_any_residual_has_the_oracles_mask_and_bytes(x, ratio, unit, data):
    rows = np.array(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))))
    t, live = torch.from_numpy(x), torch.from_numpy(rows)
    _, residual, mask = nvfp4.encode_with_residual(t, ratio, unit[0], rows=live)
    r = x - oracle(x)[3]
    expected = oracle_mask(r, ratio, unit[1], rows)
    assert (mask.numpy() == expected).all()
    packed = oracle(np.where(expected, r, np.float32(0)), outer_of=x)[0]
    assert residual.pack().packed.numpy().tobytes() == packed.astype(np.uint8).tobytes()


@given(tensors(MODERATE), st.integers(-20, 20))
def test_a_power_of_two_moves_into_the_global_scale_alone_and_a_sign_mirrors(x, k):
    """In a range where nothing over- or underflows."""
    t = torch.from_numpy(x)
    a, b, c = (nvfp4.encode(y) for y in (t, t * 2.0**k, -t))
    assert torch.equal(a.planes(), b.planes()) and torch.equal(a.planes(), -c.planes())
    live = t.abs().amax(1, keepdim=True) > 0
    assert torch.equal(torch.where(live, a.global_scale * 2.0**k, 1.0), b.global_scale)


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
