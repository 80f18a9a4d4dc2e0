"""qat.py, and what the two sides owe each other: same weights, fresh weights, replay."""

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


def per_slot(x, w, choice, dy):
    """y (slots, N), dL/dx, dL/dw in fp64, by plain autograd."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    y = torch.einsum("sk,snk->sn", x.repeat_interleave(choice.shape[1], 0), w[choice.flatten()])
    return y.detach(), *torch.autograd.grad(y, (x, w), dy.double())


@mark.parametrize("name", ["bf16", "fp8", "w4a16", "w16a4", "w4a4"])
@mark.parametrize("top_k", [1, 2, 3])
def test_forward_and_backward_use_both_quantized_operands_and_skip_the_quantizer(name, top_k):
    """V = W / o, gain 32: y = x^ V^T, dx = dy V^ (rounded to bf16), grad_V = grad_V^ = dy^T x^ and
    grad_W = grad_V^ / o, block maxima included. Experts get [0, 1, 127, 129] tokens, or random
    ones. n = 512 products and scales in a sum: n * 2^-24 of sum |products|; integers are exact."""
    o, a = torch.ones(48).index_fill_(0, torch.tensor([5, 20]), 32.0), ARITHMETICS[name]
    layer, counts = qat.FakeQuantExperts(4, 32, 48, o, a), torch.tensor([0, 1, 127, 129])
    choice = 1 + torch.rand(257, 3).topk(top_k).indices
    choice = torch.arange(4).repeat_interleave(counts).unsqueeze(1) if top_k == 1 else choice
    x, dy = torch.randint(-8, 9, (257, 48)).float(), torch.randint(-8, 9, (257 * top_k, 32)).float()
    y = layer(x.requires_grad_(), model.route(choice, 4), None)
    y.backward(dy)
    x_hat = qat.encode_operand((x * o).bfloat16(), a.activations).value()
    v_hat = qat.encode_operand(layer.weight / o, a.weights, "tensor").value()
    assert not layer.weight.grad[0].any() and not torch.equal(v_hat, layer.weight / o)
    want = zip(per_slot(x_hat, v_hat, choice, dy),
               per_slot(x_hat.abs(), v_hat.abs(), choice, dy.abs()), strict=True)  # fmt: skip
    exact = 0 if a.activations == "bf16" else 2**-15
    got = (y, 2**-15, 0), (x.grad / o, 2**-15, 2**-8), (layer.weight.grad * o, exact, 0)
    for (g, bound, rounding), (w, total) in zip(got, want, strict=True):
        assert ((g - w).abs() <= bound * total + rounding * w.abs()).all()
    empty = layer(x[:0], model.route(choice[:0], 4), None)
    assert empty.shape == (0, 32) and not torch.autograd.grad(empty.sum(), layer.weight)[0].any()


def test_the_trainer_multiplies_what_the_engine_packed():
    """Bit for bit, also for amax 0.02 beside a block of 5e-5: s_b = 1.125, decodes to 5.0223e-5;
    to within 2^-8 in V, whose amax is rounded to bf16."""
    policy, tokens = policy_of("w4a16"), torch.zeros(1, 4, dtype=torch.int64)
    down = policy.layers[0].down
    down.weight.data[1] = torch.tensor([5e-5, 0.02]).repeat_interleave(16)
    engine = Engine(policy, ARITHMETICS["w4a4"])
    policy(tokens)
    for name, mine in policy.expert_linears().items():
        stored = nvfp4.NVFP4Tensor(*engine.experts[name].stored)
        assert torch.equal(mine.consumed.plane, nvfp4.unpack(stored).planes())
        assert torch.equal(mine.consumed.scale, stored.global_scale)
    assert (engine.experts["layers.0.down"].stored[1][1, :, 0].float() == 1.125).all()
    assert down.consumed.value()[1, 0, 0].item() == approx(5.0223e-5, rel=2**-8)
    assert engine.multiplies_what(policy)
    down.weight.data[2, 5] *= -1
    policy(tokens)
    assert not engine.multiplies_what(policy)


@mark.parametrize("name", ARITHMETICS)
def test_after_a_sync_the_engine_equals_a_freshly_built_one(name):
    """w -> 2w: every field of the next rollout, bit for bit; without the sync, the old one's."""
    policy = policy_of()
    engine = Engine(policy, ARITHMETICS[name])
    old = generate(engine)[1]
    for p in policy.parameters():
        p.data *= 2
    stale = generate(engine)[1]
    engine.sync()
    synced, fresh = (generate(e)[1] for e in (engine, Engine(policy, ARITHMETICS[name])))
    assert all(map(torch.equal, old, stale)) and all(map(torch.equal, synced, fresh))
    assert not torch.equal(synced.logprobs, stale.logprobs)


def test_equal_arithmetic_on_both_sides_leaves_the_gap_of_the_residual_stream():
    """At step 0 the gap of w4a16 / w4a16 is that of bf16 / bf16: bf16 roundings of 250 tokens, one
    kind, so equal to 7%; 1.4 is 4 sigma. Another format on one side is 17 times the floor."""
    gap = []
    for rollout, trainer in ("bf16", "bf16"), ("w4a16", "w4a16"), ("w4a16", "bf16"):
        policy = policy_of(trainer, layers=3, width=64)
        prompts, out = generate(Engine(policy, ARITHMETICS[rollout]))
        read = torch.cat([prompts, out.tokens[:, :-1]], 1)
        replay = out.choice.movedim(1, 0).flatten(1, 2)  # a flipped choice is a large event
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
    (None, [0.625, 0.375, 0, 0]), ([3, 0], [10 / 11, 0, 0, 1 / 11]),
])  # fmt: skip
def test_a_replayed_choice_is_weighted_by_the_dense_probabilities_renormalized(replay, want):
    """p = [.5, .3, .15, .05], live {0, 1}, replayed {0, 3}: .909 / .091. The router learns, by
    dg_i / dlogits_k = g_i ([i = k] - g_k). 3e-6: 1 / sqrt(1 + 1e-6) in the norm, |log p| <= 3."""
    config = model.ModelConfig(18, 24, width=16, experts=4, expert_width=16, heads=1)
    layer, want = model.Layer(config, torch.ones(16), Marker, model.route), torch.tensor(want)
    layer.out.data.zero_()  # no attention: norm(h) is 1 everywhere
    layer.router.data[:] = torch.tensor([[0.5], [0.3], [0.15], [0.05]]).log() / 16
    turn, taken = torch.zeros(2, 1, 8), replay and torch.tensor([replay])
    h, choice, _ = layer(torch.ones(1, 1, 16), turn, 0, None, None, taken)
    torch.testing.assert_close(h[0, 0, :4] - 1, want, rtol=0, atol=3e-6)
    assert replay is None or choice[0].tolist() == replay
    h[0, 0, want.argmax()].backward()
    slope = want.max() * (torch.eye(4)[want.argmax()] - want)
    expected = slope.unsqueeze(1).expand(4, 16)
    torch.testing.assert_close(layer.router.grad, expected, rtol=0, atol=3e-6)


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
