"""Where the gap comes from: both sides of each mode on the same tokens, compared layer by layer.

    python rollout.py --errors                                      the warm start of tiny
    python rollout.py --errors quads_min/checkpoints/base.pt        that of base, two minutes

The engine generates as it always does, the trainer reads the result in one pass, as in training,
and every expert matmul of both notes its calls. `measure` collects, `text` prints:

    gap             log-prob of the trainer - engine's, per sampled token: mean, p99, max of |gap|
    input, output   |engine - trainer| / |trainer|, Frobenius, over all tokens read: of what the
                    experts' first GEMM multiplies, planted channels left out, and of what the
                    second returns, where both sides took the same experts
    choice          share of the tokens read whose set of experts differs
    drift           noise on the engine's expert inputs, as a share of their rms
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from quads_min import grpo, nvfp4, report
from quads_min.model import MoETransformer
from quads_min.modes import ARITHMETICS, MODES, Arithmetic
from quads_min.qat import Operand, encode_operand, grouped_matmul, make_policy
from quads_min.tasks import ChainTask

RATIOS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
DRIFTS = (0.0, 0.004, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
W4A16, W4A4, RAC = (ARITHMETICS[name] for name in ("w4a16", "w4a4", "w4a4+rac"))


class Call(NamedTuple):
    """One product of an expert matmul; with RAC, what the first packet lost, by 16-block."""

    consumed: torch.Tensor  # (rows, K) fp32, the input as it was multiplied
    returned: torch.Tensor  # (slots, N) fp32
    lost: torch.Tensor | None = None  # (K / 16,) fp32, energy over live rows


class Setting(NamedTuple):
    """What engines and trainers of any arithmetic are compared on."""

    policy: MoETransformer
    task: ChainTask
    make_engine: Callable  # (policy, arithmetic, drift=) -> an engine in the torch backend
    prompts: torch.Tensor  # (B, P) int64
    seed: int  # of sampling and drift


def listen(model: MoETransformer, choose: Callable | None = None, zero_planted: bool = False):
    """A list of Calls by expert matmul, which grows as the model runs. choose(name, x) names the
    blocks that RAC must take; zero_planted sets planted channels to 0 ahead of the quantizer."""
    heard = {name: [] for name in model.expert_linears()}

    def product(name, linear, original, x, routing, live):
        if zero_planted and linear.outliers is not None:
            x = torch.where(linear.outliers != 1, 0.0, x)
        a = linear.arithmetic
        if a.rac_ratio:
            mask = choose(name, x).repeat_interleave(nvfp4.QBLOCK) if choose else None
            main, extra, _ = nvfp4.encode_with_residual(
                x, a.rac_ratio, a.rac_unit, rows=live, mask=mask
            )
            x_hat = Operand(main.planes(), main.global_scale)
            y = grouped_matmul(x_hat, linear.operand, routing, extra.planes())
            lost = (x.float() - main.dequantize()).square()
            lost = lost if live is None else torch.where(live.unsqueeze(1), lost, 0.0)
            lost = lost.sum(0).unflatten(0, (-1, nvfp4.QBLOCK)).sum(1)
            heard[name].append(Call(main.dequantize() + extra.dequantize(), y, lost))
        else:
            y = original(x, routing, live)
            heard[name].append(Call(encode_operand(x, a.activations).value(), y))
        return y

    for name, linear in model.expert_linears().items():
        linear.product = partial(product, name, linear, linear.product)
    return heard


def roll_out(at: Setting, arithmetic: Arithmetic, drift: float = 0.0, **control):
    """The engine's completion of each prompt, and what was heard; `control` of listen."""
    engine, task = at.make_engine(at.policy, arithmetic, drift=drift), at.task
    heard, noise = listen(engine.model, **control), torch.Generator().manual_seed(at.seed)
    torch.manual_seed(at.seed)  # of the injected drift
    limits = (task.max_new_tokens, task.eos, task.pad)
    return engine.generate(at.prompts, *limits, generator=noise, eager=True), heard


