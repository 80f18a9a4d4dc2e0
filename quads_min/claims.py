"""The paper's claims, each as a function of the logs: `python -m quads_min.claims`.

What was measured, and a verdict by a rule that is written here and not in anybody's eye:

    holds             what the paper says, in its own size where the toy has that size
    partly            the direction, not the size, or under conditions that are named
    does not          the toy shows something else
    estimate only     cannot be measured without FP4 tensor cores

Losses are differences of pass@1, in points; ± is a standard error over seeds (report.py), and a
difference counts from two of them on. The factor of C2 is our bar for "dominates". Next:
tests/test_claims.py, which reruns each of them on the tiny preset.
"""

from pathlib import Path
from typing import NamedTuple

from quads_min import analysis, report

RESULTS = Path(__file__).parent / "results"
ERRORS = "python rollout.py --errors --checkpoint quads_min/checkpoints/base.pt --prompts 512"
SETS = ("base", "switches", "gain", "ratio")  # the folders of RESULTS that claims are made from


class Claim(NamedTuple):
    name: str
    paper: str
    ours: str
    command: str
    verdict: str


def loss(rows: dict, label: str, key: str = "deployed") -> tuple[float, float]:
    """What `label` loses against bf16: (mean, standard error), as shares."""
    return report.difference(rows["bf16"][key], rows[label][key])


def growth(row: dict, key: str) -> float:
    """Mean over the last 10% of the steps by that of the first 10%."""
    return row[key][0] / row[f"{key}_first"][0]


def c1(rows: dict, runs: list[dict]) -> Claim:
    naive, bf16 = rows["naive"], rows["bf16"]
    fell, grew = naive["collapsed"], growth(naive, "gap_mean")
    steps = sorted(s["fell_at"] for s in map(report.summarize, runs) if s["collapsed"])
    ours = (
        f"naive {report.points(naive['deployed'])} deployed, {report.points(naive['trainer'])} in "
        f"bf16; bf16 {report.points(bf16['deployed'])}; collapsed {fell} of {naive['n']}, having "
        f"lost 20 points by step {', '.join(f'{s:g}' for s in steps)} (bf16: {bf16['collapsed']}); "
        f"mean gap x {grew:.2f} to {naive['gap_mean'][0]:.2f}, p99 x "
        f"{growth(naive, 'gap_p99'):.2f} to {naive['gap_p99'][0]:.1f} "
        f"(bf16: {bf16['gap_mean'][0]:.4f}, {bf16['gap_p99'][0]:.3f})"
    )
    collapses = fell == naive["n"] and bf16["collapsed"] == 0
    verdict = "does not" if not collapses else "holds" if grew > 1 else "partly: no growth"
    return Claim("C1", "naive NVFP4 collapses near step 150 (51.4 against 73.2), the gap grows",
                 ours, "python train.py --mode bf16,naive --seeds 0,1,2,3,4", verdict)  # fmt: skip


def excess(rows: dict) -> tuple[float, float]:
    """loss(w16a4) - 5 * loss(w4a16), with its standard error (bf16 enters with weight -4)."""
    base, a, b = (rows[k]["deployed"] for k in ("bf16", "w16a4", "w4a16"))
    se = (a[1] ** 2 + (5 * b[1]) ** 2 + (4 * base[1]) ** 2) ** 0.5
    return 5 * b[0] - a[0] - 4 * base[0], se


def c2(rows: dict) -> Claim:
    value, se = excess(rows)
    pair = lambda s: " and ".join(  # noqa: E731
        report.points(loss(rows, m + s)) for m in ("w4a16", "w16a4") if m + s in rows
    )
    ours = (
        f"w4a16 and w16a4 lose {pair('')}; w16a4 - 5 w4a16 = {report.points((value, se))}. "
        f"Without outliers {pair('+outlier_gain=1')}; with them in the weights instead (o -> 1/o) "
        f"{pair('+outlier_gain=0.03125')}"
    )
    verdict = "holds, because outliers are planted" if value > 2 * se else "does not"
    return Claim("C2", "activation error, not weight error, dominates", ours,
                 "python train.py --mode w4a16,w16a4 --seeds 0,1,2,3,4", verdict)  # fmt: skip


