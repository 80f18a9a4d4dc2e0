"""How fast the kernels are, beside the strongest bf16 and fp8 that torch offers. Needs a GPU.

    python tests/bench.py --only quantize engine        without --only: all of it, a minute

Every time is the median of replays of a CUDA graph of 24 calls that go round buffers larger than
the L2 cache together. Shares are of what this card was measured to do in the same run: copy
bandwidth for what moves bytes, a bf16 matmul of 8,192^3 for what multiplies. Bytes are those that
must move once: a W4A4 weight is 0.5625 B, bf16 2 B, fp8 1 B.
"""

import argparse
import statistics
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script of tests/: the root is not on it
import kernels
import rollout
from quads_min import checkpoint, nvfp4
from quads_min.model import route
from quads_min.modes import ARITHMETICS, Arithmetic

W4 = 0.5625
MOE = {"gate_up": (128, 8, 1536, 2048), "down": (128, 8, 2048, 768)}  # E, top_k, N, K (Qwen3-30B)
normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)


def milliseconds(call, repeats: int) -> float:
    """Median time of a call on the device, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def microseconds(call, buffers: list, count: int = 24) -> float:
    """Median time of call(buffer), in a graph: alone, a small kernel would wait for the CPU."""
    call(buffers[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(buffers[i % len(buffers)])
    return milliseconds(graph.replay, 20) * 1e3 / count


def copies(make, bytes_each: float) -> list:
    """As many as are together three times the L2 cache, 24 at most."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return [make() for _ in range(min(24, int(3 * l2 / bytes_each) + 1))]


def show(what: str, path: str, call, buffers: list, moved: float, flops: float = 0) -> None:
    """A line: time, and the rate by bytes or by operations, as a share of the card's own."""
    try:
        us = microseconds(call, buffers)
    except (RuntimeError, NotImplementedError, AttributeError):  # torch lacks it for this shape
        torch.cuda.synchronize()
        return print(f"{what:52} {path:9} {'-':>9}")
    rate = f"{moved / us / 1e3:6.0f} GB/s {100 * moved / us / 1e3 / COPY:4.0f} %"
    if flops:
        rate += f" {flops / us / 1e6:7.1f} TFLOP/s {100 * flops / us / 1e6 / MATMUL:4.0f} %"
    print(f"{what:52} {path:9} {us:9.2f} us {rate}", flush=True)


def bench_quantize() -> None:
    for M, K in ((256, 128), (64, 2048), (4096, 4096)):
        xs = copies(lambda: normal(M, K), 2.0 * M * K)
        live = torch.ones(M, dtype=torch.bool, device="cuda")
        for what, call, packets in (
            ("", partial(kernels.quantize, check=False), 1),
            (" + residual, energies", lambda x: kernels._quantize(x, "row", "x", live), 2),
            (" + mask", partial(kernels.quantize_with_residual, rows=live, check=False), 2),
        ):
            show(f"quantize {M} x {K}{what}", PATH, call, xs, (2 + packets * W4) * M * K)


