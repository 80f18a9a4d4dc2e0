"""qat.py and modes.py, and what the two sides owe each other: same weights, fresh weights, replay.

A reference here loops over slots in fp64, with plain autograd. Two ways to be strict: on integers of
few bits every fp32 sum is exact, in any order, so results must be bit-equal; on real numbers a sum
of n products may be off by n * 2^-24 * sum |products| (fp32 rounding, any order).
"""

import pytest
import torch
import torch.nn.functional as F

from quads_min import grpo, nvfp4
from quads_min.model import ExpertLinear, Layer, ModelConfig, route
from quads_min.modes import ARITHMETICS, MODES, Arithmetic
from quads_min.qat import (
    FakeQuantExperts, Operand, encode_activation, encode_weight, grouped_matmul, make_policy,
)  # fmt: skip
from rollout import Engine

B16, EOS, PAD = torch.bfloat16, 16, 17


def policy_of(arithmetic, seed=0, **sizes):
    torch.manual_seed(seed)
    small = {"width": 32, "layers": 2, "heads": 2, "experts": 4, "expert_width": 32}
    sizes = {**small, "outlier_channels": 1, **sizes}
    return make_policy(ModelConfig(18, 24, **sizes), ARITHMETICS[arithmetic])


def generate(engine, samples=2):
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(16, (16, 8), generator=g)
    return prompts.repeat_interleave(samples, 0), engine.generate(prompts, 9, EOS, PAD, samples, generator=g)


def trainer_pass(policy, prompts, out, replay=False):
    """As in train.py: old log-probs, expert choices (B, L, T, k), and which tokens were read."""
    read = torch.cat([prompts, out.tokens[:, :-1]], 1)
    taken = out.choice.movedim(1, 0).flatten(1, 2) if replay else None
    with torch.no_grad():
        got = policy(read, replay=taken, logits_from=prompts.shape[1] - 1)
    choice = torch.stack(got.choice, 1).unflatten(0, read.shape).movedim(2, 1)
    fed = torch.arange(read.shape[1]) < prompts.shape[1] + out.lengths.unsqueeze(1) - 1
    return grpo.token_logprobs(got.logits, out.tokens, 1.0)[0], choice, fed


