"""kernels.py against its torch reference: in the interpreter anywhere, on the GPU with -m gpu.

Quantizer, masks and routing must agree bit for bit. For the GEMMs the bound is that of fp32
summation: each of the at most 4 K additions of exact products (two packets, in any order, and two
scales) is off by 2^-24 of a partial sum at most, which is at most sum |x| |w|; a tensor core may
truncate instead of rounding, so twice that: K 2^-21 sum |x| |w|.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import triton.language as tl

import kernels
import rollout
from quads_min import model, nvfp4
from quads_min.model import ModelConfig
from quads_min.modes import ARITHMETICS, Arithmetic
from quads_min.nvfp4 import NVFP4Tensor
from quads_min.qat import make_policy

cuda = pytest.param("cuda", marks=pytest.mark.gpu)
ROOT = Path(__file__).parent.parent


@pytest.fixture(params=["cpu", cuda])
def device(request):
    if request.param == "cpu" and not kernels.INTERPRETED:
        pytest.skip("with a GPU the kernels are compiled, not interpreted: use -m gpu")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def same(a, b):
    """Equal bits, of every tensor of two packets or of two tensors."""
    a, b = ((t,) if torch.is_tensor(t) else t for t in (a, b))
    for x, y in zip(a, b, strict=True):
        x, y = (t.contiguous() for t in (x, y))
        if x.dtype == torch.float8_e4m3fn:
            x, y = x.view(torch.uint8), y.view(torch.uint8)
        if x.shape != y.shape or not torch.equal(x, y):
            return False
    return True


def hard_rows(M, K, device, dtype=torch.bfloat16, seed=0):
    """Rows of very different size, an outlier channel, a zero row, a quiet block, a zero block."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=rng) * (2 * torch.randn(M, 1, generator=rng)).exp()
    x[:, K // 2] *= 32
    x[0, :16] = 0
    if M > 2:
        x[1], x[2, :16] = 0, x[2, :16] * 1e-4
    return x.to(device, dtype)


def value(t):
    return nvfp4.dequantize(t).double()


def check_gemm(y, x_hat, w_hat):
    """y (S, N) against x_hat (S, K) times w_hat (N, K) or (S, N, K), in fp64."""
    w_hat = w_hat.expand(len(x_hat), -1, -1)
    expected = torch.einsum("sk,snk->sn", x_hat, w_hat)
    bound = x_hat.shape[1] * 2.0**-21 * torch.einsum("sk,snk->sn", x_hat.abs(), w_hat.abs())
    assert ((y.double() - expected).abs() <= bound).all()
    assert expected.abs().max() > 0


# ---- quantize


SHAPES = [(1, 16), (5, 80), (33, 48), (3, 256), (1025, 16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_kernel_equals_reference_bit_for_bit(shape, dtype, device):
    x = hard_rows(*shape, device, dtype)
    assert same(kernels.quantize(x), nvfp4.quantize(x))


@pytest.mark.parametrize("unit", ["block", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_packets_and_mask_equal_the_reference(shape, dtype, unit, device):
    """unit="block": one pass gives the packets of all blocks, the reference's under a full mask."""
    x = hard_rows(*shape, device, dtype)
    rows = torch.arange(shape[0], device=device) % 3 != 1
    for ratio in (0.0, 0.3, 1.0):
        main, residual, mask = kernels.quantize_with_residual(x, ratio, unit, rows)
        expected = nvfp4.quantize_with_residual(x, ratio, unit, rows=rows)
        assert same(main, expected[0]) and same(mask, expected[2])
        full = torch.ones_like(mask)
        packets = nvfp4.quantize_with_residual(x, mask=full) if unit == "block" else expected
        assert same(residual, packets[1])


def test_a_given_mask_is_used_as_it_is(device):
    x = hard_rows(4, 64, device)
    mask = torch.arange(64, device=device) % 5 < 2
    found = kernels.quantize_with_residual(x, mask=mask)
    expected = nvfp4.quantize_with_residual(x, mask=mask)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_energies_are_summed_in_the_tree_order(device):
    """By quantize_kernel over its rows, by energy_kernel over what is left (in two levels)."""
    x = hard_rows(300, 32, device, seed=1)
    found = kernels._packets(x, "row", 1, 1)[3]
    residual = x.float() - nvfp4.fake_quantize(x)
    energy = residual.square().view(300, 2, 16).movedim(-1, 0)
    assert len(found) > 1 and same(nvfp4.tree_sum(found), nvfp4.tree_sum(nvfp4.tree_sum(energy)))
    parts = torch.rand(1500, 5, generator=torch.Generator().manual_seed(0)).to(device)
    order = nvfp4.tree_sum(parts).sort(descending=True).indices
    mask = kernels._choose(parts, 0.4, 1)
    assert mask.nonzero().flatten().tolist() == sorted(order[:2].tolist())
    total = torch.empty(2, 5, device=device)
    kernels.energy_kernel[(1, 2)](parts, total, 1500, 5, 1024, 16, enable_fp_fusion=False)
    assert same(nvfp4.tree_sum(total), nvfp4.tree_sum(parts))


def test_ties_go_to_the_lower_index(device):
    x = torch.tensor([[1.0, 0.3, 0.7] + [0.0] * 13], device=device).repeat(3, 4)
    mask = kernels.quantize_with_residual(x, 0.5)[2]
    assert mask.tolist() == [True] * 32 + [False] * 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_share_a_global_scale_per_matrix(dtype, device):
    v = hard_rows(6, 80, device, dtype).view(2, 3, 80)
    assert same(kernels.quantize(v, "tensor"), nvfp4.quantize(v, "tensor"))


def test_rows_too_long_for_a_program_take_two_passes(device):
    x = hard_rows(2, kernels.LONGEST_ROW + 16, device)
    assert same(kernels.quantize(x), nvfp4.quantize(x))


def test_any_strides_do(device):
    wide = hard_rows(6, 97, device, torch.bfloat16)
    for x in (wide[:, :64], wide[::2, 16:80], wide[:, 1:65], wide[:5, :80].T.contiguous().T,
              wide.as_strided((5, 16), (97, 2))):  # fmt: skip
        before = wide.clone()
        assert same(kernels.quantize(x), nvfp4.quantize(x)) and torch.equal(before, wide)


def test_the_hard_values_of_the_format(device):
    """Midpoints both ways, E4M3 midpoints and edges, scale order (23, 28), reciprocal times value,
    subnormal block scales, huge and tiny numbers: fp32 input, where nothing is rounded before."""
    grid = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    rows = [grid + [-v for v in grid], [23.0] * 16 + [28.0] * 16, [1.0044062] * 16]
    for s in (448.0, 464.0, 1.0625, 1.1875, 2**-9, 1.5 * 2**-9, 2**-10, 0.0059 / 6, 240.0, 256.0):
        rows.append([2688.0] * 16 + [6 * s, 6 * s * 0.9999999, -0.0, 0.0239257794] * 4)
    rows += [[3e38, -1e-38] * 8, [1e-45, -1e-40] * 8, [-0.0] * 16, [0.02] * 16 + [5e-5] * 16]
    rows += [row[::-1] for row in rows]
    x = torch.zeros(len(rows), 32, device=device)  # zeros at the end of a row change no scale
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row)
    assert same(kernels.quantize(x), nvfp4.quantize(x))
    assert not (kernels.quantize(x).scale.view(torch.uint8) == 0x7F).any()
    full = torch.ones(32, dtype=torch.bool, device=device)
    pair = (m.quantize_with_residual(x, mask=full) for m in (kernels, nvfp4))
    assert all(same(a, b) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_inf_and_nan_are_refused_or_poison_the_global_scale(bad, device):
    x = hard_rows(3, 80, device)
    x[1, 70] = bad
    with pytest.raises(ValueError, match="gate_up holds inf or NaN"):
        kernels.quantize(x, name="gate_up")
    with pytest.raises(ValueError, match="x holds inf or NaN"):
        kernels.quantize_with_residual(x)
    g = kernels.quantize(x, check=False).global_scale
    assert torch.isfinite(g).flatten().tolist() == [True, False, True]


def test_empty_input_needs_no_launch(device):
    x = torch.empty(0, 32, device=device)
    assert kernels.quantize(x).packed.shape == (0, 16)
    main, residual, mask = kernels.quantize_with_residual(x)
    assert residual.packed.shape == (0, 16) and same(mask, nvfp4.quantize_with_residual(x)[2])
    w = kernels.quantize(torch.ones(24, 32, device=device), "tensor")
    assert kernels.w4a4_gemm(main, w).shape == (0, 24)


def test_what_cannot_be_quantized_is_refused_as_by_the_reference(device):
    ones = torch.ones(2, 32, device=device)
    for call in (
        lambda m: m.quantize(ones[:, :20]), lambda m: m.quantize(ones.int()),
        lambda m: m.quantize(ones, "column"), lambda m: m.quantize_with_residual(ones, 1.5),
        lambda m: m.quantize_with_residual(ones, unit="row"),
        lambda m: m.quantize_with_residual(ones, rows=ones[0] > 0),
    ):  # fmt: skip
        messages = []
        for module in (kernels, nvfp4):
            with pytest.raises(ValueError) as error:
                call(module)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


# ---- GEMM


def operands(M, N, K, device, ratio=0.5):
    x, w = hard_rows(M, K, device), hard_rows(N, K, device, seed=2)
    return *kernels.quantize_with_residual(x, ratio), kernels.quantize(w, "tensor")


@pytest.mark.parametrize(
    "M, N, K", [(3, 3, 16), (5, 70, 80), (17, 64, 128), (40, 40, 272)], ids=str
)
def test_gemm_equals_dequantize_and_matmul(M, N, K, device):
    x, residual, mask, w = operands(M, N, K, device)
    check_gemm(kernels.w4a4_gemm(x, w), value(x), value(w))
    compensated = value(x) + torch.where(mask, value(residual), 0.0)
    check_gemm(kernels.w4a4_gemm(x, w, residual, mask), compensated, value(w))


def test_every_number_of_rows_from_1_to_129(device):
    """On the GPU; in the interpreter, which takes a second a number, those around tile edges."""
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128]
    x, residual, mask, w = operands(129, 24, 16, device, ratio=1.0)
    whole = kernels.w4a4_gemm(x, w, residual, mask)
    check_gemm(whole, value(x) + value(residual), value(w))
    for M in edges if kernels.INTERPRETED else range(1, 129):
        few = [NVFP4Tensor(*(t[:M].contiguous() for t in packet)) for packet in (x, residual)]
        assert same(kernels.w4a4_gemm(few[0], w, few[1], mask), whole[:M]), M


def test_the_planes_are_exact_for_all_codes_and_scales(device):
    """Through the GEMM with the identity as weight: 16 codes times every E4M3 scale but NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)  # every byte: both nibbles
    packed = codes.view(1, 32, 8).repeat(127, 1, 1).flatten(1)  # (127, 256): K = 512
    scale = torch.arange(127, dtype=torch.uint8, device=device)[:, None].repeat(1, 32)
    x = NVFP4Tensor(packed, scale.view(torch.float8_e4m3fn), torch.ones(127, 1, device=device))
    rows = slice(0, 127, 9) if kernels.INTERPRETED else slice(None)  # 3 s a hundred rows there
    x = NVFP4Tensor(*(t[rows].contiguous() for t in x))
    eye = torch.eye(512, device=device).unflatten(1, (-1, 16))
    one = torch.ones((), device=device)
    w = nvfp4.Encoded(eye, one.expand(512, 32).contiguous(), one.view(1, 1)).pack()
    assert same(kernels.w4a4_gemm(x, w), nvfp4.dequantize(x) + 0.0)


def test_k_tiles_without_a_kept_channel_skip_the_residual(device):
    """Poison (scales of NaN) in the residual packets that the mask leaves out changes no bit."""
    x, residual, _, w = operands(5, 24, 384, device)
    mask = torch.zeros(384, dtype=torch.bool, device=device)
    mask[128:144] = True
    y = kernels.w4a4_gemm(x, w, residual, mask)
    scale = residual.scale.view(torch.uint8).clone()
    scale[:, :8], scale[:, 9:] = 0x7F, 0x7F
    poisoned = residual._replace(scale=scale.view(torch.float8_e4m3fn))
    assert same(kernels.w4a4_gemm(x, w, poisoned, mask), y)
    assert not same(y, kernels.w4a4_gemm(x, w))
    none = torch.zeros_like(mask)
    assert same(kernels.w4a4_gemm(x, w, poisoned, none), kernels.w4a4_gemm(x, w))


def test_bytes_around_the_operands_do_not_matter(device):
    """Operands cut from larger buffers filled with 0xFF, outputs allocated over NaN."""

    def cut(t):
        flat = t.contiguous().view(torch.uint8).flatten()
        room = torch.full((flat.numel() + 512,), 0xFF, dtype=torch.uint8, device=device)
        room[256:-256] = flat
        return room[256:-256].view(t.dtype).view(t.shape)

    x, residual, mask, w = operands(5, 24, 80, device)
    y = kernels.w4a4_gemm(x, w, residual, mask)
    x, residual, w = (NVFP4Tensor(*map(cut, t)) for t in (x, residual, w))
    empty = torch.empty

    def poisoned(*shape, **kwargs):
        t = empty(*shape, **kwargs)
        t.view(torch.uint8).fill_(0xFF)  # NaN in every float format here
        return t

    kernels.torch.empty = poisoned
    try:
        again = kernels.w4a4_gemm(x, w, residual, cut(mask))
        packets = kernels.quantize(hard_rows(5, 80, device))
    finally:
        kernels.torch.empty = empty
    assert same(again, y) and same(packets, kernels.quantize(hard_rows(5, 80, device)))


def test_a_row_has_the_same_bits_alone_and_in_any_batch(device):
    """Given the mask, and across tile sizes. K = 528 is split into parts, which few rows compute
    side by side and many rows one after the other."""
    K, most = 528, 70
    x, residual, mask, w = operands(most, 40, K, device)
    assert kernels.k_parts(40, K) > 1
    whole = kernels.w4a4_gemm(x, w, residual, mask)
    for M in (1, 33) if kernels.INTERPRETED else range(1, most):
        few = [NVFP4Tensor(*(t[:M].contiguous() for t in packet)) for packet in (x, residual)]
        assert same(kernels.w4a4_gemm(few[0], w, few[1], mask), whole[:M]), M


@pytest.mark.parametrize("counts", [[0, 1, 127, 129], [0, 0, 3], [1]], ids=str)
def test_grouped_gemm_gives_each_expert_the_rows_of_its_own_gemm(counts, device):
    """Zero-token experts included; a row per slot (down) and a row per token (gate and up)."""
    E, N, K = len(counts), 24, 80
    choice = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    order = torch.randperm(len(choice), generator=torch.Generator().manual_seed(0))
    choice = choice[order].to(device)
    x, residual, mask = kernels.quantize_with_residual(hard_rows(len(choice), K, device))
    w = kernels.quantize(hard_rows(E * N, K, device, seed=3).view(E, N, K), "tensor")
    routing = kernels.route(choice[:, None], E)
    y = kernels.grouped_w4a4_gemm(x, w, routing, residual, mask)
    compensated = value(x) + torch.where(mask, value(residual), 0.0)
    check_gemm(y, compensated, value(w)[choice])
    if len(choice) % 2 == 0:
        pairs = kernels.route(choice.view(-1, 2), E)
        half = NVFP4Tensor(*(t[: len(choice) // 2].contiguous() for t in x))
        token = torch.arange(len(choice), device=device) // 2
        check_gemm(kernels.grouped_w4a4_gemm(half, w, pairs), value(x)[token], value(w)[choice])


def test_an_expert_row_has_the_same_bits_alone_and_in_a_batch_of_64(device):
    E, N, K = 2, 24, 144
    x, residual, mask = kernels.quantize_with_residual(hard_rows(64, K, device))
    w = kernels.quantize(hard_rows(E * N, K, device, seed=3).view(E, N, K), "tensor")
    choice = (torch.arange(64, device=device) % 3 == 0).long()[:, None]
    whole = kernels.grouped_w4a4_gemm(x, w, kernels.route(choice, E), residual, mask)
    for i in (0, 5):
        one, r = (NVFP4Tensor(*(t[i : i + 1].contiguous() for t in p)) for p in (x, residual))
        y = kernels.grouped_w4a4_gemm(one, w, kernels.route(choice[i : i + 1], E), r, mask)
        assert same(y[0], whole[i])


@pytest.mark.parametrize("T, E, top_k", [(1, 1, 1), (7, 5, 2), (40, 4, 3), (300, 3, 1)], ids=str)
def test_route_deals_as_the_model_does(T, E, top_k, device):
    """Tile sizes may differ; per expert the same slots in the same order, unused tiles empty."""
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(1))
    choice = scores.topk(top_k).indices.to(device)
    dealt = []
    for routing in (kernels.route(choice, E), model.route(choice, E)):
        rows, S = routing.tile_rows, T * top_k
        slots = routing.slot_of_row.view(-1, rows).tolist()
        assert all(sorted(tile, key=lambda s: s == S) == tile for tile in slots)
        experts = routing.expert_of_tile.tolist()
        pairs = zip(experts, slots, strict=True)
        dealt.append({e: [] for e in range(E)})
        for e, tile in pairs:
            dealt[-1][e] += [s for s in tile if s < S]
        at = routing.row_of_slot.long()
        assert torch.equal(routing.slot_of_row[at].long(), torch.arange(S, device=device))
    assert dealt[0] == dealt[1]


def test_block_scales_are_tiled_128_by_4(device):
    """(5, 80) takes 1,024 bytes; in a tile, byte (r % 32) * 16 + r // 32 * 4 + c."""
    assert (
        kernels.tile_scales(torch.zeros(5, 5, device=device).to(torch.float8_e4m3fn)).numel()
        == 1024
    )
    for r, c, offset in ((1, 0, 16), (32, 0, 4), (33, 2, 22), (127, 3, 511)):
        scale = torch.zeros(128, 4, dtype=torch.uint8, device=device)
        scale[r, c] = 1
        tiled = kernels.tile_scales(scale.view(torch.float8_e4m3fn)).view(torch.uint8)
        assert tiled.flatten().nonzero().item() == offset


def test_the_kernel_reads_tiled_scales_back_in_order(device):
    """What the native path does with them, as far as it can run anywhere: 200 x 11 scales."""
    scale = torch.arange(200 * 11, device=device).view(200, 11).remainder(120).to(torch.uint8)
    tiled = kernels.tile_scales(scale.view(torch.float8_e4m3fn)).view(torch.uint8)
    out = torch.zeros(256, 16, dtype=torch.uint8, device=device)
    triton.jit(untile_kernel)[(2, 2)](tiled, out, 11, 3, BLOCK_K=128)
    assert same(out[:200, :11], scale) and not out[200:].any() and not out[:, 11:].any()


def untile_kernel(ptr, out_ptr, columns, tiles, BLOCK_K: tl.constexpr):
    r, c = tl.program_id(0), tl.program_id(1)
    s = kernels.load_tiled_scales(ptr + r * tiles * 512, columns, c * 8, BLOCK_K)
    at = (r * 128 + tl.arange(0, 128))[:, None] * 16 + c * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + at, s)


def test_operands_that_do_not_fit_are_refused(device):
    x, residual, mask, w = operands(4, 24, 32, device)
    e = NVFP4Tensor(*(t[None] for t in w))
    routing = kernels.route(torch.zeros(4, 1, dtype=torch.int64, device=device), 1)
    row_scaled = kernels.quantize(torch.ones(24, 32, device=device))
    zeros = torch.zeros(4, 1, dtype=torch.int64, device=device)
    gemm, grouped = kernels.w4a4_gemm, kernels.grouped_w4a4_gemm
    for call, message in (
        (lambda: gemm(x, w._replace(packed=w.packed[:, :8])), "w's K=16"),
        (lambda: gemm(x, e), r"w must be \(N, K\)"),
        (lambda: gemm(x, row_scaled), "w needs 1 global scales"),
        (lambda: gemm(x._replace(scale=x.scale[:2]), w), r"x.scale must be .* \(4, 2\)"),
        (lambda: gemm(x, w._replace(scale=w.scale[:, :1])), "w.scale must be contiguous"),
        (lambda: gemm(x._replace(scale=x.scale.view(torch.uint8)), w), "x.scale must be"),
        (lambda: gemm(x._replace(packed=x.packed.float()), w), "x.packed must be"),
        (lambda: gemm(x, w, x._replace(packed=x.packed[:2]), mask), "residual.packed must be"),
        (lambda: gemm(x, w, residual), "come together"),
        (lambda: gemm(x, w, residual, mask[:16]), r"mask must be bool \(32,\)"),
        (lambda: gemm(x, w, residual, mask.float()), r"mask must be bool \(32,\)"),
        (lambda: grouped(x, w, routing), r"w must be \(E, N, K\)"),
        (lambda: grouped(x, e, kernels.route(zeros[:3].expand(3, 2), 1)), "a row per slot"),
        (lambda: grouped(x, e, model.route(zeros, 1)), "kernels.route"),
        (lambda: kernels.route(zeros.int(), 1), "int64"),
        (lambda: kernels.route(zeros[0], 1), r"choice \(T, top_k\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    if kernels.INTERPRETED:
        with pytest.raises(ValueError, match="misreads NVFP4"):
            gemm(x, w, native=True)


# ---- the engine on these kernels


def small_policy(device):
    config = ModelConfig(
        vocab=12, max_len=12, width=32, layers=1, heads=2, experts=3, expert_width=32,
        outlier_channels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return make_policy(config, Arithmetic("nvfp4", "bf16")).to(device)


def generate(engine):
    prompts = torch.arange(8).view(2, 4)
    rng = torch.Generator().manual_seed(5)
    return engine.generate(prompts, 3, eos=11, pad=10, samples=2, generator=rng)


@pytest.mark.parametrize("name", ["w4a4", "w4a4+rac"])
def test_both_backends_generate_the_same(name, device):
    """Log-probs differ by the order of fp32 sums, and where that turns a bf16 rounding later on."""
    policy = small_policy(device)
    engines = [rollout.Engine(policy, ARITHMETICS[name], b) for b in ("torch", "emulated")]
    assert [e.backend.name for e in engines] == ["torch", "emulated"]
    a, b = map(generate, engines)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.choice, b.choice)
    assert (a.logprobs - b.logprobs).abs().max() < 0.02
    assert engines[0].weight_bytes == engines[1].weight_bytes


def test_the_gemm_multiplies_what_the_trainer_does(device):
    """Weight identity, read through the kernel with the identity as input; also after w -> 2w."""
    policy = small_policy(device)
    engine = rollout.Engine(policy, ARITHMETICS["w4a4+rac"], "emulated")
    tokens = torch.arange(6, device=device).view(1, 6)
    policy(tokens)
    assert engine.multiplies_what(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p *= 1.5
    policy(tokens)
    assert not engine.multiplies_what(policy)
    engine.sync()
    fresh = rollout.Engine(policy, ARITHMETICS["w4a4+rac"], "emulated")
    assert same(generate(engine)[:2], generate(fresh)[:2])


def test_a_failed_self_check_falls_back_to_torch_loudly(device, monkeypatch, capsys):
    policy = small_policy(device)
    checks = rollout.self_check.__wrapped__(device, False)
    assert len(checks) == 8 and all(c.passed for c in checks), checks
    broken = kernels.gemm_kernel

    class Wrong:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                broken[grid](*args, **kwargs)
                args[9].mul_(1.001)

            return launch

    rollout.self_check.cache_clear()
    monkeypatch.setattr(kernels, "gemm_kernel", Wrong())
    engine = rollout.Engine(policy, ARITHMETICS["w4a4"], "triton")
    rollout.self_check.cache_clear()
    said = capsys.readouterr().err
    assert engine.backend.name == "torch" and "FAILED" in engine.backend.reason
    assert "WARNING" in said and "grouped_w4a4_gemm" in said and torch.__version__ in said


def test_the_backend_is_resolved_by_arithmetic_and_device(device):
    rac = ARITHMETICS["w4a4+rac"]
    assert rollout.resolve_backend("torch", rac, device).name == "torch"
    auto = rollout.resolve_backend("auto", rac, device)
    assert auto.name == ("torch" if device == "cpu" else auto.name) and auto.reason
    mixed = rollout.resolve_backend("auto", ARITHMETICS["w4a16"], device)
    assert mixed.name == "torch" and ("W4A4" in mixed.reason)
    if not kernels.has_fp4(device)[0]:
        assert rollout.resolve_backend("triton", rac, device).name == "emulated"
        with pytest.raises(ValueError, match="use --backend emulated"):
            rollout.resolve_backend("native", rac, device)


@pytest.mark.gpu
def test_a_graph_replayed_with_new_routing_equals_eager():
    """The tile table is built on the device, the grid depends on shapes alone."""
    E, T, K, N = 8, 40, 128, 64
    w = kernels.quantize(torch.randn(E, N, K, device="cuda"), "tensor")
    x = torch.randn(T, K, device="cuda", dtype=torch.bfloat16)
    choice = torch.zeros(T, 2, dtype=torch.int64, device="cuda")
    live = torch.ones(T, dtype=torch.bool, device="cuda")

    def layer():
        main, residual, mask = kernels.quantize_with_residual(x, rows=live, check=False)
        return kernels.grouped_w4a4_gemm(main, w, kernels.route(choice, E), residual, mask)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    for seed in range(3):
        torch.manual_seed(seed)
        choice.copy_(torch.rand(T, E, device="cuda").topk(2).indices)
        x.copy_(torch.randn_like(x))
        live.copy_(torch.rand(T, device="cuda") > 0.3)
        graph.replay()
        assert same(y, layer())


def test_triton_is_asked_for_cuda_tensors():
    """In a process without the interpreter: a CPU tensor is an error, not a crash."""
    code = """import torch, kernels
try: kernels.quantize(torch.ones(2, 32))
except ValueError as e: assert "CUDA" in str(e) and "quads_min.nvfp4" in str(e), e
else: raise SystemExit("no error")"""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
