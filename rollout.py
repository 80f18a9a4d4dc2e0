"""The rollout engine: a quantized snapshot of the policy that generates completions.

    engine = Engine(policy, arithmetic)
    engine.sync()                                    weights: master -> packed, once per update
    rollout = engine.generate(prompts, ...)          tokens, and the log-probs of sampling them

Activations are quantized online, in every expert GEMM of every decode step; so is the residual of
RAC, whose channel mask is chosen anew in each GEMM over the sequences that are still running:

    r = x - x^,   m = the blocks with most energy in r,   r^ = DQ(Q(r * m)),   y = (x^ + r^) (V^)^T

Both sides round dense weights, queries, keys and values to bf16. Embedding and residual stream are
bf16 here and fp32 in the trainer, and sums have another order: the natural drift between two sides
that would otherwise compute the same.

As a script:

    python rollout.py                                                a policy's pass@1, completions
    python rollout.py CHECKPOINT --arithmetic bf16,w4a4,w4a4+rac     the same in several arithmetics
    python rollout.py --errors                                       where the gap comes from
    python rollout.py --self-check                                   are the Triton kernels right?

The second is the control that tells *deployment loss* (the policy is good, the arithmetic it is
served in hurts) from *RL collapse* (the policy itself went bad). Next: kernels.py.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from quads_min import analysis, checkpoint, nvfp4, runs
from quads_min.grpo import token_logprobs
from quads_min.model import Cache, ExpertLinear, MoETransformer, Routing, route
from quads_min.modes import ARITHMETICS, Arithmetic
from quads_min.qat import Operand, encode_operand, grouped_matmul
from quads_min.tasks import ChainTask

SHIPPED = Path(checkpoint.__file__).parent / "checkpoints"  # the warm-started policies
TILES = {"least": 16, "most": 64}  # rows of an expert's tile, as the kernels want them


class Rollout(NamedTuple):
    """B completions of N tokens. What lies past `lengths` is padding, its log-probs meaningless."""

    tokens: torch.Tensor  # (B, N) int64
    logprobs: torch.Tensor  # (B, N) fp32, of the sampled tokens, at the sampling temperature
    lengths: torch.Tensor  # (B,) int64, EOS included
    choice: torch.Tensor  # (B, L, P + N - 1, top_k) int64: the experts of every token that was read


# ---- the experts: a class for each backend


class TorchExperts(ExpertLinear):
    """The engine's expert matmul in plain torch: the numbers of an FP4 GEMM, not its speed.

    `stored` is the snapshot as an FP4 engine would hold it; `operand` its planes, decoded at sync.
    """

    def __init__(self, experts, n, k, outliers, arithmetic: Arithmetic, drift: float = 0.0):
        super().__init__(experts, n, k, outliers)
        self.arithmetic, self.drift = arithmetic, drift
        self.stored: tuple[torch.Tensor, ...] = ()
        self.operand: Operand | None = None

    def load(self, v: torch.Tensor) -> None:
        """Quantize and pack V (E, N, K), later times in place: CUDA graphs hold addresses."""
        v = v.detach().to(torch.bfloat16)
        if self.arithmetic.weights == "nvfp4":
            stored = nvfp4.encode(v, "tensor").pack()
            operand = Operand(nvfp4.unpack(stored).planes(), stored.global_scale)
        elif self.arithmetic.weights == "fp8":
            stored = nvfp4.encode_fp8(v)
            operand = Operand(stored[0].float(), stored[1])
        else:
            stored, operand = (v,), Operand(v.float(), None)
        if self.operand is None:
            self.stored, self.operand = stored, operand
            return
        for mine, new in zip((*self.stored, *self.operand), (*stored, *operand), strict=True):
            if mine is not None:
                mine.copy_(new)

    def forward(self, x: torch.Tensor, routing: Routing, live: torch.Tensor | None) -> torch.Tensor:
        if self.drift:  # injected mismatch: noise relative to the row's rms, before quantization
            rms = x.square().mean(-1, keepdim=True).sqrt()
            x = x + self.drift * rms * torch.randn_like(x)
        return super().forward(x, routing, live)

    def product(self, x: torch.Tensor, routing: Routing, live: torch.Tensor | None) -> torch.Tensor:
        a = self.arithmetic
        if not a.rac_ratio:
            return grouped_matmul(encode_operand(x, a.activations), self.operand, routing)
        main, residual, _ = nvfp4.encode_with_residual(x, a.rac_ratio, a.rac_unit, rows=live)
        x_hat = Operand(main.planes(), main.global_scale)
        return grouped_matmul(x_hat, self.operand, routing, residual.planes())

    def weights_seen(self) -> torch.Tensor:
        """What the GEMM multiplies, (E, N, K) fp32, read through it with the identity as input."""
        E, N, K = self.shape
        one = torch.ones((), device=self.stored[0].device)
        eye = torch.eye(K, device=one.device).repeat(E, 1).unflatten(1, (-1, nvfp4.QBLOCK))
        eye = nvfp4.Encoded(eye, one.expand(eye.shape[:2]), one.expand(E * K, 1))
        expert = torch.arange(E, device=one.device).repeat_interleave(K, output_size=E * K)
        y = self.multiply(eye, route(expert.unsqueeze(1), E, **TILES))
        return y.view(E, K, N).mT

    def multiply(self, x: nvfp4.Encoded, routing: Routing) -> torch.Tensor:
        return grouped_matmul(Operand(x.planes(), x.global_scale), self.operand, routing)


class TritonExperts(TorchExperts):
    """W4A4, with or without RAC by block, in the kernels of kernels.py."""

    def __init__(self, experts, n, k, outliers, arithmetic: Arithmetic, drift: float, native: bool):
        super().__init__(experts, n, k, outliers, arithmetic, drift)
        import kernels  # not at the top, so that every other path works without Triton

        self.kernels, self.native = kernels, native

    def load(self, v: torch.Tensor) -> None:
        new = self.kernels.quantize(v.detach().to(torch.bfloat16), "tensor", check=False)
        if self.native:
            new = new._replace(scale=self.kernels.tile_scales(new.scale))
        if not self.stored:
            self.stored = new
            return
        for mine, tensor in zip(self.stored, new, strict=True):
            mine.copy_(tensor)

    def product(self, x: torch.Tensor, routing: Routing, live: torch.Tensor | None) -> torch.Tensor:
        k, ratio, mask = self.kernels, self.arithmetic.rac_ratio, None
        if ratio:
            x_hat, mask = k.quantize_with_residual(x, ratio, live, check=False)
        else:
            x_hat = k.quantize(x, check=False)
        return k.w4a4_gemm(x_hat, self.stored, routing, mask, self.native)

    def multiply(self, x: nvfp4.Encoded, routing: Routing) -> torch.Tensor:
        packet = nvfp4.NVFP4Tensor(*(t.contiguous() for t in x.pack()))
        return self.kernels.w4a4_gemm(packet, self.stored, routing, native=self.native)


# ---- which of them runs

BACKENDS = ("auto", "torch", "emulated", "native")


class Backend(NamedTuple):
    name: str  # "torch (emulated)", "triton (emulated)" or "triton (native)"
    reason: str


def resolve_backend(backend: str, arithmetic: Arithmetic, device: torch.device | str) -> Backend:
    """What `backend` means for this arithmetic on this device.

    The kernels are W4A4: other arithmetics run in torch. "auto" takes them on CUDA, "native" on a
    card with FP4 tensor cores and "emulated" on others; these two names insist. Kernels that fail
    their self-check are not used: torch takes over, and says so on stderr.
    """
    device, in_torch, obstacle = torch.device(device), partial(Backend, "torch (emulated)"), ""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return in_torch("asked for")
    if (arithmetic.weights, arithmetic.activations) != ("nvfp4", "nvfp4"):
        return in_torch(f"the Triton kernels are W4A4, these experts {arithmetic}")
    if arithmetic.rac_ratio and arithmetic.rac_unit != "block":
        return in_torch("the Triton kernels compensate by block, not by channel")
    try:
        import kernels

        if device.type != "cuda" and (backend == "auto" or not kernels.INTERPRETED):
            obstacle = f"the Triton kernels need CUDA, this is {device}"
    except ImportError as e:
        obstacle = f"no Triton here ({e})"
    if obstacle and backend == "auto":
        return in_torch(obstacle)
    if obstacle:
        raise ValueError(f"backend {backend}: {obstacle}; use --backend torch")
    able, card = kernels.has_fp4(device)
    if backend == "native" and not able:
        raise ValueError(f"backend native: {card}; use --backend emulated")
    path = "native" if able and backend != "emulated" else "emulated"
    failed = [c for c in kernels.self_check(str(device), path == "native") if not c.passed]
    if not failed:
        return Backend(f"triton ({path})", "asked for" if backend == path else card)
    what = "; ".join(f"{c.kernel}: {c.found}" for c in failed)
    reason = f"the {path} kernels FAILED their self-check ({what}) on {card}"
    print(f"WARNING: {reason}. Falling back to torch.", file=sys.stderr, flush=True)
    return in_torch(reason)


# ---- CUDA graphs: the toy is so small that launching kernels one by one takes most of the time


class Graphed:
    """fn(*tensors) -> tuple of tensors, replayed as a CUDA graph; on a CPU simply called.

    The first call with given shapes records every kernel that fn launches, later ones launch the
    recording with the inputs copied into place. So fn must not wait for the device, nor depend on
    anything but tensors that stay where they are: weights are updated in place. Results are copies.
    A recorded backward writes the .grad tensors that it allocated, afresh at each replay.
    """

    def __init__(self, fn: Callable[..., tuple[torch.Tensor, ...]]):
        self.fn, self.recorded = fn, {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if inputs[0].device.type != "cuda":
            return self.fn(*inputs)
        shapes = tuple(t.shape for t in inputs)
        if shapes not in self.recorded:
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            static = [t.clone() for t in inputs]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.fn(*static)  # warm up: libraries allocate workspaces outside the graph
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                outputs = self.fn(*static)
            self.recorded[shapes] = graph, static, outputs
        graph, static, outputs = self.recorded[shapes]
        for mine, new in zip(static, inputs, strict=True):
            mine.copy_(new)
        graph.replay()
        return tuple(t.clone() for t in outputs)


# ---- the engine


class Engine:
    """A snapshot of `policy` in `arithmetic`, ready to generate. Call `sync` after each update.

    Args:
        policy: the trainer's model (qat.make_policy); read at each sync, never written.
        arithmetic: of the experts' GEMMs (modes.py).
        backend: of BACKENDS, see resolve_backend.
        drift: injected noise on the experts' inputs, relative to their rms (0: none).
    """

    def __init__(
        self, policy: MoETransformer, arithmetic: Arithmetic, backend: str = "auto",
        drift: float = 0.0,
    ):  # fmt: skip
        self.policy, self.arithmetic = policy, arithmetic
        self.device = policy.embed.device
        self.backend = resolve_backend(backend, arithmetic, self.device)
        experts, router = partial(TorchExperts, arithmetic=arithmetic, drift=drift), route
        if self.backend.name.startswith("triton"):
            native = self.backend.name == "triton (native)"
            experts = partial(TritonExperts, arithmetic=arithmetic, drift=drift, native=native)
            router = partial(route, **TILES)
        self.model = MoETransformer(policy.config, experts, torch.bfloat16, router)
        self.model.to(self.device).requires_grad_(False)
        for name, p in self.model.named_parameters():
            if name.endswith(("embed", "head", "qkv", "out")):
                p.data = p.data.to(torch.bfloat16)
        self.experts = self.model.expert_linears()
        self.programs: dict[tuple, Graphed] = {}  # one per settings of `generate`
        self.copy_weights = Graphed(self._copy_weights)
        self.sync()

    def sync(self) -> None:
        """Copy the policy's weights: dense ones rounded to bf16, experts quantized and packed. They
        are read where they were at the first call: update a policy in place."""
        self.copy_weights(self.policy.embed[:1, :1].detach())  # Graphed wants a tensor: any will do

    @torch.no_grad()
    def _copy_weights(self, _) -> tuple:
        masters = dict(self.policy.named_parameters())
        for name, p in self.model.named_parameters():
            p.copy_(masters[name])
        for name, master in self.policy.expert_linears().items():
            self.experts[name].load(master.scaled_weight())
        return ()

    @torch.no_grad()
    def multiplies_what(self, policy: MoETransformer) -> torch.Tensor:
        """0-dim bool: are the weights in every expert GEMM those of the policy's latest one, bit
        for bit? Read through the GEMM itself, so that packing, layout and decoding are covered."""
        masters = policy.expert_linears()
        equal = [
            (mine.weights_seen() == masters[name].consumed.value()).all()
            for name, mine in self.experts.items()
        ]
        return torch.stack(equal).all()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the experts' weights as stored, scales included."""
        return sum(t.nbytes for e in self.experts.values() for t in e.stored)

    def generate(
        self, prompts: torch.Tensor, max_new_tokens: int, eos: int, pad: int, samples: int = 1,
        temperature: float = 1.0, generator: torch.Generator | None = None, eager: bool = False,
    ) -> Rollout:  # fmt: skip
        """Sample `samples` completions of each prompt; those of one prompt are neighbours.

        Args:
            prompts: (B / samples, P) int64, all of one length. Each is read once: its KV cache is
                shared by copying, as engines with prefix caching do.
            max_new_tokens: N; a sequence stops after `eos` or N tokens; `pad` fills the rest.
            temperature: above 0; log-probs are taken at it.
            generator: on the CPU. Token i of row b depends on uniform [b, i] of one draw alone, so
                equal seeds give engines of different arithmetic common random numbers.
            eager: launch every kernel anew, so that whoever listens in (analysis.py) hears it.
        """
        B, P = prompts.shape[0] * samples, prompts.shape[1]
        if temperature <= 0:
            raise ValueError(f"generate: temperature must be above 0, got {temperature}")
        if P + max_new_tokens - 1 > self.policy.config.max_len:
            raise ValueError(
                f"generate: {P} prompt tokens + {max_new_tokens} new ones exceed "
                f"max_len={self.policy.config.max_len}; make the model's max_len larger"
            )
        uniforms = 1 - torch.rand(B, max_new_tokens, generator=generator)  # (0, 1]
        inputs = prompts.to(self.device), uniforms.to(self.device)
        settings = (samples, eos, pad, temperature)
        program = partial(self._generate, *settings)
        if eager:
            return Rollout(*program(*inputs))
        return Rollout(*self.programs.setdefault(settings, Graphed(program))(*inputs))

    @torch.no_grad()
    def _generate(self, samples, eos, pad, temperature, prompts, uniforms) -> tuple:
        (B, N), P = uniforms.shape, prompts.shape[1]
        cache = self.model.new_cache(prompts.shape[0])
        out = self.model(prompts, 0, cache, logits_from=P - 1)  # prefill
        repeat = partial(torch.repeat_interleave, repeats=samples, dim=0)
        cache = [Cache(*map(repeat, layer)) for layer in cache]
        logits, choices = repeat(out.logits), [repeat(out.choices(len(prompts)))]
        live = torch.ones(B, dtype=torch.bool, device=self.device)
        tokens, logprobs, lives = [], [], []
        for i in range(N):
            if i:
                read = tokens[-1].unsqueeze(1)  # (B, 1)
                out = self.model(read, P + i - 1, cache, live=live.unsqueeze(1))
                logits = out.logits
                choices.append(out.choices(B))  # (B, L, 1, top_k)
            # inverse CDF: the first token whose cumulative probability reaches the uniform number
            cumulative = (logits[:, 0] / temperature).softmax(-1).cumsum(-1)  # (B, vocab)
            token = (cumulative < uniforms[:, i : i + 1] * cumulative[:, -1:]).sum(-1)
            logprob, _ = token_logprobs(logits[:, 0], token, temperature)
            tokens.append(torch.where(live, token, pad))
            logprobs.append(logprob)
            lives.append(live)
            live = live & (token != eos)
        lengths = torch.stack(lives, 1).sum(1)
        return torch.stack(tokens, 1), torch.stack(logprobs, 1), lengths, torch.cat(choices, 2)


