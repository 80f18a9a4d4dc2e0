"""GRPO, its importance corrections, and the measures of rollout/trainer mismatch.

For each prompt, G completions are sampled and rewarded. With r the rewards of one group,

    advantage  A = (r - mean) / std                   population std; exactly 0 if all r are equal
    ratio      p = exp(logprobs - old_logprobs)       both of the trainer, old: before any update
    loss       - sum over tokens of min(p A, clip(p, 1 - c, 1 + c) A) / their number

No KL term, no critic. At the first mini-batch p is exactly 1, so the loss is minus the
token-weighted mean advantage, near 0, while its gradient is the full policy gradient: watch the
reward, not the loss.

Completions are sampled by the engine, so p should really compare with `rollout_logprobs`. The
difference is the *gap*, old_logprobs - rollout_logprobs per sampled token, with equal weights on
both sides: it is what quantization does to RL. An importance correction w multiplies each token's
term:

    tis    w = min(exp(gap), C)                       truncated importance sampling
    mis    w = exp(gap) where that is <= C, else 0    masked importance sampling

Source: GRPO, arXiv 2402.03300; loss averaged over all tokens of the batch as in DAPO, arXiv
2503.14476. Next: tasks.py.
"""

import torch

CORRECTIONS = ("none", "tis", "mis")


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards (prompts, G) to advantages (prompts, G) fp32, normalized within each row.

    Raises:
        ValueError: not two-dimensional, or G < 2, where no reward can differ from its group's mean.

    >>> group_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    tensor([[ 1.7321, -0.5774, -0.5774, -0.5774]])
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"group_advantages: rewards must be (prompts, G), G >= 2, got {tuple(rewards.shape)}"
        )
    rewards = rewards.float()
    equal = (rewards == rewards[:, :1]).all(
        1, keepdim=True
    )  # a rounded mean would leave a remainder
    centered = rewards - rewards.mean(1, keepdim=True)
    std = centered.square().mean(1, keepdim=True).sqrt()
    return torch.where(equal, 0.0, centered / torch.where(equal, 1.0, std))


def token_mask(lengths: torch.Tensor, N: int) -> torch.Tensor:
    """(B,) lengths, EOS included, to (B, N) bool: the real tokens. Token values play no part.

    >>> token_mask(torch.tensor([2, 4]), 4).int().tolist()
    [[1, 1, 0, 0], [1, 1, 1, 1]]
    """
    return torch.arange(N, device=lengths.device) < lengths.unsqueeze(1)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, N) fp32 of `tokens` (B, N) at `temperature`, and the entropy (B, N).

    One definition for both sides: log-softmax in fp32 over the whole vocabulary.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def importance_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, correction: str, cap: float
) -> torch.Tensor:
    """Weights w (B, N) of the module docstring, detached; ones for correction "none"."""
    if correction not in CORRECTIONS:
        raise ValueError(f"correction must be one of {', '.join(CORRECTIONS)}, got {correction!r}")
    ratio = (old_logprobs - rollout_logprobs).detach().exp()
    if correction == "none":
        return torch.ones_like(ratio)
    return ratio.clamp(max=cap) if correction == "tis" else torch.where(ratio <= cap, ratio, 0.0)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float = 0.2,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped objective, averaged over real tokens.

    Args:
        logprobs, old_logprobs: (B, N). advantages: (B,). mask: (B, N) bool.
        clip: c of the module docstring. weights: (B, N) importance weights, or None.
    Returns:
        loss (scalar, differentiable), share of real tokens at which the clip is active (scalar).
    """
    ratio = (logprobs - old_logprobs).exp()
    A = advantages.unsqueeze(1)
    plain, clipped = ratio * A, ratio.clamp(1 - clip, 1 + clip) * A
    term = torch.minimum(plain, clipped)
    if weights is not None:
        term = term * weights
    count = mask.sum().clamp(min=1)
    loss = -torch.where(mask, term, 0.0).sum() / count
    return loss, ((clipped < plain) & mask).sum() / count


def kl_k3(rollout_logprobs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(rollout || trainer) from rollout samples: e^d - 1 - d, always >= 0.

    d = log pi_trainer - log pi_rollout at the sampled token. Source: Schulman's k3 estimator.

    >>> round(kl_k3(torch.tensor([0.0]), torch.tensor([-0.1])).item(), 6)
    0.004837
    """
    d = logprobs - rollout_logprobs
    return torch.expm1(d) - d


def mismatch(
    rollout_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Measures of the gap over real tokens, 0-dim tensors: mean, p99 and max of |gap|, and KL."""
    gap = torch.where(mask, (old_logprobs - rollout_logprobs).abs(), -1.0)  # -1: not a token
    count = mask.sum()
    ranked = gap.flatten().sort(descending=True).values  # real tokens first
    p99 = ranked.gather(0, (count * 0.01).long().clamp(max=ranked.numel() - 1).view(1)).squeeze(0)
    total = count.clamp(min=1)
    kl = torch.where(mask, kl_k3(rollout_logprobs, old_logprobs), 0.0)
    return {
        "gap_mean": torch.where(mask, gap, 0.0).sum() / total,
        "gap_p99": p99,
        "gap_max": ranked[0],
        "kl": kl.sum() / total,
    }


def gap_by_advantage(
    rollout_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Where the gap sits: sum of |gap| over the tokens with these signs of advantage and gap, by
    the number of all real tokens; 0-dim tensors. Of "neg_neg" the engine was more certain than the
    trainer, and the update makes the trainer less so: it widens the gap."""
    gap = torch.where(mask, old_logprobs - rollout_logprobs, 0.0)
    count, A = mask.sum().clamp(min=1), advantages.unsqueeze(1)
    signs = {"pos": 1, "neg": -1}
    return {
        f"mass_{a}_{g}": torch.where((A * i > 0) & (gap * j > 0), gap.abs(), 0.0).sum() / count
        for a, i in signs.items()
        for g, j in signs.items()
    }


def same_experts(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Choices (..., top_k) to (...) bool: equal as sets?"""
    return (ours.sort(-1).values == theirs.sort(-1).values).all(-1)


def choice_mismatch(ours: torch.Tensor, theirs: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Share of (layer, token) pairs whose expert choice, as a set, differs.

    Args:
        ours, theirs: (B, L, T, top_k) int64. read: (B, T) bool, the tokens that count.
    """
    differs = ~same_experts(ours, theirs) & read.unsqueeze(1)
    return differs.sum() / (read.sum().clamp(min=1) * ours.shape[1])
