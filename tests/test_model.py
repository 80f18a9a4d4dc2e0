"""model.py: routing by a loop, the policy by dense autograd, outliers, and what is refused."""

from itertools import product

import torch
import torch.nn.functional as F
from pytest import mark, raises

from quads_min import model
from quads_min.modes import ARITHMETICS
from quads_min.qat import make_policy
from rollout import Engine


def policy_of(name="bf16", **sizes):
    torch.manual_seed(0)
    sizes = {"width": 32, "layers": 2, "expert_width": 32, "outlier_channels": 1} | sizes
    return make_policy(model.ModelConfig(18, 24, experts=4, **sizes), ARITHMETICS[name])


@mark.parametrize(("T", "top_k", "crowd"), [*product((0, 1, 30, 400), (1, 2, 3), (0, 9))])
def test_routing_deals_every_slot_to_a_row_of_a_tile_of_its_expert(T, top_k, crowd):
    """Rows that no slot owns read zero; what is put into them (NaN here) never comes back out."""
    preference, slots = torch.tensor([0, 0, 0, crowd, crowd // 2]), T * top_k  # 9: all to the same
    choice = (torch.rand(T, 5) + preference).topk(top_k).indices
    routing, x = model.route(choice, 5, most=32), torch.randn(slots, 2)
    assert routing.tile_rows == min(r for r in (8, 16, 32) if r == 32 or 20 * r >= slots)
    expert, order = choice.flatten(), routing.row_of_slot.argsort()
    assert torch.equal(routing.expert_of_tile[routing.row_of_slot // routing.tile_rows], expert)
    assert torch.equal(order, expert.argsort(stable=True))
    tiles = model.to_tiles(x, routing)
    empty = (tiles == 0).all(-1)
    assert (~empty).sum() == slots
    tiles[empty] = torch.nan
    assert torch.equal(model.from_tiles(tiles, routing), x)


def dense_logits(c, w, tokens, choice):
    """Every expert runs on every token, RoPE turns complex numbers."""
    (B, T), d, h = tokens.shape, c.width // c.heads, w["embed"][tokens]
    turn = torch.exp(1j * torch.arange(T).unsqueeze(1) / 10_000 ** (torch.arange(0, d, 2) / d))
    for i in range(c.layers):
        p = {name.removeprefix(f"layers.{i}."): weight for name, weight in w.items()}
        x = F.rms_norm(h, (c.width,), p["attn_norm"], 1e-6)
        *qk, v = (x @ p["qkv"].T).view(B, T, 3, c.heads, d).permute(2, 0, 3, 1, 4)
        qk = (turn * torch.complex(*x.chunk(2, -1)) for x in qk)
        q, k = (torch.view_as_real(x).flatten(-2) for x in qk)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + y.transpose(1, 2).flatten(2) @ p["out"].T
        x = F.rms_norm(h, (c.width,), p["ffn_norm"], 1e-6)
        gate = (x @ p["router"].T).softmax(-1) * F.one_hot(choice[:, i], c.experts).sum(-2)
        a, b = torch.einsum("btd,efd->btef", x, p["gate_up.weight"]).chunk(2, -1)
        y = torch.einsum("btef,edf,bte->btd", F.silu(a) * b, p["down.weight"], gate)
        h = h + y / gate.sum(-1, keepdim=True)
    return F.rms_norm(h, (c.width,), w["norm"], 1e-6) @ w["head"].T


@mark.parametrize(("top_k", "replayed"), [(2, False), (3, False), (2, True)])
def test_logits_and_every_gradient_equal_a_dense_autograd_reference(top_k, replayed):
    """In norm, up to four bf16 steps of 2^-8 in every entry: the reference does not round. A
    replayed choice, too, is weighted by the dense probabilities, renormalized, and teaches."""
    policy, tokens = policy_of(top_k=top_k, width=48, heads=3), torch.randint(18, (4, 9))
    replay = torch.rand(2, 36, 4).topk(top_k).indices if replayed else None  # any, in any order
    w = {n: p.detach().clone().requires_grad_() for n, p in policy.named_parameters()}
    out = policy(tokens, replay=replay)
    assert not replayed or torch.equal(torch.stack(out.choice), replay)
    logits = dense_logits(policy.config, w, tokens, out.choices(4))
    for x in out.logits, logits:
        F.cross_entropy(x.flatten(0, 1), tokens.flip(0).flatten()).backward()
    grads = [(p.grad, w[n].grad) for n, p in policy.named_parameters()]
    assert all((got - x).norm() <= 2**-6 * x.norm() for got, x in [(out.logits, logits), *grads])


def test_gain_1_and_gain_32_are_the_same_bf16_policy_to_the_bit():
    """Logits of both sides, gradients, weights after a step."""
    seen, tokens = [], torch.arange(96).view(6, 16) % 17
    for gain in (1.0, 32.0):
        policy = policy_of(width=64, outlier_gain=gain, outlier_channels=4)
        logits = policy(tokens).logits
        F.cross_entropy(logits.flatten(0, 1), tokens.flip(0).flatten()).backward()
        torch.optim.AdamW(policy.parameters(), 3e-3).step()
        engine = Engine(policy, ARITHMETICS["bf16"]).model
        weights = [*policy.parameters()]
        seen.append([logits, engine(tokens).logits, *weights, *(w.grad for w in weights)])
    assert all(map(torch.equal, *seen))


@mark.parametrize("channels", [0, 1, 3, 4, 6, 64])
def test_outliers_are_dealt_one_per_block_while_blocks_last(channels):
    sizes = {"width": 64, "layers": 5, "outlier_channels": channels, "outlier_gain": 0.5}
    configs = (model.ModelConfig(18, 24, outlier_seed=seed, **sizes) for seed in (0, 0, 1))
    o, again, other = map(model.plant_outliers, configs)
    assert ((o == 1) | (o == 0.5)).all()
    per_block = (o == 0.5).unflatten(1, (4, 16)).sum(-1)
    assert (per_block.sum(1) == channels).all() and per_block.max() - per_block.min() <= 1
    assert model.contaminated_blocks(o) == (5 * min(channels, 4), 20)
    assert torch.equal(again, o) and torch.equal(other, o) == (channels in (0, 64))


def test_impossible_sizes_are_refused_by_name():
    bad = {"width": (0, 40), "expert_width": (0, 24), "heads": (0, 3, 128), "top_k": (0, 9)}
    bad |= {"outlier_gain": (24.0, 0.0, -2.0, torch.inf, torch.nan), "outlier_channels": (-1, 129)}
    for name, value in ((name, value) for name, values in bad.items() for value in values):
        with raises(ValueError, match=f"^{name}"):
            model.ModelConfig(18, 24, **{name: value})


@mark.parametrize("name", ["bf16", "fp8", "w4a16", "w4a4"])
@mark.parametrize("bad", [torch.nan, torch.inf])
def test_whatever_is_not_finite_is_named(name, bad):
    """An entry of an expert's input, on both sides and from then on; an entry of a weight."""
    policy, x = policy_of(name), torch.zeros(3, 32)
    x[1, 0] = bad
    for side in policy, Engine(policy, ARITHMETICS[name]).model:
        for rows in x, x[:1]:
            side.layers[1].gate_up(rows, model.route(torch.zeros(len(rows), 1).long(), 4), None)
            assert side.nonfinite() == ["input of layers.1.gate_up"]
    policy.layers[0].router.data[1, 2] = bad
    assert policy.nonfinite()[1:] == ["layers.0.router"]
