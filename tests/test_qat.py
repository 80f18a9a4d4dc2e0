"""qat.py and modes.py, and what the two sides owe each other: same weights, fresh weights, replay.

References loop over slots in fp64, by plain autograd. On integers of few bits every fp32 sum is
exact in any order, so results must be bit-equal. On reals a sum of n products may be off by n *
2^-24 * sum |products|, and a rounding to bf16 by 2^-8.
"""

import torch
import torch.nn.functional as F
from pytest import approx, mark, raises

from quads_min import grpo, model, nvfp4, qat
from quads_min.model import ModelConfig, route
from quads_min.modes import ARITHMETICS, MODES, Arithmetic
from rollout import Engine


def policy_of(name, seed=0, **sizes):
    torch.manual_seed(seed)
    small = {"width": 32, "layers": 2, "heads": 2, "experts": 4, "expert_width": 32}
    config = ModelConfig(18, 24, **{**small, "outlier_channels": 1, **sizes})
    return qat.make_policy(config, ARITHMETICS[name])


def generate(engine):
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(16, (16, 8), generator=rng)
    return prompts, engine.generate(prompts, 9, 16, 17, 2, generator=rng)


def trainer_pass(policy, prompts, out, choice=None):
    """As in train.py: old log-probs, expert choices (B, L, T, k), and which tokens were read."""
    read = torch.cat([prompts.repeat_interleave(2, 0), out.tokens[:, :-1]], 1)
    with torch.no_grad():
        replay = None if choice is None else choice.movedim(1, 0).flatten(1, 2)
        got = policy(read, replay=replay, logits_from=7)
    choice = torch.stack(got.choice, 1).unflatten(0, read.shape).movedim(2, 1)
    fed = torch.arange(16) < 7 + out.lengths.unsqueeze(1)
    return grpo.token_logprobs(got.logits, out.tokens, 1.0)[0], choice, fed


def choices(T, experts, top_k):
    return torch.rand(T, experts).topk(top_k).indices


