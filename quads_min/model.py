"""The policy: a pre-norm MoE transformer (RoPE, SwiGLU experts, softmax router, top-k).

    h += attention(norm(h))          x = norm(h)
    h += sum over the token's top-k experts e of gate_e * down_e(silu(a) * b), [a, b] = gate_up_e(x)
    gate = softmax(router(x)) of these experts, renormalized to sum 1

Engine and trainer share this definition; arguments bring what differs: the expert matmul (`linear`,
a subclass of ExpertLinear) and the dtype of the residual stream. On both sides attention and output
head have bf16 operands and fp32 sums; router, norms, softmax, combine and logits are fp32.

Routing. A *slot* is one (token, chosen expert) pair. A counting sort deals the slots into tiles,
each of one expert, so that all experts run as one batched matmul. Its shape depends on shapes
alone: no loop over experts, no host sync, no atomics, fit for a CUDA graph.

    slots     e1 e0 e1 e2 e1 e0          expert_of_tile   0      1      1     2     (unused)
    tiles of 2 rows:                     slot_of_row    [1 5]  [0 2]  [4 .] [3 .]  [. .]  ...

Outliers. Large models grow a few activation channels 20 to 100 times larger than the rest; a toy
does not, so they are planted: a vector o (ones, but a power of two on a few channels) multiplies
the experts' input and divides gate_up's columns, (x * o) (W / o)^T. The function is unchanged, to
the bit in bf16; a quantizer sees x * o and W / o, and the large channel's neighbours in its
16-block lose their resolution. Next: qat.py, for the trainer's ExpertLinear.
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
        width, blocks = self.width, f"a multiple of {QBLOCK}"
        mantissa = torch.tensor(self.outlier_gain).frexp().mantissa
        sizes = ("vocab", "max_len", "width", "layers", "experts", "expert_width")
        for name, fits, rule in (
            *((size, 1 <= getattr(self, size) < 2**17, "from 1 to 131071") for size in sizes),
            ("width", width % QBLOCK == 0, blocks),
            ("expert_width", self.expert_width % QBLOCK == 0, blocks),
            ("heads", self.heads > 0 and width % (2 * self.heads) == 0, "a divisor of width / 2"),
            ("top_k", 1 <= self.top_k <= self.experts, f"from 1 to experts={self.experts}"),
            ("outlier_gain", mantissa == 0.5, "a power of two, else it changes the bf16 function"),
            ("outlier_channels", 0 <= self.outlier_channels <= width, f"from 0 to {width=}"),
        ):
            if not fits:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")


def plant_outliers(config: ModelConfig) -> torch.Tensor:
    """o of every layer, (L, D): dealt round-robin over the 16-blocks, in seeded random order."""
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
    hit = (o.unflatten(-1, (-1, QBLOCK)) != 1).any(-1)
    return int(hit.sum()), hit.numel()


class Routing(NamedTuple):
    """Where every slot goes. Built once per layer, used by both expert GEMMs."""

    expert_of_tile: torch.Tensor  # (tiles,) int64; unused tiles name the last expert
    slot_of_row: torch.Tensor  # (tiles * tile_rows,) int64; an empty row: the number of slots
    row_of_slot: torch.Tensor  # (slots,) int64
    experts: int
    top_k: int

    @property
    def tile_rows(self) -> int:
        return self.slot_of_row.numel() // self.expert_of_tile.numel()

    def slots_per_row(self, x: torch.Tensor) -> int:
        """How many slots read each row of x: 1 for a row per slot, top_k for a row per token."""
        return 1 if x.shape[0] == self.row_of_slot.numel() else self.top_k


def route(choice: torch.Tensor, experts: int, least: int = 8, most: int = 128) -> Routing:
    """Deal the slots of `choice` (tokens, top_k) int64 into one-expert tiles, by slot number."""
    expert, slots, device = choice.flatten(), choice.numel(), choice.device
    tile_rows = least  # grows with slots / experts: little padding beside the slots, few tiles
    while tile_rows < most and tile_rows * 4 * experts < slots:
        tile_rows *= 2
    tiles = max(1, -(-slots // tile_rows) + min(experts, slots))  # enough for any routing
    seen = (expert == torch.arange(experts, device=device).unsqueeze(1)).cumsum(1)  # (E, slots)
    rank = seen.gather(0, expert.unsqueeze(0)).squeeze(0) - 1  # place among the expert's slots
    tile_end = ((seen[:, -1:] + tile_rows - 1) // tile_rows).sum(1).cumsum(0)  # (E,)
    row_of_slot = F.pad(tile_end, (1, 0))[expert] * tile_rows + rank
    slot_of_row = torch.full((tiles * tile_rows,), slots, device=device)
    slot_of_row.scatter_(0, row_of_slot, torch.arange(slots, device=device))
    tile = torch.arange(tiles, device=device)
    expert_of_tile = torch.searchsorted(tile_end, tile, right=True).clamp(max=experts - 1)
    return Routing(expert_of_tile, slot_of_row, row_of_slot, experts, choice.shape[1])


def to_tiles(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Rows to (tiles, tile_rows, K). x has a row per token (read top_k times) or one per slot."""
    padded = F.pad(x, (0, 0, 0, 1))  # the zero row that empty tile rows read
    rows = padded.index_select(0, routing.slot_of_row // routing.slots_per_row(x))
    return rows.unflatten(0, (-1, routing.tile_rows))


def from_tiles(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(tiles, tile_rows, N) to (slots, N), in order of slot number."""
    return y.flatten(0, 1).index_select(0, routing.row_of_slot)


def sum_per_expert(per_tile: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(tiles, N, K) to (E, N, K): each expert's tiles added up, by a matmul, in a fixed order."""
    experts = torch.arange(routing.experts, device=per_tile.device)
    hit = (experts.unsqueeze(1) == routing.expert_of_tile).float()  # (E, tiles)
    return (hit @ per_tile.flatten(1)).unflatten(1, per_tile.shape[1:])


class ExpertLinear(nn.Module):
    """The experts' matmul, y = (x * o) (W / o)^T; a subclass brings weights and their `product`."""

    def __init__(self, experts: int, n: int, k: int, outliers: torch.Tensor | None):
        super().__init__()
        self.shape = (experts, n, k)
        self.register_buffer("outliers", outliers)  # o, (K,) fp32; None: all ones
        self.register_buffer("poison", torch.zeros(()), persistent=False)  # NaN once an input was

    def forward(self, x: torch.Tensor, routing: Routing, live: torch.Tensor | None) -> torch.Tensor:
        """x (rows, K) fp32, a row per token or slot; live (rows,) bool. Returns (slots, N) fp32."""
        if self.outliers is not None:
            x = x * self.outliers
        self.poison += x.detach().sum() * 0.0  # inf * 0 and NaN * 0 are NaN; read once a step
        return self.product(x.to(torch.bfloat16), routing, live)


class Cache(NamedTuple):
    k: torch.Tensor  # one layer's keys, (B, H, max_len, D / H) bf16
    v: torch.Tensor  # and values


class Output(NamedTuple):
    logits: torch.Tensor  # (B, T, vocab) fp32
    choice: list[torch.Tensor]  # per layer, (B * T, top_k) int64: the experts taken
    router_probs: list[torch.Tensor]  # per layer, (B * T, E) fp32
    hidden: torch.Tensor  # (B, T, D), the residual stream that the logits are made from

    def choices(self, B: int) -> torch.Tensor:
        """`choice` as one tensor: (B, L, T, top_k)."""
        return torch.stack(self.choice, 1).unflatten(0, (B, -1)).movedim(2, 1)


def matmul_bf16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T with bf16 operands and fp32 accumulation: bf16 products are exact in fp32."""
    return F.linear(x.to(torch.bfloat16).float(), w.to(torch.bfloat16).float())


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, o: torch.Tensor, linear: Callable, route: Callable):
        super().__init__()
        D, E, width = config.width, config.experts, config.expert_width
        self.heads, self.top_k, self.experts, self.route = config.heads, config.top_k, E, route
        self.attn_norm = nn.Parameter(torch.ones(D))
        self.qkv = nn.Parameter(torch.randn(3 * D, D) * D**-0.5)
        self.out = nn.Parameter(torch.randn(D, D) * D**-0.5)
        self.ffn_norm = nn.Parameter(torch.ones(D))
        self.router = nn.Parameter(torch.randn(E, D) * D**-0.5)
        self.gate_up = linear(E, 2 * width, D, o)  # one matrix, one global scale
        self.down = linear(E, D, width, None)

    def forward(self, h, turn, start, cache, live, replay):
        """h (B, T, D), turn: cos and sin of its positions -> h, experts taken, router probs."""
        x = F.rms_norm(h.float(), h.shape[-1:], self.attn_norm, 1e-6)
        heads = rearrange(matmul_bf16(x, self.qkv), "b t (n h d) -> n b h t d", n=3, h=self.heads)
        (a, b), (cos, sin) = heads[:2].chunk(2, -1), turn  # RoPE turns the pairs (x[i], x[i + d/2])
        q, k = torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(torch.bfloat16)
        v, end = heads[2].to(torch.bfloat16), start + h.shape[1]
        if cache is not None:
            cache.k[:, :, start:end], cache.v[:, :, start:end] = k, v
            k, v = cache.k[:, :, :end], cache.v[:, :, :end]
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5  # (B, H, T, end) fp32
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(start + 1)
        probs = scores.masked_fill(future, -torch.inf).softmax(-1).to(torch.bfloat16)
        y = rearrange(probs.float() @ v.float(), "b h t d -> b t (h d)")
        h = (h + matmul_bf16(y, self.out)).to(h.dtype)

        x = F.rms_norm(h.float(), h.shape[-1:], self.ffn_norm, 1e-6).flatten(0, 1)  # (B * T, D)
        probs = F.linear(x, self.router).softmax(-1)  # (B * T, E) fp32
        choice = probs.topk(self.top_k, sorted=False).indices if replay is None else replay
        gate = probs.gather(1, choice)  # (B * T, top_k): dense probabilities of the choice,
        gate = gate / gate.sum(1, keepdim=True)  # renormalized, so a replayed router keeps gradient
        routing = self.route(choice, self.experts)
        a, b = self.gate_up(x, routing, live).chunk(2, -1)  # (slots, F) fp32 each
        slot_live = None if live is None else live.unsqueeze(1).expand_as(choice).flatten()
        y = self.down(F.silu(a) * b, routing, slot_live).unflatten(0, choice.shape)
        y = (y * gate.unsqueeze(-1)).sum(1)  # (B * T, D) fp32
        return (h + y.view(h.shape)).to(h.dtype), choice, probs


class MoETransformer(nn.Module):
    """`linear(E, n, k, o)` makes an expert matmul: the side's arithmetic. `route`: as above."""

    def __init__(
        self, config: ModelConfig, linear: Callable[..., ExpertLinear],
        residual_dtype: torch.dtype = torch.float32, route: Callable[..., Routing] = route,
    ):  # fmt: skip
        super().__init__()
        self.config, self.residual_dtype, D = config, residual_dtype, config.width
        self.embed = nn.Parameter(torch.randn(config.vocab, D))
        self.layers = nn.ModuleList(Layer(config, o, linear, route) for o in plant_outliers(config))
        self.norm = nn.Parameter(torch.ones(D))
        self.head = nn.Parameter(torch.randn(config.vocab, D) * D**-0.5)
        half = D // config.heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(config.max_len).unsqueeze(1) * frequencies  # (max_len, D / H / 2)
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def expert_linears(self) -> dict[str, ExpertLinear]:
        """All expert matmuls by name, such as 'layers.0.gate_up'."""
        return {n: m for n, m in self.named_modules() if isinstance(m, ExpertLinear)}

    def nonfinite(self) -> list[str]:
        """Names of weights that hold inf or NaN, and of expert inputs that did since the start."""
        tensors = {f"input of {n}": m.poison for n, m in self.expert_linears().items()}
        tensors |= dict(self.named_parameters())
        if nn.utils.get_total_norm(tensors.values()).isfinite():  # one device sync
            return []
        return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]

    def new_cache(self, B: int) -> list[Cache]:
        c = self.config
        shape = (c.layers, 2, B, c.heads, c.max_len, c.width // c.heads)
        cache = torch.zeros(shape, dtype=torch.bfloat16, device=self.embed.device)
        return [Cache(*layer) for layer in cache]

    def forward(
        self,
        tokens: torch.Tensor,  # (B, T), at positions start, start + 1, ...
        start: int = 0,  # above 0 it needs a cache
        cache: list[Cache] | None = None,  # holds the past; these positions are written
        live: torch.Tensor | None = None,  # (B, T) bool: tokens whose error RAC looks at; None: all
        replay: torch.Tensor | None = None,  # (L, B * T, top_k) int64: experts to take
        logits_from: int = 0,  # logits are for tokens[:, logits_from:] alone
    ) -> Output:
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