@torch.no_grad()
def read(at: Setting, arithmetic: Arithmetic, rollout):
    """The trainer's gap to the engine, its choices (B, L, tokens, top_k), and what was heard."""
    trainer = make_policy(at.policy.config, arithmetic).to(at.policy.embed.device)
    trainer.load_state_dict(at.policy.state_dict())
    heard = listen(trainer)
    tokens = torch.cat([at.prompts.to(trainer.embed.device), rollout.tokens[:, :-1]], 1)
    out = trainer(tokens, logits_from=at.task.prompt_len - 1)
    logprobs, _ = grpo.token_logprobs(out.logits, rollout.tokens, 1.0)
    sampled = grpo.token_mask(rollout.lengths, at.task.max_new_tokens)
    found = grpo.mismatch(rollout.logprobs, logprobs, sampled)
    gap = {name: found[name].item() for name in ("gap_mean", "gap_p99", "gap_max")}
    return gap, out.choices(len(tokens)), heard


def gap_of(at: Setting, engine: Arithmetic, trainer: Arithmetic, **how) -> dict[str, float]:
    """The gap between two arithmetics; `how` as in roll_out."""
    rollout, _ = roll_out(at, engine, **how)
    return read(at, trainer, rollout)[0]


def layer_errors(policy, live: torch.Tensor, engine: tuple, trainer: tuple) -> dict[str, list]:
    """Errors by layer, over the live tokens (B, T) bool. A side: (its choices, what was heard)."""
    B, found = len(live), {"input": [], "output": [], "choice": []}
    for i, layer in enumerate(policy.layers):
        same = grpo.same_experts(engine[0][:, i], trainer[0][:, i])
        inputs, outputs = [], []
        for choice, heard in (engine, trainer):
            first, second = heard[f"layers.{i}.gate_up"], heard[f"layers.{i}.down"]
            slots = (B, -1, policy.config.top_k)
            x = torch.cat([call.consumed.unflatten(0, (B, -1)) for call in first], 1)  # (B, T, D)
            y = torch.cat([call.returned.unflatten(0, slots) for call in second], 1)
            y = y.gather(2, choice[:, i].argsort(-1).unsqueeze(-1).expand_as(y))  # by expert
            inputs.append(x[live][:, layer.gate_up.outliers == 1])
            outputs.append(y[live & same])
        for what, (ours, theirs) in (("input", inputs), ("output", outputs)):
            found[what].append(((ours - theirs).norm() / theirs.norm()).item())
        found["choice"].append((live & ~same).sum().item() / live.sum().item())
    return found


def one_gemm(drift: float) -> list[float]:
    """Error of one Gaussian product whose input drifted by d, relative to x V^: Q(x + d) V^ -
    Q(x) V^ for symmetric QAT, Q(x + d) V^ - x V^ for asymmetric QAT, the same with RAC in Q."""
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 512, 256, generator=generator)
    v = nvfp4.encode(v.to(torch.bfloat16), "tensor").dequantize()
    noise = torch.randn(x.shape, generator=generator)
    moved = x + drift * x.square().mean(1, keepdim=True).sqrt() * noise
    x, moved = x.to(torch.bfloat16), moved.to(torch.bfloat16)
    main, residual, _ = nvfp4.encode_with_residual(moved, RAC.rac_ratio)
    y, extra = main.dequantize() @ v.T, residual.dequantize() @ v.T
    symmetric, plain = nvfp4.encode(x).dequantize() @ v.T, x.float() @ v.T
    pairs = ((y, symmetric), (y, plain), (y + extra, plain))
    return [((a - b).norm() / plain.norm()).item() for a, b in pairs]


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