def slot_loop(x, w, choice, dy):
    """y (S, N), dL/dx, dL/dw in fp64 by autograd, each slot on its own."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    pairs = [(t, e) for t, experts in enumerate(choice.tolist()) for e in experts]
    y = torch.stack([x[t] @ w[e].T for t, e in pairs])
    y.backward(dy.double())
    return y.detach(), x.grad, w.grad


def choices(T, experts, top_k, seed=0):
    scores = torch.rand(T, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k).indices


# ---- the product and its straight-through gradient


def test_grouped_matmul_equals_four_separate_matmuls():
    """Counts [0, 1, 127, 129], on integers, with every kind of scale and RAC's second packet.

    The sums are exact, and the scales round once each in the order w, x: bit-equal.
    """
    torch.manual_seed(0)
    expert = torch.arange(4).repeat_interleave(torch.tensor([0, 1, 127, 129]))
    expert = expert[torch.randperm(257)]
    x, r = torch.randint(-9, 9, (2, 257, 48)).float()
    plane = torch.randint(-9, 9, (4, 32, 48)).float()
    for scale in (None, torch.rand(4, 1, 1), torch.rand(4, 32, 1)):
        for x_scale, residual in ((None, None), (torch.rand(257, 1), None), (torch.rand(257, 1), r)):
            y = grouped_matmul(
                Operand(x, x_scale), Operand(plane, scale), route(expert[:, None], 4), residual
            )
            for e in range(4):
                want = (x if residual is None else x + r)[expert == e] @ plane[e].T
                want = want if scale is None else want * scale[e].T
                want = want if x_scale is None else want * x_scale[expert == e]
                assert torch.equal(y[expert == e], want)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_gradient_is_straight_through_to_the_bit(top_k):
    """V = W / o, gain 32: y = x DQ(Q(V))^T, grad_V == grad_V^ exactly, grad_W = grad_V^ / o.

    Block maxima included. S = 1 and block scales from 56 make V^ even integers, so sums are exact;
    dL/dx is rounded to bf16, once. An expert without tokens gets exactly zero.
    """
    torch.manual_seed(0)
    o = torch.ones(64).index_fill_(0, torch.tensor([3, 20, 47]), 32.0)
    layer, choice = FakeQuantExperts(5, 32, 64, o, ARITHMETICS["w4a16"]), choices(40, 4, top_k)
    V = (torch.randn(5, 32, 64) * 600).clamp(-2600, 2600).to(B16).float()
    V[:, :, ::16] = 1000.0
    V[:, 0, 0] = -2688.0
    layer.weight.data = V * o
    x = torch.randint(-8, 9, (40, 64)).float().requires_grad_()
    dy = torch.randint(-8, 9, (40 * top_k, 32)).float()
    y = layer(x, route(choice, 5), None)
    y.backward(dy)
    V_hat = nvfp4.fake_quantize(V, outer="tensor")
    assert (V_hat != V).float().mean() > 0.5
    want_y, dx, dV_hat = slot_loop(x.detach() * o, V_hat, choice, dy)
    assert torch.equal(y.double(), want_y)
    assert torch.equal(x.grad, dx.float().to(B16).float() * o)
    assert torch.equal(layer.weight.grad.double(), dV_hat / o)
    maxima = V.unflatten(-1, (4, 16)).abs().argmax(-1, keepdim=True)
    at_maxima = layer.weight.grad.unflatten(-1, (4, 16)).gather(-1, maxima)
    assert at_maxima[:4].ne(0).float().mean() > 0.9 and not layer.weight.grad[4].any()


@pytest.mark.parametrize("name", ["bf16", "fp8", "w4a16", "w16a4", "w4a4"])
def test_forward_and_backward_use_the_quantized_operands_in_every_format(name):
    """y = x^ V^T, dx = dy V^, dV = dy^T x^ to the bound above; dx also 2^-8, a bf16 rounding."""
    torch.manual_seed(0)
    a, choice, o = ARITHMETICS[name], choices(24, 4, 2), torch.ones(48).index_fill_(0, torch.tensor(5), 32)
    for outliers in (o, None):
        layer = FakeQuantExperts(4, 32, 48, outliers, a)
        scale = torch.ones(48) if outliers is None else o
        x, dy = torch.randn(24, 48, requires_grad=True), torch.randn(48, 32)
        y = layer(x, route(choice, 4), None)
        y.backward(dy)
        x_hat = encode_activation((x * scale).to(B16), a.activations).value()
        v_hat = encode_weight(layer.weight / scale, a.weights).value()
        want, bound = (
            slot_loop(*args) for args in ((x_hat, v_hat, choice, dy), (x_hat.abs(), v_hat.abs(), choice, dy.abs()))
        )  # fmt: skip
        got = (y, x.grad / scale, layer.weight.grad * scale)
        for g, w, b, bf16 in zip(got, want, bound, (0, 2**-8, 0), strict=True):
            assert ((g - w).abs() <= 100 * 2**-24 * b + bf16 * w.abs()).all()


@pytest.mark.parametrize("name", ["bf16", "fp8", "w4a16", "w4a4"])
def test_no_tokens_give_no_output_and_zero_gradient(name):
    """In every format: x (0, K) -> (0, N)."""
    layer = FakeQuantExperts(4, 32, 48, torch.ones(48), ARITHMETICS[name])
    x = torch.zeros(0, 48, requires_grad=True)
    y = layer(x, route(torch.zeros(0, 2, dtype=torch.int64), 4), None)
    y.sum().backward()
    assert y.shape == (0, 32) and x.grad.shape == (0, 48) and not layer.weight.grad.any()


# ---- the two sides


@pytest.mark.parametrize("mode", MODES)
def test_both_sides_multiply_the_same_weights_after_a_sync(mode):
    """Weight identity, read through the engine's GEMM: true where both formats are the same, false
    once a single row of a single expert has changed, true again after the next sync."""
    rollout, trainer = MODES[mode]
    policy = policy_of(trainer)
    engine, tokens = Engine(policy, ARITHMETICS[rollout]), torch.zeros(1, 4, dtype=torch.int64)
    same = ARITHMETICS[rollout].weights == ARITHMETICS[trainer].weights
    assert same == (mode in ("bf16", "fp8", "w16a4", "qat", "sym", "quads"))
    for row in (None, (2, 5), (3, 0)):
        if row:
            policy.layers[-1].down.weight.data[row] *= -1
            policy(tokens)
            assert not engine.multiplies_what(policy)
        engine.sync()
        policy(tokens)
        assert engine.multiplies_what(policy) == same


def test_the_trainer_multiplies_what_the_engine_packed():
    """Also for amax 0.02 beside a block of 5e-5: s_b = 1.125, decodes to 5.0223e-5.

    Plane and scale are bit-equal, hence V^ as the GEMMs see it, plane * g. `dequantize` associates
    otherwise, value * (s_b * g): one more rounding each, 2^-22 in all.
    """
    policy = policy_of("w4a16")
    with torch.no_grad():
        policy.layers[0].down.weight[1] = torch.tensor([5e-5, 0.02]).repeat_interleave(16)
    engine = Engine(policy, ARITHMETICS["w4a4"])
    policy(torch.zeros(1, 4, dtype=torch.int64))
    for name, mine in policy.expert_linears().items():
        stored = nvfp4.NVFP4Tensor(*engine.experts[name].stored)
        assert torch.equal(mine.consumed.plane, nvfp4.unpack(stored).planes())
        assert torch.equal(mine.consumed.scale, stored.global_scale)
        assert torch.equal(mine.consumed.value(), engine.experts[name].weights_seen())
        V_hat = nvfp4.dequantize(stored)
        torch.testing.assert_close(mine.consumed.value(), V_hat, rtol=2**-22, atol=0)
    stored, seen = engine.experts["layers.0.down"].stored, policy.layers[0].down.consumed.value()
    assert (stored[1][1, :, 0].float() == 1.125).all()
    # amax is rounded to bf16 on the way: 2^-9 relative, and the decoded block is a multiple of it
    assert seen[1, 0, 0].item() == pytest.approx(5.0223e-5, rel=2**-9)
    W = torch.tensor([[5e-5, 0.02]]).repeat_interleave(16, 1)
    assert nvfp4.fake_quantize(W, "tensor")[0, 0].item() == pytest.approx(5.0223e-5, abs=5e-10)


@pytest.mark.parametrize("name", ARITHMETICS)
def test_after_a_sync_the_engine_equals_a_freshly_built_one(name):
    """w -> 2w, then every field of the next rollout bit for bit; without the sync, the old one's."""
    policy = policy_of("bf16")
    engine = Engine(policy, ARITHMETICS[name])
    _, before = generate(engine)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(2.0)
    _, stale = generate(engine)
    assert all(map(torch.equal, before, stale))
    engine.sync()
    _, synced = generate(engine)
    _, fresh = generate(Engine(policy, ARITHMETICS[name]))
    assert all(map(torch.equal, synced, fresh)) and not torch.equal(synced.logprobs, stale.logprobs)