def slot_loop(x, w, choice, dy):
    """y (S, N), dL/dx, dL/dw in fp64, each slot on its own."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    y = torch.stack([w[e] @ x[t] for t, experts in enumerate(choice.tolist()) for e in experts])
    y.backward(dy.double())
    return y.detach(), x.grad, w.grad


# ---- the product and its straight-through gradient


def test_grouped_matmul_equals_four_separate_matmuls():
    """Counts [0, 1, 127, 129], every kind of scale, RAC's second packet, on integers.

    The sums are exact and the scales round once each, w's before x's: bit-equal.
    """
    torch.manual_seed(0)
    expert = torch.arange(4).repeat_interleave(torch.tensor([0, 1, 127, 129]))[torch.randperm(257)]
    x, r = torch.randint(-9, 9, (2, 257, 48)).float()
    w, routing = torch.randint(-9, 9, (4, 32, 48)).float(), route(expert.unsqueeze(1), 4)
    g, per_row, per_token = torch.rand(4, 1, 1), torch.rand(4, 32, 1), torch.rand(257, 1)
    for scale, x_scale, residual in (None,) * 3, (g, per_token, None), (per_row, per_token, r):
        y = qat.grouped_matmul(qat.Operand(x, x_scale), qat.Operand(w, scale), routing, residual)
        for e in range(4):
            rows = expert == e
            want = (x if residual is None else x + r)[rows] @ w[e].T
            want = want if scale is None else want * scale[e].T * x_scale[rows]
            assert torch.equal(y[rows], want)


@mark.parametrize("top_k", [1, 2, 3])
def test_the_gradient_is_straight_through_to_the_bit(top_k):
    """V = W / o, gain 32: y = x DQ(Q(V))^T, grad_V == grad_V^ exactly, grad_W = grad_V^ / o.

    Block maxima included. S = 1 and block scales of 56 or more make V^ even integers, so sums are
    exact; dL/dx is rounded to bf16, once. An expert without tokens gets exactly zero.
    """
    torch.manual_seed(0)
    o = torch.ones(64).index_fill_(0, torch.tensor([3, 20, 47]), 32.0)
    layer, choice = qat.FakeQuantExperts(5, 32, 64, o, ARITHMETICS["w4a16"]), choices(40, 4, top_k)
    V = (torch.randn(5, 32, 64) * 600).clamp(-2600, 2600).bfloat16().float()
    V[:, :, ::16], V[:, 0, 0] = 1000.0, -2688.0
    layer.weight.data = V * o
    x = torch.randint(-8, 9, (40, 64)).float().requires_grad_()
    dy = torch.randint(-8, 9, (40 * top_k, 32)).float()
    y = layer(x, route(choice, 5), None)
    y.backward(dy)
    V_hat = nvfp4.fake_quantize(V, outer="tensor")
    want, dx, dV_hat = slot_loop(x * o, V_hat, choice, dy)
    assert torch.equal(y.double(), want) and (V_hat != V).float().mean() > 0.5
    assert torch.equal(x.grad, dx.bfloat16().float() * o)
    assert torch.equal(layer.weight.grad.double(), dV_hat / o) and not layer.weight.grad[4].any()
    block_maxima = V.unflatten(-1, (4, 16)).abs().argmax(-1, keepdim=True)
    at_maxima = layer.weight.grad.unflatten(-1, (4, 16)).gather(-1, block_maxima)
    assert at_maxima[:4].ne(0).float().mean() > 0.9


@mark.parametrize("name", ["bf16", "fp8", "w4a16", "w16a4", "w4a4"])
def test_forward_and_backward_use_the_quantized_operands_in_every_format(name):
    """y = x^ V^T, dx = dy V^, dV = dy^T x^ to the bounds above, n = 128 for at most 64 products and
    their scales; no tokens give no output and zero gradient."""
    torch.manual_seed(0)
    o = torch.ones(48).index_fill_(0, torch.tensor(5), 32)
    layer, a = qat.FakeQuantExperts(4, 32, 48, o, ARITHMETICS[name]), ARITHMETICS[name]
    x, dy, choice = torch.randn(24, 48, requires_grad=True), torch.randn(48, 32), choices(24, 4, 2)
    y = layer(x, route(choice, 4), None)
    y.backward(dy)
    x_hat = qat.encode_activation((x * o).bfloat16(), a.activations).value()
    w_hat = qat.encode_weight(layer.weight / o, a.weights).value()
    want = slot_loop(x_hat, w_hat, choice, dy)
    sums = slot_loop(x_hat.abs(), w_hat.abs(), choice, dy.abs())
    got = y, x.grad / o, layer.weight.grad * o
    for g, w, total, rounding in zip(got, want, sums, (0, 2**-8, 0), strict=True):
        assert ((g - w).abs() <= 2**-17 * total + rounding * w.abs()).all()
    empty, layer.weight.grad = x[:0], None
    y = layer(empty, route(choice[:0], 4), None)
    y.sum().backward()
    assert y.shape == (0, 32) and not layer.weight.grad.any()


# ---- the two sides


@mark.parametrize("mode", MODES)
def test_both_sides_multiply_the_same_weights_after_a_sync(mode):
    """Weight identity, read through the engine's GEMM, wherever both sides hold the same format:
    false once a row of one expert has changed, true again after the next sync."""
    rollout, trainer = (ARITHMETICS[name] for name in MODES[mode])
    policy = policy_of(MODES[mode][1])
    engine, tokens = Engine(policy, rollout), torch.zeros(1, 4, dtype=torch.int64)
    for row in (None, (2, 5), (3, 0)):
        if row:
            policy.layers[-1].down.weight.data[row] *= -1
            policy(tokens)
            assert not engine.multiplies_what(policy)
        engine.sync()
        policy(tokens)
        assert engine.multiplies_what(policy) == (rollout.weights == trainer.weights)


def test_the_trainer_multiplies_what_the_engine_packed():
    """Also for amax 0.02 beside a block of 5e-5: s_b = 1.125, decodes to 5.0223e-5.

    Plane and scale are bit-equal, so V^ = plane * g is. `dequantize` associates otherwise, value *
    (s_b * g): within 2^-22. The bf16 rounding of amax, before, moves the block by 2^-8 at most.
    """
    policy, W = policy_of("w4a16"), torch.tensor([[5e-5, 0.02]]).repeat_interleave(16, 1)
    policy.layers[0].down.weight.data[1] = W
    engine = Engine(policy, ARITHMETICS["w4a4"])
    policy(torch.zeros(1, 4, dtype=torch.int64))
    for name, mine in policy.expert_linears().items():
        stored = nvfp4.NVFP4Tensor(*engine.experts[name].stored)
        assert torch.equal(mine.consumed.plane, nvfp4.unpack(stored).planes())
        assert torch.equal(mine.consumed.scale, stored.global_scale)
        V_hat = mine.consumed.value()
        torch.testing.assert_close(nvfp4.dequantize(stored), V_hat, rtol=2**-22, atol=0)
    assert (engine.experts["layers.0.down"].stored[1][1, :, 0].float() == 1.125).all()
    assert policy.layers[0].down.consumed.value()[1, 0, 0].item() == approx(5.0223e-5, rel=2**-8)
    assert nvfp4.fake_quantize(W, "tensor")[0, 0].item() == approx(5.0223e-5, abs=5e-10)


@mark.parametrize("name", ARITHMETICS)
def test_after_a_sync_the_engine_equals_a_freshly_built_one(name):
    """w -> 2w: every field of the next rollout, bit for bit; without the sync, the old one's."""
    policy = policy_of("bf16")
    engine = Engine(policy, ARITHMETICS[name])
    rollouts = [generate(engine)[1]]
    with torch.no_grad():
        for p in policy.parameters():
            p *= 2
    rollouts.append(generate(engine)[1])
    engine.sync()
    rollouts += [generate(engine)[1], generate(Engine(policy, ARITHMETICS[name]))[1]]
    old, stale, synced, fresh = rollouts
    assert all(map(torch.equal, old, stale)) and all(map(torch.equal, synced, fresh))
    assert not torch.equal(synced.logprobs, stale.logprobs)


