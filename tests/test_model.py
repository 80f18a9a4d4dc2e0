"""model.py: routing against python loops, gradients against dense autograd, the planted outliers.

Runs of the same shapes are compared bit for bit. With other shapes (a KV cache, fewer sequences) a
BLAS may add fp32 sums in another order: 2^-24, which now and then flips the rounding of a bf16
operand by a step, 2^-8. FLIP allows a result, in norm, one such step in every entry at once.
"""

import torch
import torch.nn.functional as F
from pytest import mark, raises

from quads_min import model
from quads_min.model import ModelConfig, plant_outliers, route
from quads_min.modes import ARITHMETICS
from quads_min.qat import make_policy
from rollout import Engine

FLIP = 2**-8
FORMATS = ("bf16", "fp8", "w4a16", "w4a4")


def policy_of(name="bf16", **sizes):
    torch.manual_seed(0)
    small = {"width": 32, "layers": 2, "heads": 2, "experts": 4, "expert_width": 16}
    config = ModelConfig(18, 24, **{**small, "outlier_channels": 1, **sizes})
    return make_policy(config, ARITHMETICS[name])


def both_sides(name):
    policy = policy_of(name)
    return policy, Engine(policy, ARITHMETICS[name]).model


def tokens_of(B, T, seed=0):
    return torch.randint(18, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_close_in_norm(got, want):
    assert (got - want).norm() <= FLIP * want.norm()


# ---- routing

COUNTS = ([0, 1, 127, 129], [9, 9, 9, 9], [7, 8, 0, 0], [0, 0, 0, 300], [1] * 40, [0, 0, 0])


@mark.parametrize("case", [*COUNTS, *((T, k) for T in (0, 1, 7, 400) for k in (1, 2, 3))], ids=str)
def test_routing_deals_every_slot_to_a_row_of_a_tile_of_its_expert(case):
    """Against a python loop; on small integers, so that products and sums are exact.

    Rows that no slot owns read zero, and what is put into them (NaN here) never comes back out.
    """
    torch.manual_seed(0)
    if isinstance(case, list):
        expert = torch.arange(len(case)).repeat_interleave(torch.tensor(case))
        choice, E = expert[torch.randperm(len(expert))].unsqueeze(1), len(case)
    else:
        choice, E = torch.rand(case[0], 5).topk(case[1]).indices, 5
    (T, top_k), S, expert = choice.shape, choice.numel(), choice.flatten()
    routing = route(choice, E)
    owner = routing.slot_of_row.view(-1, routing.tile_rows)  # the slot of each row of each tile
    for e in range(E):  # in order of slot number, as a stable sort would
        mine = owner[routing.expert_of_tile == e]
        assert torch.equal(mine[mine < S], (expert == e).nonzero().flatten())
    per_token, per_slot = torch.randint(1, 9, (T, 3)).float(), torch.randint(1, 9, (S, 2)).float()
    of_slot = per_token.repeat_interleave(top_k, 0)
    tiles = [model.to_tiles(x, routing) for x in (per_token, per_slot)]
    for got, x in zip(tiles, (of_slot, per_slot), strict=True):
        assert torch.equal(got, F.pad(x, (0, 0, 0, 1))[owner])
        poisoned = torch.where((owner == S).unsqueeze(-1), torch.nan, got)
        assert torch.equal(model.from_tiles(poisoned, routing), x)
    outer = per_slot.unsqueeze(2) * of_slot.unsqueeze(1)
    want = torch.stack([outer[expert == e].sum(0) for e in range(E)])
    assert torch.equal(model.sum_per_expert(tiles[1].mT @ tiles[0], routing), want)


# ---- the whole model


def dense_reference(policy, tokens):
    """(logits, router probs, parameters): the architecture again, in fp64 by plain autograd.

    Every expert runs on every token; RoPE turns complex numbers. `r` rounds to bf16 where model.py
    does, expert weights straight-through.
    """
    c, r = policy.config, lambda x: x.bfloat16().double()
    w = {n: p.detach().double().requires_grad_() for n, p in policy.named_parameters()}
    norm = lambda x, g: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * g  # noqa: E731
    weight = lambda v: v + (r(v) - v).detach()  # noqa: E731
    (B, T), d, probs, h = tokens.shape, c.width // c.heads, [], w["embed"][tokens]
    angle = torch.arange(T)[:, None].double() / 10_000 ** (torch.arange(0, d, 2).double() / d)

    def rope(x):
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1)

    for i, o in enumerate(plant_outliers(c)):
        p = {n.removeprefix(f"layers.{i}."): t for n, t in w.items()}
        qkv = (r(norm(h, p["attn_norm"])) @ r(p["qkv"]).T).view(B, T, 3, c.heads, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = r(rope(q)) @ r(rope(k)).mT / d**0.5 + torch.full((T, T), -torch.inf).triu(1)
        h = h + r((r(scores.softmax(-1)) @ r(v)).transpose(1, 2).flatten(2)) @ r(p["out"]).T
        x = norm(h, p["ffn_norm"])
        probs.append((x @ p["router"].T).softmax(-1))
        gate = probs[-1] * (probs[-1] >= probs[-1].topk(c.top_k).values[..., -1:])
        gate, x = gate / gate.sum(-1, keepdim=True), r(x * o)
        for e in range(c.experts):
            a, b = (x @ weight(p["gate_up.weight"][e] / o).T).chunk(2, -1)
            h = h + gate[..., e : e + 1] * (r(F.silu(a) * b) @ weight(p["down.weight"][e]).T)
    return r(norm(h, w["norm"])) @ r(w["head"]).T, torch.stack(probs), w


@mark.parametrize("top_k", [1, 2, 3])
def test_logits_and_gradients_equal_a_dense_autograd_reference(top_k):
    """Every parameter, without tiles and without the custom autograd function; bound: FLIP.

    The loss reads logits and router probabilities. Unused experts get exactly zero gradient.
    """
    policy, tokens = policy_of(top_k=top_k, experts=16, width=48, heads=3), tokens_of(2, 4)
    out = policy(tokens)
    logits, probs, w = dense_reference(policy, tokens)
    pairs = (out.logits, logits), (torch.stack(out.router_probs), probs.flatten(1, 2))
    for side in zip(*pairs, strict=True):
        loss = F.cross_entropy(side[0].flatten(0, 1), tokens.flip(0).flatten())
        (loss + side[1].square().sum()).backward()
    for got, want in (*pairs, *((p.grad, w[n].grad) for n, p in policy.named_parameters())):
        assert_close_in_norm(got, want)
    for name, linear in policy.expert_linears().items():
        used = torch.zeros(16).bool().index_fill_(0, out.choice[int(name[7])].flatten(), True)
        assert torch.equal(linear.weight.grad.flatten(1).any(1), used) and not used.all()


@mark.parametrize("name", ["bf16", "w4a16"])
def test_prefill_and_decode_equal_the_full_sequence(name):
    """A prefill in two chunks, then single steps, over a cache of garbage. Bound: FLIP."""
    tokens = tokens_of(4, 16)
    for side in both_sides(name):
        side.requires_grad_(False)
        cache = [model.Cache(*(x + 9 for x in layer)) for layer in side.new_cache(4)]
        parts = [side(tokens[:, :5], 0, cache), side(tokens[:, 5:7], 5, cache)]
        parts += [side(tokens[:, i : i + 1], i, cache) for i in range(7, 16)]
        full = side(tokens).logits
        assert_close_in_norm(torch.cat([p.logits for p in parts], 1), full)
        assert torch.equal(side(tokens, logits_from=9).logits, full[:, 9:])


@mark.parametrize("name", FORMATS)
def test_a_later_token_never_reaches_earlier_logits(name):
    """Nor other sequences, in any format. Same shapes, so bit-equal; its own and later change."""
    tokens = tokens_of(4, 16)
    other = tokens.clone()
    other[2, 9:], other[:, -1] = (tokens[2, 9:] + 5) % 18, (tokens[:, -1] + 1) % 18
    changed = tokens != other
    for side in both_sides(name):
        assert torch.equal((side(tokens).logits != side(other).logits).any(-1), changed)


@mark.parametrize("name", ["bf16", "w4a16"])
def test_a_token_s_logits_do_not_depend_on_its_batch_mates(name):
    """Bound: FLIP. With quantized activations a flip is a step of the format, so these are left to
    the test above, and RAC reads the batch on purpose."""
    tokens = tokens_of(6, 12)
    for side in both_sides(name):
        alone = torch.cat([side(row).logits for row in tokens.split(1)])
        assert_close_in_norm(alone, side(tokens).logits)


# ---- planted outliers


def test_gain_1_and_gain_32_are_the_same_bf16_policy_to_the_bit():
    """Logits of both sides, gradients, every parameter after each of 5 clipped AdamW steps: a power
    of two is multiplied and divided exactly. A quantizer does see the outliers."""
    pair = [policy_of(width=64, outlier_gain=gain, outlier_channels=4) for gain in (1.0, 32.0)]
    optimizers = [torch.optim.AdamW(p.parameters(), 3e-3, betas=(0.9, 0.95)) for p in pair]
    for step in range(5):
        tokens, seen = tokens_of(6, 16, seed=step), []
        for policy, optimizer in zip(pair, optimizers, strict=True):
            logits = policy(tokens).logits
            optimizer.zero_grad()
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            grads = [p.grad.clone() for p in policy.parameters()]
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.1)
            optimizer.step()
            engine = Engine(policy, ARITHMETICS["bf16"]).model
            seen.append([logits, engine(tokens).logits, *grads, *policy.parameters()])
        assert all(map(torch.equal, *seen))
    assert not torch.equal(*(Engine(p, ARITHMETICS["w4a4"]).model(tokens).logits for p in pair))


