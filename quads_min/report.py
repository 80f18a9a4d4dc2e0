"""Run logs to the README's tables and figures.

    python -m quads_min.report runs --figure out.png       a row per label, curves over steps
    python -m quads_min.report runs --by lr                modes against values of one knob
    python -m quads_min.report runs --collapse             what moves when a run collapses
    python -m quads_min.report --cross cross.jsonl         policies against arithmetics

A run is one log.jsonl of train.py. pass@1 is measured twice, because two things fail differently:

    deployed    by the engine of the mode; low here alone is *deployment loss*
    trainer     in the trainer's own arithmetic; falling here is *RL collapse*

    final       mean of the last 5 evaluations (of all, if there are fewer)
    fell at     first evaluation 20 points below the best one before it, in the trainer's arithmetic
    collapsed   best single evaluation - final >= 20 points, both in the trainer's arithmetic
    stable      best mean of 5 evaluations in a row - final <= 1.5 points, likewise
    gap         mean or p99 of |gap|, averaged over the last (first) 10% of the logged steps
    ± se        over n seeds, sample std / sqrt(n); of a difference sqrt(se^2 + se^2), unpaired

Unfinished runs enter no mean and no curve; a line below the table names them. Next: analysis.py.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from functools import partial
from math import hypot, isnan, nan
from pathlib import Path
from statistics import fmean, median, stdev

from quads_min.modes import MODES

IGNORED = {"seed", "resume", "check_weights", "checkpoint_every", "log_every"}  # free within a row
LAST, COLLAPSE, STABLE, LEARNED = 5, 0.20, 0.015, 0.10
COLORS = {  # Okabe and Ito's palette, with a grey, and a wine for its yellow
    "bf16": "#000000", "fp8": "#999999", "naive": "#D55E00", "w4a16": "#56B4E9", "w16a4": "#E69F00",
    "qat": "#CC79A7", "rac": "#009E73", "sym": "#882255", "quads": "#0072B2",
}  # fmt: skip
ROW = "{:24} {:>4} {:>10} {:>9} {:>9} {:>9} {:>9} {:>7}  {}"
HEAD = """
| label | rollout | trainer | pass@1 deployed, % | pass@1 trainer's arithmetic, % | \
deployed - bf16, points | mean gap, last 10% (x first 10%) | collapsed | minutes |
|---|---|---|---|---|---|---|---|---|"""


def find_logs(paths: Iterable[str | Path]) -> list[Path]:
    """Files as they are, folders searched for *.jsonl. ValueError for a path that yields none."""
    logs = []
    for path in map(Path, paths):
        found = [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
        if not found:
            raise ValueError(f"no *.jsonl in {path}; pass the folders that train.py wrote")
        logs += found
    return logs


def read_log(path: str | Path) -> dict:
    """One run: config, steps, evals, end, error as logged (the last two or None); path and setting.

    Of a step logged twice the later counts: a resumed run repeats what it had not saved.

    Raises:
        ValueError: names file:line. Only a last line without newline may be broken: killed there.
    """
    run, logged = dict.fromkeys(("config", "end", "error")), {"step": {}, "eval": {}}
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line or '{"event": "none"}')
            kind, step = event["event"], event.get("step")
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: expected an event, got {line[:40]!r}") from None
        if kind in logged:
            logged[kind][step] = event
        elif kind == "config" and run["config"]:
            raise ValueError(f"{path}:{number}: a second config line; give each run its own file")
        elif kind in ("config", "end", "error", "resume"):
            run |= {"end": None, "error": None, kind: event}
    if run["config"] is None:
        raise ValueError(f"{path}:{len(lines)}: the file ends without a config line")
    steps, evals = ([events[step] for step in sorted(events)] for events in logged.values())
    setting = (str(run["config"]["config"].get("preset")), run["config"]["device"])
    return run | {"path": path, "setting": setting, "steps": steps, "evals": evals}


def _mean(events: list[dict], key: str) -> float:
    return fmean(e[key] for e in events) if events else nan


def _se(events: list[dict], key: str) -> float:
    values = [e[key] for e in events]
    return nan if len(values) < 2 or any(map(isnan, values)) else stdev(values) / len(values) ** 0.5


def _text(value: float, spec: str = ".1f") -> str:
    return "-" if isnan(value) else format(value, spec)


def fell_at(evals: list[dict]) -> float:
    """The step of the first evaluation 20 points below the best before it; NaN if there is none."""
    best = 0.0
    for e in evals:
        best = max(best, e["trainer"])
        if round(best - e["trainer"], 9) >= COLLAPSE:
            return float(e["step"])
    return nan


def summarize(run: dict) -> dict:
    """The measures above for one run: pass@1 as shares of 1, NaN where nothing was logged."""
    config, steps, evals, end = (run[key] for key in ("config", "steps", "evals", "end"))
    final, best = _mean(evals[-LAST:], "trainer"), max([e["trainer"] for e in evals], default=nan)
    fives = [evals[i : i + LAST] for i in range(max(1, len(evals) - LAST + 1))]
    whole = steps[-1]["step"] if steps else 0
    first = [s for s in steps if s["step"] <= whole / 10] or steps[:1]
    last = [s for s in steps if s["step"] > 0.9 * whole]
    return {
        **{key: config[key] for key in ("label", "seed", "backend")},
        "deployed": _mean(evals[-LAST:], "deployed"),
        "trainer": final,
        "trainer_best": best,
        "fell_at": fell_at(evals),
        "collapsed": round(best - final, 9) >= COLLAPSE,  # rounded: 0.75 - 0.55 < 0.2 in floats
        "stable": round(max(_mean(five, "trainer") for five in fives) - final, 9) <= STABLE,
        "gap_mean": _mean(last, "gap_mean"),
        "gap_mean_first": _mean(first, "gap_mean"),
        "gap_p99": _mean(last, "gap_p99"),
        "gap_p99_first": _mean(first, "gap_p99"),
        "steps": (end or [{"step": 0}, *steps][-1])["step"],
        "steps_per_second": median([1 / s["seconds"] for s in steps] or [nan]),
        "minutes": end["seconds"] / 60 if end else nan,
        "finished": end is not None,
    }


def header() -> str:
    """The line above row()."""
    names = "label seed deployed,% trainer,% gap_mean gap_p99 collapsed minutes backend"
    return ROW.format(*names.split())


def row(summary: dict) -> str:
    """One run in one line, aligned with header(); train.py ends with it."""
    s, collapsed = summary, "yes" if summary["collapsed"] else "no"
    shown = [_text(100 * s[key]) for key in ("deployed", "trainer")]
    shown += [_text(s[key], ".3g") for key in ("gap_mean", "gap_p99")]
    return ROW.format(s["label"], s["seed"], *shown, collapsed, _text(s["minutes"]), s["backend"])


def by_label(runs: list[dict]) -> dict[str, list[dict]]:
    """Finished runs by label, in the order of MODES. ValueError where a mean would mix settings."""
    rows, rank = {}, [*MODES, *(run["config"]["mode"] for run in runs)].index
    for run in sorted(runs, key=lambda r: (rank(r["config"]["mode"]), r["config"]["label"])):
        if run["end"]:
            rows.setdefault(run["config"]["label"], []).append(run)
    for label, group in rows.items():
        seeds = sorted(run["config"]["seed"] for run in group)
        items = [run["config"]["config"].items() for run in group]
        knobs = [{(k, v) for k, v in i if isinstance(v, int | float)} for i in items]
        mixed = {k for k, _ in set.union(*knobs) - set.intersection(*knobs)} - IGNORED
        if mixed or len(set(seeds)) < len(seeds):
            why = f"differ in {', '.join(sorted(mixed))}" if mixed else f"repeat a seed: {seeds}"
            paths = ", ".join(str(run["path"]) for run in group)
            raise ValueError(f"runs labelled {label} {why}; pass only one kind of {paths}")
    return rows


def aggregate(group: list[dict]) -> dict:
    """Runs of one label to (mean, standard error) by measure; n, and how many collapsed."""
    each = [summarize(run) for run in group]
    measures = {k: (_mean(each, k), _se(each, k)) for k, v in each[0].items() if type(v) is float}
    return measures | {"n": len(each), "collapsed": sum(s["collapsed"] for s in each)}


def difference(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """a - b of two (mean, standard error), unpaired."""
    return a[0] - b[0], hypot(a[1], b[1])


def points(value: tuple[float, float], spec: str = ".1f") -> str:
    """(mean, standard error) of a share, in percent."""
    return f"{_text(100 * value[0], spec)} ± {_text(100 * value[1])}"


def table(runs: list[dict]) -> str:
    """Markdown: per (preset, device) a table, with a row per label over its finished runs."""
    lines = []
    for setting in sorted({run["setting"] for run in runs}):
        here = [run for run in runs if run["setting"] == setting]
        said = [", ".join(sorted({r["config"][k] for r in here})) for k in ("backend", "commit")]
        lines += ["**Preset {} on {}**, backend {}, commit {}".format(*setting, *said), HEAD]
        rows = by_label(here)
        base = aggregate(rows["bf16"]) if "bf16" in rows else None
        for label, group in rows.items():
            config, a = group[0]["config"], aggregate(group)
            plain = label == "bf16" or base is None
            gap, first = a["gap_mean"][0], a["gap_mean_first"][0]
            cells = (
                f"{label} | {config['rollout']} | {config['trainer']}",
                f"{points(a['deployed'])} (n = {a['n']})",
                points(a["trainer"]),
                "-" if plain else points(difference(a["deployed"], base["deployed"]), "+.1f"),
                f"{_text(gap, '.3g')} (x {_text(gap / first if first else nan, '.2f')})",
                f"{a['collapsed']}/{a['n']}",
                _text(a["minutes"][0]),
            )
            lines.append(f"| {' | '.join(cells)} |")
        dead = [(summarize(run), run["error"]) for run in here if not run["end"]]
        lines.append(f"\nUnfinished, in no mean: {len(dead)} of {len(here)} runs.")
        for s, error in dead:
            why = f" ({error['message']})" if error else ""
            lines[-1] += f" {s['label']} seed {s['seed']}: after step {s['steps']}{why}."
        lines[-1] += "\n"
    return "\n".join(lines).rstrip()


def by_knob(runs: list[dict], knob: str) -> str:
    """Markdown: pass@1 deployed, in percent, of modes (rows) at values of one knob (columns), all
    else as in the preset."""
    found = {}
    for label, group in by_label(runs).items():
        config = group[0]["config"]
        if label in (config["mode"], f"{config['mode']}+{knob}={config['config'][knob]:g}"):
            found[config["mode"], config["config"][knob]] = aggregate(group)
    columns = sorted({value for _, value in found})
    lines = [f"| {knob} | {' | '.join(f'{c:g}' for c in columns)} |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for mode in dict.fromkeys(mode for mode, _ in found):
        rows = [found.get((mode, c)) for c in columns]
        cells = [
            "-" if a is None else f"{points(a['deployed'])} ({a['n']})"
            + f", {a['collapsed']} collapsed" * (a["collapsed"] > 0)
            for a in rows
        ]  # fmt: skip
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cross_table(path: str | Path) -> str:
    """Markdown: policies (a row per mode they were trained in, mean over seeds) evaluated in every
    arithmetic (a column each), from the lines of `rollout.py --eval ... --log`."""
    rows = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            event = json.loads(line)
            folder, found = event["checkpoint"].split("/")[0], event["pass@1"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{number}: expected a line of rollout.py --eval") from None
        name = "warm start" if folder == "checkpoints" else folder.rsplit("-s", 1)[0]
        rows.setdefault(name, []).append(found)
    names = sorted(rows, key=["warm start", *MODES, *rows].index)
    columns = list(rows[names[0]][0])
    lines = [f"| trained in | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        own = MODES.get(name, ())  # (deployed, trainer's), bold: what the mode is about
        cells = []
        for c in columns:
            value, mark = points((_mean(rows[name], c), _se(rows[name], c))), "**" * (c in own)
            cells.append(f"{mark}{value}{mark}")
        lines.append(f"| {name} (n = {len(rows[name])}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def moments(run: dict) -> dict[str, list[dict]]:
    """The first 100 steps of a run and its last; the 100 up to its best evaluation and up to where
    it fell, if it collapsed and had gained LEARNED before."""
    within = lambda low, high: [s for s in run["steps"] if low < s["step"] <= high]  # noqa: E731
    fell, end = fell_at(run["evals"]), run["evals"][-1]["step"]
    found = {"start": within(0, 100)}
    if summarize(run)["collapsed"]:
        before = [e for e in run["evals"] if e["step"] < fell]
        best = max(before, key=lambda e: e["trainer"])
        if best["trainer"] - before[0]["trainer"] >= LEARNED:
            at = best["step"]
            found |= {"at its best": within(at - 100, at), "fallen": within(fell - 100, fell)}
    return found | {"end": within(end - 100, end)}


def collapse_table(runs: list[dict]) -> str:
    """Markdown: what was logged at the moments of a run, mean over the runs of a label."""
    measures = [key for _, events, key, _ in COLLAPSE_PANELS if events == "steps"]
    lines = [f"| label | moment | runs | {' | '.join(measures)} |"]
    lines += ["|---" * (len(measures) + 3) + "|"]
    for label, group in by_label(runs).items():
        seen = [moments(run) for run in group]
        for fate, ms in ((", learned, then fell", [m for m in seen if "fallen" in m]),
                         ("", [m for m in seen if "fallen" not in m])):  # fmt: skip
            for moment in ms[0] if ms else ():
                means = [fmean(_mean(m[moment], k) for m in ms) for k in measures]
                cells = " | ".join(f"{v:.3g}" for v in means)
                lines.append(f"| {label}{fate} | {moment} | {len(ms)} | {cells} |")
    return "\n".join(lines)


PANELS = (  # title, events, key, factor
    ("pass@1 deployed, %", "evals", "deployed", 100),
    ("pass@1 trainer's arithmetic, %", "evals", "trainer", 100),
    ("mean |gap| per token, nats", "steps", "gap_mean", 1),
)
COLLAPSE_PANELS = (
    *PANELS[1:],
    ("gap mass, A < 0 and gap < 0", "steps", "mass_neg_neg", 1),
    ("gap mass, A > 0 and gap > 0", "steps", "mass_pos_pos", 1),
    ("entropy, nats", "steps", "entropy", 1),
    ("gradient norm before clipping", "steps", "grad_norm", 1),
    ("std of logits", "steps", "logit_std", 1),
    ("rms of residual stream", "steps", "hidden_rms", 1),
    ("share of tokens, other experts", "steps", "choice_mismatch", 1),
    ("completion length, tokens", "steps", "length", 1),
)
LOGARITHMIC = {"gap_mean", "mass_neg_neg", "mass_pos_pos", "grad_norm"}


def new_figure(path: str | Path, size: tuple[float, float]):
    """An empty matplotlib figure for `path`; ValueError where it cannot be drawn or written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figure needs matplotlib: pip install -e '.[plot]'") from None
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"figure: expected a name ending in .png or .svg, got {path}")
    return Figure(figsize=size, dpi=100, layout="constrained")


