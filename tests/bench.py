"""How fast the kernels are, beside the strongest bf16 and fp8 that torch offers. Needs a GPU.

    python tests/bench.py                       all of it, a minute
    python tests/bench.py --only quantize engine

Every time is the median of replays of a CUDA graph of 24 calls that go round buffers larger than
the L2 cache together. Shares are of what this card was measured to do in the same run: copy
bandwidth for what moves bytes, a bf16 matmul of 8,192^3 for what multiplies. Bytes are those that
must move once: a W4A4 weight is 0.5625 B, bf16 2 B, fp8 1 B.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script of tests/: the root is not on it
import kernels
import rollout
from quads_min import checkpoint, nvfp4
from quads_min.model import route
from quads_min.modes import ARITHMETICS, Arithmetic

W4 = 0.5625
MOE = {"gate_up": (128, 8, 1536, 2048), "down": (128, 8, 2048, 768)}  # E, top_k, N, K: a layer like
TOKENS = (16, 64, 4096)  # those of Qwen3-30B-A3B


def microseconds(calls, count: int = 24, repeats: int = 20) -> float:
    """Median time of a call. A graph leaves out what the CPU takes to launch, which would hide a
    kernel of a few microseconds."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[1:])


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def copies(make, bytes_each: float) -> list:
    """As many as are together three times the L2 cache, 24 at most."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return [make() for _ in range(max(1, min(24, int(3 * l2 / bytes_each) + 1)))]


def show(what: str, path: str, calls, moved: float, flops: float = 0) -> None:
    """A line: time, and the rate by bytes or by operations, as a share of the card's own."""
    try:
        us = microseconds(calls)
    except (RuntimeError, NotImplementedError, AttributeError):  # torch lacks it for this shape
        torch.cuda.synchronize()
        print(f"{what:52} {path:9} {'-':>9}")
        return
    share = 100 * moved / us / 1e3 / COPY
    rate = f"{moved / us / 1e3:6.0f} GB/s {share:4.0f} %"
    if flops:
        rate += f" {flops / us / 1e6:7.1f} TFLOP/s {100 * flops / us / 1e6 / MATMUL:4.0f} %"
    print(f"{what:52} {path:9} {us:9.2f} us {rate}", flush=True)


def bench_quantize(path: str) -> None:
    for M, K in ((256, 128), (64, 2048), (4096, 4096)):
        xs = copies(lambda: normal(M, K), 2.0 * M * K)
        live = torch.ones(M, dtype=torch.bool, device="cuda")
        for what, call, packets in (
            ("", lambda x: kernels.quantize(x, check=False), 1),
            (" + residual, energies", lambda x: kernels._quantize(x, "row", "x", live), 2),
            (" + mask", lambda x: kernels.quantize_with_residual(x, rows=live, check=False), 2),
        ):
            calls = [lambda x=x: call(x) for x in xs]
            show(f"quantize {M} x {K}{what}", path, calls, (2 + packets * W4) * M * K)


