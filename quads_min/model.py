"""The policy: a pre-norm MoE transformer (RoPE, SwiGLU experts, softmax router, top-k).

There is one definition of the architecture. What differs between rollout engine and trainer comes
in as arguments: the expert matmul (`linear`, a subclass of ExpertLinear), the dtype of the
residual stream and that of the dense weights. Both sides compute attention and output head with
bf16 operands and fp32 accumulation, and router, norms, softmax, top-k combine and logits in fp32.

    h += attention(norm(h))          x = norm(h)
    h += sum over the token's top-k experts e of gate_e * down_e(silu(a) * b), [a, b] = gate_up_e(x)
    gate = softmax(router(x)) of these experts, renormalized to sum 1

Routing is sparse. A *slot* is one (token, chosen expert) pair, S = T * top_k of them. A counting
sort deals the slots into tiles of `tile_rows` rows, each tile of one expert, unused rows left
empty, so that all experts run as one batched matmul whose shape depends on shapes alone: no loop
over experts, no host sync, no atomics, and it can live in a CUDA graph.

    slots     e1 e0 e1 e2 e1 e0          expert_of_tile   0      1      1     2     (unused)
    tiles of 2 rows:                     slot_of_row    [1 5]  [0 2]  [4 .] [3 .]  [. .]  ...

Outlier channels. Large models grow a few activation channels 20 to 100 times larger than the
rest; a toy does not, so they are planted: a fixed vector o (ones, but a power of two on a few
channels) multiplies the experts' input and divides the matching columns of gate_up, (x * o) (W /
o)^T. The function is unchanged, to the bit in bf16; a quantizer sees x * o and V = W / o, and the
large channel's 16-block neighbours lose their resolution. Next: qat.py, for the trainer's
ExpertLinear.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from quads_min.nvfp4 import QBLOCK


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the policy; the letters are those of quads_min/__init__.py."""

    vocab: int
    max_len: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    expert_width: int = 64
    outlier_gain: float = 32.0  # a power of two; 1: no outliers
    outlier_channels: int = 4  # planted channels per layer, one per 16-block while blocks last
    outlier_seed: int = 0

    def __post_init__(self):
        for name in ("width", "expert_width"):
            if getattr(self, name) % QBLOCK or getattr(self, name) < QBLOCK:
                raise ValueError(
                    f"{name} must be a positive multiple of {QBLOCK} (QBLOCK), "
                    f"got {getattr(self, name)}"
                )
        if self.heads < 1 or self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} must be a multiple of 2 * heads={2 * self.heads}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must lie in 1..experts={self.experts}, got {self.top_k}")
        if self.outlier_gain <= 0 or torch.tensor(self.outlier_gain).frexp().mantissa != 0.5:
            raise ValueError(
                f"outlier_gain must be a power of two (else it changes the bf16 function), "
                f"got {self.outlier_gain}"
            )
        if not 0 <= self.outlier_channels <= self.width:
            raise ValueError(
                f"outlier_channels must lie in 0..width={self.width}, got {self.outlier_channels}"
            )