def measure(policy, task, make_engine: Callable, prompts: torch.Tensor, seed: int = 0) -> dict:
    """Everything that `text` prints, as plain numbers; the arguments are those of Setting."""
    at = Setting(policy, task, make_engine, prompts, seed)
    pairs = {mode: [ARITHMETICS[side] for side in sides] for mode, sides in MODES.items()}
    result = {"modes": {}, "ratio": [], "drift": [], "controls": {}}
    before = task.prompt_len - 1
    for mode, (engine, trainer) in pairs.items():
        rollout, ours = roll_out(at, engine)
        gap, choice, theirs = read(at, trainer, rollout)
        live = grpo.token_mask(before + rollout.lengths, before + task.max_new_tokens)
        errors = layer_errors(policy, live, (rollout.choice, ours), (choice, theirs))
        result["modes"][mode] = gap | errors
    for ratio in RATIOS:
        for unit in ("block", "channel") if 0 < ratio < 1 else ("block",):
            gap = gap_of(at, replace(W4A4, rac_ratio=ratio, rac_unit=unit), W4A16)
            result["ratio"].append({"ratio": ratio, "unit": unit} | gap)
    for drift in DRIFTS:
        gaps = [gap_of(at, *pairs[m], drift=drift)["gap_mean"] for m in ("sym", "qat", "quads")]
        result["drift"].append({"drift": drift, "gauss": one_gemm(drift), "gap": gaps})
    result["crossing"] = {k: crossing(result["drift"], k) for k in ("gauss", "gap")}

    others = task.sample_prompts(len(prompts), torch.Generator().manual_seed(1))
    _, heard = roll_out(at._replace(prompts=others, seed=seed + 1), RAC)
    static = {
        name: nvfp4.choose_groups(sum(call.lost for call in calls), RAC.rac_ratio)
        for name, calls in heard.items()
    }
    generator = torch.Generator().manual_seed(seed)

    def drawn(name, x):
        energy = torch.rand(x.shape[1] // nvfp4.QBLOCK, generator=generator)
        return nvfp4.choose_groups(energy, RAC.rac_ratio).to(x.device)

    forced = partial(gap_of, at, RAC, W4A16)
    result["controls"] = {
        "no RAC": result["modes"]["qat"],
        "RAC, mask chosen online": result["modes"]["quads"],
        "RAC, mask calibrated on other prompts": forced(choose=lambda name, x: static[name]),
        "RAC, random mask in every call": forced(choose=drawn),
        "no RAC, planted channels zeroed": gap_of(at, W4A4, W4A16, zero_planted=True),
    }
    return result


def text(result: dict) -> str:
    """The tables, for a terminal and the README."""
    lines, modes, drifts = [], result["modes"], result["drift"]

    def section(title, columns, rows):
        width = max(map(len, rows)) + 2
        lines.extend([title, f"{'':{width}}" + "".join(f"{column:>9}" for column in columns)])
        for name, values in rows.items():
            lines.append(f"  {name:{width - 2}}" + "".join(f"{value:9.4f}" for value in values))
        lines.append("")

    ratios = {f"{row['ratio']:<5g} by {row['unit']}": row for row in result["ratio"]}
    for title, rows in (("gap by mode", modes), ("gap of quads by RAC ratio", ratios),
                        ("gap of qat, quads, and controls", result["controls"])):  # fmt: skip
        gaps = {
            name: [row[f"gap_{c}"] for c in ("mean", "p99", "max")] for name, row in rows.items()
        }
        section(title, ("mean", "p99", "max"), gaps)
    whats, layers = ("input", "output", "choice"), range(len(modes["bf16"]["input"]))
    errors = {mode: [value for what in whats for value in row[what]] for mode, row in modes.items()}
    section("errors by layer", [f"{what} {i}" for what in whats for i in layers], errors)
    rows = {f"{r['drift']:g}": [*r["gauss"], *r["gap"]] for r in drifts}
    title = "error of one Gaussian GEMM, mean gap of the whole model, by drift"
    section(title, ("sym", "asym", "+RAC") * 2, rows)
    at = [result["crossing"][kind] for kind in ("gauss", "gap")]
    below = ["at all of these" if drift is None else f"below {drift:.4f}" for drift in at]
    return "\n".join([*lines[:-1], "  sym is below asym: " + "; ".join(below)])


def main() -> None:
    """Print the tables of what `rollout.py --errors --log` wrote last."""
    parser = argparse.ArgumentParser("analysis", description=main.__doc__)
    parser.add_argument("log")
    try:
        *_, last = report.read_lines(parser.parse_args().log, "errors")
        print(text(last["errors"]))
    except (ValueError, OSError, LookupError, TypeError) as e:
        parser.exit(2, f"analysis: error: expected a log of rollout.py --errors: {e}\n")


if __name__ == "__main__":
    main()
