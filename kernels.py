"""Triton kernels of the rollout engine: NVFP4 quantization with RAC's residual packets, W4A4 GEMMs.

    kernel           | what it computes                     | torch reference
    quantize_kernel  | rows to packed NVFP4; RAC's residual | nvfp4.encode, encode_with_residual
                     | packets and their energies           |   (bit for bit)
    choose_kernel    | RAC's mask of blocks, from energies  | nvfp4.choose_groups (bit for bit)
    decode_kernel    | packed activations to fp16 planes    | Encoded.planes * 2^-7 (bit for bit)
    gemm_kernel      | x w^T, dense or for routed experts   | dequantize, matmul in fp64
    combine_kernel   | the splits of K, summed              |   (to fp32 summation error)

tests/test_kernels.py holds each to its reference, tests/bench.py times it. The format, and why the
order of operations is part of it, is the docstring of quads_min/nvfp4.py.

Native and emulated. Blackwell's tensor cores multiply packed E2M1 under E4M3 block scales
(`tl.dot_scaled`): the *native* path of gemm_kernel. Anything else (another card, Triton before 3.8)
decodes both operands to fp16, where code value * block scale is exact, and multiplies those: the
*emulated* path, the same numbers up to the order of the fp32 sum. The emulated path runs on NVIDIA
cards since sm_80 and, without any card, in Triton's interpreter (TRITON_INTERPRET=1). The native
one has been compiled for sm_100 and sm_120 and its instruction checked; no such card has run it
yet, so an engine checks every kernel against torch before the first use (`self_check`) and tells
what it found.

Sizes: x (M, K), w (N, K) or (E, N, K). Packing and scales as in NVFP4Tensor:

    row of x    | c1 c0 | c3 c2 | c5 c4 | ...        K / 2 bytes, the even channel in the low nibble
                 \\____ 8 bytes = 16 channels ___/    one E4M3 scale;  K / 16 of them a row

Next: quads_min/nvfp4.py.
"""

from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from einops import rearrange

from quads_min import nvfp4
from quads_min.model import Routing, route
from quads_min.nvfp4 import E4M3_MAX, FLT_MAX, QBLOCK, NVFP4Tensor

INTERPRETED = triton.knobs.runtime.interpret  # no GPU needed, and no inline assembly possible
K_TILE = 128  # BLOCK_K of the GEMMs: part of the order of summation, so one for every shape
LONGEST_ROW = 16384  # channels that one program of quantize_kernel holds
_E4M3_MAX, _FLT_MAX = tl.constexpr(E4M3_MAX), tl.constexpr(FLT_MAX)
_EXPONENT = tl.constexpr(0x7F800000)  # the exponent bits of an fp32 number


