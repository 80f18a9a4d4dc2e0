"""The RL loop of QUADS: it ties the engine (rollout.py) to the trainer (quads_min/).

    python train.py --mode quads                    one run: two minutes or less
    python train.py --mode all --seeds 0,1,2        every row of the table, one after the other

A mode is a pair of arithmetics for the routed experts' GEMMs, one of the engine and one of the
trainer: the table is in quads_min/modes.py. What this loop leaves out, compared with the paper
(arXiv 2607.15810), and why:

1. Its 25B MoE model, Megatron-LM and SGLang: a toy of 0.2M (tiny) or 1M (base) parameters, so
   that a run takes minutes and every mode can be run over seeds.
2. FP4 tensor cores: the planes of nvfp4.py give their numbers on any device, not their speed.
   kernels.py can use such cores, but has met none yet.
3. Natural activation outliers: planted (model.py), since a toy grows none.
4. Asynchrony between engine and trainer: rollouts are from the current weights, so that the gap
   is that of arithmetic alone.
5. A learning-rate schedule, weight decay, a KL term, dropout: one thing less to tune per mode.

Next: rollout.py.
"""

import argparse
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from quads_min import checkpoint, grpo, report, runs
from quads_min.model import ModelConfig, contaminated_blocks, plant_outliers
from quads_min.modes import ARITHMETICS, MODES, Arithmetic
from quads_min.qat import make_policy
from quads_min.tasks import ChainTask
from rollout import BACKENDS, SHIPPED, Engine, Graphed, check_device, held_out_prompts, sample


def knob(default, help: str, **kwargs):
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": help, **kwargs})


