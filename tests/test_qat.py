"""qat.py, and what the two sides owe each other: same weights, fresh weights, replay.

References loop over slots in fp64, by plain autograd. On integers of few bits every fp32 sum is
exact in any order, so results are bit-equal. On reals a sum of n products may be off by n * 2^-24 *
sum |products|, and a rounding to bf16 by 2^-8.
"""

import torch
import torch.nn.functional as F
from pytest import approx, mark, raises
from test_model import policy_of

from quads_min import grpo, model, nvfp4, qat
from quads_min.modes import ARITHMETICS, Arithmetic
from rollout import Engine


def generate(engine):
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(16, (16, 8), generator=rng)
    return prompts.repeat_interleave(2, 0), engine.generate(prompts, 9, 16, 17, 2, generator=rng)


def slot_loop(x, w, choice, dy):
    """y (slots, N), dL/dx, dL/dw in fp64, each slot on its own."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    y = torch.stack([w[e] @ x[t] for t, experts in enumerate(choice.tolist()) for e in experts])
    y.backward(dy.double())
    return y.detach(), x.grad, w.grad


@mark.parametrize("name", ["bf16", "fp8", "w4a16", "w16a4", "w4a4"])
@mark.parametrize("top_k", [1, 2, 3])
def test_forward_and_backward_use_both_quantized_operands_and_skip_the_quantizer(name, top_k):
    """V = W / o, gain 32: y = x^ V^T, dx = dy V^ (rounded to bf16), grad_V = grad_V^ = dy^T x^ and
    grad_W = grad_V^ / o, block maxima included; n = 512 for products, scales and their sum.

    Experts get [0, 1, 127, 129] tokens, or random ones. With integer activations, not quantized,
    grad_W is exact; without tokens it is 0. RAC's second packet adds to the first.
    """
    o = torch.ones(48).index_fill_(0, torch.tensor([5, 20]), 32.0)
    layer, a = qat.FakeQuantExperts(4, 32, 48, o, ARITHMETICS[name]), ARITHMETICS[name]
    counts = torch.arange(4).repeat_interleave(torch.tensor([0, 1, 127, 129])).unsqueeze(1)
    choice = counts if top_k == 1 else 1 + torch.rand(257, 3).topk(top_k).indices
    x, r = torch.randint(-8, 9, (2, 257, 48)).float()
    dy, routing = torch.randint(-8, 9, (choice.numel(), 32)).float(), model.route(choice, 4)
    y = layer(x.requires_grad_(), routing, None)
    y.backward(dy)
    x_hat = qat.encode_activation((x * o).bfloat16(), a.activations)
    v_hat = qat.encode_weight(layer.weight / o, a.weights)
    want = slot_loop(x_hat.value(), v_hat.value(), choice, dy)
    sums = slot_loop(x_hat.value().abs(), v_hat.value().abs(), choice, dy.abs())
    exact = 0 if a.activations == "bf16" else 2**-15
    got = (y, 2**-15, 0), (x.grad / o, 2**-15, 2**-8), (layer.weight.grad * o, exact, 0)
    for (g, bound, rounding), w, total in zip(got, want, sums, strict=True):
        assert ((g - w).abs() <= bound * total + rounding * w.abs()).all()
    assert not layer.weight.grad[0].any() and not torch.equal(v_hat.value(), layer.weight / o)
    both = qat.grouped_matmul(qat.Operand(x_hat.plane + r, x_hat.scale), v_hat, routing)
    torch.testing.assert_close(qat.grouped_matmul(x_hat, v_hat, routing, r), both)
    empty = layer(x[:0], model.route(choice[:0], 4), None)
    (grad,) = torch.autograd.grad(empty.sum(), layer.weight)
    assert empty.shape == (0, 32) and not grad.any()


def test_the_trainer_multiplies_what_the_engine_packed():
    """Also for amax 0.02 beside a block of 5e-5: s_b = 1.125, decodes to 5.0223e-5.

    Plane and scale are bit-equal, so V^ = plane * g is. `dequantize` associates otherwise, value *
    (s_b * g): within 2^-22. The bf16 rounding of amax, before, moves the block by 2^-8 at most.
    """
    policy, W = policy_of("w4a16"), torch.tensor([[5e-5, 0.02]]).repeat_interleave(16, 1)
    down = policy.layers[0].down
    down.weight.data[1] = W
    engine = Engine(policy, ARITHMETICS["w4a4"])
    policy(torch.zeros(1, 4, dtype=torch.int64))
    for name, mine in policy.expert_linears().items():
        stored = nvfp4.NVFP4Tensor(*engine.experts[name].stored)
        assert torch.equal(mine.consumed.plane, nvfp4.unpack(stored).planes())
        assert torch.equal(mine.consumed.scale, stored.global_scale)
        V_hat = mine.consumed.value()
        torch.testing.assert_close(nvfp4.dequantize(stored), V_hat, rtol=2**-22, atol=0)
    assert (engine.experts["layers.0.down"].stored[1][1, :, 0].float() == 1.125).all()
    assert down.consumed.value()[1, 0, 0].item() == approx(5.0223e-5, rel=2**-8)
    assert nvfp4.encode(W, "tensor").dequantize()[0, 0].item() == approx(5.0223e-5, abs=5e-10)
    assert engine.multiplies_what(policy)
    down.weight.data[2, 5] *= -1
    policy(torch.zeros(1, 4, dtype=torch.int64))
    assert not engine.multiplies_what(policy)


@mark.parametrize("name", ARITHMETICS)
def test_after_a_sync_the_engine_equals_a_freshly_built_one(name):
    """w -> 2w: every field of the next rollout, bit for bit; without the sync, the old one's."""
    policy = policy_of("bf16")
    engine = Engine(policy, ARITHMETICS[name])
    old = generate(engine)[1]
    for p in policy.parameters():
        p.data *= 2
    stale = generate(engine)[1]
    engine.sync()
    synced, fresh = generate(engine)[1], generate(Engine(policy, ARITHMETICS[name]))[1]
    assert all(map(torch.equal, old, stale)) and all(map(torch.equal, synced, fresh))
    assert not torch.equal(synced.logprobs, stale.logprobs)


