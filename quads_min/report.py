"""Run logs to the README's tables and figures.

    python -m quads_min.report runs --figure out.png             a row per label, a line per run
    python -m quads_min.report runs --measures entropy,length    the same of any other measure
    python -m quads_min.report --cross cross.jsonl               policies against arithmetics

pass@1, the mean of a run's last 5 evaluations, is measured twice, as two things fail differently:
*deployed*, by the engine of the mode, where it can be low alone (deployment loss); and in the
*trainer*'s own arithmetic, where *collapsed* is 20 points or more below the best evaluation. Other
measures are means over the first tenth of the steps -> over the last. ± is a standard error over n
seeds, std / sqrt(n); of a difference sqrt(se^2 + se^2), unpaired. Next: analysis.py.
"""

import argparse
import json
from math import hypot, nan
from pathlib import Path
from statistics import fmean, stdev

from quads_min.modes import MODES

# knobs in which the runs of one label may differ
WITHIN = {"seed", "resume", "check_weights", "checkpoint_every", "log_every"}
TITLES = {"deployed": "pass@1 deployed", "trainer": "pass@1 in the trainer's arithmetic",
          "gap_mean": "mean |gap| per token, nats"}  # fmt: skip
LOGARITHMIC = {"gap_mean", "gap_p99", "mass_neg_neg", "mass_pos_pos", "grad_norm"}
COLORS = {  # Okabe and Ito's palette, with a grey, and a wine for its yellow
    "bf16": "#000000", "fp8": "#999999", "naive": "#D55E00", "w4a16": "#56B4E9", "w16a4": "#E69F00",
    "qat": "#CC79A7", "rac": "#009E73", "sym": "#882255", "quads": "#0072B2",
}  # fmt: skip