@dataclass(frozen=True)
class Config:
    """Every knob of one run. A preset fills the fields that no flag sets."""

    mode: str = knob("quads", "row of quads_min/modes.py, several with commas, or all")
    seed: int = knob(0, "of prompts and sampling noise; --seeds 0,1,2 makes several runs")
    preset: str = knob("base", "tiny (default on a CPU) or base (default on CUDA)")
    steps: int = knob(1000, "RL steps: rollouts of prompts * group_size sequences each")
    # the run's place
    out: str = knob("runs", "folder; each run gets a folder in it")
    device: str = knob("cpu", "cpu or cuda (default: cuda if there is one)")
    backend: str = knob("auto", "of the engine: auto takes Triton on CUDA", choices=BACKENDS)
    init: str = knob("", "checkpoint to start from (default: the preset's warm start)")
    resume: bool = knob(False, "continue runs that --out holds; start those that it does not")
    deterministic: bool = knob(False, "deterministic CUDA kernels, so that resuming is bit-exact")
    checkpoint_every: int = knob(10, "steps between checkpoints: what a kill can lose")
    log_every: int = knob(1, "steps between lines of the log; evaluations are always logged")
    # GRPO (grpo.py)
    lr: float = knob(2e-4, "of AdamW")
    prompts: int = knob(16, "prompts per step")
    group_size: int = knob(16, "G, completions per prompt")
    minibatches: int = knob(2, "updates per step, each on whole groups")
    temperature: float = knob(1.0, "of sampling; log-probs of both sides are taken at it")
    clip: float = knob(0.2, "c of the clipped ratio")
    grad_clip: float = knob(1.0, "largest gradient norm")
    correction: str = knob("none", "importance correction", choices=grpo.CORRECTIONS)
    correction_cap: float = knob(2.0, "C of the importance correction")
    replay_routing: bool = knob(False, "the trainer takes the engine's expert choices")
    # quantization (modes.py, nvfp4.py)
    rac_ratio: float = knob(0.5, "share of the channels that RAC compensates, in modes with RAC")
    rac_unit: str = knob("block", "what RAC selects", choices=("block", "channel"))
    engine_drift: float = knob(0.0, "noise on the engine's expert inputs, relative to their rms")
    check_weights: bool = knob(True, "check weight identity between the sides after every sync")
    # the policy (model.py) and its task (tasks.py)
    width: int = knob(128, "D")
    layers: int = knob(4, "transformer layers")
    heads: int = knob(4, "attention heads")
    experts: int = knob(8, "E, experts per layer")
    top_k: int = knob(2, "experts per token")
    expert_width: int = knob(64, "F, hidden width of an expert")
    outlier_gain: float = knob(32.0, "planted activation outliers: their size, a power of two")
    outlier_channels: int = knob(4, "planted activation outliers: channels per layer")
    prime: int = knob(41, "modulus of the task")
    chain: int = knob(8, "operations per prompt of the task")
    # evaluation
    eval_every: int = knob(50, "steps between evaluations")
    eval_prompts: int = knob(1024, "held-out prompts")
    # warm start
    warm_steps: int = knob(2000, "supervised steps")
    warm_lr: float = knob(2e-3, "peak learning rate, cosine to 0")
    warm_batch: int = knob(1024, "demonstrations per step")
    warm_noise: float = knob(0.1, "probability that a demonstrated result is replaced")

    def __post_init__(self):
        for names, good, expected in (
            ("mode", MODES.__contains__, f"one of {', '.join(MODES)}"),
            ("preset", PRESETS.__contains__, f"one of {', '.join(PRESETS)}"),
            ("backend", BACKENDS.__contains__, f"one of {', '.join(BACKENDS)}"),
            ("out", bool, "the name of a folder"),
            ("seed", range(2**62).__contains__, "in 0..2^62 - 1"),
            ("group_size", lambda v: v >= 2, "2 or more: GRPO compares"),
            ("lr temperature clip grad_clip correction_cap warm_lr", lambda v: 0 < v < inf,
             "a positive number"),
            ("steps checkpoint_every log_every eval_every eval_prompts layers prompts minibatches "
             "warm_steps warm_batch", lambda v: v >= 1, "1 or more"),
            ("minibatches", lambda v: self.prompts % v == 0,
             f"a divisor of prompts={self.prompts}: a mini-batch holds whole groups"),
            ("engine_drift", lambda v: 0 <= v < inf, "0 or more"),
            ("warm_noise rac_ratio", lambda v: 0 <= v <= 1, "from 0 to 1"),
        ):  # fmt: skip
            for name in names.split():
                if not good(getattr(self, name)):
                    raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")
        check_device(self.device)
        _ = self.task, self.model, self.arithmetics  # their own checks

    @property
    def task(self) -> ChainTask:
        return ChainTask(self.prime, self.chain)

    @property
    def model(self) -> ModelConfig:
        sizes = {f.name: getattr(self, f.name) for f in fields(ModelConfig)
                 if hasattr(self, f.name)}  # fmt: skip
        max_len = self.task.prompt_len + self.task.max_new_tokens
        return ModelConfig(self.task.vocab, max_len, **sizes)

    @property
    def arithmetics(self) -> tuple[Arithmetic, Arithmetic]:
        """(of the rollout engine, of the trainer)"""
        rollout, trainer = (ARITHMETICS[name] for name in MODES[self.mode])
        if rollout.rac_ratio:
            rollout = replace(rollout, rac_ratio=self.rac_ratio, rac_unit=self.rac_unit)
        return rollout, trainer

    @property
    def label(self) -> str:
        """The mode, and every switch that makes the run another row than its mode's own."""
        default = Config(self.mode, preset=self.preset, **PRESETS[self.preset])
        switches = [self.correction] * (self.correction != "none")
        switches += ["replay"] * self.replay_routing
        for name in ("correction_cap", "rac_ratio", "rac_unit", "engine_drift", "lr",
                     "outlier_gain", "outlier_channels"):  # fmt: skip
            value = getattr(self, name)
            if value != getattr(default, name):
                text = f"{value:g}" if isinstance(value, float) else str(value)
                switches.append(f"{name}={text}")
        return "+".join([self.mode, *switches])

    @property
    def folder(self) -> Path:
        """Of the run. Preset, steps and what shapes policy and task are not in its name."""
        return Path(self.out) / f"{self.label}-s{self.seed}"


