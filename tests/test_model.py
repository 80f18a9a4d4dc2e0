"""model.py: routing against python loops, the whole model against dense autograd, the outliers.

ROUNDING allows a result, in norm, four bf16 steps of 2^-8 in every entry at once: the reference
does not round, and a cache makes a BLAS sum in another order. Otherwise bit-equal.
"""

import torch
import torch.nn.functional as F
from pytest import mark, raises

from quads_min import model
from quads_min.model import ModelConfig, plant_outliers, route
from quads_min.modes import ARITHMETICS
from quads_min.qat import make_policy
from rollout import Engine

ROUNDING = 2**-6
SMALL = {"width": 32, "layers": 2, "heads": 2, "experts": 4, "expert_width": 32}


def policy_of(name="bf16", **sizes):
    torch.manual_seed(0)
    config = ModelConfig(18, 24, **{**SMALL, "outlier_channels": 1, **sizes})
    return make_policy(config, ARITHMETICS[name])


def tokens_of(B, T):
    return torch.randint(18, (B, T), generator=torch.Generator().manual_seed(0))


@mark.parametrize("least", [8, 16])
@mark.parametrize("crowd", [0, 9])
@mark.parametrize(("T", "top_k"), [(T, k) for T in (0, 1, 30, 400) for k in (1, 2, 3)])
def test_routing_deals_every_slot_to_a_row_of_a_tile_of_its_expert(T, top_k, crowd, least):
    """Against a python loop; on small integers, so that products and sums are exact.

    Rows that no slot owns read zero, and what is put into them (NaN here) never comes back out.
    """
    preference = torch.tensor([0, 0, 0, crowd, crowd // 2])  # 9: all tokens to the same experts
    choice, E, slots = (torch.rand(T, 5) + preference).topk(top_k).indices, 5, T * top_k
    expert = choice.flatten()
    routing = route(choice, E, least, most=32)
    assert routing.tile_rows == min(r for r in (least, 16, 32) if r == 32 or r * 4 * E >= slots)
    owner = routing.slot_of_row.view(-1, routing.tile_rows)  # the slot of each row of each tile
    for e in range(E):  # in order of slot number, as a stable sort would
        mine = owner[routing.expert_of_tile == e]
        assert torch.equal(mine[mine < slots], (expert == e).nonzero().flatten())
    per_token, per_slot = torch.randint(1, 9, (T, 3)).float(), torch.randn(slots, 2).round()
    of_slot = per_token.repeat_interleave(top_k, 0)
    tiles = [model.to_tiles(x, routing) for x in (per_token, per_slot)]
    for got, x in zip(tiles, (of_slot, per_slot), strict=True):
        assert torch.equal(got, F.pad(x, (0, 0, 0, 1))[owner])
        poisoned = torch.where((owner == slots).unsqueeze(-1), torch.nan, got)
        assert torch.equal(model.from_tiles(poisoned, routing), x)
    outer = per_slot.unsqueeze(2) * of_slot.unsqueeze(1)
    want = torch.stack([outer[expert == e].sum(0) for e in range(E)])
    assert torch.equal(model.sum_per_expert(tiles[1].mT @ tiles[0], routing), want)


def dense_reference(c, w, tokens, choice):
    """Logits by plain autograd: every expert runs on every token, RoPE turns complex numbers."""
    (B, T), d, h = tokens.shape, c.width // c.heads, w["embed"][tokens]
    angle = torch.arange(T).unsqueeze(1) / 10_000 ** (torch.arange(0, d, 2) / d)
    for i in range(c.layers):
        p = {name.removeprefix(f"layers.{i}."): weight for name, weight in w.items()}
        x = F.rms_norm(h, (c.width,), p["attn_norm"], 1e-6)
        q, k, v = (x @ p["qkv"].T).view(B, T, 3, c.heads, d).permute(2, 0, 3, 1, 4)
        turned = (torch.complex(*x.chunk(2, -1)) * torch.exp(1j * angle) for x in (q, k))
        q, k = (torch.cat([x.real, x.imag], -1) for x in turned)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + y.transpose(1, 2).flatten(2) @ p["out"].T
        x = F.rms_norm(h, (c.width,), p["ffn_norm"], 1e-6)
        gate = (x @ p["router"].T).softmax(-1) * F.one_hot(choice[:, i], c.experts).sum(-2)
        gate = gate / gate.sum(-1, keepdim=True)
        a, b = torch.einsum("btd,efd->btef", x, p["gate_up.weight"]).chunk(2, -1)
        h = h + torch.einsum("btef,edf,bte->btd", F.silu(a) * b, p["down.weight"], gate)
    return F.rms_norm(h, (c.width,), w["norm"], 1e-6) @ w["head"].T


@mark.parametrize("top_k", [2, 3])
def test_logits_and_every_gradient_equal_a_dense_autograd_reference(top_k):
    """The same with a KV cache of garbage: a prefill in two chunks, then single steps."""
    policy, tokens = policy_of(top_k=top_k, width=48, heads=3), tokens_of(4, 9)
    w = {n: p.detach().clone().requires_grad_() for n, p in policy.named_parameters()}
    out = policy(tokens)
    logits = dense_reference(policy.config, w, tokens, out.choices(4))
    for x in out.logits, logits:
        F.cross_entropy(x.flatten(0, 1), tokens.flip(0).flatten()).backward()
    grads = [(p.grad, w[n].grad) for n, p in policy.named_parameters()]
    cache = [model.Cache(layer.k + 9, layer.v + 9) for layer in policy.new_cache(4)]
    with torch.no_grad():
        spans = (0, 5), (5, 7), (7, 8), (8, 9)
        parts = [policy(tokens[:, a:b], a, cache).logits for a, b in spans]
        assert torch.equal(policy(tokens, logits_from=4).logits, out.logits[:, 4:])
    for got, want in (out.logits, logits), (torch.cat(parts, 1), logits), *grads:
        assert (got - want).norm() <= ROUNDING * want.norm()


def test_gain_1_and_gain_32_are_the_same_bf16_policy_to_the_bit():
    """Logits of both sides, gradients, parameters after an AdamW step: a power of two is multiplied
    and divided exactly. A quantizer does see the outliers."""
    seen, quantized, tokens = [], [], tokens_of(6, 16)
    for gain in (1.0, 32.0):
        policy = policy_of(width=64, outlier_gain=gain, outlier_channels=4)
        logits = policy(tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.optim.AdamW(policy.parameters(), 3e-3).step()
        mine, other = (Engine(policy, ARITHMETICS[name]).model for name in ("bf16", "w4a4"))
        weights = [*policy.parameters(), *(p.grad for p in policy.parameters())]
        seen.append([logits, mine(tokens).logits, *weights])
        quantized.append(other(tokens).logits)
    assert all(map(torch.equal, *seen)) and not torch.equal(*quantized)


@mark.parametrize("channels", [0, 1, 3, 4, 6, 64])
def test_outliers_are_dealt_one_per_block_while_blocks_last(channels):
    """Seeded; a block has the floor or the ceiling of channels / blocks."""
    sizes = {"width": 64, "layers": 5, "outlier_channels": channels, "outlier_gain": 0.5}
    configs = [ModelConfig(18, 24, outlier_seed=seed, **sizes) for seed in (0, 0, 1)]
    o, again, other = map(plant_outliers, configs)
    per_block = (o == 0.5).unflatten(1, (4, 16)).sum(-1)
    assert (per_block.sum(1) == channels).all() and per_block.max() - per_block.min() <= 1
    assert ((o == 1) | (o == 0.5)).all()
    assert model.contaminated_blocks(o) == (5 * min(channels, 4), 20)
    assert torch.equal(again, o) and torch.equal(other, o) == (channels in (0, 64))


def test_impossible_sizes_are_refused_by_name():
    bad = {"width": (0, 40), "expert_width": (0, 24), "heads": (0, 3, 128), "top_k": (0, 9)}
    bad |= {"outlier_gain": (24.0, 0.0, -2.0, torch.inf, torch.nan), "outlier_channels": (-1, 129)}
    for name, value in [(name, value) for name, values in bad.items() for value in values]:
        with raises(ValueError, match=f"^{name}"):
            ModelConfig(18, 24, **{name: value})


@mark.parametrize("name", ["bf16", "fp8", "w4a16", "w4a4"])
@mark.parametrize("bad", [torch.nan, torch.inf])
def test_whatever_is_not_finite_is_named(name, bad):
    """One entry of an expert's input, on both sides and from then on; one entry of any weight."""
    policy, x = policy_of(name), torch.zeros(3, 32)
    x[1, 0] = bad
    for side in policy, Engine(policy, ARITHMETICS[name]).model:
        assert side.nonfinite() == []
        for rows in (x, x[:1]):
            side.layers[1].gate_up(rows, route(torch.zeros(len(rows), 1).long(), 4), None)
            assert side.nonfinite() == ["input of layers.1.gate_up"]
    for i, (weight, p) in enumerate(policy.named_parameters(), start=2):
        p.data.view(-1)[0] = bad
        assert weight in policy.nonfinite() and len(policy.nonfinite()) == i
