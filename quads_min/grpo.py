"""GRPO, its importance corrections, and the measures of rollout/trainer mismatch.

For each prompt, a group of completions is sampled and rewarded. With the rewards r of one group,

    advantage   (r - mean) / std                    population std; exactly 0 if all r are equal
    ratio       exp(logprobs - old_logprobs)        both of the trainer, old: before any update
    loss        - sum over tokens of min(ratio * advantage, clip(ratio, 1 - c, 1 + c) * advantage)
                / their number

No KL term, no critic. At the first mini-batch the ratio is exactly 1, so the loss is minus the
token-weighted mean advantage, near 0, while its gradient, - mean(advantage * gradient of logprob),
is not: watch the reward, not the loss.

Completions are sampled by the engine, so the ratio should really compare with `rollout_logprobs`.
The difference is the *gap*, old_logprobs - rollout_logprobs per sampled token, with equal weights
on both sides: it is what quantization does to RL. An importance correction multiplies each token's
term by a weight:

    tis    min(exp(gap), cap)                         truncated importance sampling
    mis    exp(gap) where that is <= cap, else 0      masked importance sampling

Source: GRPO, arXiv 2402.03300; loss averaged over all tokens of the batch as in DAPO, arXiv
2503.14476. Shapes: B completions of T tokens (train.py's N). Next: tasks.py.
"""

import torch

CORRECTIONS = ("none", "tis", "mis")


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards (prompts, G) to advantages (prompts, G) fp32, normalized within each row."""
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (prompts, G), G >= 2, got {tuple(rewards.shape)}")
    rewards = rewards.float()
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)  # the mean may round to another number
    centered = rewards - rewards.mean(1, keepdim=True)
    std = centered.square().mean(1, keepdim=True).sqrt()
    return torch.where(equal, 0.0, centered / torch.where(equal, 1.0, std))


def token_mask(lengths: torch.Tensor, T: int) -> torch.Tensor:
    """Lengths (B,), EOS included, to (B, T) bool: the real tokens. Token values play no part."""
    return torch.arange(T, device=lengths.device) < lengths.unsqueeze(1)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float):
    """Log-probabilities of `tokens` (B, T) and entropy (B, T) at `temperature`, one definition for
    both sides: log-softmax in fp32 over the whole vocabulary."""
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def importance_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, correction: str, cap: float
) -> torch.Tensor:
    """Weights (B, T) of the module docstring, detached; ones for correction "none"."""
    if correction not in CORRECTIONS:
        raise ValueError(f"correction must be one of {', '.join(CORRECTIONS)}, got {correction!r}")
    weights = (old_logprobs - rollout_logprobs).detach().exp()
    if correction == "none":
        return torch.ones_like(weights)
    return weights.clamp(max=cap) if correction == "tis" else weights.where(weights <= cap, 0.0)


def policy_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor,
    mask: torch.Tensor, clip: float = 0.2, weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss and the share of real tokens at which the clip is active, scalars.

    logprobs, old_logprobs, weights: (B, T). advantages: (B,). mask: (B, T) bool. clip: c.
    """
    ratio = (logprobs - old_logprobs).exp()
    advantages = advantages.unsqueeze(1)
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    term = torch.minimum(plain, clipped)
    if weights is not None:
        term = term * weights
    count = mask.sum().clamp(min=1)
    return -torch.where(mask, term, 0.0).sum() / count, ((clipped < plain) & mask).sum() / count


def kl_k3(rollout_logprobs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """KL(rollout || trainer) per token, estimated from rollout samples: e^d - 1 - d, always >= 0.

    d = log pi_trainer - log pi_rollout at the sampled token. Source: Schulman's k3 estimator.
    """
    d = logprobs - rollout_logprobs
    return torch.expm1(d) - d


def mismatch(
    rollout_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Measures of the gap over real tokens, 0-dim tensors: mean, p99 and max of |gap|, and KL."""
    gap = torch.where(mask, (old_logprobs - rollout_logprobs).abs(), -1.0)  # -1: not a token
    kl = torch.where(mask, kl_k3(rollout_logprobs, old_logprobs), 0.0)
    ranked, count = gap.flatten().sort(descending=True).values, mask.sum()  # real tokens first
    p99 = ranked.gather(0, (count * 0.01).long().clamp(max=ranked.numel() - 1).view(1)).squeeze(0)
    mean, total = torch.where(mask, gap, 0.0).sum(), count.clamp(min=1)
    return {"gap_mean": mean / total, "gap_p99": p99, "gap_max": ranked[0], "kl": kl.sum() / total}


def gap_by_advantage(
    rollout_logprobs: torch.Tensor, old_logprobs: torch.Tensor,
    advantages: torch.Tensor, mask: torch.Tensor,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Where the gap sits: sum of |gap| over the tokens with these signs of advantage and gap, by
    the number of all real tokens; 0-dim tensors. Of "neg_neg" the engine was more certain than the
    trainer, and the update makes the trainer less so: it widens the gap."""
    gap, count = torch.where(mask, old_logprobs - rollout_logprobs, 0.0), mask.sum().clamp(min=1)
    rows = {"pos": advantages.unsqueeze(1) > 0, "neg": advantages.unsqueeze(1) < 0}
    gaps = {"pos": gap.clamp(min=0), "neg": (-gap).clamp(min=0)}
    return {f"mass_{a}_{g}": gaps[g].where(rows[a], 0.0).sum() / count for a in rows for g in gaps}


def same_experts(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Choices (..., top_k) to (...) bool: equal as sets?"""
    return (ours.sort(-1).values == theirs.sort(-1).values).all(-1)


def choice_mismatch(ours: torch.Tensor, theirs: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
    """Share of (layer, token) pairs (B, L, T, top_k) with other experts, where `fed` (B, T)."""
    differs = ~same_experts(ours, theirs) & fed.unsqueeze(1)
    return differs.sum() / (fed.sum().clamp(min=1) * ours.shape[1])