def plant_outliers(config: ModelConfig) -> torch.Tensor:
    """o for every layer: (L, D) fp32, `outlier_gain` on the planted channels, else 1.

    The channels are dealt round-robin over the 16-blocks in random order, from a fixed seed.
    """
    generator = torch.Generator().manual_seed(config.outlier_seed)
    o = torch.ones(config.layers, config.width)
    for row in o:
        blocks = torch.randperm(config.width // QBLOCK, generator=generator)
        offsets = torch.stack([torch.randperm(QBLOCK, generator=generator) for _ in blocks])
        order = (blocks * QBLOCK + offsets.T).flatten()  # one channel of each block, then the next
        row[order[: config.outlier_channels]] = config.outlier_gain
    return o


def contaminated_blocks(o: torch.Tensor) -> tuple[int, int]:
    """How many 16-blocks hold a planted channel, and how many there are, over all layers."""
    hit = (rearrange(o, "l (b k) -> l b k", k=QBLOCK) != 1).any(-1)
    return int(hit.sum()), hit.numel()


# ---- sparse routing


class Routing(NamedTuple):
    """Where every slot goes. Built once per layer, used by both expert GEMMs."""

    expert_of_tile: torch.Tensor  # (tiles,) int64; unused tiles name the last expert
    slot_of_row: torch.Tensor  # (tiles * tile_rows,) int64; S marks an empty row
    row_of_slot: torch.Tensor  # (S,) int64
    experts: int
    top_k: int

    @property
    def tile_rows(self) -> int:
        return self.slot_of_row.numel() // self.expert_of_tile.numel()

    def slots_per_row(self, x: torch.Tensor) -> int:
        """How many slots read each row of x: 1 for a row per slot, top_k for a row per token."""
        return 1 if x.shape[0] == self.row_of_slot.numel() else self.top_k


def route(choice: torch.Tensor, experts: int, least: int = 8, most: int = 128) -> Routing:
    """Deal the slots of `choice` (T, top_k) int64 into one-expert tiles, by slot number."""
    expert = choice.flatten()  # (S,)
    S = expert.numel()
    tile_rows = least  # grows with S / E: padding stays small beside the slots, tiles stay few
    while tile_rows < most and tile_rows * 4 * experts < S:
        tile_rows *= 2
    tiles = max(1, -(-S // tile_rows) + min(experts, S))  # enough for any routing
    experts_column = torch.arange(experts, device=expert.device).unsqueeze(1)
    seen = (expert == experts_column).cumsum(1)  # (E, S); along rows a GPU scans 100 times faster
    rank = seen.gather(0, expert.unsqueeze(0)).squeeze(0) - 1  # place among the expert's slots
    tile_end = ((seen[:, -1:] + tile_rows - 1) // tile_rows).sum(1).cumsum(0)  # (E,)
    first_tile = F.pad(tile_end, (1, 0))[expert]
    row_of_slot = first_tile * tile_rows + rank
    slot_of_row = torch.full((tiles * tile_rows,), S, device=expert.device)
    slot_of_row.scatter_(0, row_of_slot, torch.arange(S, device=expert.device))
    tile = torch.arange(tiles, device=expert.device)
    expert_of_tile = torch.searchsorted(tile_end, tile, right=True).clamp(max=experts - 1)
    return Routing(expert_of_tile, slot_of_row, row_of_slot, experts, choice.shape[1])


def to_tiles(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Rows to (tiles, tile_rows, K). x has a row per token (read top_k times) or one per slot."""
    padded = F.pad(x, (0, 0, 0, 1))  # the zero row that empty tile rows read
    rows = padded.index_select(0, routing.slot_of_row // routing.slots_per_row(x))
    return rows.view(routing.expert_of_tile.numel(), routing.tile_rows, x.shape[1])


def from_tiles(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(tiles, tile_rows, N) to (S, N), in order of slot number."""
    return y.flatten(0, 1).index_select(0, routing.row_of_slot)


def sum_per_expert(per_tile: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(tiles, N, K) to (E, N, K): each expert's tiles added up, by a matmul, in a fixed order."""
    experts = torch.arange(routing.experts, device=per_tile.device)
    hit = (experts.unsqueeze(1) == routing.expert_of_tile).float()  # (E, tiles)
    return (hit @ per_tile.flatten(1)).unflatten(1, per_tile.shape[1:])


# ---- the layers


class ExpertLinear(nn.Module):
    """The routed experts' matmul, y = (x * o) (W / o)^T; subclasses bring weights and `product`."""

    def __init__(self, experts: int, n: int, k: int, outliers: torch.Tensor | None):
        super().__init__()
        self.shape = (experts, n, k)
        self.register_buffer("outliers", outliers)  # o, (K,) fp32; None: all ones
        self.register_buffer("poison", torch.zeros(()), persistent=False)  # NaN once an input was

    def forward(self, x: torch.Tensor, routing: Routing, live: torch.Tensor | None) -> torch.Tensor:
        """x (rows, K) fp32, a row per token or per slot; live (rows,) bool. Returns (S, N) fp32."""
        if self.outliers is not None:
            x = x * self.outliers
        self.poison += x.detach().sum() * 0.0  # inf * 0 and NaN * 0 are NaN; read once a step
        return self.product(x.to(torch.bfloat16), routing, live)

    def product(self, x: torch.Tensor, routing: Routing, live: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class Cache(NamedTuple):
    """One layer's KV cache: k and v (B, H, max_len, D / H) bf16."""

    k: torch.Tensor
    v: torch.Tensor


class Output(NamedTuple):
    logits: torch.Tensor  # (B, T, V) fp32
    choice: list[torch.Tensor]  # per layer, (B * T, top_k) int64: the experts taken
    router_probs: list[torch.Tensor]  # per layer, (B * T, E) fp32
    hidden: torch.Tensor  # (B, T, D), the residual stream that the logits are made from

    def choices(self, B: int) -> torch.Tensor:
        """`choice` as one tensor: (B, L, T, top_k)."""
        return torch.stack(self.choice, 1).unflatten(0, (B, -1)).movedim(2, 1)


def matmul_bf16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T with bf16 operands and fp32 accumulation: bf16 products are exact in fp32."""
    return F.linear(x.to(torch.bfloat16).float(), w.to(torch.bfloat16).float())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE: turn the pairs (x[i], x[i + d/2]) of x (..., T, d); cos and sin (T, d/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        o: torch.Tensor,
        linear: Callable[..., ExpertLinear],
        route: Callable[[torch.Tensor, int], Routing],
    ):
        super().__init__()
        self.route = route
        D, E, width = config.width, config.experts, config.expert_width
        self.heads, self.top_k, self.experts = config.heads, config.top_k, E
        self.attn_norm = nn.Parameter(torch.ones(D))
        self.qkv = nn.Parameter(torch.randn(3 * D, D) * D**-0.5)
        self.out = nn.Parameter(torch.randn(D, D) * D**-0.5)
        self.ffn_norm = nn.Parameter(torch.ones(D))
        self.router = nn.Parameter(torch.randn(E, D) * D**-0.5)
        self.gate_up = linear(E, 2 * width, D, o)  # one matrix, one global scale
        self.down = linear(E, D, width, None)

    def attention(
        self, h: torch.Tensor, turn: torch.Tensor, start: int, cache: Cache | None
    ) -> torch.Tensor:
        x = F.rms_norm(h.float(), h.shape[-1:], self.attn_norm, 1e-6)  # (B, T, D) fp32
        heads = rearrange(matmul_bf16(x, self.qkv), "b t (n h d) -> n b h t d", n=3, h=self.heads)
        q, k = rotate(heads[:2], *turn).to(torch.bfloat16)
        v = heads[2].to(torch.bfloat16)
        T = q.shape[2]
        if cache is not None:
            cache.k[:, :, start : start + T] = k
            cache.v[:, :, start : start + T] = v
            k, v = cache.k[:, :, : start + T], cache.v[:, :, : start + T]
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5  # (B, H, T, start + T) fp32
        if T > 1:
            future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(start + 1)
            scores = scores.masked_fill(future, -torch.inf)
        probs = scores.softmax(-1).to(torch.bfloat16)
        y = rearrange(probs.float() @ v.float(), "b h t d -> b t (h d)")
        return matmul_bf16(y, self.out)  # (B, T, D) fp32

    def moe(
        self, h: torch.Tensor, live: torch.Tensor | None, replay: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = F.rms_norm(h.float(), h.shape[-1:], self.ffn_norm, 1e-6).flatten(0, 1)  # (T, D) fp32
        probs = F.linear(x, self.router).softmax(-1)  # (T, E) fp32
        choice = probs.topk(self.top_k, sorted=False).indices if replay is None else replay
        gate = probs.gather(1, choice)  # (T, top_k): dense probabilities of the choice,
        gate = gate / gate.sum(1, keepdim=True)  # renormalized, so a replayed router keeps gradient
        routing = self.route(choice, self.experts)
        a, b = self.gate_up(x, routing, live).chunk(2, -1)  # (S, F) fp32 each
        slot_live = (
            None if live is None else live.repeat_interleave(self.top_k, output_size=choice.numel())
        )
        y = self.down(F.silu(a) * b, routing, slot_live)  # (S, D) fp32
        y = (y.unflatten(0, choice.shape) * gate.unsqueeze(-1)).sum(1)
        return y.view(h.shape), choice, probs

    def forward(self, h, turn, start, cache, live, replay):
        h = (h + self.attention(h, turn, start, cache)).to(h.dtype)
        y, choice, probs = self.moe(h, live, replay)
        return (h + y).to(h.dtype), choice, probs


class MoETransformer(nn.Module):
    """The policy. `linear(E, n, k, o)` makes an expert matmul: the side's arithmetic.

    `route(choice, E)` deals the slots: the function of this module, or a faster one.
    """

    def __init__(
        self,
        config: ModelConfig,
        linear: Callable[..., ExpertLinear],
        residual_dtype: torch.dtype = torch.float32,
        route: Callable[[torch.Tensor, int], Routing] = route,
    ):
        super().__init__()
        self.config, self.residual_dtype = config, residual_dtype
        D = config.width
        self.embed = nn.Parameter(torch.randn(config.vocab, D))
        self.layers = nn.ModuleList(Layer(config, o, linear, route) for o in plant_outliers(config))
        self.norm = nn.Parameter(torch.ones(D))
        self.head = nn.Parameter(torch.randn(config.vocab, D) * D**-0.5)
        half = D // config.heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(config.max_len).unsqueeze(1) * frequencies  # (max_len, D / H / 2)
        turn = torch.stack([angles.cos(), angles.sin()])  # (2, max_len, D / H / 2)
        self.register_buffer("turn", turn, persistent=False)

    def expert_linears(self) -> dict[str, ExpertLinear]:
        """All expert matmuls by name, such as 'layers.0.gate_up'."""
        return {n: m for n, m in self.named_modules() if isinstance(m, ExpertLinear)}

    def nonfinite(self) -> list[str]:
        """Names of weights that hold inf or NaN, and of expert inputs that did since the start."""
        poison = torch.stack([m.poison for m in self.expert_linears().values()])
        weights = torch.nn.utils.get_total_norm(self.parameters())
        if torch.isfinite(poison.sum() + weights):  # one device sync on the healthy path
            return []
        inputs = [f"input of {n}" for n, m in self.expert_linears().items() if m.poison.isnan()]
        return inputs + [n for n, p in self.named_parameters() if not torch.isfinite(p).all()]

    def new_cache(self, B: int) -> list[Cache]:
        """An empty KV cache for B sequences, one Cache a layer."""
        c = self.config
        shape = (2, c.layers, B, c.heads, c.max_len, c.width // c.heads)
        k, v = torch.zeros(shape, dtype=torch.bfloat16, device=self.embed.device)
        return [Cache(*kv) for kv in zip(k, v, strict=True)]

    def forward(
        self,
        tokens: torch.Tensor,
        start: int = 0,
        cache: list[Cache] | None = None,
        live: torch.Tensor | None = None,
        replay: torch.Tensor | None = None,
        logits_from: int = 0,
    ) -> Output:
        """One pass over tokens (B, T) at positions start, start + 1, ...

        Args:
            start: position of tokens[:, 0]; above 0 it needs `cache`, which holds the past.
            cache: written at these positions, read up to them; None: tokens see each other alone.
            live: (B, T) bool, which tokens count when RAC chooses its channels; None: all.
            replay: (L, B * T, top_k) int64, the expert choices to take instead of the router's.
            logits_from: compute logits for tokens[:, logits_from:] alone.
        """
        h = F.embedding(tokens, self.embed).to(self.residual_dtype)  # (B, T, D)
        turn = self.turn[:, start : start + tokens.shape[1]]
        live = None if live is None else live.flatten()
        choices, router_probs = [], []
        for i, layer in enumerate(self.layers):
            past = None if cache is None else cache[i]
            taken = None if replay is None else replay[i]
            h, choice, probs = layer(h, turn, start, past, live, taken)
            choices.append(choice)
            router_probs.append(probs)
        h = h[:, logits_from:]
        x = F.rms_norm(h.float(), h.shape[-1:], self.norm, 1e-6)
        return Output(matmul_bf16(x, self.head), choices, router_probs, h)