def c3(runs: list[dict]) -> Claim:
    weights = lambda r, side: r["config"][side].split(" / ")[0]  # noqa: E731
    same = [r for r in runs if r["config"]["config"]["check_weights"]
            and weights(r, "rollout") == weights(r, "trainer") == "W nvfp4"]  # fmt: skip
    syncs = sum(report.summarize(r)["steps"] for r in same)
    ended = sum(r["end"] is not None for r in same)
    ours = (
        f"checked bit for bit through the engine's own GEMM at every one of {syncs:,} syncs of "
        f"{len(same)} runs with NVFP4 on both sides (any difference stops a run; {ended} reached "
        "their end)"
    )
    verdict = "holds" if ended == len(same) else "does not"
    return Claim("C3", "weights align exactly through one quantize-dequantize path", ours,
                 "python train.py --mode quads", verdict)  # fmt: skip


def c4(rows: dict, errors: dict) -> Claim:
    cross, sym, qat = errors["crossing"], rows["sym"], rows["qat"]
    at = {k: "at no drift up to 10 %" if v is None else f"above {100 * v:.1f} % drift"
          for k, v in cross.items()}  # fmt: skip
    gap = [errors["modes"][m]["gap_mean"] for m in ("sym", "qat", "quads")]
    ours = (
        f"one Gaussian GEMM: symmetric is worse {at['gauss']}; the policy's own inputs: "
        f"{at['layers']}; whole model: {at['gap']}. At the toy's own drift the warm start's gap "
        f"is {gap[0]:.2f} in sym, {gap[1]:.2f} in qat, {gap[2]:.3f} in quads. Trained: sym "
        f"{report.points(sym['deployed'])}, qat {report.points(qat['deployed'])} deployed, "
        f"{report.points(sym['trainer'])} and {report.points(qat['trainer'])} in the trainer's"
    )
    larger = all(v == 0 for v in cross.values())
    verdict = "holds" if larger else "partly: only above the crossing"
    if all(v is None for v in cross.values()):
        verdict = "does not"
    return Claim("C4", "symmetric QAT has a larger layer-wise mismatch than weight-only QAT", ours,
                 ERRORS, verdict)  # fmt: skip


def c5(rows: dict) -> Claim:
    order = ("naive", "qat", "rac", "quads")
    gain, se = report.difference(rows["quads"]["deployed"], rows["rac"]["deployed"])
    means = [rows[m]["deployed"][0] for m in order]
    ours = ", ".join(f"{m} {report.points(rows[m]['deployed'])}" for m in order)
    ours += f"; quads - rac = {report.points((gain, se), '+.1f')}; collapsed: " + ", ".join(
        f"{m} {rows[m]['collapsed']}/{rows[m]['n']}" for m in order
    )
    but = ["QAT alone recovers little"] * (2 * means[1] < means[0] + rows["bf16"]["deployed"][0])
    but += ["quads = rac within two errors"] * (abs(gain) <= 2 * se)
    verdict = (
        "does not" if means != sorted(means) else f"partly: {', '.join(but)}" if but else "holds"
    )
    command = "python train.py --mode naive,qat,rac,quads --seeds 0,1,2,3,4"
    return Claim("C5", "naive 51.4, QAT alone 71.1, QAT + RAC 72.9", ours, command, verdict)


def c6(errors: dict) -> Claim:
    ours, falls, largest = [], [], []
    for unit in ("block", "channel"):
        curve = [r for r in errors["ratio"] if r["unit"] == unit or r["ratio"] in (0, 1)]
        curve.sort(key=lambda r: r["ratio"])
        mean, p99, top = ([r[k] for r in curve] for k in ("gap_mean", "gap_p99", "gap_max"))
        falls.append([v == sorted(v, reverse=True) for v in (mean, p99)])
        largest.append(top == sorted(top, reverse=True))
        ours.append(
            f"by {unit}: mean {' '.join(f'{v:.3f}' for v in mean)}, p99 "
            f"{' '.join(f'{v:.2f}' for v in p99)}, max {' '.join(f'{v:.2f}' for v in top)}"
        )
    ratios = " ".join(f"{100 * r['ratio']:g}" for r in curve)
    everywhere, anywhere = all(map(all, falls)), any(map(any, falls))
    verdict = "partly: not every step falls" if anywhere else "does not"
    if everywhere:
        verdict = "holds" if all(largest) else "partly: mean and p99 fall throughout, the max not"
    return Claim("C6", "max gap at ratio 12.5/25/50/75/100 %: .923 .901 .854 .812 .759",
                 f"at {ratios} %, {'; '.join(ours)}",
                 ERRORS, verdict)  # fmt: skip