def find_logs(paths: list[str | Path]) -> list[Path]:
    """Files as they are, folders searched for *.jsonl."""
    logs = []
    for path in map(Path, paths):
        logs += [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
    return logs


def read_lines(path: str | Path, key: str) -> list[dict]:
    """JSON objects with `key`, one a line. A broken line is an error, unless it is the last and has
    no newline: there a run was killed."""
    found, (*lines, _) = [], Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
            found[-1][key]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{number}: no {key!r} in {line[:40]!r}") from None
    return found


def read_log(path: str | Path) -> dict:
    """A run by kind of event: all `steps` and `evals`; `config`; `end`, None if it did not end."""
    events = read_lines(path, "event")
    run = {f"{kind}s": [e for e in events if e["event"] == kind] for kind in ("step", "eval")}
    run |= {"config": None, "end": None} | {e["event"]: e for e in events}
    if run["config"] is None:
        raise ValueError(f"{path}: the file ends without a config line")
    return run | {"setting": (run["config"]["config"]["preset"], run["config"]["device"])}


def estimate(values: list[float]) -> tuple[float, float]:
    """(mean, standard error), NaN where there are too few values."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else nan
    return fmean(values or [nan]), error


def curve(run: dict, measure: str) -> dict[int, float]:
    """A measure of the step or evaluation lines, by step."""
    return {e["step"]: e[measure] for e in run["steps"] + run["evals"] if measure in e}


def tenths(run: dict, measure: str) -> tuple[float, float]:
    """Its means over the first and the last tenth of the steps."""
    values = curve(run, measure)
    end = max(values, default=0)
    first = [v for step, v in values.items() if step <= end / 10] or [*values.values()][:1]
    last = [v for step, v in values.items() if step > 0.9 * end]
    return estimate(first)[0], estimate(last)[0]


def summarize(run: dict) -> dict:
    """A run in numbers: pass@1 as shares of 1, NaN where nothing was logged."""
    passed = {key: [*curve(run, key).values()] for key in ("deployed", "trainer")}
    final = {key: estimate(values[-5:])[0] for key, values in passed.items()}
    fall = max(passed["trainer"], default=nan) - final["trainer"]
    return final | {
        **{key: run["config"][key] for key in ("label", "seed", "backend")},
        "collapsed": round(fall, 9) >= 0.2,  # rounded: 0.75 - 0.55 < 0.2 in floats
        "gap_mean": tenths(run, "gap_mean")[1],
        "steps": (run["end"] or [{"step": 0}, *run["steps"]][-1])["step"],
        "minutes": run["end"]["seconds"] / 60 if run["end"] else nan,
        "finished": run["end"] is not None,
    }


def by_label(runs: list[dict]) -> dict[str, list[dict]]:
    """Finished runs by label, in the order of MODES; ValueError where a mean would mix settings."""
    if len({run["setting"] for run in runs}) > 1:
        raise ValueError("these runs are of different presets or devices; pass those of one")
    groups, order = {}, [*MODES, *(run["config"]["mode"] for run in runs)].index
    for run in sorted(runs, key=lambda r: (order(r["config"]["mode"]), r["config"]["label"])):
        if run["end"]:
            groups.setdefault(run["config"]["label"], []).append(run)
    for label, group in groups.items():
        runs_knobs = [run["config"]["config"] | {"steps": run["end"]["step"]} for run in group]
        knobs = [{(k, v) for k, v in r.items() if isinstance(v, int | float)} for r in runs_knobs]
        mixed = {k for others in knobs for k, _ in others ^ knobs[0]} - WITHIN
        if mixed or len({run["config"]["seed"] for run in group}) < len(group):
            why = f"differ in {', '.join(sorted(mixed))}" if mixed else "repeat a seed"
            raise ValueError(f"runs labelled {label} {why}; pass only one kind")
    return groups


def aggregate(group: list[dict]) -> dict:
    """Runs of one label to (mean, standard error) by measure; n, and how many collapsed."""
    each = [summarize(run) for run in group]
    measures = ("deployed", "trainer", "gap_mean", "minutes")
    found = {key: estimate([s[key] for s in each]) for key in measures}
    return found | {"n": len(each), "collapsed": sum(s["collapsed"] for s in each)}


def difference(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """a - b of two (mean, standard error), unpaired."""
    return a[0] - b[0], hypot(a[1], b[1])


def header() -> str:
    """The line above row()."""
    return f"{'label':24} seed deployed,%  trainer,%  gap_mean collapsed minutes  backend"


def row(s: dict) -> str:
    """A summary in one line, aligned with header(); train.py ends with it."""
    passed = f"{100 * s['deployed']:10.1f} {100 * s['trainer']:10.1f} {s['gap_mean']:9.3g}"
    fate = f"{'yes' if s['collapsed'] else 'no':>9} {s['minutes']:7.1f}  {s['backend']}"
    return f"{s['label']:24} {s['seed']:4} {passed} {fate}"


def points(value: tuple[float, float], spec: str = ".1f") -> str:
    """(mean, standard error) of a share, in percent."""
    return f"{100 * value[0]:{spec}} ± {100 * value[1]:.1f}".replace("nan", "-")


def change(group: list[dict], measure: str) -> str:
    """First tenth -> last, means over runs."""
    first, last = zip(*(tenths(run, measure) for run in group), strict=True)
    return f"{fmean(first):.3g} -> {fmean(last):.3g}".replace("nan", "-")


def markdown(corner: str, rows: dict[str, dict[str, str]]) -> str:
    """A table of {row: {column: cell}}."""
    columns = list(next(iter(rows.values()), {}))
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells.values())} |" for name, cells in rows.items()]
    return "\n".join(lines)


def table(runs: list[dict]) -> str:
    """A row per label, and what is in no row: the unfinished runs."""
    groups, rows = by_label(runs), {}
    base = aggregate(groups["bf16"])["deployed"] if "bf16" in groups else None
    for label, group in groups.items():
        a = aggregate(group)
        lost = points(difference(a["deployed"], base), "+.1f") if base else "-"
        rows[label] = {
            "rollout": group[0]["config"]["rollout"],
            "trainer": group[0]["config"]["trainer"],
            "pass@1 deployed, %": f"{points(a['deployed'])} (n = {a['n']})",
            "pass@1 trainer's arithmetic, %": points(a["trainer"]),
            "deployed - bf16, points": "-" if label == "bf16" else lost,
            "mean gap, first -> last 10%": change(group, "gap_mean"),
            "collapsed": f"{a['collapsed']}/{a['n']}",
            "minutes": f"{a['minutes'][0]:.1f}",
        }
    said = [", ".join(sorted({r["config"][key] for r in runs})) for key in ("backend", "commit")]
    title = "**Preset {} on {}**, backend {}, commit {}".format(*runs[0]["setting"], *said)
    dead = [run for run in runs if not run["end"]]
    below = f"Unfinished, in no mean: {len(dead)} of {len(runs)} runs."
    for run in dead:
        s = summarize(run)
        below += f" {s['label']} seed {s['seed']}: after step {s['steps']}."
    return f"{title}\n\n{markdown('label', rows)}\n\n{below}"


def by_measure(runs: list[dict], measures: list[str]) -> str:
    """A row per label: how measures changed."""
    rows, unknown = {}, [m for m in measures if not any(curve(run, m) for run in runs)]
    if unknown:
        raise ValueError(f"no step or evaluation line holds {', '.join(unknown)}")
    for label, group in by_label(runs).items():
        rows[label] = {"runs": str(len(group))} | {m: change(group, m) for m in measures}
    return markdown("label", rows)


def cross_table(path: str | Path) -> str:
    """A row per mode of training, a column per arithmetic (bold: the mode's own), from the lines of
    `rollout.py CHECKPOINT ... --arithmetic all --log`."""
    groups, rows, lines = {}, {}, read_lines(path, "pass@1")
    kinds = {(*line["pass@1"], line.get("prompts"), line.get("seed")) for line in lines}
    if len(kinds) > 1 or len({line["checkpoint"] for line in lines}) < len(lines):
        raise ValueError(f"{path}: a checkpoint twice, or lines of other arithmetics, prompts or "
                         "seeds; log one kind")  # fmt: skip
    for line in lines:
        folder = line["checkpoint"].split("/")[0]
        name = "warm start" if folder == "checkpoints" else folder.rsplit("-s", 1)[0]
        groups.setdefault(name, []).append(line["pass@1"])
    for name in sorted(groups, key=["warm start", *MODES, *groups].index):
        found = groups[name]
        cells = {a: points(estimate([passed[a] for passed in found])) for a in found[0]}
        cells |= {a: f"**{cells[a]}**" for a in MODES.get(name, ()) if a in cells}
        rows[f"{name} (n = {len(found)})"] = cells
    return markdown("trained in", rows)


def figure(runs: list[dict], path: str | Path, measures: list[str]) -> None:
    """PNG or SVG, by suffix: a panel per measure, a line per run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--figure needs matplotlib: pip install -e '.[plot]'") from None
    rows, columns = -(-len(measures) // 3), min(3, len(measures))
    size = (3.7 * columns, 3.2 * rows + 0.9)
    fig = Figure(figsize=size, dpi=100, layout="constrained")
    for i, measure in enumerate(measures, 1):
        ax = fig.add_subplot(rows, columns, i, title=TITLES.get(measure, measure), xlabel="step")
        for j, (label, group) in enumerate(by_label(runs).items()):
            for run in group:
                values, name = curve(run, measure), label if run is group[0] else None
                color = COLORS.get(label, f"C{j}")
                ax.plot([*values], [*values.values()], color=color, lw=0.8, label=name)
        ax.set_yscale("log" if measure in LOGARITHMIC else "linear")
        ax.grid(alpha=0.3)
    fig.suptitle("Preset {} on {}: a line per run".format(*runs[0]["setting"]))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    fig.savefig(path)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser("report", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="log files, or folders searched for *.jsonl")
    parser.add_argument("--figure", help="also draw the curves, to a .png or .svg file")
    parser.add_argument("--measures", help="of step or evaluation lines, separated by commas")
    parser.add_argument("--cross", help="print the cross table of what rollout.py --log wrote")
    parser.add_argument("--labels", help="only these rows, separated by commas")
    args = parser.parse_args(argv)
    measures = args.measures.split(",") if args.measures else []
    try:
        runs = [read_log(path) for path in find_logs(args.paths)]
        if args.labels:
            runs = [run for run in runs if run["config"]["label"] in args.labels.split(",")]
        if not runs and not args.cross:
            raise ValueError(f"no log of these labels in {args.paths}; name what train.py wrote")
        if args.cross:
            print(cross_table(args.cross))
        else:
            print(by_measure(runs, measures) if measures else table(runs))
        if args.figure:
            figure(runs, args.figure, measures or [*TITLES])
    except (ValueError, OSError) as error:
        parser.exit(2, f"report: error: {error}\n")
    except (LookupError, TypeError, AttributeError) as error:
        parser.exit(2, f"report: error: not logs that train.py and rollout.py wrote: {error!r}\n")


if __name__ == "__main__":
    main()