# ---- evaluation, and as a script


def sample(engine: Engine, task: ChainTask, prompts: torch.Tensor, seed: int = 0):
    """A completion of each prompt at temperature 1, and the rewards (B,) on the engine's device.

    The noise depends on `seed` and prompt alone: common random numbers for all arithmetics.
    """
    noise = torch.Generator().manual_seed(seed)
    out = engine.generate(prompts, task.max_new_tokens, task.eos, task.pad, generator=noise)
    return out, task.rewards(prompts.to(out.tokens.device), out.tokens, out.lengths)


def held_out_prompts(task: ChainTask, count: int) -> torch.Tensor:
    """The evaluation prompts: (count, P), always the same ones, never trained on."""
    return task.sample_prompts(count, torch.Generator().manual_seed(2026), held_out=True)


def check_device(device: str) -> None:
    """ValueError unless `device` is a kind that this repository runs on and torch can reach."""
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda (or cuda:1, ...), got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: torch sees no CUDA device; use --device cpu")


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags of the script; argparse ends the program on bad ones."""
    parser = argparse.ArgumentParser(description="Look into checkpoints.", allow_abbrev=False)
    add = parser.add_argument
    add("checkpoints", type=Path, nargs="*", help="default: the warm start of tiny")
    add("--errors", action="store_true", help="compare both sides of every mode instead")
    add("--self-check", action="store_true", help="test the Triton kernels on this device instead")
    add("--arithmetic", default="w4a4+rac", help="all, or of " + ", ".join(ARITHMETICS))
    add("--prompts", type=int, default=512, help="held-out prompts")
    add("--show", type=int, default=4, help="completions to print")
    add("--seed", type=int, default=0, help="of the sampling noise")
    add("--log", type=Path, help="append what was found, a JSON line per checkpoint")
    add("--backend", default="auto", choices=BACKENDS, help="of W4A4 experts")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    names = [*ARITHMETICS] if args.arithmetic == "all" else args.arithmetic.split(",")
    if unknown := [n for n in names if n not in ARITHMETICS]:
        known = ", ".join(ARITHMETICS)
        raise ValueError(f"--arithmetic: unknown {', '.join(unknown)}; choose from {known}")
    args.arithmetics = {n: ARITHMETICS[n] for n in names}
    if args.prompts < 1:
        raise ValueError(f"--prompts must be 1 or more, got {args.prompts}")
    check_device(args.device)
    if args.log:  # fail now rather than after the work
        args.log.open("a").close()
    return args


def evaluate_in_each(args, path: Path, policy: MoETransformer, task: ChainTask, prompts) -> dict:
    """pass@1 in each arithmetic, printed with some completions: a row of the cross table."""
    found = {}
    for name, arithmetic in args.arithmetics.items():
        engine = Engine(policy, arithmetic, args.backend)
        out, rewards = sample(engine, task, prompts, args.seed)
        found[name] = passed = rewards.mean().item()
        error = 100 * (passed * (1 - passed) / len(prompts)) ** 0.5
        print(f"{name:10} {100 * passed:5.1f} +- {error:.1f} % pass@1   ({path}, {arithmetic}, "
              f"{engine.backend.name})")  # fmt: skip
        for i in range(min(args.show, len(prompts))):
            completion = task.decode(out.tokens[i, : out.lengths[i]])
            print(
                f"  {'right' if rewards[i] else 'wrong'}   {task.decode(prompts[i])} {completion}"
            )
    return {"pass@1": found}


def compare_both_sides(args, path: Path, policy: MoETransformer, task: ChainTask, prompts) -> dict:
    """Where the gap comes from: analysis.py."""
    found = analysis.measure(policy, task, partial(Engine, backend="torch"), prompts, args.seed)
    print(f"{path}, {len(prompts)} prompts\n\n{analysis.text(found)}")
    return {"errors": found}


def report_self_check(device: str) -> bool:
    """What an owner of a new card should run first, and paste into an issue. True if all passed."""
    try:
        import kernels
    except ImportError as e:
        raise ValueError(f"--self-check needs Triton: {e}") from e
    if device.split(":")[0] != "cuda" and not kernels.INTERPRETED:
        raise ValueError(f"--self-check needs CUDA, got {device}; or set TRITON_INTERPRET=1")
    able, card = kernels.has_fp4(device)
    print(card)
    checks = [(path, c) for path in ["native"] * able + ["emulated"]
              for c in kernels.self_check(device, path == "native")]  # fmt: skip
    for path, c in checks:
        print(f"{path:9} {c.kernel:18} {'ok' if c.passed else 'FAILED':7} {c.found}")
    return all(c.passed for _, c in checks)


def cli(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    try:
        args = parse(argv)
        if args.self_check:
            return 0 if report_self_check(args.device) else 1
        look = compare_both_sides if args.errors else evaluate_in_each
        for path in args.checkpoints or [SHIPPED / "tiny.pt"]:
            policy, task = checkpoint.load_policy(path, Arithmetic())  # the engine's own counts
            if bad := policy.nonfinite():
                raise ValueError(f"{path}: inf or NaN in {', '.join(bad)}")
            prompts = held_out_prompts(task, args.prompts)
            line = {"checkpoint": f"{path.parent.name}/{path.name}", "prompts": args.prompts}
            line |= {"seed": args.seed, **runs.environment(torch.device(args.device))}
            line |= look(args, path, policy.to(args.device), task, prompts)
            if args.log:
                with args.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError) as e:
        print(f"rollout.py: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