def c7(rows: dict) -> Claim:
    lost, own = loss(rows, "quads"), loss(rows, "quads", "trainer")
    ours = (
        f"quads - bf16 = {report.points((-lost[0], lost[1]), '+.1f')}, of which "
        f"{report.points((-own[0], own[1]), '+.1f')} remain in the trainer's arithmetic"
    )
    if "quads+rac_ratio=1" in rows:
        full = loss(rows, "quads+rac_ratio=1")
        ours += f"; with RAC on every block {report.points((-full[0], full[1]), '+.1f')}"
    naive, _ = loss(rows, "naive")
    close = abs(lost[0]) <= 0.003 + 2 * lost[1]
    verdict = (
        "holds" if close else "partly: stable, not level" if lost[0] < naive / 5 else "does not"
    )
    return Claim("C7", "QUADS within 0.3 points of bf16 (72.86 against 73.15)", ours,
                 "python train.py --mode bf16,quads --seeds 0,1,2,3,4", verdict)  # fmt: skip


def c8(runs: list[dict]) -> Claim:
    size = {r["config"]["mode"]: r["config"]["weight_bytes"] for r in runs}
    here = size["fp8"] / size["quads"]
    ours = (
        f"{16 / 9:.2f} times fewer bytes a weight than fp8 (here {here:.2f}: "
        "fp8 stores a scale for each of its short rows), which bounds decoding where weights "
        "arrive slower than tokens; no rate of an FP4 card"
    )
    return Claim("C8", "about 16 % more rollout throughput than FP8", ours,
                 "python tests/bench.py --only estimate", "estimate only")  # fmt: skip


def c9(rows: dict) -> Claim:
    lost, row = loss(rows, "fp8"), rows["fp8"]
    ours = (
        f"fp8 - bf16 = {report.points((-lost[0], lost[1]), '+.1f')}; collapsed "
        f"{row['collapsed']} of {row['n']}; gap {row['gap_mean'][0]:.4f}"
    )
    stable = row["collapsed"] == 0
    near = stable and abs(lost[0]) <= 0.01
    verdict = (
        "holds" if near else "partly: stable, more than 1 point below" if stable else "does not"
    )
    return Claim("C9", "FP8 RL is stable (72.9 against 73.2)", ours,
                 "python train.py --mode bf16,fp8 --seeds 0,1,2,3,4", verdict)  # fmt: skip


def rows_of(runs: list[dict]) -> dict:
    """Aggregates by label, see report.aggregate."""
    return {label: report.aggregate(group) for label, group in report.by_label(runs).items()}


def all_claims(runs: list[dict], errors: dict) -> list[Claim]:
    """C1 to C9. runs: of report.read_log; errors: of analysis.measure."""
    rows, naive = rows_of(runs), report.by_label(runs)["naive"]
    return [
        c1(rows, naive), c2(rows), c3(runs), c4(rows, errors), c5(rows), c6(errors), c7(rows),
        c8(runs), c9(rows),
    ]  # fmt: skip


def table(claims: list[Claim]) -> str:
    """Markdown, a row a claim."""
    lines = ["| | the paper | here | command | verdict |", "|---|---|---|---|---|"]
    lines += [
        f"| {c.name} | {c.paper} | {c.ours} | `{c.command}` | **{c.verdict}** |" for c in claims
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table of the logs in results/."""
    logs = report.find_logs(RESULTS / name for name in SETS)
    runs = [report.read_log(path) for path in logs]
    print(table(all_claims(runs, analysis.read_log(RESULTS / "errors_base.jsonl"))))


if __name__ == "__main__":
    main()
