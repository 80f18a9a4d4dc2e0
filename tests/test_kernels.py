"""kernels.py against its torch reference: in the interpreter anywhere, on the GPU with -m gpu.

Quantizer and mask must agree bit for bit. For the GEMMs the bound is that of fp32 summation: each
of the at most 4 K additions of exact products (two packets, in any order, and two scales) is off by
2^-24 of a partial sum at most, which is at most sum |x| |w|; a tensor core may truncate instead of
rounding, so twice that: K 2^-21 sum |x| |w|.
"""

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import triton.language as tl
from test_model import policy_of
from test_nvfp4 import MIDPOINTS, SCALES, raw

import kernels
import rollout
from quads_min import nvfp4
from quads_min.model import route
from quads_min.modes import ARITHMETICS, Arithmetic


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if (request.param == "cpu") != kernels.INTERPRETED:
        pytest.skip("kernels are interpreted without a GPU, and compiled with one: use -m gpu")
    return request.param


def hard_rows(M, K, device, seed=0):
    """Rows of very different size, an outlier channel, a zero row, a quiet block, a zero block."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=rng) * (2 * torch.randn(M, 1, generator=rng)).exp()
    x[:, K // 2] *= 32
    x[:1, :16], x[1:2], x[2:3, :16] = 0, 0, x[2:3, :16] * 1e-4
    return x.to(device, torch.bfloat16)


def operands(M, N, K, device, experts=()):
    """Packets (2, M, K), mask, weight, and in fp64: x^ and x^ + r^ of the kept blocks, w^."""
    packets, mask = kernels.quantize_with_residual(hard_rows(M, K, device))
    w = hard_rows(N * (experts or 1), K, device, seed=2)
    w = kernels.quantize(w.view(experts, N, K) if experts else w, "tensor")
    x, r = nvfp4.dequantize(packets).double()
    kept = torch.where(mask.repeat_interleave(16), r, 0.0)
    return packets, mask, w, (x, x + kept), nvfp4.dequantize(w).double()


def part(packets, packet=0, rows=slice(None)):
    """The main packet, the residual one (1), or both ([0, 1]); and of them some rows."""
    packed, scale = (t[packet, rows].contiguous() for t in packets[:2])
    return nvfp4.NVFP4Tensor(packed, scale, packets.global_scale[rows])


def check_quantizer(x, ratio=0.5, rows=None):
    """The bits of the reference: both packets, of which the residual one holds all blocks, as under
    a full mask; mask; and energies, in the kernel over a program's rows, then in torch."""
    K, live = x.shape[-1], torch.ones_like(x[..., 0]) > 0 if rows is None else rows
    packets, mask = kernels.quantize_with_residual(x, ratio, rows)
    main, _, channels = nvfp4.encode_with_residual(x, ratio, rows=rows)
    _, residual, _ = nvfp4.encode_with_residual(x, mask=torch.ones_like(channels))
    assert raw(*kernels.quantize(x)) == raw(*part(packets)) == raw(*main.pack())
    assert raw(*part(packets, 1)) == raw(*residual.pack())
    assert raw(mask.repeat_interleave(16)) == raw(channels)
    lost = torch.where(live.unsqueeze(-1), x.float() - main.dequantize(), 0.0)
    energy = nvfp4.tree_sum(lost.square().reshape(-1, K // 16, 16).movedim(-1, 0))[0]
    found = kernels._quantize(x, "row", "x", live)[1]
    assert raw(nvfp4.tree_sum(found)) == raw(nvfp4.tree_sum(energy))


def check_gemm(y, x_hat, w_hat):
    """y (S, N) against x_hat (S, K) times w_hat (N, K) or (S, N, K), in fp64."""
    x_hat, K = x_hat.unsqueeze(1), x_hat.shape[1]
    expected = torch.linalg.vecdot(x_hat, w_hat)
    bound = K * 2.0**-21 * torch.linalg.vecdot(x_hat.abs(), w_hat.abs())
    assert ((y.double() - expected).abs() <= bound).all() and expected.any()


@pytest.mark.parametrize(("M", "K", "ratio"), [(1, 16, 1.0), (5, 80, 0.5), (33, 48, 0.0),
    (3, 256, 0.3), (1025, 16, 0.3), (2, kernels.LONGEST_ROW + 16, 1.0)])  # fmt: skip
def test_packets_mask_and_energies_equal_the_reference_bit_for_bit(M, K, ratio, device):
    """With rows apart, and with one that starts within a word of two bf16. The longest rows do not
    fit a program and take two passes, as weights do."""
    wide = hard_rows(M, K + 1, device)
    check_quantizer(wide[:, :K], ratio, torch.arange(M, device=device) % 3 != 2)
    check_quantizer(wide[0, 1:])
    v = torch.stack([wide, 3 * wide])[..., :K]
    assert raw(*kernels.quantize(v, "tensor")) == raw(*nvfp4.quantize(v, "tensor"))


def test_the_hard_values_of_the_format(device):
    """Midpoints both ways, E4M3 midpoints and edges, scale order (23, 28), subnormal block scales,
    huge and tiny numbers; all of them bf16 numbers but where rounding to bf16 moves them nearby."""
    rows = [[6.0, *MIDPOINTS, -6.0, *(-v for v in MIDPOINTS)] * 2, [23.0] * 16 + [28.0] * 16,
            [3e38, -1e-38] * 16, [1e-40, -1e-40] * 16, [-0.0] * 32,
            [0.02] * 16 + [5e-5] * 16]  # fmt: skip
    for s in (448.0, 464.0, 1.0625, 1.1875, 2**-9, 1.5 * 2**-9, 2**-10, 0.0059 / 6, 240.0, 256.0):
        rows.append([2688.0] * 16 + [6 * s, 6 * s * 0.9999999, -0.0, 0.0239257794] * 4)
    x = torch.tensor(rows).to(device, torch.bfloat16)
    check_quantizer(torch.cat([x, x.flip(1)]))


def test_inf_and_nan_are_refused_or_poison_the_global_scale(device):
    x = hard_rows(5, 80, device)
    x[1:4, 70] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    g = kernels.quantize(x, check=False).global_scale
    assert g.isfinite().flatten().tolist() == [True, False, False, False, True]
    for quantize in (kernels.quantize, kernels.quantize_with_residual):
        with pytest.raises(ValueError, match="gate_up holds inf or NaN"):
            quantize(x, name="gate_up")


def test_empty_input_needs_no_launch(device):
    packets, mask, w, _, _ = operands(0, 24, 32, device)
    assert packets.packed.shape == (2, 0, 16) and mask.tolist() == [True, False]
    assert kernels.w4a4_gemm(packets, w, mask=mask).shape == (0, 24)


@pytest.mark.parametrize(("M", "N", "K"), [(3, 3, 16), (33, 70, 80), (17, 64, 128), (129, 40, 528)])
def test_gemm_equals_matmul_and_a_row_has_the_same_bits_in_any_batch(M, N, K, device):
    """Given the mask, and across tile sizes: every batch on the GPU, tile edges elsewhere. K = 528
    is split, and few rows sum the splits otherwise than many."""
    packets, mask, w, (plain, compensated), w_hat = operands(M, N, K, device)
    check_gemm(kernels.w4a4_gemm(part(packets), w), plain, w_hat)
    whole = kernels.w4a4_gemm(packets, w, mask=mask)
    check_gemm(whole, compensated, w_hat)
    assert (kernels.k_splits(N, K) > 1) == (K == 528)
    for m in {1, 17, 64} & {*range(M)} if kernels.INTERPRETED else range(1, M):
        y = kernels.w4a4_gemm(part(packets, [0, 1], slice(m)), w, mask=mask)
        assert raw(y) == raw(whole[:m]), m


@pytest.mark.parametrize("counts", [[0, 1, 127, 129], [0, 0, 4], [130]], ids=str)
def test_each_expert_gets_the_rows_of_its_own_gemm(counts, device):
    """Zero-token experts included; a row per slot (down) and a row per token (gate and up); tiles
    of 32, 16 and 64 rows."""
    E, slots = len(counts), sum(counts)
    choice = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    choice = choice[torch.randperm(slots, generator=torch.Generator().manual_seed(0))].to(device)
    packets, mask, w, (plain, compensated), w_hat = operands(slots, 24, 208, device, experts=E)
    y = kernels.w4a4_gemm(packets, w, route(choice[:, None], E, 16, 64), mask)
    check_gemm(y, compensated, w_hat[choice])
    T, pairs = slots // 2, choice[: slots // 2 * 2].view(-1, 2)
    y = kernels.w4a4_gemm(part(packets, 0, slice(T)), w, route(pairs, E, 16, 64))
    check_gemm(y, plain[:T].repeat_interleave(2, 0), w_hat[pairs.flatten()])


def test_the_planes_are_exact_for_all_codes_and_scales(device):
    """Through the GEMM with 2688 times the identity, whose scales are 1 and 448, as weight: 16
    codes times every E4M3 scale but NaN."""
    scale = SCALES[:: 6 if kernels.INTERPRETED else 1].to(device)  # all are slow there
    packed = torch.arange(256, device=device).byte().repeat(len(scale), 1)  # (.., 256): K = 512
    scale = scale.unsqueeze(1).expand(-1, 32).contiguous()
    x = nvfp4.NVFP4Tensor(packed, scale, torch.ones(len(scale), 1, device=device))
    w = nvfp4.quantize(2688 * torch.eye(512, device=device), "tensor")
    assert raw(kernels.w4a4_gemm(x, w)) == raw(2688 * nvfp4.dequantize(x) + 0.0)


def test_what_the_mask_leaves_out_changes_no_bit(device, monkeypatch):
    """Even poison (scales of NaN) in the residual packet, in K tiles with and without kept blocks;
    nor do bytes (0xFF) around the operands and in fresh memory matter."""
    gemm, mask = kernels.w4a4_gemm, torch.arange(24, device=device) == 8
    packets, _, w, _, _ = operands(5, 24, 384, device)
    y, plain = gemm(packets, w, mask=mask), gemm(part(packets), w)

    def dirty(*shape, dtype=torch.float32, device=None):  # NaN in every float format here
        t = torch.zeros(*shape, dtype=dtype, device=device)
        room = torch.full((t.nbytes + 512,), 0xFF, dtype=torch.uint8, device=device)
        return room[256:-256].view(dtype).view(t.shape)

    monkeypatch.setattr(torch, "empty", dirty)
    again, _, v, _, _ = operands(5, 24, 384, device)
    assert raw(*again, *v) == raw(*packets, *w)
    again.scale.view(torch.uint8)[1, :, ~mask] = 0x7F
    assert raw(gemm(again, v, mask=mask)) == raw(y) != raw(plain)
    assert raw(gemm(again, v, mask=mask & ~mask)) == raw(plain)


def untile_kernel(ptr, out_ptr, columns, tiles, BLOCK_K: tl.constexpr):
    r, c = tl.program_id(0), tl.program_id(1)
    s = kernels.load_tiled_scales(ptr + r * tiles * 512, columns, c * 8, BLOCK_K)
    at = (r * 128 + tl.arange(0, 128))[:, None] * 16 + c * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + at, s)


def test_block_scales_are_tiled_128_by_4_and_read_back_in_order(device):
    """Byte (r % 32) * 16 + r // 32 * 4 + c of a tile of 512. What the native path loads, as far as
    it can run anywhere: 200 x 11 scales take 2 x 3 tiles, whose missing rows and columns are 0."""
    r, c = torch.arange(200, device=device).unsqueeze(1), torch.arange(11, device=device)
    scale = ((11 * r + c) % 120).byte()
    tiled = kernels.tile_scales(scale.view(torch.float8_e4m3fn)).view(torch.uint8)
    at = r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    assert tiled.shape == (2, 3, 512) and torch.equal(tiled[r // 128, c // 4, at], scale)
    out = torch.zeros(256, 16, dtype=torch.uint8, device=device)
    triton.jit(untile_kernel)[(2, 2)](tiled, out, 11, 3, BLOCK_K=128)
    assert torch.equal(out, torch.nn.functional.pad(scale, (0, 5, 0, 56)))


def test_what_does_not_fit_is_refused(device):
    packets, mask, w, _, _ = operands(4, 24, 32, device)
    x, experts = part(packets), nvfp4.NVFP4Tensor(*(t[None] for t in w))
    ones = torch.ones(24, 32, device=device, dtype=torch.bfloat16)
    zeros = torch.zeros(4, 1, dtype=torch.int64, device=device)
    quantize, split, gemm = kernels.quantize, kernels.quantize_with_residual, kernels.w4a4_gemm
    for message, call, *args in (
        ("K=20 of x is not", quantize, ones[:, :20]), ("must be bf16", quantize, ones.float()),
        ("outer is", quantize, ones, "column"), ("ratio", split, ones, 1.5),
        ("rows must be bool", split, ones, 0.5, ones[0] > 0),
        (r"w.scale .*\(24, 1\)", gemm, x, w._replace(packed=w.packed[:, :8].contiguous())),
        (r"w.global_scale \(outer='tensor'\)", gemm, x, quantize(ones)),
        (r"x.global_scale \(outer='row'\)", gemm, quantize(ones, "tensor"), w),
        ("x.scale must be", gemm, x._replace(scale=x.scale.view(torch.uint8)), w),
        (r"x.packed .*\(4, 16\)", gemm, packets, w), (r"w.packed .*\(24, 16\)", gemm, x, experts),
        (r"x.packed must be .*\(2, 4, 16\)", gemm, x, w, None, mask),
        (r"mask must be contiguous torch.bool \(2,\)", gemm, packets, w, None, mask.float()),
        (r"w.packed must be .*\(1, 24, 16\)", gemm, x, w, route(zeros, 1, 16, 64)),
        ("one a slot or token", gemm, x, experts, route(zeros[:3].expand(3, 2), 1, 16, 64)),
        ("least=16", gemm, x, experts, route(zeros, 1)),
        *([("misreads", gemm, x, w, None, None, True)] if kernels.INTERPRETED else ()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(*args)


@pytest.mark.parametrize("name", ["w4a4", "w4a4+rac"])
def test_an_engine_on_the_kernels_generates_what_one_on_torch_does(name, device):
    """Log-probs differ by the order of fp32 sums, and where that turns a bf16 rounding later on.
    Weight identity is read through the kernel, with the identity as input."""

    def generate(engine):
        prompts, rng = torch.arange(8).view(2, 4), torch.Generator().manual_seed(5)
        return engine.generate(prompts, 3, eos=16, pad=17, samples=2, generator=rng)

    policy = policy_of("w4a16", layers=1).to(device)
    engines = [rollout.Engine(policy, ARITHMETICS[name], b) for b in ("torch", "emulated")]
    assert [e.backend.name for e in engines] == ["torch (emulated)", "triton (emulated)"]
    assert engines[0].weight_bytes == engines[1].weight_bytes
    a, b = map(generate, engines)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.choice, b.choice)
    assert (a.logprobs - b.logprobs).abs().max() < 0.02
    for p in policy.parameters():
        p.data *= 2
    policy(torch.arange(6, device=device)[None])
    assert not engines[1].multiplies_what(policy)
    engines[1].sync()
    assert engines[1].multiplies_what(policy)


def test_the_backend_is_resolved_by_arithmetic_and_device(device):
    resolve, rac = rollout.resolve_backend, ARITHMETICS["w4a4+rac"]
    assert "W4A4" in resolve("auto", ARITHMETICS["w4a16"], device).reason
    by_channel = Arithmetic("nvfp4", "nvfp4", 0.5, "channel")
    assert "by block" in resolve("auto", by_channel, device).reason
    assert device != "cpu" or "need CUDA" in resolve("auto", rac, device).reason
    if not kernels.has_fp4(device)[0]:
        with pytest.raises(ValueError, match="use --backend emulated"):
            resolve("native", rac, device)


def test_a_failed_self_check_falls_back_to_torch_loudly(device, monkeypatch, capsys):
    checks, gemm = kernels.self_check(device, False), kernels.w4a4_gemm
    assert len(checks) == 7 and all(c.passed for c in checks), checks
    monkeypatch.setattr(kernels, "self_check", kernels.self_check.__wrapped__)  # no cache
    monkeypatch.setattr(kernels, "w4a4_gemm", lambda *args, **kw: gemm(*args, **kw) * 1.001)
    backend = rollout.resolve_backend("emulated", ARITHMETICS["w4a4"], device)
    said = capsys.readouterr().err
    assert backend.name == "torch (emulated)" and "FAILED" in backend.reason
    assert "WARNING" in said and "expert GEMM" in said and torch.__version__ in said


def test_triton_is_asked_for_cuda_tensors(monkeypatch):
    """Without the interpreter: a CPU tensor is an error, before a launch could crash."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "quantize_kernel", None)
    with pytest.raises(ValueError, match=r"CUDA.*quads_min\.nvfp4"):
        kernels.quantize(torch.ones(2, 32, dtype=torch.bfloat16))
