"""grpo.py: the objective and its measures, on numbers small enough to check by hand.

Values given to n decimals are compared to half of the last one; everything else is bit-equal, or
equal up to the rounding of an fp32 sum, for which pytest.approx (1e-6 relative, 8 ulp) stands.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import rollout
from quads_min import grpo
from quads_min.model import ModelConfig
from quads_min.modes import ARITHMETICS, Arithmetic
from quads_min.qat import make_policy

E = math.e


def tensor(*values):
    return torch.tensor([list(values)], dtype=torch.float32)


def policy_and_rollout(name, temperature=1.0, **sizes):
    """A small random policy and 4 groups of 4 completions by an engine of the same arithmetic."""
    torch.manual_seed(0)
    small = {"width": 32, "layers": 2, "heads": 2, "experts": 4, "expert_width": 16}
    policy = make_policy(ModelConfig(18, 12, **{**small, **sizes}), ARITHMETICS[name])
    engine = rollout.Engine(policy, ARITHMETICS[name])
    prompts = torch.randint(16, (4, 5))
    out = engine.generate(prompts, 6, 16, 17, 4, temperature, torch.Generator().manual_seed(0))
    return policy, engine, torch.cat([prompts.repeat_interleave(4, 0), out.tokens[:, :-1]], 1), out


# ---- log-probs


def test_both_sides_take_logprobs_at_the_sampling_temperature():
    """Logits [2, 0] at 0.5: log p(0) = -log(1 + e^-4) = -0.01815, and token 0 at that rate, 4 sigma.

    Attention and experts are zeroed and the head is 2 / D, so that the logits of both sides are 2
    and 0: 1 / sqrt(1 + 1e-6) rounds to 1 in bf16.
    """
    torch.manual_seed(0)
    policy = make_policy(ModelConfig(2, 8, width=16, layers=1, heads=1, expert_width=16), Arithmetic())
    with torch.no_grad():
        for p in policy.parameters():
            p.zero_() if p.dim() == 3 else p.fill_(1.0)
        policy.layers[0].out.zero_()
        policy.head.copy_(torch.tensor([[2 / 16], [0.0]]).expand(2, 16))
    prompts, noise = torch.zeros(4000, 2, dtype=torch.int64), torch.Generator().manual_seed(0)
    out = rollout.Engine(policy, Arithmetic()).generate(prompts, 1, 1, 1, 1, 0.5, noise)
    logits = policy(prompts, logits_from=1).logits
    assert logits[0].tolist() == [[2.0, 0.0]]
    trainer, _ = grpo.token_logprobs(logits, out.tokens, temperature=0.5)
    want = torch.where(out.tokens == 0, -0.01815, -4.01815)
    for got in (trainer, out.logprobs):
        torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    p = 1 / (1 + E**-4)
    assert abs(1 - out.tokens.float().mean().item() - p) < 4 * (p * (1 - p) / 4000) ** 0.5


def test_log_softmax_is_fp32_whatever_the_logits():
    """The third log-prob of [12, .3, -1.7] is -13.7000; a bf16 log-softmax gives -13.6875."""
    assert rollout.token_logprobs is grpo.token_logprobs  # one definition for both sides
    logits, third = torch.tensor([[[12.0, 0.3, -1.7]]]), torch.tensor([[2]])
    logprob, entropy = grpo.token_logprobs(logits, third, 1.0)
    assert logprob.item() == pytest.approx(-13.7000, abs=5e-5) and logprob.dtype == torch.float32
    p = np.exp([12, 0.3, -1.7]) / np.exp([12, 0.3, -1.7]).sum()
    assert entropy.item() == pytest.approx(-(p * np.log(p)).sum(), rel=1e-3)  # 1e-4, cancelling
    half = grpo.token_logprobs(logits.bfloat16(), third, 1.0)[0]
    assert torch.equal(half, grpo.token_logprobs(logits.bfloat16().float(), third, 1.0)[0])


def test_there_is_no_dropout_anywhere():
    """No such module, and a training-mode pass repeats itself and the evaluation-mode one, bitwise."""
    policy, engine, read, _ = policy_and_rollout("w4a16")
    for model in (policy, engine.model):
        assert not any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules())
        first, again = model.train()(read).logits, model(read).logits
        assert torch.equal(first, again) and torch.equal(first, model.eval()(read).logits)


# ---- advantages, masks, weights


def test_advantages_are_normalized_per_group_by_the_population_std():
    A = grpo.group_advantages
    assert A(tensor(1, 0, 0, 0))[0].tolist() == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=5e-4)
    r = np.random.default_rng(0).random((5, 8))  # numpy's std is the population's
    want = (r - r.mean(1, keepdims=True)) / r.std(1, keepdims=True)
    torch.testing.assert_close(A(torch.from_numpy(r)), torch.from_numpy(want).float())


def test_equal_rewards_give_exactly_zero_and_a_group_of_one_is_an_error():
    """0.35 * 7 / 7 rounds to another number than 0.35: subtracting a mean is not enough."""
    for rewards in ([[0.35] * 7], [[1.0, 1.0], [0.0, 0.0]]):
        assert not grpo.group_advantages(torch.tensor(rewards)).any()
    for shape in ((4, 1), (4, 0), (4,), (2, 2, 2)):
        with pytest.raises(ValueError, match="G >= 2"):
            grpo.group_advantages(torch.ones(shape))


def test_masks_come_from_lengths():
    """[7, EOS, PAD, PAD] and [7, 8, PAD, PAD] without EOS, of length 2: the same mask."""
    mask = grpo.token_mask(torch.tensor([2, 2, 1, 4, 0]), 4)
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1] * 4, [0] * 4]
    _, _, _, out = policy_and_rollout("bf16")  # and the engine's lengths count up to the first EOS
    for tokens, length in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True):
        assert length == (tokens.index(16) + 1 if 16 in tokens else 6)
        assert tokens[length:] == [17] * (6 - length)


def test_importance_weights_compare_old_with_rollout_and_carry_no_gradient():
    """Rollout -2, old -1, current -0.5: min(e^1, C), never e^1.5; mis masks what is above C."""
    old = tensor(-1.0, -2.0, -2.0).requires_grad_()
    engine = tensor(-2.0, -2.0, -1.0)
    for correction, cap, want in (
        ("tis", 2.0, [2, 1, 1 / E]),
        ("tis", 9.0, [E, 1, 1 / E]),
        ("mis", 2.0, [0, 1, 1 / E]),
        ("mis", 9.0, [E, 1, 1 / E]),
        ("mis", 1.0, [0, 1, 1 / E]),  # at the cap it stays
        ("none", 2.0, [1, 1, 1]),
    ):
        w = grpo.importance_weights(old, engine, correction, cap)
        assert w[0].tolist() == pytest.approx(want) and not w.requires_grad
    with pytest.raises(ValueError, match="none, tis, mis, got 'is'"):
        grpo.importance_weights(old, engine, "is", 2.0)
    logprobs, mask = tensor(-0.5).requires_grad_(), torch.ones(1, 1).bool()
    w = grpo.importance_weights(tensor(-1.0), tensor(-2.0), "tis", 2.0)
    loss, _ = grpo.policy_loss(logprobs, tensor(-1.0), -torch.ones(1), mask, weights=w)
    loss.backward()  # w * p = 2 e^0.5: d/dx of it is itself, if w is a constant
    assert loss.item() == pytest.approx(2 * E**0.5) == pytest.approx(logprobs.grad.item())


# ---- the loss


def test_the_loss_is_the_clipped_term_over_real_tokens_and_padding_plays_no_part():
    """Against a python loop; padding holds 0 or garbage, loss and gradient are the same bits."""
    rng = np.random.default_rng(0)
    lengths, results = np.array([1, 5, 3, 4]), []
    real = np.arange(5) < lengths[:, None]
    old, new, w = -rng.random((4, 5)), -rng.random((4, 5)), rng.random((4, 5))
    A = rng.standard_normal(4)
    for garbage in (0.0, 30.0):
        arrays = [np.where(real, a, garbage * rng.standard_normal((4, 5))) for a in (new, old, w)]
        logprobs, old_logprobs, weights = (torch.from_numpy(a).float() for a in arrays)
        mask = grpo.token_mask(torch.from_numpy(lengths), 5)
        logprobs.requires_grad_()
        args = (logprobs, old_logprobs, torch.from_numpy(A).float(), mask, 0.2, weights)
        loss, share = grpo.policy_loss(*args)
        loss.backward()
        results.append((loss.detach(), share, logprobs.grad))
    terms, active = [], 0
    for i, j in zip(*real.nonzero(), strict=True):
        p = np.exp(new[i, j] - old[i, j])
        clipped = min(max(p, 0.8), 1.2)
        terms.append(w[i, j] * min(p * A[i], clipped * A[i]))
        active += clipped * A[i] < p * A[i]
    loss, share, grad = results[0]
    assert 0 < active < 13 and all(map(torch.equal, results[0], results[1]))
    assert loss.item() == pytest.approx(-sum(terms) / 13)
    assert share.item() == pytest.approx(active / 13) and not grad[~mask].any()


def test_the_clip_is_active_where_it_stops_the_gradient():
    """p above 1 + c for A > 0 and below 1 - c for A < 0, and nowhere else: 2 of 6."""
    p = torch.tensor([[1.3], [1.1], [0.5], [0.5], [0.9], [1.5]])
    logprobs, A = p.log().requires_grad_(), torch.tensor([1.0, 1, 1, -1, -1, -1])
    loss, share = grpo.policy_loss(logprobs, torch.zeros(6, 1), A, torch.ones(6, 1).bool(), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 + 1.1 + 0.5 - 0.8 - 0.9 - 1.5) / 6)
    assert share.item() == pytest.approx(2 / 6)
    assert logprobs.grad.flatten().tolist() == pytest.approx([0, -1.1 / 6, -0.5 / 6, 0, 0.15, 0.25])


@pytest.mark.parametrize("name", ["bf16", "fp8", "w4a16", "w4a4"])
def test_the_ratio_is_exactly_one_in_the_first_mini_batch_and_not_in_the_second(name):
    """Old log-probs come from the same rows, order and code, so bit-equal. The loss is then minus
    the token-weighted mean advantage, whatever the policy; its gradient is not zero."""
    policy, _, read, out = policy_and_rollout(name, temperature=0.7)
    logprobs = lambda b: grpo.token_logprobs(policy(read[b], logits_from=4).logits, out.tokens[b], 0.7)[0]  # noqa: E731, E501
    A = grpo.group_advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]] * 2)).flatten()
    mask, batches = grpo.token_mask(out.lengths, 6), (slice(0, 8), slice(8, 16))
    with torch.no_grad():
        old = torch.cat([logprobs(b) for b in batches])
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-4)
    for i, b in enumerate(batches):
        new = logprobs(b)
        loss, share = grpo.policy_loss(new, old[b], A[b], mask[b])
        loss.backward()
        if i == 0:
            mean = (A[b, None] * mask[b]).sum() / mask[b].sum()
            assert torch.equal(new, old[b]) and share == 0
            assert loss.item() == pytest.approx(-mean.item())
            assert policy.head.grad.norm() > 0.01
            optimizer.step()
    assert (new != old[b])[mask[b]].all()


# ---- measures


def test_k3_of_a_trainer_that_finds_the_token_less_likely():
    """d = -0.1: e^-0.1 - 1 + 0.1 = 0.0048374; the other sign would give 0.0051709."""
    for d, want in ((-0.1, 0.0048374), (0.1, 0.0051709), (0.0, 0.0)):
        assert grpo.kl_k3(tensor(0.0), tensor(d)).item() == pytest.approx(want, abs=5e-8)


def test_mismatch_equals_numpy_over_real_tokens():
    """p99 is the smallest |gap| that at least 99% do not exceed. Padding is poisoned with 50."""
    rng = np.random.default_rng(0)
    for B in (3, 40):  # fewer and more than 100 tokens
        lengths = rng.integers(1, 10, B)
        mask = np.arange(9) < lengths[:, None]
        old, engine = (-rng.random((B, 9)).astype(np.float32) for _ in range(2))
        gap = np.abs(old - engine)[mask]
        d = (old - engine)[mask].astype(np.float64)
        want = {"gap_mean": gap.mean(), "gap_p99": np.percentile(gap, 99, method="inverted_cdf")}
        want |= {"gap_max": gap.max(), "kl": (np.exp(d) - 1 - d).mean()}
        old[~mask] += 50
        got = grpo.mismatch(*map(torch.from_numpy, (engine, old, mask)))
        assert {k: v.item() for k, v in got.items()} == pytest.approx(want)


def test_choice_mismatch_compares_sets_over_the_tokens_that_were_read():
    """B, L, T, top_k = 1, 2, 3, 2: two differ in 2 layers * 2 tokens; order does not matter."""
    ours = torch.tensor([[[[0, 1], [2, 3], [0, 1]], [[0, 1], [2, 3], [0, 1]]]])
    theirs = torch.tensor([[[[1, 0], [2, 1], [2, 3]], [[0, 3], [3, 2], [2, 3]]]])
    read = torch.tensor([[True, True, False]])
    assert grpo.choice_mismatch(ours, theirs, read).item() == 0.5
    assert grpo.choice_mismatch(ours, theirs, torch.ones(1, 3).bool()).item() == pytest.approx(4 / 6)
    assert grpo.choice_mismatch(ours, ours.flip(-1), read).item() == 0