# fmt: off
PRESETS = {
    "base": {},
    "tiny": {
        "steps": 400, "prompts": 12, "group_size": 8, "width": 64, "layers": 3, "experts": 4,
        "outlier_channels": 2, "prime": 13, "chain": 5,
        "warm_steps": 1000, "warm_lr": 1e-3, "warm_batch": 256, "warm_noise": 0.12,
    },
}
# fmt: on


def main(cfg: Config) -> dict:
    """Run one mode with one seed; returns the summary that its row of the table is made from."""
    device = torch.device(cfg.device)
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 products of planes must be exact
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    run = cfg.folder
    log = runs.Log(run)
    state = runs.find_checkpoint(run, asdict(cfg))  # None: a new run

    task, (rollout_arithmetic, trainer_arithmetic) = cfg.task, cfg.arithmetics
    policy = make_policy(cfg.model, trainer_arithmetic).to(device)
    warm = Path(cfg.init) if cfg.init else SHIPPED / f"{cfg.preset}.pt"
    start_from = run / "checkpoint.pt" if state else warm
    checkpoint.load_weights(policy, state or checkpoint.load(start_from), start_from, bool(state))
    engine = Engine(policy, rollout_arithmetic, cfg.backend, cfg.engine_drift)
    same = rollout_arithmetic == trainer_arithmetic and not cfg.engine_drift
    trainer_engine = engine if same else Engine(policy, trainer_arithmetic, cfg.backend)
    optimizer = torch.optim.AdamW(
        policy.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    prompt_rng = torch.Generator().manual_seed(2 * cfg.seed)
    noise_rng = torch.Generator().manual_seed(2 * cfg.seed + 1)
    generators = {"prompts": prompt_rng, "noise": noise_rng}
    torch.manual_seed(cfg.seed)  # engine_drift alone draws from this one
    done = runs.restore(state, optimizer, generators, device, run) if state else 0
    eval_prompts = held_out_prompts(task, cfg.eval_prompts)
    P, N = task.prompt_len, task.max_new_tokens
    check_weights = cfg.check_weights and rollout_arithmetic.weights == trainer_arithmetic.weights

    def trainer_pass(read, tokens, replay):
        """Log-probs and entropy (rows, N) of sampled tokens, and what else the policy returned."""
        replay = replay.movedim(1, 0).flatten(1, 2) if cfg.replay_routing else None
        out = policy(read, replay=replay, logits_from=P - 1)
        return *grpo.token_logprobs(out.logits, tokens, cfg.temperature), out

    @Graphed
    @torch.no_grad()
    def old_pass(read, tokens, replay):
        """Log-probs, entropy, variance of the logits, mean square of the residual stream (rows, N);
        choices (rows, L, P + N - 1, k); are the weights identical, where their format is?"""
        logprobs, entropy, out = trainer_pass(read, tokens, replay)
        spread, square = out.logits.var(-1, correction=0), out.hidden.square().mean(-1)
        identical = torch.ones(1, dtype=torch.bool, device=device)
        identical = identical & engine.multiplies_what(policy) if check_weights else identical
        return logprobs, entropy, spread, square, out.choices(len(read)), identical

    @Graphed
    def gradient_pass(read, tokens, replay, old_logprobs, advantages, mask, weights):
        """Fills the policy's gradients; returns loss, share of clipped tokens, gradient norm."""
        logprobs, *_ = trainer_pass(read, tokens, replay)
        loss, clip_share = grpo.policy_loss(
            logprobs, old_logprobs, advantages, mask, cfg.clip, weights
        )
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
        return loss.detach(), clip_share, grad_norm

    with log, runs.graceful_interrupt() as interrupted:
        if state:
            log.rewind(state)
        else:
            runs.save(run, policy, task, optimizer, generators, log, asdict(cfg), 0)
        describe(cfg, engine, log, done)
        steps = range(done, cfg.steps)
        bar = tqdm(steps, cfg.label, initial=done, total=cfg.steps, disable=None)
        for step in bar:
            began = time.perf_counter()

            # 1. sync: quantize the current weights into the engine
            engine.sync()
            if step % cfg.eval_every == 0:
                run_evaluation(log, step, engine, trainer_engine, task, eval_prompts)
                began = time.perf_counter()

            # 2. roll out: G completions of each prompt, with the log-probs they were sampled with
            prompts = task.sample_prompts(cfg.prompts, prompt_rng).to(device)
            rollout = engine.generate(
                prompts, N, task.eos, task.pad, cfg.group_size, cfg.temperature, noise_rng
            )
            prompts = prompts.repeat_interleave(cfg.group_size, 0)  # (B, P), B = prompts * G

            # 3. reward
            rewards = task.rewards(prompts, rollout.tokens, rollout.lengths)  # (B,)

            # 4. advantage, within each group
            advantages = grpo.group_advantages(rewards.view(-1, cfg.group_size)).flatten()  # (B,)

            # 5. log-probs under the trainer, before the first update: (B, N)
            read = torch.cat([prompts, rollout.tokens[:, :-1]], 1)  # (B, P + N - 1)
            mask = grpo.token_mask(rollout.lengths, N)
            empty = read[:, :0]  # stands in where a Graphed function wants a tensor
            replay = rollout.choice if cfg.replay_routing else empty
            size = len(read) // cfg.minibatches  # equal shapes: the first ratio is exactly 1
            batches = [slice(i, i + size) for i in range(0, len(read), size)]
            parts = [old_pass(read[b], rollout.tokens[b], replay[b]) for b in batches]
            old_logprobs, entropy, spread, square, choice, identical = map(
                torch.cat, zip(*parts, strict=True)
            )
            weights = grpo.importance_weights(  # ones, unless --correction asks for others
                old_logprobs, rollout.logprobs, cfg.correction, cfg.correction_cap
            )
            if bad := engine.model.nonfinite() + policy.nonfinite():
                raise FloatingPointError(f"step {step + 1}: inf or NaN in {', '.join(bad)}")
            if not identical.all():
                raise RuntimeError(f"step {step + 1}: engine and trainer multiply other weights")

            for i, b in enumerate(batches):
                # 6. loss, and its gradient
                loss, clip_share, grad_norm = gradient_pass(
                    read[b], rollout.tokens[b], replay[b], old_logprobs[b], advantages[b], mask[b],
                    weights[b],
                )  # fmt: skip
                if not torch.isfinite(loss + grad_norm):
                    raise FloatingPointError(
                        f"step {step + 1}, mini-batch {i + 1}: loss {loss.item():g}, gradient norm "
                        f"{grad_norm.item():g}; the last checkpoint is from before it"
                    )

                # 7. step
                optimizer.step()

            # 8. log (loss, grad_norm and clip_share: of the last mini-batch)
            fed = grpo.token_mask(P - 1 + rollout.lengths, P + N - 1)
            tensors = {
                "reward": rewards.mean(),
                "loss": loss.detach(),
                "grad_norm": grad_norm,
                "clip_share": clip_share,
                **grpo.mismatch(rollout.logprobs, old_logprobs, mask),
                **grpo.gap_by_advantage(rollout.logprobs, old_logprobs, advantages, mask),
                "entropy": entropy[mask].mean(),
                "logit_std": spread[mask].mean().sqrt(),
                "hidden_rms": square[mask].mean().sqrt(),
                "choice_mismatch": grpo.choice_mismatch(rollout.choice, choice, fed),
                "length": rollout.lengths.float().mean(),
            }
            values = torch.stack([t.float() for t in tensors.values()]).tolist()
            metrics = dict(zip(tensors, values, strict=True))
            seconds = time.perf_counter() - began
            tokens = round(metrics["length"] * len(read))
            if (step + 1) % cfg.log_every == 0:
                log("step", step=step + 1, **metrics, tokens=tokens, seconds=seconds)
            bar.set_postfix_str("reward {reward:.3f}, gap {gap_mean:.4f}, ".format(**metrics)
                                + f"{tokens / seconds:.0f} tokens/s")  # fmt: skip
            last = step + 1 == cfg.steps or interrupted()
            if (step + 1) % cfg.checkpoint_every == 0 or last:
                runs.save(run, policy, task, optimizer, generators, log, asdict(cfg), step + 1)
            if interrupted():
                raise KeyboardInterrupt(step + 1)

        engine.sync()
        run_evaluation(log, cfg.steps, engine, trainer_engine, task, eval_prompts)
        if interrupted():
            raise KeyboardInterrupt(cfg.steps)
        log("end", step=cfg.steps, seconds=log.seconds())
    return report.summarize(report.read_log(run / "log.jsonl"))


def describe(cfg: Config, engine: Engine, log: runs.Log, done: int) -> None:
    """The log's first line, and what the terminal should know: what runs, on what, in what."""
    environment = runs.environment(engine.device)
    if done:
        log("resume", step=done, **environment)
        return
    hit, blocks = contaminated_blocks(plant_outliers(cfg.model))
    rollout, trainer = map(str, cfg.arithmetics)
    name, reason = engine.backend
    log(
        "config", mode=cfg.mode, seed=cfg.seed, label=cfg.label, config=asdict(cfg),
        command=shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]), **environment,
        backend=name, backend_reason=reason, rollout=rollout, trainer=trainer,
        weight_bytes=engine.weight_bytes, contaminated_blocks=[hit, blocks],
    )  # fmt: skip
    tqdm.write(
        f"{cfg.label}, seed {cfg.seed}: rollouts {rollout}, trainer {trainer}\n"
        f"  {name} backend, {reason}, on {environment['device']}; {engine.weight_bytes:,} bytes of "
        f"expert weights; outliers in {hit} of {blocks} blocks; log: {log.file.name}"
    )