@mark.parametrize("channels", [0, 1, 3, 4, 6, 8, 64])
def test_outliers_are_dealt_one_per_block_while_blocks_last(channels):
    """Seeded, each layer its own; a block has the floor or the ceiling of channels / blocks."""
    sizes = {"width": 64, "layers": 5, "outlier_channels": channels, "outlier_gain": 0.5}
    configs = [ModelConfig(18, 24, outlier_seed=seed, **sizes) for seed in (0, 0, 1)]
    o, again, other = map(plant_outliers, configs)
    per_block = (o == 0.5).unflatten(1, (4, 16)).sum(-1)
    assert o.shape == (5, 64) and ((o == 1) | (o == 0.5)).all()
    assert (per_block.sum(1) == channels).all() and per_block.max() - per_block.min() <= 1
    assert model.contaminated_blocks(o) == (5 * min(channels, 4), 20)
    assert torch.equal(again, o) and torch.equal(other, o) == (channels in (0, 64))
    assert len(o.unique(dim=0)) > 1 or channels in (0, 64)


def test_impossible_sizes_are_refused_by_name():
    bad = {"width": (0, 40), "expert_width": (0, 24), "heads": (0, 3, 128), "top_k": (0, 9)}
    bad |= {"outlier_gain": (24.0, 0.0, -2.0, torch.inf, torch.nan), "outlier_channels": (-1, 129)}
    for name, value in [(name, value) for name, values in bad.items() for value in values]:
        with raises(ValueError, match=name):
            ModelConfig(18, 24, **{name: value})