def test_equal_arithmetic_on_both_sides_leaves_the_gap_of_the_residual_stream():
    """At step 0 the gap of w4a16 / w4a16 is that of bf16 / bf16: bf16 roundings of 250 tokens, one
    kind, so equal to sqrt(2 * (pi / 2 - 1) / 250) = 7% (8% seen over 8 seeds). A factor of 1.4 is 4
    sigma. Routing is replayed, as a flipped choice is a large event. Another format on one side is
    seen as 17 times the floor or more, weights 2% off as 10: 5 is asked for."""
    gap, pairs = [], (("bf16", "bf16"), ("w4a16", "w4a16"), ("w4a16", "bf16"), ("w4a16", "w4a16"))
    for rollout, trainer in pairs:
        policy = policy_of(trainer, layers=3, width=64)
        engine = Engine(policy, ARITHMETICS[rollout])
        for p in policy.parameters() if len(gap) == 3 else ():
            p.data += 0.02 * p.std(correction=0) * torch.randn_like(p)
        prompts, out = generate(engine)
        old, _, _ = trainer_pass(policy, prompts, out, out.choice)
        assert engine.model.residual_dtype == engine.model.head.dtype == torch.bfloat16
        assert policy.residual_dtype == policy.head.dtype == torch.float32
        gap.append(grpo.mismatch(out.logprobs, old, grpo.token_mask(out.lengths, 9))["gap_mean"])
    assert 0 < gap[0] / 1.4 < gap[1] < gap[0] * 1.4 and min(gap[2:]) > 5 * gap[0], gap


# ---- replay of the routing