# ---- quantize
#
#     S = min(2688 / amax, FLT_MAX);  g = 1 / S;  s = E4M3(min(bmax * (S / 6), 448))
#     code = E2M1(x * min(1 / (s g), FLT_MAX));  r = x - code * (s g);  the same again for r
#
# Products and sums must round separately, as in torch, so every launch disables fused multiply-add.
# The kernel is bound by integer and fp32 instructions, not by memory: about 16 an element. Hence
# x (bf16) is read as int32 words of an even and an odd channel, which is also how codes are packed.
#
# ASM, here and below: PTX that is faster than what Triton makes. The branch without it, which the
# interpreter runs, is the definition; a first reading can skip the other.


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _abs(x, ASM: tl.constexpr):
    if ASM:  # opaque to LLVM, which would spend an instruction on it; ptxas makes it free
        return tl.inline_asm_elementwise(
            "abs.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.abs(x)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_max(even, odd, ASM: tl.constexpr):
    """(M, B, 8) even and odd channels -> (M, B), NaN if one of them is."""
    return tl.reduce(_nan_max(_abs(even, ASM), _abs(odd, ASM)), 2, _nan_max)


@triton.jit
def _e2m1_code(y):
    """y fp32 >= 0 -> 0x4B400000 + its E2M1 code, RTNE, saturating.

    The code of a value v is the lowest of 2v, v + 2, v / 2 + 4 (nvfp4.Encoded.pack). Adding
    1.5 * 2^23 rounds each line to an integer, ties to even, and leaves it in the low bits; as the
    numbers are positive, their bits compare as they do.
    """
    a = _bits(tl.fma(y, 2.0, 12582912.0))
    b = _bits(y + 12582914.0)
    c = _bits(tl.fma(y, 0.5, 12582916.0))
    return tl.minimum(tl.minimum(tl.minimum(a, b), c), 0x4B400007)


@triton.jit
def _e4m3(s):
    """s fp32 in 0..448 -> (its E4M3 value in fp32, its code), RTNE.

    Spacing = 2^-3 of the power of two 2^e at or below s, where e is -6 at least (0x3C800000).
    Adding and taking away 1.5 * 2^23 spacings rounds to it, and leaves n = s / spacing, 0 to 16,
    in the low bits. The code is 8 (e + 7) + n - 8 = 8 (e + 127) + n - 968; the exponent bits of
    2^e, shifted by 20, are 8 (e + 127). (Casts to fp8 are wrong in the interpreter.)
    """
    power = tl.maximum(_bits(s) & _EXPONENT, 0x3C800000).to(tl.float32, bitcast=True)
    big = power * 1572864.0  # 2^-3 * 1.5 * 2^23
    t = s + big
    return t - big, (_bits(t) & 31) + (_bits(power) >> 20) - 968


@triton.jit
def _block_scale(bmax, S, g):
    """-> (code of s, s * g, encode scale, sign bits to keep). A block with s = 0 stores code 0."""
    s, code = _e4m3(tl.minimum(bmax * (S * (1 / 6))[:, None], _E4M3_MAX))
    sg = s * g[:, None]
    enc = tl.where(s > 0, tl.minimum(tl.math.div_rn(1.0, sg), _FLT_MAX), 0.0)
    signs = tl.where(s > 0, -0x7FFF8000, 0)  # 0x80008000: those of a bf16 pair
    return code.to(tl.uint8), sg[:, :, None], enc[:, :, None], signs[:, :, None]


@triton.jit
def _encode(pair, even, odd, enc, signs, ASM: tl.constexpr):
    """-> (codes of the even channels, of the odd ones, both packed with the signs of `pair`)."""
    low = _e2m1_code(_abs(even, ASM) * enc)
    high = _e2m1_code(_abs(odd, ASM) * enc)
    kept = (pair & signs).to(tl.uint32, bitcast=True)
    sign = tl.umulhi(kept, 0x00100100)  # bits 31 and 15 to bits 7 and 3: >> 24 and >> 12 in one
    return low, high, (low + sign.to(tl.int32, bitcast=True) + (high << 4)).to(tl.uint8)


@triton.jit
def _residual(x, code, sg):
    """x - x^. A code in an fp32 exponent field, times 2^126, is its value (subnormals included)."""
    value = (code << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    x_hat = _bits(value * sg) | (_bits(x) & -0x80000000)
    return x - x_hat.to(tl.float32, bitcast=True)


@triton.jit
def _tree_sum(x, M: tl.constexpr, N: tl.constexpr):
    """(M, N) -> (N,): rows 0 + 1, 2 + 3, ..., then neighbours of these: nvfp4.tree_sum."""
    half: tl.constexpr = M // 2
    if M == 1:
        return tl.reshape(x, (N,))
    else:
        return _tree_sum(tl.sum(tl.reshape(x, (half, 2, N)), 1), half, N)


@triton.jit(do_not_specialize=["M"])
def quantize_kernel(
    x_ptr,  # (M, K / 2) int32: words of two bf16, the even channel in the low half
    packed_ptr,  # (1 or 2, M, K / 2) uint8: the main packet, RAC's residual packet
    scale_ptr,  # (1 or 2, M, K / 16) uint8
    g_ptr,  # (M,) fp32, written unless S is given
    S_ptr,  # GIVEN_S: (M / rows_per_S,) fp32
    live_ptr,  # RESIDUAL: (M,) which rows count in the energy
    energy_ptr,  # RESIDUAL: (M / BLOCK_M, K / 16) fp32, summed over a program's rows
    M, K, rows_per_S,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    GIVEN_S: tl.constexpr,
    RESIDUAL: tl.constexpr,  # write the residual packet, of all blocks, and its energy
    EVEN: tl.constexpr,  # BLOCK_M divides M, BLOCK_K divides K
    ASM: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = BLOCK_K // 16
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    in_m = tl.full((BLOCK_M,), True, tl.int1) if EVEN else m < M
    in_b = tl.full((BLOCKS,), True, tl.int1) if EVEN else block < K // 16
    inside = in_m[:, None] & in_b[None, :]
    inside8 = tl.broadcast_to(inside[:, :, None], (BLOCK_M, BLOCKS, 8))
    m = m.to(tl.int64)
    byte = block[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]  # of the row's K / 2
    row_b, row_s = m[:, None, None] * (K // 2), m[:, None] * (K // 16)

    # load, and find the scales
    pair = tl.load(x_ptr + row_b + byte, mask=inside8, other=0, eviction_policy="evict_first")
    even = (pair << 16).to(tl.float32, bitcast=True)  # (BLOCK_M, BLOCKS, 8)
    odd = (pair & -0x10000).to(tl.float32, bitcast=True)
    bmax = _block_max(even, odd, ASM)
    if GIVEN_S:
        S = tl.load(S_ptr + m // rows_per_S, mask=in_m, other=1.0)
    else:
        amax = tl.reduce(bmax, 1, _nan_max)
        S = tl.math.div_rn(2688.0, amax)
        S = tl.where(S > _FLT_MAX, _FLT_MAX, S)
        S = tl.where(amax == 0, 1.0, S)
    g = tl.math.div_rn(1.0, S)
    scale, sg, enc, signs = _block_scale(bmax, S, g)

    # the main packet
    low, high, packed = _encode(pair, even, odd, enc, signs, ASM)
    tl.store(packed_ptr + row_b + byte, packed, mask=inside8)
    tl.store(scale_ptr + row_s + block[None, :], scale, mask=inside)
    if not GIVEN_S:
        tl.store(g_ptr + m, g, mask=in_m)

    # what it lost, under the same g; and how much, a block and all live rows of this program
    if RESIDUAL:
        even, odd = _residual(even, low, sg), _residual(odd, high, sg)
        scale, sg, enc, signs = _block_scale(_block_max(even, odd, ASM), S, g)
        pair = (_bits(odd) & -0x10000) | ((_bits(even) >> 16) & 0xFFFF)  # for its two signs
        _, _, packed = _encode(pair, even, odd, enc, signs, ASM)
        row_b += M.to(tl.int64) * (K // 2)
        row_s += M.to(tl.int64) * (K // 16)
        tl.store(packed_ptr + row_b + byte, packed, mask=inside8)
        tl.store(scale_ptr + row_s + block[None, :], scale, mask=inside)
        e = tl.reshape(even * even + odd * odd, (BLOCK_M, BLOCKS, 4, 2))
        e = tl.sum(tl.reshape(tl.sum(e, 3), (BLOCK_M, BLOCKS, 2, 2)), 3)
        live = (tl.load(live_ptr + m, mask=in_m, other=0) != 0)[:, None]
        e = _tree_sum(tl.where(live, tl.sum(e, 2), 0.0), BLOCK_M, BLOCKS)
        at_e = tl.program_id(0).to(tl.int64) * (K // 16) + block
        tl.store(energy_ptr + at_e, e, mask=in_b)


@triton.jit
def _energy(ptr, g, R, G, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr):
    """Of blocks g: rows R of (R, G) added up in tree order; -1 past the last block."""
    r = tl.arange(0, BLOCK_R)[:, None]
    e = tl.load(ptr + r * G + g[None, :], mask=(r < R) & (g < G)[None, :], other=0.0)
    return tl.where(g < G, _tree_sum(e, BLOCK_R, BLOCK_G), -1.0)


@triton.jit
def choose_kernel(
    energy_ptr,  # (R, G) fp32: R partial sums of G blocks, R at most BLOCK_R
    mask_ptr,  # (G,) uint8
    R, G, kept,
    BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Keep block i if fewer than `kept` blocks come before it: more energy, or as much and first.

    Counting instead of sorting: no order of execution can change it.
    """
    i = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    mine = _energy(energy_ptr, i, R, G, BLOCK_R, BLOCK_G)[:, None]
    before = tl.zeros((BLOCK_G,), tl.int32)
    for start in range(0, G, BLOCK_G):
        j = start + tl.arange(0, BLOCK_G)
        other = _energy(energy_ptr, j, R, G, BLOCK_R, BLOCK_G)[None, :]
        first = (other > mine) | ((other == mine) & (j[None, :] < i[:, None]))
        before += tl.sum(first.to(tl.int32), 1)
    tl.store(mask_ptr + i, (before < kept).to(tl.uint8), mask=i < G)


# ---- W4A4 GEMM
#
#     y[slot, n] = (sum over k of (x^ + r^)[row of slot, k] * w^[expert of slot, n, k])
#                = (sum of code * s planes) * g_w * g_x
#
# A slot is a row of x, or, where experts are routed, a pair (token, expert) (model.Routing).
# The weights are the tensor core's first operand (128 or 64 rows of them, always full), the tokens
# its second one (16 to 64). A weight tile is loaded and decoded once, for x^ and r^ alike.
#
# Emulated. A byte holds an even and an odd channel; two products, one over the even channels and
# one over the odd ones, need no interleaving. Bit by bit, a nibble s e e m becomes the fp16 number
# s 000ee m000000000, which is its value * 2^-14, subnormal code 1 included. Times the block scale *
# 2^7 (57344 at most, so it fits) that is value * s * 2^-7: at least 2^-17, exact; the sum takes the
# 2^-14 of both operands back. Activations are decoded once, by decode_kernel, into (packet, even |
# odd, row, column) planes.
#
# Order of summation, hence bits: tiles of BLOCK_K = 128 channels, even before odd, x^ before r^,
# then the splits of K. None of it depends on the number of rows, so a row's result does not either.


def _two_bytes(select: str, odd: int, even: int, scale: int) -> str:
    """PTX: two of the bytes in $4, to the tops of two halves, then as fp16 numbers times $scale.
    A digit of `select` names a byte of the result: 0 to 3 of $4, 4 a zero."""
    nibbles = """shr.u32 v, c, 3; and.b32 v, v, 0x0E000E00;  // exponent and mantissa into place
                 lop3.b32 v, c, 0x80008000, v, 0xEA;         // and the sign: (c & mask) | v
              """
    return f"""prmt.b32 c, $4, 0, {select}; {nibbles} mul.f16x2 ${odd}, v, ${scale};
               shl.b32 c, c, 4; {nibbles} mul.f16x2 ${even}, v, ${scale};
            """


_DECODE = tl.constexpr(  # four bytes, and the scale of each: four even and four odd fp16 numbers
    "{ .reg .b32 c, v; " + _two_bytes("0x1404", 2, 0, 5) + _two_bytes("0x3424", 3, 1, 6) + "}"
)


@triton.jit
def _scale_to_fp16(s):
    """E4M3 byte -> its value * 2^7 in fp16."""
    return (s.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 32768.0


@triton.jit
def _decode(p, s, ASM: tl.constexpr):
    """Bytes and scales * 2^7, of one shape -> (even, odd) planes * 2^-7, fp16, exact."""
    if ASM:
        return tl.inline_asm_elementwise(
            _DECODE, "=r,=r,=r,=r,r,r,r", [p, s], dtype=(tl.float16, tl.float16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        p = p.to(tl.uint16)
        even = (((p & 0x08) << 12) | ((p & 0x07) << 9)).to(tl.float16, bitcast=True)
        odd = (((p & 0x80) << 8) | ((p & 0x70) << 5)).to(tl.float16, bitcast=True)
        return even * s, odd * s


@triton.jit
def _columns(w, N: tl.constexpr, C: tl.constexpr):
    """(N, C) columns 16g + 4t + 2h + j to 16g + 8h + 2t + j.

    Any order will do, if both operands have it. In this one the columns that a thread feeds to the
    tensor core, 2t, 2t + 1, 2t + 8 and 2t + 9, are four neighbouring bytes: one load, not two.
    """
    w = tl.permute(tl.reshape(w, (N, C // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(w, (N, C))


@triton.jit(do_not_specialize=["M"])
def decode_kernel(
    packed_ptr,  # (packets, M, K / 2) uint8
    scale_ptr,  # (packets, M, K / 16) uint8
    mask_ptr,  # (K / 16,) uint8: which blocks of packet 1 count
    plane_ptr,  # (packets, 2, M, width) fp16: even channels, odd ones, in the order of _columns
    kept_ptr,  # (K / 128,) int32: does any block of this K tile of the GEMM count?
    M, K, width,
    BLOCK: tl.constexpr,  # at least width and 64
    ASM: tl.constexpr,
):  # fmt: skip
    row, packet = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < K // 2
    p = tl.load(packed_ptr + (packet * M + row) * (K // 2) + c, mask=inside, other=0)
    s = tl.load(scale_ptr + (packet * M + row) * (K // 16) + c // 8, mask=inside, other=0)
    if packet == 1:
        keep = tl.load(mask_ptr + c // 8, mask=inside, other=0).to(tl.int32)
        s = tl.where(keep > 0, s, 0)
        if row == 0:
            tile = tl.arange(0, BLOCK // 64)
            kept = tl.max(tl.reshape(keep, (BLOCK // 64, 64)), 1)
            tl.store(kept_ptr + tile, kept, mask=tile * 64 < width)
    even, odd = _decode(p, _scale_to_fp16(s), ASM)
    column = (c & -16) + ((c >> 1) & 1) * 8 + ((c >> 2) & 3) * 2 + (c & 1)
    at = plane_ptr + (2 * packet * M + row) * width + column
    tl.store(at, even, mask=c < width)
    tl.store(at + M.to(tl.int64) * width, odd, mask=c < width)


@triton.jit
def load_tiled_scales(ptr, columns, column, BLOCK_K: tl.constexpr):
    """(128, BLOCK_K / 16) scales from 512-byte tiles of 128 rows x 4 columns (`tile_scales`).

    sm_100 copies this layout to its tensor memory as it is; a row-major plane would take a detour
    through registers. ptr: the first tile of these rows; columns: K / 16; column: the first wanted.
    """
    tiles: tl.constexpr = BLOCK_K // 64
    i = tl.arange(0, tiles * 512)[None, :]
    inside = column + i // 512 * 4 < columns
    s = tl.load(ptr + column // 4 * 512 + i, mask=inside, other=0.0)  # (1, tiles * 512)
    s = tl.reshape(s, (1, tiles, 32, 4, 4))
    return tl.reshape(tl.trans(s, 0, 3, 2, 1, 4), (128, tiles * 4))


@triton.jit(do_not_specialize=["slots"])
def gemm_kernel(
    x_ptr,  # native: packed (packets, M, K / 2) uint8; emulated: planes (packets, 2, M, width) fp16
    xs_ptr,  # native: (packets, M, K / 16) fp8
    xg_ptr,  # (M,) fp32
    mask_ptr,  # RESIDUAL, native: (K / 16,) uint8, which blocks of packet 1 count
    kept_ptr,  # RESIDUAL, emulated: (K / BLOCK_K,) int32, decode_kernel's
    w_ptr,  # (E, N, K / 2) uint8
    ws_ptr,  # native: tiled fp8 (E, N / 128, K / 64, 512); emulated: (E, N, K / 16) uint8
    wg_ptr,  # (E,) fp32
    expert_of_tile_ptr,  # GROUPED: (tiles,)
    slot_of_row_ptr,  # GROUPED: (tiles * BLOCK_M,); `slots` marks an empty row
    y_ptr,  # (slots, N) fp32; where programs share K (splits, slots, N), unscaled
    slots, N, K,
    width,  # of a row at x_ptr: K / 2, in the emulated path rounded up to 16
    split_k,  # channels of a split of K
    SLOTS_PER_ROW: tl.constexpr,  # slots that read a row of x
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,  # that this program sums, one after the other
    GROUPED: tl.constexpr, RESIDUAL: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr,  # BLOCK_N divides N, BLOCK_K divides K
    ASM: tl.constexpr,
):  # fmt: skip
    # tile: which slots, which expert, which of its outputs
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot, first, expert = m, tl.program_id(1) * BLOCK_M, tl.program_id(1).to(tl.int64) * 0
    if GROUPED:
        slot = tl.load(slot_of_row_ptr + m).to(tl.int32)
        first = tl.load(slot_of_row_ptr + first).to(tl.int32)
        expert = tl.load(expert_of_tile_ptr + tl.program_id(1)).to(tl.int64)
    if first < slots:  # tiles fill from the front: an empty first row means an empty tile
        live = slot < slots
        row = (slot // SLOTS_PER_ROW).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = (n < N)[:, None]
        c = tl.arange(0, BLOCK_K // 2)[None, :]
        b = tl.arange(0, BLOCK_K // 16)[None, :]
        w_row = expert * N + n.to(tl.int64)[:, None]
        w_ptrs, ws_ptrs = w_ptr + w_row * (K // 2) + c, ws_ptr + w_row * (K // 16) + b
        x_ptrs = x_ptr + row[:, None] * width + c
        rows = (slots // SLOTS_PER_ROW).to(tl.int64)
        plane = rows * width  # native: a packet; emulated: half of one
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            start = (tl.program_id(2) * SPLITS + split) * split_k
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for k in tl.range(start, min(start + split_k, K), BLOCK_K):
                # load
                in_x = tl.broadcast_to(live[:, None], (BLOCK_M, BLOCK_K // 2))
                in_w = tl.full((BLOCK_N, BLOCK_K // 2), True, tl.int1)
                in_s = tl.full((BLOCK_N, BLOCK_K // 16), True, tl.int1)
                if not EVEN:
                    in_x = in_x & (c < width - k // 2)
                    in_w = in_n & (c < (K - k) // 2)
                    in_s = in_n & (b < (K - k) // 16)
                w = tl.load(w_ptrs + k // 2, mask=in_w, other=0)
                x = tl.load(x_ptrs + k // 2, mask=in_x, other=0)
                if NATIVE:
                    # multiply packed codes under their scales
                    tl.static_assert(BLOCK_N == 128)  # rows of a tile of scales
                    tiles = (expert * tl.cdiv(N, 128) + tl.program_id(0)) * tl.cdiv(K, 64)
                    ws = load_tiled_scales(ws_ptr + tiles * 512, K // 16, k // 16, BLOCK_K)
                    in_xs = live[:, None] & (b < (K - k) // 16)
                    xs_ptrs = xs_ptr + row[:, None] * (K // 16) + b + k // 16
                    xs = tl.load(xs_ptrs, mask=in_xs, other=0.0)
                    acc = tl.dot_scaled(w, ws, "e2m1", x.T, xs, "e2m1", acc)
                    if RESIDUAL:
                        keep = tl.load(mask_ptr + k // 16 + b, mask=b < (K - k) // 16, other=0) > 0
                        r = tl.load(x_ptrs + plane + k // 2, mask=in_x, other=0)
                        xs_ptrs += rows * (K // 16)
                        rs = tl.load(xs_ptrs, mask=in_xs & keep, other=0.0)
                        if tl.max(keep.to(tl.int32)) > 0:
                            acc = tl.dot_scaled(w, ws, "e2m1", r.T, rs, "e2m1", acc)
                else:
                    # decode
                    s = _scale_to_fp16(tl.load(ws_ptrs + k // 16, mask=in_s, other=0))
                    s = tl.broadcast_to(s[:, :, None], (BLOCK_N, BLOCK_K // 16, 8))
                    even, odd = _decode(w, tl.reshape(s, (BLOCK_N, BLOCK_K // 2)), ASM)
                    even = _columns(even, BLOCK_N, BLOCK_K // 2)
                    odd = _columns(odd, BLOCK_N, BLOCK_K // 2)
                    # multiply
                    x_odd = tl.load(x_ptrs + plane + k // 2, mask=in_x, other=0)
                    acc = tl.dot(even, x.T, acc)
                    acc = tl.dot(odd, x_odd.T, acc)
                    if RESIDUAL:
                        r = tl.load(x_ptrs + 2 * plane + k // 2, mask=in_x, other=0)
                        r_odd = tl.load(x_ptrs + 3 * plane + k // 2, mask=in_x, other=0)
                        if tl.load(kept_ptr + k // BLOCK_K) > 0:
                            acc = tl.dot(even, r.T, acc)
                            acc = tl.dot(odd, r_odd.T, acc)
            total += acc
        # store
        at = slot[None, :].to(tl.int64) * N + n[:, None]
        in_y = live[None, :] & in_n
        if tl.num_programs(2) > 1:
            at += tl.program_id(2).to(tl.int64) * slots * N
            tl.store(y_ptr + at, total, mask=in_y)
        else:
            if not NATIVE:
                total *= 16384.0  # both planes hold 2^-7 of their value
            xg = tl.load(xg_ptr + row, mask=live, other=0.0)[None, :]
            tl.store(y_ptr + at, total * tl.load(wg_ptr + expert) * xg, mask=in_y)


@triton.jit
def combine_kernel(
    split_ptr, xg_ptr, wg_ptr, y_ptr, size, N, UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(SPLITS, M, N) -> (M, N): y = (split 0 + split 1 + ...) * g_w * g_x, as gemm_kernel does."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(split_ptr + split * size + i, mask=i < size, other=0.0)
    xg = tl.load(xg_ptr + i // N, mask=i < size, other=0.0)
    tl.store(y_ptr + i, total * UNIT * tl.load(wg_ptr) * xg, mask=i < size)


# ---- launchers: checks, allocation, grid


def _check_device(*tensors: torch.Tensor) -> None:
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1 or not (INTERPRETED or tensors[0].is_cuda):
        raise ValueError(
            f"kernels: need tensors of one CUDA device, got {' and '.join(sorted(devices))}; "
            "on a CPU use quads_min.nvfp4, or set TRITON_INTERPRET=1 before importing triton"
        )


def _on(x: torch.Tensor):
    """Launches go to the current device: make it x's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _quantize(
    x: torch.Tensor, outer: str, name: str, live: torch.Tensor | None = None
) -> tuple[NVFP4Tensor, torch.Tensor]:
    """Launch quantize_kernel; with `live` rows (M,) also the residual packet: (2, M, K), and the
    parts of its energy (programs, K / 16)."""
    nvfp4.check_input(x, outer, name)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"kernels: {name} must be bf16, got {x.dtype}; cast it, or use nvfp4")
    _check_device(x)
    *lead, K = x.shape
    words = x.contiguous().view(-1, K)
    words = (words.clone() if words.data_ptr() % 4 else words).view(torch.int32)
    M, device = len(words), x.device
    packets = 1 if live is None else 2
    packed = torch.empty(packets, M, K // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(packets, M, K // QBLOCK, dtype=torch.uint8, device=device)
    given = outer == "tensor" or K > LONGEST_ROW
    S = nvfp4.encode_scale(x.float(), outer) if given else torch.empty(*lead, 1, device=device)
    g = S.reciprocal() if given else torch.empty_like(S)
    block_k = min(triton.next_power_of_2(K), 4096 if given else LONGEST_ROW)
    block_m = max(1, 4096 // block_k)
    grid = (triton.cdiv(M, block_m), triton.cdiv(K, block_k))
    energy = torch.empty(grid[0], K // QBLOCK, device=device)
    if M:
        with _on(x):
            quantize_kernel[grid](
                words, packed, scale, g, S, S if live is None else live, energy,
                M, K, x.shape[-2] if outer == "tensor" else 1,
                block_m, block_k, given, live is not None,
                M % block_m == 0 and K % block_k == 0, not INTERPRETED,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    lead = lead if live is None else [2, *lead]
    scale = scale.view(torch.float8_e4m3fn).view(*lead, K // QBLOCK)
    return NVFP4Tensor(packed.view(*lead, K // 2), scale, g), energy


def quantize(
    x: torch.Tensor, outer: str = "row", name: str = "x", check: bool = True
) -> NVFP4Tensor:
    """nvfp4.quantize of bf16 x, bit for bit.

    check: raise on inf or NaN, which costs a device sync. Without it they make the row's
    global_scale inf or NaN, so whoever captures a CUDA graph can look at that later.
    """
    t, _ = _quantize(x, outer, name)
    if check:
        nvfp4.check_finite(t.global_scale, name)
    return t


def quantize_with_residual(
    x: torch.Tensor, ratio: float = 0.5, rows: torch.Tensor | None = None, name: str = "x",
    check: bool = True,
) -> tuple[NVFP4Tensor, torch.Tensor]:  # fmt: skip
    """Both packets of RAC in one NVFP4Tensor (2, M, K), and the mask of 16-blocks (K / 16,) bool.

    nvfp4.encode_with_residual of x (M, K) bf16 by block, bit for bit, with one difference: the
    residual packet holds *all* blocks, so that one pass over x is enough. The GEMM leaves out those
    that the mask does not keep.
    """
    nvfp4.check_split(x, ratio, "block", rows, None)
    every = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    t, energy = _quantize(x, "row", name, every if rows is None else rows.contiguous())
    if check:
        nvfp4.check_finite(t.global_scale, name)
    energy = nvfp4.tree_sum(energy, down_to=64)  # many rows: the first levels in torch
    R, G = energy.shape
    mask = torch.empty(G, dtype=torch.bool, device=x.device)
    with _on(x):
        choose_kernel[(triton.cdiv(G, 32),)](
            energy, mask.view(torch.uint8), R, G, nvfp4.kept_groups(G, ratio),
            max(1, triton.next_power_of_2(R)), 32, enable_fp_fusion=False,
        )  # fmt: skip
    return t, mask


def tile_scales(scale: torch.Tensor) -> torch.Tensor:
    """Block scales (..., R, C) fp8 to the layout of load_tiled_scales: (..., R', C', 512).

    R' = ceil(R / 128), C' = ceil(C / 4); the scale of row r, column c of a tile is byte
    (r % 32) * 16 + r // 32 * 4 + c. Missing rows and columns are 0.
    """
    *lead, R, C = scale.shape
    rows, columns = triton.cdiv(R, 128), triton.cdiv(C, 4)
    out = scale.new_zeros(*lead, rows * 128, columns * 4, dtype=torch.uint8)
    out[..., :R, :C] = scale.view(torch.uint8)
    out = rearrange(out, "... (R four r) (C c) -> ... R C (r four c)", four=4, r=32, c=4)
    return out.view(torch.float8_e4m3fn)


def k_splits(N: int, K: int) -> int:
    """Into how many splits a dense GEMM cuts K: enough programs for a large card at few rows.

    Depends on the weight alone, so that a row's bits do not depend on how many rows there are.
    """
    splits = 1
    while splits < 8 and splits * triton.cdiv(N, 64) < 512 and splits * 4 * K_TILE <= K:
        splits *= 2
    return splits


def w4a4_gemm(
    x: NVFP4Tensor, w: NVFP4Tensor, routing: Routing | None = None,
    mask: torch.Tensor | None = None, native: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x^ w^^T (M, N) fp32; or all routed experts in one launch: y[slot] = x^[row] w^[expert]^T.

    Args:
        x: (M, K), one global scale a row; with `mask`, the two packets of quantize_with_residual.
        w: (N, K); with `routing` (E, N, K), one global scale an expert.
        routing: of model.route with tiles of 16, 32 or 64 rows; x has a row per token or per slot.
        mask: (K / 16,) bool: add the blocks of the residual packet that it keeps.
        native: FP4 tensor cores (where has_fp4), or decode to fp16.
    Raises:
        ValueError: shapes or dtypes that do not match, no CUDA.
    The grid depends on shapes alone: fit for a CUDA graph.
    """
    M, N, K = _check_operands(x, w, routing, mask, native)
    slots, device = M if routing is None else routing.row_of_slot.numel(), x.packed.device
    y = torch.empty(slots, N, device=device)
    if slots == 0 or N == 0:
        return y
    packets = 1 if mask is None else 2
    kept = not_read = x.packed  # stands for pointers that a variant leaves alone
    with _on(y):
        if native:
            planes, width, x_scale = x.packed, K // 2, x.scale
            w_scale = w.scale if w.scale.dim() > w.packed.dim() else tile_scales(w.scale)
        else:
            width = triton.cdiv(K, 32) * 16
            planes = torch.empty(packets, 2, M, width, dtype=torch.float16, device=device)
            kept = torch.empty(triton.cdiv(K, K_TILE), dtype=torch.int32, device=device)
            x_scale, w_scale = x.scale.view(torch.uint8), w.scale.view(torch.uint8)
            decode_kernel[(M, packets)](
                x.packed, x_scale, not_read if mask is None else mask, planes, kept, M, K, width,
                max(64, triton.next_power_of_2(width)), not INTERPRETED,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
        block_n = 128 if native else 64
        if routing is None:
            block_m, splits = min(64, max(16, triton.next_power_of_2(M))), k_splits(N, K)
            tiles, table = triton.cdiv(M, block_m), (not_read, not_read)
        else:
            block_m, splits = routing.tile_rows, 1
            table = (routing.expert_of_tile, routing.slot_of_row)
            tiles = len(routing.expert_of_tile)
        shared = splits > 1 and M <= 64  # rows are few: a program a split; else it sums them all
        out = torch.empty(splits, slots, N, device=device) if shared else y
        gemm_kernel[(triton.cdiv(N, block_n), tiles, splits if shared else 1)](
            planes, x_scale, x.global_scale, not_read if mask is None else mask, kept,
            w.packed, w_scale, w.global_scale, *table, out, slots, N, K, width,
            triton.cdiv(K, splits * K_TILE) * K_TILE, slots // M, block_m, block_n, K_TILE,
            1 if shared else splits, routing is not None, mask is not None, native,
            N % block_n == 0 and K % K_TILE == 0, not INTERPRETED,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
        if shared:
            combine_kernel[(triton.cdiv(slots * N, 512),)](
                out, x.global_scale, w.global_scale, y, slots * N, N, 1.0 if native else 16384.0,
                splits, 512, enable_fp_fusion=False,
            )  # fmt: skip
    return y


def _check_operands(x, w, routing, mask, native) -> tuple[int, int, int]:
    """M, N, K; ValueError unless these are operands of w4a4_gemm."""
    if native and INTERPRETED:
        raise ValueError("w4a4_gemm: Triton's interpreter misreads NVFP4; use native=False")
    M, N = (t.packed.shape[-2] if t.packed.dim() > 1 else 0 for t in (x, w))
    K = 2 * w.packed.shape[-1]
    packets = () if mask is None else (2,)
    experts = () if routing is None else (routing.experts,)
    w_scales, e4m3 = (N, K // QBLOCK), torch.float8_e4m3fn
    if native and w.scale.dim() > w.packed.dim():  # tile_scales made them
        w_scales = (triton.cdiv(N, 128), triton.cdiv(K, 64), 512)
    for name, t, dtype, shape in (
        ("w.packed", w.packed, torch.uint8, (*experts, N, K // 2)),
        ("w.scale", w.scale, e4m3, (*experts, *w_scales)),
        ("w.global_scale (outer='tensor')", w.global_scale, torch.float32, (*experts, 1, 1)),
        ("x.packed", x.packed, torch.uint8, (*packets, M, K // 2)),
        ("x.scale", x.scale, e4m3, (*packets, M, K // QBLOCK)),
        ("x.global_scale (outer='row')", x.global_scale, torch.float32, (M, 1)),
        ("mask", mask, torch.bool, (K // QBLOCK,)),
    ):
        if t is not None and (t.dtype != dtype or t.shape != shape or not t.is_contiguous()):
            raise ValueError(
                f"w4a4_gemm: {name} must be contiguous {dtype} {tuple(shape)} here, got {t.dtype} "
                f"{tuple(t.shape)}; make x and w with kernels.quantize"
            )
    if routing is not None:
        slots = routing.row_of_slot.numel()
        if M not in (slots, slots // routing.top_k) or routing.tile_rows not in (16, 32, 64):
            raise ValueError(
                f"w4a4_gemm: the routing deals {slots} slots, top {routing.top_k}, in tiles of "
                f"{routing.tile_rows} rows; x has {M} rows, expected one a slot or token, and "
                "tiles of 16, 32 or 64 rows: route(choice, experts, least=16, most=64)"
            )
    _check_device(*x, *w, *(() if mask is None else (mask,)))
    return M, N, K


# ---- does this card compute what torch computes?


def has_fp4(device: str | torch.device) -> tuple[bool, str]:
    """Can this card, with this Triton, take the native path? And card, versions, and why (not)."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    if torch.device(device).type != "cuda":
        return False, f"{device} in Triton's interpreter, {versions}"
    major, minor = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}), {versions}"
    if major not in (10, 12):
        return False, f"{card}: no FP4 tensor cores"
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        return False, f"{card}: FP4 tensor cores, but they need triton 3.8"
    return True, f"{card}: FP4 tensor cores"


class Check(NamedTuple):
    kernel: str
    passed: bool
    found: str


@cache
def self_check(device: str, native: bool) -> list[Check]:
    """`compare_with_torch`, once a process; a kernel that does not even run is a failed check."""
    try:
        return compare_with_torch(device, native)
    except Exception as e:  # compilers and drivers raise what they like, and any of it means: no
        lines = str(e).strip().splitlines() or [""]
        return [Check("launch", False, f"{type(e).__name__}: {lines[0]}")]


def compare_with_torch(device: str, native: bool) -> list[Check]:
    """Each kernel on a small awkward shape: ragged M, N and K, an empty expert.

    Quantizer and mask bit for bit; the GEMMs against an explicit dequantize and matmul in fp64, to
    K 2^-21 sum |x| |w|, which tests/test_kernels.py derives.
    """
    E, T, top_k, N, K = 5, 19, 2, 72, 592  # K is split, and its last tile holds 80 channels
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=rng) * torch.randn(T, 1, generator=rng).exp()
    x[:, 7] *= 64  # an outlier channel
    x[1], x[2, :QBLOCK] = 0, x[2, :QBLOCK] * 1e-4
    x = x.to(device, torch.bfloat16)
    v = torch.randn(E, N, K, generator=rng).to(device, torch.bfloat16)
    choice = torch.stack([torch.randperm(E - 1, generator=rng)[:top_k] for _ in range(T)])
    choice, rows = choice.to(device), torch.arange(T, device=device) % 5 != 0
    checks = []

    def same(kernel: str, *pairs) -> None:
        wrong = sum((a.view(torch.uint8) != b.view(torch.uint8)).sum().item() for a, b in pairs)
        checks.append(Check(kernel, not wrong, f"{wrong} bytes differ" if wrong else "equal bits"))

    def close(kernel: str, y: torch.Tensor, x_hat: torch.Tensor, w_hat: torch.Tensor) -> None:
        expected = torch.einsum("sk,snk->sn", x_hat, w_hat)
        bound = K * 2.0**-21 * torch.einsum("sk,snk->sn", x_hat.abs(), w_hat.abs())
        error = ((y.double() - expected).abs() / bound.clamp(min=1e-30)).max().item()
        checks.append(Check(kernel, error <= 1, f"error {error:.3f} of the bound"))

    w, plain = quantize(v, "tensor"), quantize(x)
    packets, mask = quantize_with_residual(x, rows=rows)
    main, _, channels = nvfp4.encode_with_residual(x, rows=rows)
    every = torch.ones_like(channels)
    residual = nvfp4.encode_with_residual(x, mask=every)[1].pack()  # of all blocks, as the kernel's
    same("quantize", *zip((*w, *plain), (*nvfp4.quantize(v, "tensor"), *main.pack()), strict=True))
    same("residual", (packets.packed[0], plain.packed), (packets.scale[0], plain.scale),
         (packets.packed[1], residual.packed), (packets.scale[1], residual.scale))  # fmt: skip
    same("mask", (mask.repeat_interleave(QBLOCK), channels))
    x_hat, w_hat = nvfp4.dequantize(plain).double(), nvfp4.dequantize(w).double()
    rac_hat = x_hat + torch.where(channels, nvfp4.dequantize(residual).double(), 0.0)
    routing, token = route(choice, E, 16, 64), torch.arange(T * top_k, device=device) // top_k
    w0 = NVFP4Tensor(*(t[0] for t in w))
    for name, packet, m, hat in (("", plain, None, x_hat), (" + RAC", packets, mask, rac_hat)):
        y = w4a4_gemm(packet, w0, mask=m, native=native)
        close("dense GEMM" + name, y, hat, w_hat[0].expand(T, -1, -1))
        y = w4a4_gemm(packet, w, routing, m, native)
        close("expert GEMM" + name, y, hat[token], w_hat[choice.flatten()])
    return checks