def bench_gemm(path: str, native: bool) -> None:
    """Dense N = K = 4096, and both expert GEMMs of MOE."""
    for layer, (E, top_k, N, K) in {"dense": (0, 1, 4096, 4096), **MOE}.items():
        shape, count = ((E, N, K) if E else (N, K)), (E or 1) * N * K
        wb = copies(lambda: normal(*shape), 2.0 * count)
        w8 = [nvfp4.encode_fp8(w) for w in wb]
        ws = copies(lambda: kernels.quantize(normal(*shape), "tensor", check=False), W4 * count)
        if native:
            ws = [w._replace(scale=kernels.tile_scales(w.scale)) for w in ws]
        for T in TOKENS:
            torch.manual_seed(T)
            choice = torch.rand(T, max(E, 1), device="cuda").topk(top_k).indices
            routing = route(choice, E, 16, 64) if E else None
            if layer == "gate_up":
                show(f"route E={E} T={T} (torch)", path, [lambda: route(choice, E, 16, 64)], 0)
            slots, hit = T * top_k, len(choice.unique())
            xb = normal(slots if layer == "down" else T, K)  # a row per slot, or per token
            flops, name = 2 * slots * N * K, f"{layer} N={N} K={K} T={T}"
            plain = kernels.quantize(xb)
            for what, ratio in (("", 0), (" + RAC 0.5", 0.5), (" + RAC 1.0", 1.0)):
                x, mask = kernels.quantize_with_residual(xb, ratio) if ratio else (plain, None)
                calls = [lambda w=w: kernels.w4a4_gemm(x, w, routing, mask, native) for w in ws]
                show(f"{name} w4a4{what}", path, calls, W4 * hit * N * K, flops)
            if not E:
                x8, sx = nvfp4.encode_fp8(xb)
                calls = [lambda w=w: xb @ w.T for w in wb]
                fp8 = [lambda w=w: torch._scaled_mm(
                    x8, w[0].T, sx, w[1].T, out_dtype=torch.bfloat16
                ) for w in w8]  # fmt: skip
            else:
                order = choice.flatten().argsort(stable=True)
                rows = xb[order] if layer == "down" else xb[order // top_k]
                ends = torch.bincount(choice.flatten(), minlength=E).cumsum(0).int()
                x8, sx = nvfp4.encode_fp8(rows)
                calls = [lambda w=w: torch._grouped_mm(rows, w.mT, ends) for w in wb]
                fp8 = [lambda w=w: torch._scaled_grouped_mm(
                    x8, w[0].mT, sx.flatten(), w[1].squeeze(-1), ends, out_dtype=torch.bfloat16
                ) for w in w8]  # fmt: skip
            show(f"{name} bf16", "torch", calls, 2 * hit * N * K, flops)
            show(f"{name} fp8", "torch", fp8, hit * N * K, flops)


def bench_engine() -> None:
    policy, task = checkpoint.load_policy(rollout.SHIPPED / "base.pt", Arithmetic())
    prompts = rollout.held_out_prompts(task, 16)
    for name, arithmetic in ARITHMETICS.items():
        engine = rollout.Engine(policy.to("cuda"), arithmetic)
        ask = (prompts, task.max_new_tokens, task.eos, task.pad, 16)
        tokens, times = int(engine.generate(*ask).lengths.sum()), []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            engine.generate(*ask)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        ms = statistics.median(times)
        print(f"engine {name:9} {engine.backend.name:18} {ms:7.2f} ms for 16 x 16 completions, "
              f"{tokens / ms * 1e3:8.0f} tokens/s")  # fmt: skip


def estimate(bandwidth: float, flops: float) -> None:
    """Roofline: the larger of bytes / bandwidth and FLOPs / rate. Nothing was run for this."""
    print(f"\nESTIMATE, not measured, for a card of {bandwidth:g} TB/s and {flops:g} PFLOP/s dense "
          "FP4 (default: vendor's figures for an HGX B200):")  # fmt: skip
    for layer, (E, top_k, N, K) in MOE.items():
        for T in (64, 4096):
            hit = E * (1 - (1 - top_k / E) ** T)  # experts hit, on average
            moved = (W4 * hit * N + W4 * T * top_k) * K + 4 * T * top_k * N
            memory = moved / bandwidth / 1e6
            once, twice = (2 * p * T * top_k * N * K / flops / 1e9 for p in (1, 2))
            print(f"  {layer} T={T}: {moved / 1e6:.0f} MB -> {memory:.1f} us; MMA {once:.1f} us, "
                  f"with RAC {twice:.1f} us: RAC costs at least "
                  f"x {max(memory, twice) / max(memory, once):.2f}")  # fmt: skip


if __name__ == "__main__":
    sections = ("quantize", "gemm", "engine", "estimate")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--estimate-bandwidth", type=float, default=8.0, help="TB/s")
    parser.add_argument("--estimate-fp4", type=float, default=9.0, help="PFLOP/s, dense")
    args = parser.parse_args()
    if set(args.only) != {"estimate"}:
        if not torch.cuda.is_available():
            parser.error("needs a CUDA device")
        native, card = kernels.has_fp4("cuda")
        path = "native" if native else "emulated"
        a, b = (torch.empty(1 << 28, device="cuda", dtype=torch.uint8) for _ in range(2))
        COPY = 2 * a.numel() / microseconds([lambda: b.copy_(a)], 8) / 1e3  # GB/s
        x, w = normal(8192, 8192), normal(8192, 8192)
        MATMUL = 2 * 8192**3 / microseconds([lambda: x @ w.T], 4) / 1e6  # TFLOP/s
        print(f"{card}\ncopy {COPY:.0f} GB/s, bf16 matmul {MATMUL:.0f} TFLOP/s\n")
    if "quantize" in args.only:
        bench_quantize(path)
    if "gemm" in args.only:
        bench_gemm(path, native)
    if "engine" in args.only:
        bench_engine()
    if "estimate" in args.only:
        estimate(args.estimate_bandwidth, args.estimate_fp4)
