"""kernels.py against its torch reference: in the interpreter anywhere, on the GPU with -m gpu.

Quantizer and mask must agree bit for bit. For the GEMMs the bound is that of fp32 summation: each
of the at most 4 K additions of exact products (two packets, in any order, and two scales) is off by
2^-24 of a partial sum at most, which is at most sum |x| |w|; a tensor core may truncate instead of
rounding, so twice that: K 2^-21 sum |x| |w|.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import triton.language as tl
from test_model import policy_of
from test_nvfp4 import raw

import kernels
import rollout
from quads_min import nvfp4
from quads_min.model import route
from quads_min.modes import ARITHMETICS, Arithmetic
from quads_min.nvfp4 import NVFP4Tensor


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and not kernels.INTERPRETED:
        pytest.skip("with a GPU the kernels are compiled, not interpreted: use -m gpu")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def hard_rows(M, K, device, seed=0):
    """Rows of very different size, an outlier channel, a zero row, a quiet block, a zero block."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=rng) * (2 * torch.randn(M, 1, generator=rng)).exp()
    x[:, K // 2] *= 32
    x[0, :16] = 0
    if M > 2:
        x[1], x[2, :16] = 0, x[2, :16] * 1e-4
    return x.to(device, torch.bfloat16)


def operands(M, N, K, device, ratio=0.5, experts=()):
    """Packets (2, M, K), mask, weight, and in fp64: x^ and x^ + r^ of the kept blocks, w^."""
    packets, mask = kernels.quantize_with_residual(hard_rows(M, K, device), ratio)
    w = hard_rows(N * (experts or 1), K, device, seed=2)
    w = kernels.quantize(w.view(experts, N, K) if experts else w, "tensor")
    x, r = nvfp4.dequantize(packets).double()
    kept = torch.where(mask.repeat_interleave(16), r, 0.0)
    return packets, mask, w, (x, x + kept), nvfp4.dequantize(w).double()


def part(packets, packet=0, rows=slice(None)):
    """The main packet, the residual one (1), or both ([0, 1]); and of them some rows."""
    packed, scale = (t[packet, rows].contiguous() for t in packets[:2])
    return NVFP4Tensor(packed, scale, packets.global_scale[rows])


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
    w_hat = w_hat.expand(len(x_hat), -1, -1)
    expected = torch.einsum("sk,snk->sn", x_hat, w_hat)
    bound = x_hat.shape[1] * 2.0**-21 * torch.einsum("sk,snk->sn", x_hat.abs(), w_hat.abs())
    assert ((y.double() - expected).abs() <= bound).all() and expected.abs().max() > 0


@pytest.mark.parametrize(("M", "K"), [(1, 16), (5, 80), (33, 48), (3, 256), (1025, 16)])
def test_packets_mask_and_energies_in_tree_order_equal_the_reference_bit_for_bit(M, K, device):
    rows = torch.arange(M, device=device) % 3 != 2
    for ratio in (0.0, 0.3, 1.0):
        check_quantizer(hard_rows(M, K, device), ratio, rows)


def test_weights_and_rows_too_long_for_a_program_take_two_passes(device):
    v = hard_rows(6, 80, device).view(2, 3, 80)
    assert raw(*kernels.quantize(v, "tensor")) == raw(*nvfp4.quantize(v, "tensor"))
    check_quantizer(hard_rows(2, kernels.LONGEST_ROW + 16, device))


def test_any_strides_do_and_x_is_not_changed(device):
    wide = hard_rows(6, 97, device)
    before = wide.clone()
    for x in (wide[:, :64], wide[::2, 16:80], wide[:, 1:65], wide[0, 1:17],
              wide.as_strided((5, 16), (97, 2))):  # fmt: skip
        check_quantizer(x)
        assert torch.equal(before, wide)


def test_the_hard_values_of_the_format(device):
    """Midpoints both ways, E4M3 midpoints and edges, scale order (23, 28), subnormal block scales,
    huge and tiny numbers; all of them bf16 numbers but where rounding to bf16 moves them nearby."""
    grid = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    rows = [grid + [-v for v in grid], [23.0] * 16 + [28.0] * 16]
    for s in (448.0, 464.0, 1.0625, 1.1875, 2**-9, 1.5 * 2**-9, 2**-10, 0.0059 / 6, 240.0, 256.0):
        rows.append([2688.0] * 16 + [6 * s, 6 * s * 0.9999999, -0.0, 0.0239257794] * 4)
    rows += [[3e38, -1e-38] * 8, [1e-40, -1e-40] * 8, [-0.0] * 16, [0.02] * 16 + [5e-5] * 16]
    rows += [row[::-1] for row in rows]
    padded = [row + [0.0] * (32 - len(row)) for row in rows]  # which changes no scale
    check_quantizer(torch.tensor(padded).to(device, torch.bfloat16))


def test_inf_and_nan_are_refused_or_poison_the_global_scale(device):
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = hard_rows(3, 80, device)
        x[1, 70] = bad
        for quantize in (kernels.quantize, kernels.quantize_with_residual):
            with pytest.raises(ValueError, match="gate_up holds inf or NaN"):
                quantize(x, name="gate_up")
        g = kernels.quantize(x, check=False).global_scale
        assert torch.isfinite(g).flatten().tolist() == [True, False, True]


def test_empty_input_needs_no_launch(device):
    x = torch.empty(0, 32, device=device, dtype=torch.bfloat16)
    packets, mask = kernels.quantize_with_residual(x)
    assert packets.packed.shape == (2, 0, 16) and mask.tolist() == [True, False]
    w = kernels.quantize(torch.ones(24, 32, device=device, dtype=torch.bfloat16), "tensor")
    assert kernels.w4a4_gemm(packets, w, mask=mask).shape == (0, 24)


@pytest.mark.parametrize(("M", "N", "K"), [(3, 3, 16), (33, 70, 80), (17, 64, 128), (40, 40, 272)])
def test_gemm_equals_dequantize_and_matmul(M, N, K, device):
    packets, mask, w, (plain, compensated), w_hat = operands(M, N, K, device)
    check_gemm(kernels.w4a4_gemm(part(packets), w), plain, w_hat)
    check_gemm(kernels.w4a4_gemm(packets, w, mask=mask), compensated, w_hat)


@pytest.mark.parametrize("counts", [[0, 1, 127, 129], [0, 0, 3], [129]], ids=str)
def test_each_expert_gets_the_rows_of_its_own_gemm(counts, device):
    """Zero-token experts included; a row per slot (down) and a row per token (gate and up); tiles
    of 32, 16 and 64 rows."""
    E, K, slots = len(counts), 208, sum(counts)
    choice = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    choice = choice[torch.randperm(slots, generator=torch.Generator().manual_seed(0))].to(device)
    packets, mask, w, (plain, compensated), w_hat = operands(slots, 24, K, device, experts=E)
    y = kernels.w4a4_gemm(packets, w, route(choice[:, None], E, 16, 64), mask)
    check_gemm(y, compensated, w_hat[choice])
    T, pairs = slots // 2, choice[: slots // 2 * 2].view(-1, 2)
    y = kernels.w4a4_gemm(part(packets, 0, slice(T)), w, route(pairs, E, 16, 64))
    check_gemm(y, plain[:T].repeat_interleave(2, 0), w_hat[pairs.flatten()])


def test_a_row_has_the_same_bits_alone_and_in_any_batch(device):
    """Given the mask, and across tile sizes: every M in 1..129 on the GPU, tile edges elsewhere.
    K = 528 is split, and few rows sum the splits otherwise than many."""
    packets, mask, w, (_, compensated), w_hat = operands(129, 40, 528, device)
    assert kernels.k_splits(40, 528) > 1
    whole = kernels.w4a4_gemm(packets, w, mask=mask)
    check_gemm(whole, compensated, w_hat)
    for M in (1, 17, 64) if kernels.INTERPRETED else range(1, 129):
        y = kernels.w4a4_gemm(part(packets, [0, 1], slice(M)), w, mask=mask)
        assert raw(y) == raw(whole[:M]), M


def test_the_planes_are_exact_for_all_codes_and_scales(device):
    """Through the GEMM with the identity as weight: 16 codes times every E4M3 scale but NaN."""
    scale = torch.arange(0, 127, 9 if kernels.INTERPRETED else 1, device=device)  # slow there
    packed = torch.arange(256, device=device).byte().repeat(len(scale), 1)  # (.., 256): K = 512
    scale = scale.byte()[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    x = NVFP4Tensor(packed, scale, torch.ones(len(scale), 1, device=device))
    eye, one = torch.eye(512, device=device).unflatten(1, (-1, 16)), torch.ones(1, 1, device=device)
    w = nvfp4.Encoded(eye, one.expand(512, 32).contiguous(), one).pack()
    assert raw(kernels.w4a4_gemm(x, w)) == raw(nvfp4.dequantize(x) + 0.0)


def test_what_the_mask_leaves_out_changes_no_bit(device, monkeypatch):
    """Even poison (scales of NaN) in the residual packet, in K tiles with and without kept blocks;
    nor do bytes around the operands (0xFF) and in fresh memory matter."""
    gemm, mask = kernels.w4a4_gemm, torch.arange(24, device=device) == 8
    packets, _, w, _, _ = operands(5, 24, 384, device)
    scale = packets.scale.view(torch.uint8).clone()
    scale[1, :, ~mask] = 0x7F
    poisoned = packets._replace(scale=scale.view(torch.float8_e4m3fn))
    y, plain = gemm(packets, w, mask=mask), gemm(part(packets), w)
    assert raw(gemm(poisoned, w, mask=mask)) == raw(y) != raw(plain)
    assert raw(gemm(poisoned, w, mask=mask & ~mask)) == raw(plain)

    def cut(t):
        room = torch.full((t.nbytes + 512,), 0xFF, dtype=torch.uint8, device=device)
        room[256:-256] = t.view(torch.uint8).flatten()
        return room[256:-256].view(t.dtype).view(t.shape)

    def dirty(*shape, dtype=torch.float32, device=None):  # NaN in every float format here
        t = torch.zeros(*shape, dtype=dtype, device=device)
        return t.view(torch.uint8).fill_(0xFF).view(dtype)

    monkeypatch.setattr(torch, "empty", dirty)
    operand, weight = (NVFP4Tensor(*map(cut, t)) for t in (packets, w))
    assert raw(gemm(operand, weight, mask=cut(mask))) == raw(y)
    again, _ = kernels.quantize_with_residual(hard_rows(5, 384, device))
    assert raw(*again) == raw(*packets)


def untile_kernel(ptr, out_ptr, columns, tiles, BLOCK_K: tl.constexpr):
    r, c = tl.program_id(0), tl.program_id(1)
    s = kernels.load_tiled_scales(ptr + r * tiles * 512, columns, c * 8, BLOCK_K)
    at = (r * 128 + tl.arange(0, 128))[:, None] * 16 + c * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + at, s)


def test_block_scales_are_tiled_128_by_4_and_read_back_in_order(device):
    """(5, 80) takes 1,024 bytes; in a tile, byte (r % 32) * 16 + r // 32 * 4 + c. What the native
    path loads, as far as it can run anywhere: 200 x 11 scales."""

    def tile(scale):
        return kernels.tile_scales(scale.view(torch.float8_e4m3fn)).view(torch.uint8)

    zeros = torch.zeros(256, 16, dtype=torch.uint8, device=device)
    assert tile(zeros[:5, :5].contiguous()).numel() == 1024
    for r, c, offset in ((1, 0, 16), (32, 0, 4), (33, 2, 22), (127, 3, 511)):
        scale = zeros[:128, :4].clone()
        scale[r, c] = 1
        assert tile(scale).flatten().nonzero().item() == offset
    scale, out = torch.arange(200 * 11, device=device).view(200, 11) % 120, zeros.clone()
    triton.jit(untile_kernel)[(2, 2)](tile(scale.byte()), out, 11, 3, BLOCK_K=128)
    assert torch.equal(out[:200, :11], scale) and not out[200:].any() and not out[:, 11:].any()


def test_what_does_not_fit_is_refused(device):
    packets, mask, w, _, _ = operands(4, 24, 32, device)
    x, experts = part(packets), NVFP4Tensor(*(t[None] for t in w))
    ones = torch.ones(24, 32, device=device, dtype=torch.bfloat16)
    zeros = torch.zeros(4, 1, dtype=torch.int64, device=device)
    routing, three_rows = (route(c, 1, 16, 64) for c in (zeros, zeros[:3].expand(3, 2)))
    quantize, split, gemm = kernels.quantize, kernels.quantize_with_residual, kernels.w4a4_gemm
    for call, args, message in (
        (quantize, [ones[:, :20]], "K=20 of x is not"), (quantize, [ones.float()], "must be bf16"),
        (quantize, [ones, "column"], "outer is"), (split, [ones, 1.5], "ratio"),
        (split, [ones, 0.5, ones[0] > 0], "rows must be bool"),
        (gemm, [x, w._replace(packed=w.packed[:, :8].contiguous())], r"w.scale .*\(24, 1\)"),
        (gemm, [x, quantize(ones)], r"w.global_scale \(outer='tensor'\)"),
        (gemm, [quantize(ones, "tensor"), w], r"x.global_scale \(outer='row'\)"),
        (gemm, [x._replace(scale=x.scale.view(torch.uint8)), w], "x.scale must be"),
        (gemm, [packets, w], r"x.packed must be .*\(4, 16\)"),
        (gemm, [x, w, None, mask], r"x.packed must be .*\(2, 4, 16\)"),
        (gemm, [packets, w, None, mask.float()], r"mask must be contiguous torch.bool \(2,\)"),
        (gemm, [x, experts], r"w.packed must be .*\(24, 16\)"),
        (gemm, [x, w, routing], r"w.packed must be .*\(1, 24, 16\)"),
        (gemm, [x, experts, three_rows], "one a slot or token"),
        (gemm, [x, experts, route(zeros, 1)], "least=16"),
        *([(gemm, [x, w, None, None, True], "misreads")] if kernels.INTERPRETED else ()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(*args)


@pytest.mark.parametrize("name", ["w4a4", "w4a4+rac"])
def test_an_engine_on_the_kernels_generates_what_one_on_torch_does(name, device):
    """Log-probs differ by the order of fp32 sums, and where that turns a bf16 rounding later on.
    Weight identity is read through the kernel, with the identity as input; also after w -> 2w."""

    def generate(engine):
        prompts, rng = torch.arange(8).view(2, 4), torch.Generator().manual_seed(5)
        return engine.generate(prompts, 3, eos=16, pad=17, samples=2, generator=rng)

    policy, tokens = policy_of("w4a16", layers=1).to(device), torch.arange(6, device=device)
    engines = [rollout.Engine(policy, ARITHMETICS[name], b) for b in ("torch", "emulated")]
    assert [e.backend.name for e in engines] == ["torch (emulated)", "triton (emulated)"]
    assert engines[0].weight_bytes == engines[1].weight_bytes
    a, b = map(generate, engines)
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.choice, b.choice)
    assert (a.logprobs - b.logprobs).abs().max() < 0.02
    for factor in (1, 2):
        for p in policy.parameters():
            p.data *= factor
        policy(tokens[None])
        assert engines[1].multiplies_what(policy) == (factor == 1)
    engines[1].sync()
    fresh = rollout.Engine(policy, ARITHMETICS[name], "emulated")
    assert engines[1].multiplies_what(policy)
    assert raw(*generate(engines[1])[:2]) == raw(*generate(fresh)[:2])


def test_the_backend_is_resolved_by_arithmetic_and_device(device):
    resolve, rac = rollout.resolve_backend, ARITHMETICS["w4a4+rac"]
    assert resolve("torch", rac, device).name == "torch (emulated)"
    assert "W4A4" in resolve("auto", ARITHMETICS["w4a16"], device).reason
    by_channel = Arithmetic("nvfp4", "nvfp4", 0.5, "channel")
    assert "by block" in resolve("auto", by_channel, device).reason
    assert device != "cpu" or "need CUDA" in resolve("auto", rac, device).reason
    if not kernels.has_fp4(device)[0]:
        assert resolve("emulated", rac, device).name == "triton (emulated)"
        with pytest.raises(ValueError, match="use --backend emulated"):
            resolve("native", rac, device)


def test_a_failed_self_check_falls_back_to_torch_loudly(device, monkeypatch, capsys):
    policy = policy_of("w4a16", layers=1).to(device)
    checks, gemm = kernels.self_check(device, False), kernels.w4a4_gemm
    assert len(checks) == 7 and all(c.passed for c in checks), checks
    kernels.self_check.cache_clear()
    monkeypatch.setattr(kernels, "w4a4_gemm", lambda *args, **kw: gemm(*args, **kw) * 1.001)
    backend = rollout.Engine(policy, ARITHMETICS["w4a4"], "emulated").backend
    kernels.self_check.cache_clear()
    said = capsys.readouterr().err
    assert backend.name == "torch (emulated)" and "FAILED" in backend.reason
    assert "WARNING" in said and "expert GEMM" in said and torch.__version__ in said


@pytest.mark.gpu
def test_a_graph_replayed_with_new_routing_equals_eager():
    """The tile table is built on the device, the grid depends on shapes alone."""
    E, T, K, N = 8, 40, 128, 64
    w = kernels.quantize(torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16), "tensor")

    def layer(x, choice, live):
        packets, mask = kernels.quantize_with_residual(x, rows=live, check=False)
        return (kernels.w4a4_gemm(packets, w, route(choice, E, 16, 64), mask),)

    graphed = rollout.Graphed(layer)
    for seed in range(3):
        torch.manual_seed(seed)
        choice = torch.rand(T, E, device="cuda").topk(2).indices
        x, live = torch.randn(T, K).bfloat16().cuda(), torch.rand(T, device="cuda") > 0.3
        assert raw(*graphed(x, choice, live)) == raw(*layer(x, choice, live))


def test_triton_is_asked_for_cuda_tensors():
    """In a process without the interpreter: a CPU tensor is an error, not a crash."""
    code = """import torch, kernels
try: kernels.quantize(torch.ones(2, 32, dtype=torch.bfloat16))
except ValueError as e: assert "CUDA" in str(e) and "quads_min.nvfp4" in str(e), e
else: raise SystemExit("no error")"""
    root = Path(kernels.__file__).parent
    env = {"PATH": "/usr/bin:/bin", "HOME": str(root)}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=env, check=True)
