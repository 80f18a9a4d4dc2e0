"""Where the gap comes from: both sides of each mode on the same tokens, compared layer by layer.

    python rollout.py --errors                            the warm start of tiny, under a minute
    python rollout.py --errors --checkpoint quads_min/checkpoints/base.pt --prompts 512

The engine generates as it always does, prefill and then one token at a time, RAC choosing its
blocks in each of these batches; the trainer reads the result in one pass, as in training.

    input, output   |engine - trainer| / |trainer|, Frobenius, over all tokens read: of what the
                    experts' first GEMM multiplies, planted channels left out, and of what the
                    second returns, where both sides took the same experts
    choice          share of the tokens read whose set of experts differs
    gap             log-prob of the trainer - engine's, per sampled token: mean, p99, max of |gap|

`measure` collects everything, `text` prints it, `figure` draws it; as a script, this file prints
what `rollout.py --errors --log` wrote. How to make an engine is an argument: the package imports
no root module. Next: claims.py.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from quads_min import checkpoint, grpo, nvfp4
from quads_min.model import ExpertLinear, MoETransformer
from quads_min.modes import ARITHMETICS, MODES, Arithmetic
from quads_min.qat import Operand, encode_activation, grouped_matmul, make_policy
from quads_min.tasks import ChainTask

RATIOS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
DRIFTS = (0.0, 0.004, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)  # of a row's rms
RAC = ARITHMETICS["w4a4+rac"]


class Tap:
    """Writes down what every expert matmul of a model consumes and returns.

    Args:
        model: of either side, an engine's in the torch backend.
        rule: (name, x, live) -> the mask (K,) bool that RAC must take; None: it chooses.
        zero_planted: set the planted channels to 0 ahead of the quantizer.
    """

    def __init__(self, model: MoETransformer, rule: Callable | None = None, zero_planted=False):
        self.top_k, self.rule, self.zero_planted = model.config.top_k, rule, zero_planted
        self.consumed, self.returned = defaultdict(list), defaultdict(list)  # a tensor per call
        self.residual = defaultdict(list)  # per call: energy by block (K / 16,), blocks chosen
        for name, linear in model.expert_linears().items():
            linear.product = partial(self.product, name, linear, linear.product)

    def product(self, name, linear, original, x, routing, live) -> torch.Tensor:
        a = linear.arithmetic
        if self.zero_planted:
            x = torch.where(planted(linear), 0.0, x)
        if a.rac_ratio:
            mask = self.rule(name, x, live) if self.rule else None
            main, residual, mask = nvfp4.encode_with_residual(
                x, a.rac_ratio, a.rac_unit, rows=live, mask=mask
            )
            x_hat = Operand(main.planes(), main.global_scale)
            y = grouped_matmul(x_hat, linear.operand, routing, residual.planes())
            consumed = main.dequantize() + residual.dequantize()
            lost = energy(x.float() - main.dequantize(), live)
            self.residual[name].append((lost, lost * mask.unflatten(0, (len(lost), -1)).any(1)))
        else:
            consumed = encode_activation(x, a.activations).value()
            y = original(x, routing, live)
        self.consumed[name].append(consumed)
        self.returned[name].append(y)
        return y

    def inputs(self, layer: int, B: int) -> torch.Tensor:
        """What gate/up multiplied: (B, tokens read, D)."""
        calls = self.consumed[f"layers.{layer}.gate_up"]
        return torch.cat([x.view(B, -1, x.shape[-1]) for x in calls], 1)

    def outputs(self, layer: int, choice: torch.Tensor) -> torch.Tensor:
        """What down returned, slots in order of expert: (B, tokens read, top_k, D)."""
        shape = (len(choice), -1, self.top_k)
        calls = self.returned[f"layers.{layer}.down"]
        y = torch.cat([y.view(*shape, y.shape[-1]) for y in calls], 1)
        order = choice[:, layer].argsort(-1).unsqueeze(-1).expand_as(y)
        return y.gather(2, order)


def planted(linear: ExpertLinear) -> torch.Tensor:
    """(K,) bool: where o is not 1."""
    if linear.outliers is None:
        return torch.zeros(linear.shape[2], dtype=torch.bool, device=linear.poison.device)
    return linear.outliers != 1


def energy(residual: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """Of a residual (rows, K) fp32, per 16-block, over live rows: (K / 16,) fp32."""
    lost = residual.square()
    lost = lost if live is None else torch.where(live.unsqueeze(1), lost, 0.0)
    return lost.sum(0).unflatten(0, (-1, nvfp4.QBLOCK)).sum(1)


def remake(policy: MoETransformer, arithmetic: Arithmetic, gain: float | None = None):
    """The same function in bf16, its experts in `arithmetic`, its planted channels of `gain`."""
    config = policy.config if gain is None else replace(policy.config, outlier_gain=gain)
    new = make_policy(config, arithmetic).to(policy.embed.device)
    weights = {"weights": policy.state_dict()}
    checkpoint.load_weights(new, weights, Path("this policy"), outliers=gain is None)
    return new


class Study:
    """One policy and one set of prompts, seen by engines and trainers of any arithmetic."""

    def __init__(self, policy: MoETransformer, task: ChainTask, make_engine, prompts, seed=0):
        self.policy, self.task, self.make_engine, self.prompts = policy, task, make_engine, prompts
        self.seed = seed

    def roll_out(self, arithmetic: Arithmetic, policy=None, drift: float = 0.0, **tap):
        """A completion of each prompt by the engine, and what its experts saw."""
        engine = self.make_engine(policy or self.policy, arithmetic, drift=drift)
        heard, noise = Tap(engine.model, **tap), torch.Generator().manual_seed(self.seed)
        torch.manual_seed(self.seed)  # of the injected drift
        t = self.task
        rollout = engine.generate(
            self.prompts, t.max_new_tokens, t.eos, t.pad, generator=noise, eager=True
        )
        return rollout, heard

    @torch.no_grad()
    def read(self, rollout, arithmetic: Arithmetic, policy=None):
        """The trainer's log-probs (B, N), choices (B, L, read, top_k), and what its experts saw."""
        trainer = remake(policy or self.policy, arithmetic)
        heard = Tap(trainer)
        read = torch.cat([self.prompts.to(trainer.embed.device), rollout.tokens[:, :-1]], 1)
        out = trainer(read, logits_from=self.task.prompt_len - 1)
        logprobs, _ = grpo.token_logprobs(out.logits, rollout.tokens, 1.0)
        return logprobs, out.choices(len(read)), heard

    def gap(self, rollout, logprobs: torch.Tensor) -> dict[str, float]:
        mask = grpo.token_mask(rollout.lengths, self.task.max_new_tokens)
        found = grpo.mismatch(rollout.logprobs, logprobs, mask)
        return {k: v.item() for k, v in found.items() if k.startswith("gap")}

    def gap_of(self, engine: Arithmetic, trainer: Arithmetic, **how) -> dict[str, float]:
        """The gap between two arithmetics; `how` as in roll_out."""
        rollout, _ = self.roll_out(engine, **how)
        return self.gap(rollout, self.read(rollout, trainer, how.get("policy"))[0])

    def tokens_read(self, rollout, choice: torch.Tensor) -> torch.Tensor:
        """Prompt and completion, what follows EOS left out: (B, P + N - 1) bool."""
        return grpo.token_mask(self.task.prompt_len - 1 + rollout.lengths, choice.shape[2])

    def layers(self, rollout, engine: Tap, choice: torch.Tensor, trainer: Tap) -> dict:
        """The errors of the module docstring, a list over layers each."""
        B, read = len(choice), self.tokens_read(rollout, choice)
        found = {"input": [], "output": [], "choice": []}
        for i, layer in enumerate(self.policy.layers):
            agree = grpo.same_experts(rollout.choice[:, i], choice[:, i])
            own = ~planted(layer.gate_up)
            pairs = {
                "input": [side.inputs(i, B)[read][:, own] for side in (engine, trainer)],
                "output": [
                    side.outputs(i, c)[read & agree]
                    for side, c in ((engine, rollout.choice), (trainer, choice))
                ],
            }
            for what, (a, b) in pairs.items():
                found[what].append(((a - b).norm() / b.norm()).item())
            found["choice"].append((read & ~agree).sum().item() / read.sum().item())
        return found