def test_equal_arithmetic_on_both_sides_leaves_the_gap_of_the_residual_stream():
    """At step 0 the gap of w4a16 / w4a16 is that of bf16 / bf16: bf16 roundings of 250 tokens, one
    kind, so equal to 7% (8% seen over 8 seeds). A factor of 1.4 is 4 sigma. Routing is replayed, as
    a flipped choice is a large event. Another format on one side is seen as 17 times the floor or
    more: 5 is asked for."""
    gap = []
    for rollout, trainer in ("bf16", "bf16"), ("w4a16", "w4a16"), ("w4a16", "bf16"):
        policy = policy_of(trainer, layers=3, width=64)
        prompts, out = generate(Engine(policy, ARITHMETICS[rollout]))
        read = torch.cat([prompts, out.tokens[:, :-1]], 1)
        replay = out.choice.movedim(1, 0).flatten(1, 2)
        logits = policy(read, replay=replay, logits_from=7).logits
        old, mask = grpo.token_logprobs(logits, out.tokens, 1.0)[0], grpo.token_mask(out.lengths, 9)
        gap.append(grpo.mismatch(out.logprobs, old, mask)["gap_mean"])
    assert 0 < gap[0] / 1.4 < gap[1] < gap[0] * 1.4 and gap[2] > 5 * gap[0], gap


class Marker(model.ExpertLinear):
    """gate_up (with outliers) gives ones; down marks a slot with its expert, one-hot."""

    def product(self, x, routing, live):
        expert = routing.expert_of_tile[routing.row_of_slot // routing.tile_rows]
        return F.one_hot(expert, self.shape[1]).float() ** (self.outliers is None)


@mark.parametrize(("replay", "want"), [
    (None, [0.625, 0.375, 0, 0]), ([0, 3], [10 / 11, 0, 0, 1 / 11]),
    ([3, 0], [10 / 11, 0, 0, 1 / 11]), ([1, 2], [0, 2 / 3, 1 / 3, 0]),
])  # fmt: skip
def test_a_replayed_choice_is_weighted_by_the_dense_probabilities_renormalized(replay, want):
    """p = [.5, .3, .15, .05], live {0, 1}, replayed {0, 3}: .909 / .091, and the router learns.

    With g = p_i / (p_i + p_j), dg/dlogits is g (1 - g) at i, minus that at j, else 0. The tolerance
    covers 1 / sqrt(1 + 1e-6) in the norm, times |log p| <= 3.
    """
    config = model.ModelConfig(18, 24, width=16, experts=4, expert_width=16, heads=1)
    layer = model.Layer(config, torch.ones(16), Marker, model.route)
    layer.out.data.zero_()  # no attention: norm(h) is 1 everywhere
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    layer.router.data = (p.log() / 16).unsqueeze(1).repeat(1, 16)
    turn, taken = torch.zeros(2, 1, 8), replay and torch.tensor([replay])
    h, choice, _ = layer(torch.ones(1, 1, 16), turn, 0, None, None, taken)
    torch.testing.assert_close(h[0, 0, :4] - 1, torch.tensor(want), rtol=0, atol=3e-6)
    assert replay is None or choice[0].tolist() == replay
    i, j = (i for i in range(4) if want[i])
    h[0, 0, i].backward()
    slope = torch.zeros(4, 16)
    slope[i], slope[j] = want[i] * want[j], -want[i] * want[j]
    torch.testing.assert_close(layer.router.grad, slope, rtol=0, atol=3e-6)


@mark.parametrize(("args", "message"), [
    (("nvfp4", "bf16", 0.5), "RAC compensates nvfp4 activations, these are bf16"),
    (("fp4", "bf16"), "weights must be bf16, fp8 or nvfp4, got 'fp4'"),
    (("bf16", "int8"), "activations must be"), (("nvfp4", "nvfp4", 1.1), "share from 0 to 1"),
    (("nvfp4", "nvfp4", float("nan")), "share"), (("bf16", "bf16", 0.0, "row"), "got 'row'"),
    (("nvfp4", "nvfp4", 0.5), r"trainer cannot run W nvfp4 / A nvfp4 \+ RAC"),
])  # fmt: skip
def test_impossible_arithmetics_are_refused(args, message):
    with raises(ValueError, match=message):
        qat.make_policy(model.ModelConfig(18, 24), Arithmetic(*args))