def run_evaluation(log, step: int, engine: Engine, trainer_engine: Engine, task, prompts) -> None:
    """pass@1 of the current policy, as deployed and in the trainer's own arithmetic; and the share
    of prompts whose right answer skipped steps."""
    out, rewards = sample(engine, task, prompts)
    deployed = trainer = rewards.mean().item()
    skipped = (rewards * (out.lengths < task.max_new_tokens)).mean().item()
    if trainer_engine is not engine:
        trainer_engine.sync()
        trainer = sample(trainer_engine, task, prompts)[1].mean().item()
    log("eval", step=step, deployed=deployed, trainer=trainer, skipped=skipped)
    tqdm.write(
        f"step {step}: pass@1 deployed {100 * deployed:.1f} %, "
        f"in the trainer's arithmetic {100 * trainer:.1f} %"
    )


# ---- warm start: the base policy that RL begins with


def warm_start(cfg: Config) -> Path:
    """Supervised training on noisy demonstrations (tasks.py), in bf16; returns the checkpoint."""
    device, task = torch.device(cfg.device), cfg.task
    path = Path(cfg.out) / f"{cfg.preset}.pt"
    if path.exists():
        raise ValueError(f"{path} already holds a policy; choose another --out")
    runs.make_folder(path.parent)
    torch.manual_seed(cfg.seed)
    policy = make_policy(cfg.model, Arithmetic()).to(device)
    engine = Engine(policy, Arithmetic())
    optimizer = torch.optim.AdamW(policy.parameters(), cfg.warm_lr, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.warm_steps)
    rng = torch.Generator().manual_seed(cfg.seed)
    eval_prompts = held_out_prompts(task, cfg.eval_prompts)

    @Graphed
    def gradient_pass(tokens):
        out = policy(tokens[:, :-1], logits_from=task.prompt_len - 1)
        loss = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, task.prompt_len :].flatten())
        balance = sum(map(load_balance, out.router_probs, out.choice))
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
        return (loss.detach(),)

    bar = tqdm(range(1, cfg.warm_steps + 1), desc=f"warm start {cfg.preset}", disable=None)
    for step in bar:
        prompts = task.sample_prompts(cfg.warm_batch, rng)
        answer = task.demonstrations(prompts, cfg.warm_noise, rng)  # (B, N)
        (loss,) = gradient_pass(torch.cat([prompts, answer], 1).to(device))
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == cfg.warm_steps:
            engine.sync()
            passed = sample(engine, task, eval_prompts)[1].mean().item()
            tqdm.write(f"step {step}: loss {loss.item():.3f}, pass@1 {100 * passed:.1f} %")
    checkpoint.save(path, policy, task, dtype=torch.bfloat16)
    print(f"wrote {path}; use it with --init {path}")
    return path