def measure(policy, task, make_engine: Callable, prompts: torch.Tensor, seed: int = 0) -> dict:
    """Everything that `text` prints, as plain numbers.

    Args:
        policy, task: of checkpoint.load_policy. prompts: (B, P) int64. seed: of sampling and noise.
        make_engine: (policy, arithmetic, drift=) -> an engine in the torch backend.
    """
    study = Study(policy, task, make_engine, prompts, seed)
    W4A16, W4A4 = ARITHMETICS["w4a16"], ARITHMETICS["w4a4"]
    result = {"modes": {}, "ratio": [], "drift": [], "controls": {}, "gains": []}
    rollouts = {}
    for mode, (engine, trainer) in MODES.items():
        if engine not in rollouts:
            rollouts[engine] = study.roll_out(ARITHMETICS[engine])
        rollout, heard = rollouts[engine]
        logprobs, choice, read = study.read(rollout, ARITHMETICS[trainer])
        layers = study.layers(rollout, heard, choice, read)
        result["modes"][mode] = study.gap(rollout, logprobs) | layers
        if mode == "bf16":
            fed = study.tokens_read(rollout, choice)
            inputs = [read.inputs(i, len(prompts))[fed] for i in range(len(policy.layers))]
    result["residual"] = held_by_the_chosen(policy, rollouts["w4a4+rac"][1])

    for ratio in RATIOS:
        for unit in ("block", "channel") if 0 < ratio < 1 else ("block",):
            engine = replace(W4A4, rac_ratio=ratio, rac_unit=unit)
            found = study.gap_of(engine, W4A16)
            result["ratio"].append({"ratio": ratio, "unit": unit} | found)

    for drift in DRIFTS:
        rollout, _ = study.roll_out(W4A4, drift=drift)
        gaps = [study.gap(rollout, study.read(rollout, t)[0])["gap_mean"] for t in (W4A4, W4A16)]
        gaps.append(study.gap_of(RAC, W4A16, drift=drift)["gap_mean"])
        result["drift"].append({"drift": drift, **one_gemm(policy, inputs, drift), "gap": gaps})
    kinds = ("gauss", "layers", "gap")
    result["crossing"] = {kind: crossing(result["drift"], kind) for kind in kinds}

    static, random = calibrate(study), torch.Generator().manual_seed(seed)
    result["controls"] = {
        "no RAC": result["modes"]["qat"],
        "RAC, mask chosen online": result["modes"]["quads"],
        "RAC, mask calibrated on other prompts": study.gap_of(
            RAC, W4A16, rule=lambda name, x, live: static[name]
        ),
        "RAC, random mask in every call": study.gap_of(
            RAC, W4A16, rule=lambda name, x, live: random_mask(x, random)
        ),
        "no RAC, planted channels zeroed": study.gap_of(W4A4, W4A16, zero_planted=True),
    }
    gain = policy.config.outlier_gain
    for g in sorted({gain, 1.0, 1 / gain}, reverse=True):
        other = remake(policy, Arithmetic(), g)
        gaps = {
            mode: study.gap_of(*(ARITHMETICS[a] for a in MODES[mode]), policy=other)["gap_mean"]
            for mode in ("w4a16", "w16a4", "naive")
        }
        result["gains"].append({"gain": g} | gaps)
    return result


