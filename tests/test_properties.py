"""Quantizer and objective on what hypothesis comes up with, subnormals and FLT_MAX included."""

import numpy as np
import pytest
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
    ours = [q.packed.numpy(), q.scale.view(torch.uint8).numpy(), q.global_scale.numpy()]
    ours.append(nvfp4.dequantize(q).numpy())
    for mine, expected in zip(ours, oracle(x, outer), strict=True):
        assert mine.tobytes() == expected.astype(mine.dtype).tobytes()


@given(tensors(ANY), st.floats(0, 1), st.sampled_from([("block", 16), ("channel", 1)]), st.data())
def test_any_residual_has_the_oracles_mask_and_bytes(x, ratio, unit, data):
    rows = np.array(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))))
    t, live = torch.from_numpy(x), torch.from_numpy(rows)
    _, residual, mask = nvfp4.quantize_with_residual(t, ratio, unit[0], rows=live)
    r = x - oracle(x)[3]
    expected = oracle_mask(r, ratio, unit[1], rows)
    assert (mask.numpy() == expected).all()
    packed = oracle(np.where(expected, r, np.float32(0)), outer_of=x)[0]
    assert residual.packed.numpy().tobytes() == packed.astype(np.uint8).tobytes()


@given(tensors(ANY), st.randoms(use_true_random=False))
def test_rows_know_nothing_of_each_other_and_signs_only_mirror(x, random):
    t, order = torch.from_numpy(x), list(range(len(x)))
    random.shuffle(order)
    q, shuffled = nvfp4.quantize(t), nvfp4.quantize(t[order])
    assert all(torch.equal(a[order], b) for a, b in zip(q, shuffled, strict=True))
    assert torch.equal(nvfp4.dequantize(nvfp4.quantize(-t)), -nvfp4.dequantize(q))


@given(tensors(MODERATE), st.integers(-20, 20))
def test_a_power_of_two_moves_into_the_global_scale_alone(x, k):
    """In a range where nothing over- or underflows."""
    t = torch.from_numpy(x)
    a, b = nvfp4.quantize(t), nvfp4.quantize(t * 2.0**k)
    assert torch.equal(a.packed, b.packed) and torch.equal(a.scale.float(), b.scale.float())
    live = t.abs().amax(1, keepdim=True) > 0
    assert torch.equal(torch.where(live, a.global_scale * 2.0**k, 1.0), b.global_scale)


@given(tensors(MODERATE))
def test_what_is_lost_is_less_than_one_code_step_and_the_residual_packet_loses_less(x):
    """E2M1's widest spacing is 2, so rounding loses 1 at most, in units of scale * global scale;
    clamping less, since E4M3 rounds a normal scale by 1 part in 16. 2^-20: rounding in fp32."""
    t = torch.from_numpy(x)
    for packet, rest in nvfp4_errors(t):
        step = packet.scale.float() * packet.global_scale
        normal = packet.scale.float() >= 2.0**-6
        lost = rest.unflatten(-1, (-1, 16)).abs().amax(-1)
        assert (lost <= step * (1 + 2.0**-20))[normal].all()


def nvfp4_errors(t):
    """(main packet, what it loses), (residual packet of everything, what both lose)."""
    main, residual, _ = nvfp4.quantize_with_residual(t, 1.0)
    r = t - nvfp4.dequantize(main)
    return (main, r), (residual, r - nvfp4.dequantize(residual))


DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool])


@given(st.lists(st.integers(0, 33), max_size=3), DTYPE, st.sampled_from(["row", "tensor", "", 0]),
       st.floats(), st.sampled_from(["block", "channel", None]))  # fmt: skip
def test_nonsense_is_a_value_error_that_names_the_function(shape, dtype, outer, ratio, unit):
    x = torch.ones(shape).to(dtype)
    good = dtype in (torch.float32, torch.bfloat16) and outer in ("row", "tensor")
    good &= len(shape) > (outer == "tensor") and shape[-1] > 0 and shape[-1] % 16 == 0
    good = good and (outer == "row" or shape[-2] > 0)
    if good and 0 <= ratio <= 1 and unit:
        nvfp4.quantize_with_residual(x, ratio, unit, outer)
        return
    with pytest.raises(ValueError, match=r"^quantize_with_residual: "):
        nvfp4.quantize_with_residual(x, ratio, unit, outer)


# ---- objective

REWARDS = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(2, 9)),
                 elements=st.integers(-80, 80).map(lambda i: i / 8))  # fmt: skip


@given(REWARDS, st.integers(-9, 9), st.sampled_from([0.25, 1, 8]))
def test_advantages_are_standardized_in_each_group_whatever_the_rewards_unit(r, shift, unit):
    """Sixteenths are exact in fp32, so equal rewards stay equal; 1e-5: sums of nine numbers."""
    A = grpo.group_advantages(torch.from_numpy(r))
    equal = torch.from_numpy((r == r[:, :1]).all(1))
    assert (A[equal] == 0).all()
    torch.testing.assert_close(A.sum(1), torch.zeros(len(r)), atol=1e-5, rtol=0)
    torch.testing.assert_close(A[~equal].square().mean(1), torch.ones(int((~equal).sum())))
    torch.testing.assert_close(grpo.group_advantages(torch.from_numpy(r) * unit + shift), A)
    assert torch.equal(grpo.group_advantages(torch.from_numpy(r[:1])), A[:1])


@given(st.integers(1, 6), st.integers(1, 7), st.floats(0.05, 0.5), st.randoms())
def test_padding_and_the_order_of_rows_change_nothing(B, N, clip, random):
    """Loss and gradient; equal bits for the padding, sums in another order for the rows."""
    torch.manual_seed(random.randrange(2**31))
    new, old, lengths = -torch.rand(B, N) * 3, -torch.rand(B, N) * 3, torch.randint(1, N + 1, (B,))
    A, mask = torch.randn(B), grpo.token_mask(lengths, N)

    def loss_and_gradient(new, old, A, mask):
        new = new.clone().requires_grad_()
        loss, share = grpo.policy_loss(new, old, A, mask, clip)
        loss.backward()
        return loss.detach(), share, new.grad

    plain = loss_and_gradient(new, old, A, mask)
    garbage = -torch.rand(B, N) * 20
    padded = loss_and_gradient(torch.where(mask, new, garbage), old, A, mask)
    assert all(map(torch.equal, plain, padded)) and (plain[2][~mask] == 0).all()
    order = torch.randperm(B)
    moved = loss_and_gradient(new[order], old[order], A[order], mask[order])
    torch.testing.assert_close(moved, (*plain[:2], plain[2][order]))


@given(st.floats(-8, 8, width=32), st.floats(-3, 3, width=32), st.floats(0.05, 0.5))
def test_the_clip_stops_the_gradient_where_the_ratio_went_far_enough(d, advantage, clip):
    new = torch.tensor([[d]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, share = grpo.policy_loss(new, torch.zeros(1, 1), torch.tensor([advantage]), mask, clip)
    loss.backward()
    ratio = new.detach().exp().item()
    far = ratio > 1 + clip + 1e-6 if advantage > 0 else ratio < 1 - clip - 1e-6
    near = ratio < 1 + clip - 1e-6 if advantage > 0 else ratio > 1 - clip + 1e-6
    assert not (far and advantage) or (new.grad.item() == 0 and share == 1)
    if near:
        torch.testing.assert_close(new.grad, torch.tensor([[-ratio * advantage]]))
    assert grpo.kl_k3(torch.zeros(1), torch.tensor([d])) >= 0
