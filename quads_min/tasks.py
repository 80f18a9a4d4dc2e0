"""The task: chain arithmetic modulo a prime, answered step by step.

    prompt      x0 op x1 op ... xn =        op is + or *, applied left to right, one token a number
    completion  r1 r2 ... rn EOS            the running results; the last one is the answer

Modulo 41:  7 + 5 * 3 =  is completed by  12 36 EOS, since (7 + 5) * 3 = 36. The reward is 1 if the
last token before the first EOS is the answer, else 0. A policy may stop early: what it skips is
logged. Checkable, no download, and a small chain of thought: an error spoils what follows.

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
    """Chains of `steps` operations modulo `prime`; B prompts of P tokens each are (B, P) int64."""

    prime: int = 41
    steps: int = 8

    # tokens: the numbers 0 .. prime - 1, then these
    plus = property(lambda self: self.prime)
    times = property(lambda self: self.prime + 1)
    equals = property(lambda self: self.prime + 2)
    eos = property(lambda self: self.prime + 3)
    pad = property(lambda self: self.prime + 4)
    vocab = property(lambda self: self.prime + 5)

    prompt_len = property(lambda self: 2 * self.steps + 2)
    max_new_tokens = property(lambda self: self.steps + 1)

    def __post_init__(self):
        p = self.prime
        if not 2 < p < 2**16 or any(p % d == 0 for d in range(2, int(p**0.5) + 1)):
            raise ValueError(f"prime must be an odd prime below 65536, got {p}")
        if not 1 <= self.steps <= 1000:
            raise ValueError(f"chain steps must be from 1 to 1000, got {self.steps}")

    def sample_prompts(self, count: int, generator: torch.Generator, held_out: bool = False):
        """`count` random prompts of one side of the split, on the CPU: (count, P) int64."""
        found = []
        while sum(map(len, found)) < count:
            x = torch.empty(4 * count + 64, self.prompt_len, dtype=torch.int64)
            x[:, 0::2] = torch.randint(self.prime, x[:, 0::2].shape, generator=generator)
            x[:, 1::2] = self.plus + torch.randint(2, x[:, 1::2].shape, generator=generator)
            x[:, -1] = self.equals
            found.append(x[self.is_held_out(x) == held_out])
        return torch.cat(found)[:count]

    def is_held_out(self, prompts: torch.Tensor) -> torch.Tensor:
        """(B,) bool: a weighted sum of the tokens decides. A rule, not a list, so that training
        can never meet an evaluation prompt, however long it runs."""
        weights = 2 * torch.arange(self.prompt_len, device=prompts.device) + 1
        return (prompts * weights).sum(1) % HELD_OUT == 0

    def step(self, result: torch.Tensor, prompts: torch.Tensor, i: int) -> torch.Tensor:
        """The running result after operation i (from 0), given the one before it: (B,)."""
        operand = prompts[:, 2 * i + 2]
        added, multiplied = result + operand, result * operand
        return torch.where(prompts[:, 2 * i + 1] == self.plus, added, multiplied) % self.prime

    def answers(self, prompts: torch.Tensor) -> torch.Tensor:
        """The right final results: (B,)."""
        result = prompts[:, 0]
        for i in range(self.steps):
            result = self.step(result, prompts, i)
        return result

    def demonstrations(self, prompts: torch.Tensor, noise: float, generator: torch.Generator):
        """Completions (B, steps + 1), each running result replaced with probability `noise`."""
        result, steps = prompts[:, 0], []
        for i in range(self.steps):
            wrong = torch.rand(len(prompts), generator=generator) < noise
            random = torch.randint(self.prime, (len(prompts),), generator=generator)
            result = torch.where(wrong, random, self.step(result, prompts, i))
            steps.append(result)
        return torch.stack([*steps, torch.full_like(result, self.eos)], 1)

    def rewards(self, prompts: torch.Tensor, completions: torch.Tensor, lengths: torch.Tensor):
        """(B,) fp32; completions (B, T), of which lengths (B,), EOS included, were sampled."""
        last_two = lengths.unsqueeze(1) + torch.arange(-2, 0, device=lengths.device)
        answer, end = completions.gather(1, last_two.clamp(min=0)).T  # EOS alone: it is both
        return ((end == self.eos) & (answer == self.answers(prompts))).float()

    def decode(self, tokens: torch.Tensor) -> str:
        """A row of tokens as text, such as 7 + 5 * 3 = 12 36 EOS."""
        words = [*map(str, range(self.prime)), "+", "*", "=", "EOS", "PAD"]
        return " ".join(words[t] for t in tokens.tolist())