def held_by_the_chosen(policy: MoETransformer, heard: Tap) -> dict[str, list[float]]:
    """Per layer, over all calls of the engine: residual energy that RAC's blocks held, of both
    GEMMs, and contaminated blocks that it found."""
    found = {"gate_up": [], "down": [], "contaminated": []}
    for i, layer in enumerate(policy.layers):
        for gemm in ("gate_up", "down"):
            lost, kept = map(sum, zip(*heard.residual[f"layers.{i}.{gemm}"], strict=True))
            found[gemm].append((kept.sum() / lost.sum()).item())
        hit = planted(layer.gate_up).unflatten(0, (-1, nvfp4.QBLOCK)).any(1)
        calls = [kept > 0 for lost, kept in heard.residual[f"layers.{i}.gate_up"] if lost.sum() > 0]
        shares = [((hit & kept).sum() / hit.sum().clamp(min=1)).item() for kept in calls]
        found["contaminated"].append(sum(shares) / len(shares))
    return found


def calibrate(study: Study) -> dict[str, torch.Tensor]:
    """A mask per GEMM, chosen once from the residuals of other prompts."""
    prompts = study.task.sample_prompts(len(study.prompts), torch.Generator().manual_seed(1))
    other = Study(study.policy, study.task, study.make_engine, prompts, study.seed + 1)
    _, heard = other.roll_out(RAC)
    masks = {}
    for name, calls in heard.residual.items():
        lost = sum(lost for lost, _ in calls)
        mask = torch.zeros_like(lost, dtype=torch.bool)
        mask[lost.argsort(descending=True)[: nvfp4.selected_groups(len(lost), RAC.rac_ratio)]] = (
            True
        )
        masks[name] = mask.repeat_interleave(nvfp4.QBLOCK)
    return masks