# ---- inf and NaN

LAST = ("norm", "head", "layers.1.router", "layers.1.down.weight")  # no expert input after them


@mark.parametrize("name", FORMATS)
@mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named(name, bad):
    """One entry of any weight that reaches an expert's input; the engine names that input."""
    tokens = tokens_of(4, 12)
    for weight in [None, *dict(policy_of().named_parameters())]:
        if weight not in LAST:
            policy = policy_of(name)
            if weight:
                entry = 32 * tokens[0, 0] if weight == "embed" else 0
                policy.get_parameter(weight).data.view(-1)[entry] = bad
            engine = Engine(policy, ARITHMETICS[name]).model
            policy(tokens), engine(tokens)
            assert weight in policy.nonfinite() if weight else policy.nonfinite() == []
            assert bool(engine.nonfinite()) == bool(weight)


@mark.parametrize("weight", LAST)
def test_a_weight_after_the_last_expert_input_is_named(weight):
    policy = policy_of()
    policy.get_parameter(weight).data[:] = torch.nan
    assert policy(tokens_of(4, 12)).logits.isnan().any() and weight in policy.nonfinite()


@mark.parametrize("name", FORMATS)
@mark.parametrize("bad", [[torch.nan], [torch.inf], [torch.inf, -torch.inf]], ids=str)
def test_an_input_that_is_not_finite_is_named_from_then_on(name, bad):
    """A single entry of a single row, on both sides; a healthy call does not clear it."""
    x = torch.zeros(3, 32)
    x[1, : len(bad)] = torch.tensor(bad)
    for side in both_sides(name):
        for rows in (x, x[:1]):
            side.layers[1].gate_up(rows, route(torch.zeros(len(rows), 1).long(), 4), None)
            assert side.nonfinite() == ["input of layers.1.gate_up"]