def test_equal_arithmetic_on_both_sides_leaves_the_gap_of_the_residual_stream():
    """At step 0 the gap of w4a16 / w4a16 is that of bf16 / bf16; another weight format or a stale
    engine shows as 5 times that or more. Routing is replayed: a flipped expert choice is a rare,
    large event, without it the gap is some 250 tokens' worth of bf16 roundings of the same kind.
    Their mean |gap| has a relative error of about 1 / sqrt(250) * sqrt(pi / 2 - 1) = 5% a side, more
    as tokens of a sequence correlate: a factor of 1.5 either way is over 4 sigma.
    """
    gap = {}
    for rollout, trainer in (("bf16", "bf16"), ("w4a16", "w4a16"), ("w4a16", "bf16"), ("stale", "w4a16")):
        policy = policy_of(trainer, layers=3, width=64)
        engine = Engine(policy, ARITHMETICS["w4a16" if rollout == "stale" else rollout])
        if rollout == "stale":
            with torch.no_grad():
                for p in policy.parameters():
                    p += 0.02 * p.std(correction=0) * torch.randn_like(p)
        prompts, out = generate(engine)
        old, _, _ = trainer_pass(policy, prompts, out, replay=True)
        mask = grpo.token_mask(out.lengths, 9)
        gap[rollout, trainer] = grpo.mismatch(out.logprobs, old, mask)["gap_mean"].item()
    floor = gap["bf16", "bf16"]
    assert 0 < floor / 1.5 < gap["w4a16", "w4a16"] < floor * 1.5, gap
    assert min(gap["w4a16", "bf16"], gap["stale", "w4a16"]) > 5 * floor, gap


# ---- replay of the routing