def random_mask(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """As many 16-blocks as RAC takes, drawn: (K,) bool."""
    blocks = x.shape[-1] // nvfp4.QBLOCK
    mask, keep = torch.zeros(blocks, dtype=torch.bool), nvfp4.selected_groups(blocks, RAC.rac_ratio)
    mask[torch.randperm(blocks, generator=generator)[:keep]] = True
    return mask.repeat_interleave(nvfp4.QBLOCK).to(x.device)


def one_gemm(policy: MoETransformer, inputs: list[torch.Tensor], drift: float) -> dict:
    """Relative error of one product whose input drifted by d, |engine - trainer| / |x V^|, where

        engine - trainer = Q(x + d) V^ - Q(x) V^   symmetric QAT
                           Q(x + d) V^ - x V^      asymmetric QAT, then the same with RAC in Q

    "gauss": Gaussian x and V, K = 256. "layers": gate/up of expert 0 on what the policy feeds it,
    (rows, D) a layer with o in it; mean over layers. d is relative to the row's rms ahead of o.
    """
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(2, 512, 256, generator=generator)
    cases = [(gauss[0], gauss.new_ones(256), gauss[1])]
    for layer, x in zip(policy.layers, inputs, strict=True):
        linear = layer.gate_up
        o = x.new_ones(x.shape[1]) if linear.outliers is None else linear.outliers
        rows = torch.randperm(len(x), generator=generator)[:512].to(x.device)
        cases.append((x[rows] / o, o, linear.scaled_weight()[0].detach()))
    errors = []
    for x, o, v in cases:
        v = nvfp4.encode(v.to(torch.bfloat16), "tensor").dequantize()
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        moved = x + drift * x.square().mean(1, keepdim=True).sqrt() * noise
        x, moved = ((t * o).to(torch.bfloat16) for t in (x, moved))
        main, residual, _ = nvfp4.encode_with_residual(moved, RAC.rac_ratio)
        y, extra = main.dequantize() @ v.T, residual.dequantize() @ v.T
        symmetric, plain = nvfp4.encode(x).dequantize() @ v.T, x.float() @ v.T
        pairs = ((y, symmetric), (y, plain), (y + extra, plain))
        errors.append([((a - b).norm() / plain.norm()).item() for a, b in pairs])
    layers = [sum(column) / len(inputs) for column in zip(*errors[1:], strict=True)]
    return {"gauss": errors[0], "layers": layers}


def crossing(rows: list[dict], kind: str) -> float | None:
    """The drift from which on symmetric is no better than asymmetric, between two rows; that of the
    first row if it never is; None if it still is in the last."""
    excess = [row[kind][0] - row[kind][1] for row in rows]
    if excess[-1] < 0:
        return None
    for (a, low), (b, high) in reversed([*pairwise(zip(rows, excess, strict=True))]):
        if low < 0:
            return a["drift"] + (b["drift"] - a["drift"]) * low / (low - high)
    return rows[0]["drift"]


# ---- what is shown


def read_log(path) -> dict:
    """What `rollout.py --errors --log` wrote last."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8").splitlines()[-1])["errors"]
    except (ValueError, KeyError, TypeError, IndexError):
        raise ValueError(f"{path}: its last line is none of rollout.py --errors --log") from None


def text(result: dict) -> str:
    """The tables, for a terminal and the README."""
    errors = lambda values: " ".join(f"{v:6.4f}" for v in values)  # noqa: E731
    shares = lambda values: " ".join(f"{100 * v:5.1f}" for v in values)  # noqa: E731
    width = 7 * len(result["residual"]["down"]) - 1
    names = f"{'mean':>8} {'p99':>7} {'max':>6}"
    lines = [f"{'mode':6} {'gap':>4}{'':19}  {'input, by layer':{width}}  {'output':{width}}  "
             "other experts, %", f"{'':6} {names}"]  # fmt: skip
    for mode, row in result["modes"].items():
        lines.append(
            f"{mode:6} {_gaps(row)}  {errors(row['input'])}  {errors(row['output'])}  "
            f"{shares(row['choice'])}"
        )
    lines += ["", f"gap of quads by RAC ratio {names}"]
    for row in result["ratio"]:
        unit = {0.0: "no RAC", 1.0: "everything"}.get(row["ratio"], f"by {row['unit']}")
        lines.append(f"  {row['ratio']:5g} {unit:17} {_gaps(row)}")
    lines += ["", f"gap of qat, quads, and controls{'':9} {names}"]
    lines += [f"  {name:38} {_gaps(row)}" for name, row in result["controls"].items()]
    lines += ["", "mean gap by outlier gain       w4a16     w16a4     naive"]
    for row in result["gains"]:
        gaps = " ".join(f"{row[m]:9.4f}" for m in ("w4a16", "w16a4", "naive"))
        lines.append(f"  {row['gain']:<26g} {gaps}")
    lines += ["", "of RAC's blocks, layer by layer"]
    labels = ("residual energy held, gate/up, %", "residual energy held, down, %",
              "contaminated blocks found, %")  # fmt: skip
    for label, values in zip(labels, result["residual"].values(), strict=True):
        lines.append(f"  {label:34} {shares(values)}")
    heads = ("one GEMM, Gaussian", "one GEMM, the policy's", "mean gap, whole model")
    columns = " ".join([f"{'sym':>7} {'asym':>7} {'+RAC':>7}  "] * 3)
    lines += ["", "drift, %   " + "".join(f"{head:26}" for head in heads), f"{'':10}{columns}"]
    for row in result["drift"]:
        cells = [" ".join(f"{v:7.4f}" for v in row[kind]) for kind in result["crossing"]]
        lines.append(f"  {100 * row['drift']:<7g} " + "   ".join(cells))
    at = result["crossing"].values()
    below = ["at all of these" if v is None else f"below {100 * v:.1f} %" for v in at]
    lines.append("  sym is below asym: " + "; ".join(below))
    return "\n".join(line.rstrip() for line in lines)


def _gaps(row: dict) -> str:
    return f"{row['gap_mean']:8.4f} {row['gap_p99']:7.3f} {row['gap_max']:6.2f}"


def figure(result: dict, path) -> None:
    """PNG or SVG, by suffix: gap by mode, gap against the RAC ratio, errors against drift."""
    from quads_min.report import COLORS, new_figure

    fig = new_figure(path, (15, 3.8))
    axes = fig.subplots(1, 4)
    modes = result["modes"]
    axes[0].bar(range(len(modes)), [m["gap_mean"] for m in modes.values()],
                color=[COLORS[m] for m in modes])  # fmt: skip
    axes[0].set_xticks(range(len(modes)), list(modes), rotation=60)
    axes[0].set(title="mean |gap| by mode, nats", yscale="log")
    for unit, line in (("block", "-"), ("channel", "--")):
        rows = [r for r in result["ratio"] if r["unit"] == unit or r["ratio"] in (0, 1)]
        for key, color in (("gap_mean", "#0072B2"), ("gap_p99", "#D55E00")):
            y = [r[key] for r in rows]
            axes[1].plot([r["ratio"] for r in rows], y, line, color=color, label=f"{key}, {unit}")
    axes[1].set(title="gap of quads against RAC ratio", yscale="log")
    drifts = [100 * row["drift"] for row in result["drift"]]
    titles = ("one GEMM, Gaussian: relative error", "whole model: mean |gap|, nats")
    for ax, kind, title in zip(axes[2:], ("gauss", "gap"), titles, strict=True):
        for i, name in enumerate(("sym", "qat", "quads")):
            ax.plot(drifts, [row[kind][i] for row in result["drift"]], color=COLORS[name],
                    label=("symmetric", "asymmetric", "asymmetric + RAC")[i])  # fmt: skip
        ax.set(title=title, xlabel="engine drift, % of rms")
    for ax in axes[1:]:
        ax.legend(frameon=False, fontsize=8)
    fig.savefig(path)


def main() -> None:
    """Print the tables of a log."""
    try:
        (path,) = sys.argv[1:] or ["none given"]
        print(text(read_log(path)))
    except (ValueError, OSError) as e:
        sys.exit(f"analysis: error: expected one log of rollout.py --errors: {e}")


if __name__ == "__main__":
    main()