def rivals(x: torch.Tensor, choice: torch.Tensor, E: int) -> tuple:
    """torch's bf16 and fp8 GEMM of x, as calls of a weight: dense, or rows sorted by expert."""
    order, ends = choice.flatten().argsort(stable=True), choice.flatten().bincount(minlength=E)
    x, ends = x[order // (len(order) // len(x))], ends.cumsum(0).int()
    (x8, sx), out = nvfp4.encode_fp8(x), {"out_dtype": torch.bfloat16}
    if not E:
        return lambda w: x @ w.T, lambda w: torch._scaled_mm(x8, w[0].T, sx, w[1].T, **out)
    return lambda w: torch._grouped_mm(x, w.mT, ends), lambda w: torch._scaled_grouped_mm(
        x8, w[0].mT, sx.flatten(), w[1].squeeze(-1), ends, **out)  # fmt: skip


def bench_gemm() -> None:
    """Dense N = K = 4096, and both expert GEMMs of MOE."""
    for layer, (E, top_k, N, K) in {"dense": (0, 1, 4096, 4096), **MOE}.items():
        shape, native = (E, N, K)[not E :], PATH == "native"
        wb = copies(lambda: normal(*shape), W4 * max(E, 1) * N * K)
        w8 = [nvfp4.encode_fp8(w) for w in wb]
        ws = [kernels.quantize(w, "tensor", check=False) for w in wb]
        if native:
            ws = [w._replace(scale=kernels.tile_scales(w.scale)) for w in ws]
        for T in (16, 64, 4096):
            torch.manual_seed(T)
            choice = torch.rand(T, max(E, 1), device="cuda").topk(top_k).indices
            routing = route(choice, E, 16, 64) if E else None
            rows, read = T * top_k, len(choice.unique()) * N * K  # weights of the experts hit
            xb = normal(rows if layer == "down" else T, K)  # a row per slot, or per token
            flops, name = 2 * rows * N * K, f"{layer} N={N} K={K} T={T}"
            packets = {"": (kernels.quantize(xb), None)}
            packets |= {f" + RAC {r}": kernels.quantize_with_residual(xb, r) for r in (0.5, 1.0)}
            for what, (x, mask) in packets.items():
                call = partial(kernels.w4a4_gemm, x, routing=routing, mask=mask, native=native)
                show(f"{name} w4a4{what}", PATH, call, ws, W4 * read, flops)
            bf16, fp8 = rivals(xb, choice, E)
            show(f"{name} bf16", "torch", bf16, wb, 2 * read, flops)
            show(f"{name} fp8", "torch", fp8, w8, read, flops)


def bench_engine() -> None:
    policy, task = checkpoint.load_policy(rollout.SHIPPED / "base.pt", Arithmetic())
    prompts = rollout.held_out_prompts(task, 16)
    for name, arithmetic in ARITHMETICS.items():
        engine = rollout.Engine(policy.to("cuda"), arithmetic)
        call = partial(engine.generate, prompts, task.max_new_tokens, task.eos, task.pad, 16)
        tokens, ms = int(call().lengths.sum()), milliseconds(call, 12)
        print(f"engine {name:9} {engine.backend.name:18} {ms:7.2f} ms for 16 x 16 completions, "
              f"{tokens / ms * 1e3:8.0f} tokens/s")  # fmt: skip


def estimate(bandwidth: float, flops: float) -> None:
    """Roofline: the larger of bytes / bandwidth and FLOPs / rate. Nothing was run for this."""
    print(f"\nESTIMATE, not measured, for a card of {bandwidth:g} TB/s and {flops:g} PFLOP/s dense "
          "FP4 (default: vendor's figures for an HGX B200):")  # fmt: skip
    for (layer, (E, top_k, N, K)), T in product(MOE.items(), (64, 4096)):
        hit = E * (1 - (1 - top_k / E) ** T)  # experts hit, on average
        moved = (W4 * hit * N + W4 * T * top_k) * K + 4 * T * top_k * N
        memory = moved / bandwidth / 1e6
        once, twice = (2 * p * T * top_k * N * K / flops / 1e9 for p in (1, 2))
        ratio = max(memory, twice) / max(memory, once)
        print(f"  {layer} T={T}: {moved / 1e6:.0f} MB -> {memory:.1f} us; MMA {once:.1f} us, "
              f"with RAC {twice:.1f} us: RAC costs at least x {ratio:.2f}")  # fmt: skip


if __name__ == "__main__":
    sections = {"quantize": bench_quantize, "gemm": bench_gemm, "engine": bench_engine}
    sections |= {"estimate": lambda: estimate(args.estimate_bandwidth, args.estimate_fp4)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--estimate-bandwidth", type=float, default=8.0, help="TB/s")
    parser.add_argument("--estimate-fp4", type=float, default=9.0, help="PFLOP/s, dense")
    args = parser.parse_args()
    if {*args.only} != {"estimate"}:
        if not torch.cuda.is_available():
            parser.error("needs a CUDA device")
        native, card = kernels.has_fp4("cuda")
        PATH = "native" if native else "emulated"
        a, b = (torch.empty(1 << 28, device="cuda", dtype=torch.uint8) for _ in range(2))
        COPY = 2 * a.numel() / microseconds(b.copy_, [a], 8) / 1e3  # GB/s
        x, w = normal(8192, 8192), normal(8192, 8192)
        MATMUL = 2 * 8192**3 / microseconds(x.matmul, [w.T], 4) / 1e6  # TFLOP/s
        print(f"{card}\ncopy {COPY:.0f} GB/s, bf16 matmul {MATMUL:.0f} TFLOP/s\n")
    for name in args.only:
        sections[name]()
