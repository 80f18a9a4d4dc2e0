"""The task: chain arithmetic modulo a prime, answered step by step.

    prompt      x0 op x1 op ... xn =        op is + or *, applied left to right, one token a number
    completion  r1 r2 ... rn EOS            the running results; the last one is the answer

With p = 41:  7 + 5 * 3 =  is completed by  12 36 EOS, since (7 + 5) * 3 = 36 mod 41. The reward
is 1 if the last token before the first EOS is the answer, else 0. A policy may stop early: what
it skips is logged. Checkable, no download, and a small chain of thought: an error spoils what
follows.

Warm start: GRPO cannot teach a policy that never succeeds, so the base policy is first trained on
*noisy* demonstrations: each running result is replaced by a random number with some probability and
the rest follows from it. It then knows the task but samples badly, which is what RL repairs.
Next: checkpoint.py.
"""

from dataclasses import dataclass

import torch

HELD_OUT = 16  # one prompt in 16 is for evaluation alone


@dataclass(frozen=True)
class ChainTask:
    """Chains of `steps` operations modulo `prime`."""

    prime: int = 41
    steps: int = 8

    def __post_init__(self):
        if self.prime < 3 or any(self.prime % d == 0 for d in range(2, int(self.prime**0.5) + 1)):
            raise ValueError(f"prime must be an odd prime, got {self.prime}")
        if self.steps < 1:
            raise ValueError(f"chain steps must be 1 or more, got {self.steps}")

    # tokens: the numbers 0 .. p - 1, then these
    @property
    def plus(self) -> int:
        return self.prime

    @property
    def times(self) -> int:
        return self.prime + 1

    @property
    def equals(self) -> int:
        return self.prime + 2

    @property
    def eos(self) -> int:
        return self.prime + 3

    @property
    def pad(self) -> int:
        return self.prime + 4

    @property
    def vocab(self) -> int:
        return self.prime + 5

    @property
    def prompt_len(self) -> int:
        return 2 * self.steps + 2

    @property
    def max_new_tokens(self) -> int:
        return self.steps + 1

    def sample_prompts(
        self, count: int, generator: torch.Generator, held_out: bool = False
    ) -> torch.Tensor:
        """`count` random prompts (count, P) int64 of one side of the split, on the CPU.

        A prompt is held out if a weighted sum of its tokens is 0 modulo HELD_OUT: a rule, not a
        list, so that training can never meet an evaluation prompt, however long it runs.
        """
        found = []
        while sum(map(len, found)) < count:
            x = torch.empty(4 * count + 64, self.prompt_len, dtype=torch.int64)
            x[:, 0::2] = torch.randint(self.prime, x[:, 0::2].shape, generator=generator)
            x[:, 1::2] = self.plus + torch.randint(2, x[:, 1::2].shape, generator=generator)
            x[:, -1] = self.equals
            found.append(x[self.is_held_out(x) == held_out])
        return torch.cat(found)[:count]

    def is_held_out(self, prompts: torch.Tensor) -> torch.Tensor:
        """(B, P) to (B,) bool: which prompts only evaluation may use."""
        weights = 2 * torch.arange(self.prompt_len, device=prompts.device) + 1
        return (prompts * weights).sum(1) % HELD_OUT == 0

    def step(self, result: torch.Tensor, prompts: torch.Tensor, i: int) -> torch.Tensor:
        """The running result after operation i (from 0), given the one before it: (B,)."""
        operand = prompts[:, 2 * i + 2]
        added, multiplied = result + operand, result * operand
        return torch.where(prompts[:, 2 * i + 1] == self.plus, added, multiplied) % self.prime

    def answers(self, prompts: torch.Tensor) -> torch.Tensor:
        """(B, P) to (B,): the right final results."""
        result = prompts[:, 0]
        for i in range(self.steps):
            result = self.step(result, prompts, i)
        return result

    def demonstrations(
        self, prompts: torch.Tensor, noise: float, generator: torch.Generator
    ) -> torch.Tensor:
        """(B, P) to completions (B, steps + 1), each running result replaced with prob. `noise`."""
        result, steps = prompts[:, 0], []
        for i in range(self.steps):
            wrong = torch.rand(len(prompts), generator=generator) < noise
            random = torch.randint(self.prime, (len(prompts),), generator=generator)
            result = torch.where(wrong, random, self.step(result, prompts, i))
            steps.append(result)
        return torch.stack([*steps, torch.full_like(result, self.eos)], 1)

    def rewards(
        self, prompts: torch.Tensor, completions: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """1.0 where the token before the first EOS is the answer, else 0.0.

        Args:
            prompts: (B, P). completions: (B, N). lengths: (B,) tokens sampled, EOS included.
        Returns:
            (B,) fp32. No EOS within the N tokens, or nothing before it: 0.
        """
        at = lambda i: completions.gather(1, i.clamp(min=0).unsqueeze(1)).squeeze(1)  # noqa: E731
        ended = at(lengths - 1) == self.eos
        return (ended & (lengths >= 2) & (at(lengths - 2) == self.answers(prompts))).float()

    def decode(self, tokens: torch.Tensor) -> str:
        """A row of tokens as text.

        >>> ChainTask(41, 2).decode(torch.tensor([7, 41, 5, 42, 3, 43, 12, 36, 44]))
        '7 + 5 * 3 = 12 36 EOS'
        """
        names = ("+", "*", "=", "EOS", "PAD")
        return " ".join(
            str(t) if t < self.prime else names[t - self.prime] for t in tokens.tolist()
        )