class Marker(ExpertLinear):
    """gate_up gives ones, so that its experts agree; down marks a slot with its expert: one-hot."""

    def product(self, x, routing, live):
        expert = routing.expert_of_tile[routing.row_of_slot // routing.tile_rows]
        y = F.one_hot(expert, self.shape[1]).float()
        return torch.ones(len(y), self.shape[1]) if self.outliers is not None else y


def test_a_replayed_choice_is_weighted_by_the_dense_probabilities_renormalized():
    """p = [.5, .3, .15, .05], live {0, 1}, replayed {0, 3}: .909 / .091, and the router learns.

    With g = p_0 / (p_0 + p_3), dg/dlogits is g (1 - g) = 0.0826 at 0, minus that at 3, 0 elsewhere.
    Tolerances are half the last printed digit.
    """
    config = ModelConfig(18, 24, width=16, experts=4, expert_width=16, heads=1)
    layer = Layer(config, torch.ones(16), Marker)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    layer.router.data = (p.log() / 16)[:, None].repeat(1, 16)  # norm(h) is 1 everywhere
    h = torch.ones(1, 3, 16)
    y, choice, probs = layer.moe(h, None, None)
    assert choice.sort(1).values.tolist() == [[0, 1]] * 3
    torch.testing.assert_close(probs, p.expand(3, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(y[0, 0, :4], torch.tensor([0.625, 0.375, 0, 0]), rtol=0, atol=1e-5)
    replay = torch.tensor([[0, 3], [3, 0], [1, 2]])
    y, choice, _ = layer.moe(h, None, replay)
    assert torch.equal(choice, replay)
    want = torch.tensor([[10 / 11, 0, 0, 1 / 11], [10 / 11, 0, 0, 1 / 11], [0, 2 / 3, 1 / 3, 0]])
    torch.testing.assert_close(y[0, :, :4], want, rtol=0, atol=1e-5)
    y[0, 0, 0].backward()
    slope = torch.tensor([10 / 121, 0, 0, -10 / 121])[:, None].expand(4, 16)
    torch.testing.assert_close(layer.router.grad, slope, rtol=0, atol=1e-5)


def test_the_policy_takes_the_engine_s_choices_at_every_position_it_reads():
    """Prompt included, in the engine's own layout. A random choice is replayed as well; replaying
    one's own gives the same bits. Without replay few choices differ: bf16 drift flips near ties."""
    policy = policy_of("bf16")
    prompts, out = generate(Engine(policy, ARITHMETICS["bf16"]))
    live_logprobs, live, fed = trainer_pass(policy, prompts, out)
    own, _, _ = trainer_pass(policy, prompts, out._replace(choice=live), replay=True)
    assert torch.equal(own, live_logprobs)
    assert grpo.choice_mismatch(out.choice, live, fed) < 0.05
    random = choices(out.choice[..., 0].numel(), 4, 2).view(out.choice.shape)
    for taken in (out.choice, random):
        other, replayed, _ = trainer_pass(policy, prompts, out._replace(choice=taken), replay=True)
        assert torch.equal(replayed, taken)
    assert (other - live_logprobs).abs().mean() > 0.1


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
    text = lambda a: f"{a.weights}/{a.activations}{'+' * bool(a.rac_ratio)}"  # noqa: E731
    pairs = {mode: [ARITHMETICS[name] for name in pair] for mode, pair in MODES.items()}
    assert {mode: " ".join(map(text, pair)) for mode, pair in pairs.items()} == table
    for _, trainer in pairs.values():
        make_policy(ModelConfig(18, 24, width=16, heads=1, expert_width=16, layers=1), trainer)
    with pytest.raises(ValueError, match="trainer cannot run W nvfp4 / A nvfp4 . RAC"):
        make_policy(ModelConfig(18, 24), ARITHMETICS["w4a4+rac"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nvfp4", "bf16", 0.5), "RAC compensates nvfp4 activations, these are bf16"),
        (("fp8", "fp8", 0.1), "these are fp8"),
        (("fp4", "bf16"), "weights must be bf16, fp8 or nvfp4, got 'fp4'"),
        (("bf16", "int8"), "activations must be"),
        (("nvfp4", "nvfp4", 1.1), "share from 0 to 1, got 1.1"),
        (("nvfp4", "nvfp4", -0.1), "share from 0 to 1"),
        (("nvfp4", "nvfp4", float("nan")), "share from 0 to 1"),
        (("nvfp4", "nvfp4", 0.5, "row"), "'block' or 'channel', got 'row'"),
    ],
)
def test_impossible_arithmetics_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(*args)