def figure(runs: list[dict], path: str | Path, collapse: bool = False) -> None:
    """PNG or SVG, by suffix: curves over steps, mean over seeds and range.

    collapse: ten measures instead of three, and a line for each run, since they fall at
    different times.
    """
    settings = sorted({run["setting"] for run in runs if run["end"]})
    fig = new_figure(path, (14, 6) if collapse else (11, 4.2))
    if len(settings) != 1:
        raise ValueError(f"figure needs finished runs of one preset and device, got {settings}")
    rows, panels = by_label(runs), COLLAPSE_PANELS if collapse else PANELS
    axes = fig.subplots(2, 5).flat if collapse else fig.subplots(1, 3)
    for ax, (title, events, key, scale) in zip(axes, panels, strict=True):
        dashes = {}  # the labels of a mode share its color
        for label, group in rows.items():
            mode = group[0]["config"]["mode"]
            line = dashes.setdefault(mode, ["-", "--", "-.", *(":" * len(rows))]).pop(0)
            color, name = COLORS.get(mode, "#666666"), f"{label} (n = {len(group)})"
            curves = [{e["step"]: scale * e[key] for e in run[events]} for run in group]
            if collapse:
                for curve in curves:
                    ax.plot([*curve], [*curve.values()], line, color=color, lw=0.7, label=name)
                    name = None
                continue
            x = sorted(set.intersection(*map(set, curves)))
            y = [[curve[step] for curve in curves] for step in x]
            ax.plot(x, [*map(fmean, y)], line, color=color, lw=1.2, label=name)
            ax.fill_between(x, [*map(min, y)], [*map(max, y)], color=color, alpha=0.15, lw=0)
        ax.set(title=title, xlabel="step", **({"ylim": (0, 100)} if scale == 100 else {}))
        ax.grid(alpha=0.3)
        if key in LOGARITHMIC:
            ax.set_yscale("log")
    what = "a line per run" if collapse else "mean over seeds, band from min to max"
    fig.suptitle("Preset {} on {}: ".format(*settings[0]) + what)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    fig.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser("report", description=table.__doc__, allow_abbrev=False)
    parser.add_argument("paths", nargs="*", help="log files, or folders searched for *.jsonl")
    parser.add_argument("--figure", help="also draw the curves, to a .png or .svg file")
    parser.add_argument("--collapse", action="store_true", help="ten measures at four moments")
    parser.add_argument("--by", metavar="KNOB", help="pass@1 of modes at values of one knob")
    parser.add_argument("--cross", help="print the cross table of a file that --eval wrote")
    parser.add_argument("--labels", help="only these rows, separated by commas")
    args = parser.parse_args(argv)
    try:
        if args.cross:
            print(cross_table(args.cross))
        elif not args.paths:
            raise ValueError("no log given; pass the folders that train.py wrote")
        if not args.paths:
            return 0
        runs = [read_log(path) for path in find_logs(args.paths)]
        labels = {run["config"]["label"] for run in runs}
        wanted = set(args.labels.split(",")) if args.labels else labels
        if not wanted <= labels:
            raise ValueError(f"no run labelled {sorted(wanted - labels)}, only {sorted(labels)}")
        runs = [run for run in runs if run["config"]["label"] in wanted]
        if args.by and args.by not in runs[0]["config"]["config"]:
            raise ValueError(f"--by: no knob {args.by!r}; see python train.py --help")
        make = partial(by_knob, knob=args.by) if args.by else table
        print(collapse_table(runs) if args.collapse else make(runs))
        if args.figure:
            figure(runs, args.figure, args.collapse)
    except (ValueError, OSError) as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