def load_balance(probs: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """E * sum over experts of (share of slots) * (mean probability): 1 if balanced."""
    share = F.one_hot(choice, probs.shape[1]).float().mean((0, 1))
    return probs.shape[1] * (share * probs.mean(0)).sum()


# ---- the command line


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[Config]]:
    """Flags to configs, one per mode and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--warm-start", action="store_true", help="make the base policy instead")
    parser.add_argument("--seeds", help="several runs, such as 0,1,2")
    for f in fields(Config):
        text = f.metadata["help"]
        default = "" if "default" in text else f" (default: {f.default})"
        options = {**f.metadata, "help": text + default}
        if f.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif "choices" not in options:
            options |= {"type": f.type, "metavar": f.name.upper()}
        parser.add_argument("--" + f.name.replace("_", "-"), default=None, **options)
    args = parser.parse_args(argv)
    if args.seeds and args.seed is not None and args.seeds != str(args.seed):
        raise ValueError("--seed and --seeds exclude each other; --seeds 0,1,2 makes several runs")
    given = {f.name: getattr(args, f.name) for f in fields(Config)}
    given = {name: value for name, value in given.items() if value is not None}
    device = given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    preset = given.setdefault("preset", "base" if device.startswith("cuda") else "tiny")
    seeds = str(given.get("seed", 0)) if args.seeds is None else args.seeds
    if not all(s.strip().isdecimal() for s in seeds.split(",")):
        raise ValueError(f"--seeds takes whole numbers with commas between, got {seeds!r}")
    modes = given.get("mode", "quads")
    modes = list(MODES) if modes == "all" else modes.split(",")
    given = PRESETS.get(preset, {}) | given
    pairs = [(m, int(s)) for s in seeds.split(",") for m in modes]
    if len({*pairs}) < len(pairs):
        raise ValueError("a mode or a seed is named twice; each pair is one run")
    return args, [Config(**{**given, "mode": m, "seed": s}) for m, s in pairs]


def cli(argv: list[str]) -> int:
    """The command line; returns the exit status."""
    try:
        args, configs = parse(argv)
        if args.warm_start:
            if len(configs) > 1 or configs[0].init:
                raise ValueError("--warm-start makes one policy, from nothing: give one seed, no "
                                 "--init; modes play no part in it")  # fmt: skip
            warm_start(configs[0])
            return 0
        for cfg in configs:  # fail now rather than after the runs before it
            if not cfg.resume:
                runs.check_free(cfg.folder)
        for cfg in configs:
            summary = main(cfg)
            print(report.header(), report.row(summary), sep="\n", flush=True)
    except KeyboardInterrupt as e:
        at = f" after step {e.args[0]}" if e.args else ""
        again = shlex.join(["python", "train.py", *argv, *["--resume"] * ("--resume" not in argv)])
        print(f"\ninterrupted{at}; continue with: {again}", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError, RuntimeError, OSError) as e:
        print(f"train.py: error: {(str(e) or repr(e)).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