class Marker(model.ExpertLinear):
    """gate_up (with outliers) gives ones; down marks a slot with its expert, one-hot."""

    def product(self, x, routing, live):
        expert = routing.expert_of_tile[routing.row_of_slot // routing.tile_rows]
        return F.one_hot(expert, self.shape[1]).float() ** (self.outliers is None)


def test_a_replayed_choice_is_weighted_by_the_dense_probabilities_renormalized():
    """p = [.5, .3, .15, .05], live {0, 1}, replayed {0, 3}: .909 / .091, and the router learns.

    With g = p_0 / (p_0 + p_3), dg/dlogits is g (1 - g) = 10/121 at 0, minus that at 3, else 0. The
    tolerance covers 1 / sqrt(1 + 1e-6) in the norm, times |log p| <= 3.
    """
    config = ModelConfig(18, 24, width=16, experts=4, expert_width=16, heads=1)
    layer = model.Layer(config, torch.ones(16), Marker, model.route)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    layer.router.data = (p.log() / 16).unsqueeze(1).repeat(1, 16)  # norm(h) is 1 everywhere
    for replay, want in (
        (None, [0.625, 0.375, 0, 0]),
        ([0, 3], [10 / 11, 0, 0, 1 / 11]),
        ([3, 0], [10 / 11, 0, 0, 1 / 11]),
        ([1, 2], [0, 2 / 3, 1 / 3, 0]),
    ):
        y, choice, _ = layer.moe(torch.ones(1, 1, 16), None, replay and torch.tensor([replay]))
        torch.testing.assert_close(y[0, 0, :4], torch.tensor(want), rtol=0, atol=3e-6)
        assert choice[0].tolist() == replay or (not replay and {*choice[0].tolist()} == {0, 1})
        layer.router.grad = None
        y[0, 0, 0].backward()
        slope = torch.tensor([10 / 121, 0, 0, -10 / 121]).unsqueeze(1).expand(4, 16)
        if 3 in (replay or ()):
            torch.testing.assert_close(layer.router.grad, slope, rtol=0, atol=3e-6)


def test_the_policy_takes_the_engine_s_choices_at_every_position_it_reads():
    """Prompt included, in the engine's own layout; a random choice is taken too, and one's own
    gives the same bits. Without replay few choices differ: drift flips near ties alone."""
    policy = policy_of("bf16")
    prompts, out = generate(Engine(policy, ARITHMETICS["bf16"]))
    live_logprobs, live, fed = trainer_pass(policy, prompts, out)
    assert grpo.choice_mismatch(out.choice, live, fed) < 0.05
    random = choices(live[..., 0].numel(), 4, 2).view(live.shape)
    for choice in (live, out.choice, random):
        logprobs, taken, _ = trainer_pass(policy, prompts, out, choice)
        assert torch.equal(taken, choice)
        assert torch.equal(logprobs, live_logprobs) == (choice is live)


# ---- the table of modes


def test_the_nine_modes_are_those_of_the_paper_s_ablations():
    """Weights / activations of rollout engine and trainer; + is RAC, which no trainer has."""
    table = {
        "bf16": "bf16/bf16 bf16/bf16", "fp8": "fp8/fp8 fp8/fp8",
        "naive": "nvfp4/nvfp4 bf16/bf16", "w4a16": "nvfp4/bf16 bf16/bf16",
        "w16a4": "bf16/nvfp4 bf16/bf16", "qat": "nvfp4/nvfp4 nvfp4/bf16",
        "rac": "nvfp4/nvfp4+ bf16/bf16", "sym": "nvfp4/nvfp4 nvfp4/nvfp4",
        "quads": "nvfp4/nvfp4+ nvfp4/bf16",
    }  # fmt: skip
    text = {k: f"{a.weights}/{a.activations}" for k, a in ARITHMETICS.items()}
    text |= {k: text[k] + "+" for k, a in ARITHMETICS.items() if a.rac_ratio}
    assert {mode: f"{text[r]} {text[t]}" for mode, (r, t) in MODES.items()} == table
    with raises(ValueError, match=r"trainer cannot run W nvfp4 / A nvfp4 \+ RAC"):
        policy_of("w4a4+rac")


@mark.parametrize(
    ("args", "message"),
    [
        (("nvfp4", "bf16", 0.5), "RAC compensates nvfp4 activations, these are bf16"),
        (("fp8", "fp8", 0.1), "these are fp8"),
        (("fp4", "bf16"), "weights must be bf16, fp8 or nvfp4, got 'fp4'"),
        (("bf16", "int8"), "activations must be"),
        *((("nvfp4", "nvfp4", ratio), "share from 0 to 1") for ratio in (1.1, -0.1, float("nan"))),
        (("nvfp4", "nvfp4", 0.5, "row"), "'block' or 'channel', got 'row'"),
    ],
)
def test_impossible_arithmetics_are_refused(args, message):
    with raises(ValueError, match=message):
        Arithmetic(*args)
