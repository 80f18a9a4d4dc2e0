"""The modes: which arithmetic the rollout engine runs and which the trainer runs.

An *arithmetic* says how the routed experts' two GEMMs take their weights (W) and activations (A):
bf16, fp8 (E4M3, a scale per row) or nvfp4. A mode is a pair of them, so that every ablation is one
row of a table, and neither train.py nor rollout.py asks for a mode by name. WxAy in a name counts
bits; w4a16 and w16a4 name both an arithmetic and the mode whose engine runs it. Next: grpo.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arithmetic:
    weights: str = "bf16"
    activations: str = "bf16"
    rac_ratio: float = 0.0  # share of the channels whose residual is compensated; 0: no RAC
    rac_unit: str = "block"  # "block" (of 16 channels) or "channel"

    def __post_init__(self):
        for what in ("weights", "activations"):
            if getattr(self, what) not in ("bf16", "fp8", "nvfp4"):
                raise ValueError(f"{what} must be bf16, fp8 or nvfp4, got {getattr(self, what)!r}")
        if not 0 <= self.rac_ratio <= 1:
            raise ValueError(f"rac_ratio is a share from 0 to 1, got {self.rac_ratio}")
        if self.rac_unit not in ("block", "channel"):
            raise ValueError(f"rac_unit is 'block' or 'channel', got {self.rac_unit!r}")
        if self.rac_ratio and self.activations != "nvfp4":
            raise ValueError(f"RAC compensates nvfp4 activations, these are {self.activations}")

    def __str__(self) -> str:
        rac = f" + RAC({self.rac_ratio:g}, {self.rac_unit})" if self.rac_ratio else ""
        return f"W {self.weights} / A {self.activations}{rac}"


ARITHMETICS = {
    "bf16": Arithmetic(),
    "fp8": Arithmetic("fp8", "fp8"),
    "w4a16": Arithmetic("nvfp4", "bf16"),
    "w16a4": Arithmetic("bf16", "nvfp4"),
    "w4a4": Arithmetic("nvfp4", "nvfp4"),
    "w4a4+rac": Arithmetic("nvfp4", "nvfp4", rac_ratio=0.5),
}

MODES = {  # (rollout engine, trainer): names in ARITHMETICS
    "bf16": ("bf16", "bf16"),  # the baseline: its gap is the floor
    "fp8": ("fp8", "fp8"),  # the usual low-precision RL
    "naive": ("w4a4", "bf16"),  # NVFP4 rollouts with nothing done about it: what collapses
    "w4a16": ("w4a16", "bf16"),  # ablation: weight error alone
    "w16a4": ("w16a4", "bf16"),  # ablation: activation error alone
    "qat": ("w4a4", "w4a16"),  # the trainer's half of the method: asymmetric QAT
    "rac": ("w4a4+rac", "bf16"),  # the engine's half: residual compensation
    "sym": ("w4a4", "w4a4"),  # symmetric QAT
    "quads": ("w4a4+rac", "w4a16"),  # the method: both halves
}
