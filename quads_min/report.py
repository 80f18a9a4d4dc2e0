"""Run logs to the README's table and figure: `python -m quads_min.report runs --figure out.png`.

A run is one log.jsonl of train.py. pass@1 is measured twice, because two things fail differently:

    deployed    by the engine of the mode; low here alone is *deployment loss*
    trainer     in the trainer's own arithmetic; falling here is *RL collapse*

    final       mean of the last 5 evaluations (of all, if there are fewer)
    collapsed   best single evaluation - final >= 20 points, both in the trainer's arithmetic
    stable      best mean of 5 evaluations in a row - final <= 1.5 points, likewise
    gap         mean or p99 of |gap|, averaged over the last (first) 10% of the logged steps
    ± se        over n seeds, sample std / sqrt(n); of a difference sqrt(se^2 + se^2), unpaired

Unfinished runs enter no mean and no curve; a line below the table names them. Next: README.md.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from math import hypot, isnan, nan
from pathlib import Path
from statistics import fmean, median, stdev

from quads_min.modes import MODES

IGNORED = {"seed", "resume", "check_weights"}  # knobs that may differ between runs of one row
LAST, COLLAPSE, STABLE = 5, 0.20, 0.015
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
    return stdev(e[key] for e in events) / len(events) ** 0.5 if len(events) > 1 else nan


def _text(value: float, spec: str = ".1f") -> str:
    return "-" if isnan(value) else format(value, spec)


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


def _by_label(runs: list[dict]) -> dict[str, list[dict]]:
    """Finished runs by label, in the order of MODES. ValueError where a mean would mix settings."""
    rows, rank = {}, [*MODES, *(run["config"]["mode"] for run in runs)].index
    for run in sorted(runs, key=lambda r: (rank(r["config"]["mode"]), r["config"]["label"])):
        if run["end"]:
            rows.setdefault(run["config"]["label"], []).append(run)
    for label, group in rows.items():
        seeds = sorted(run["config"]["seed"] for run in group)
        items = [run["config"]["config"].items() for run in group]
        knobs = [{(k, v) for k, v in i if isinstance(v, int | float)} for i in items]
        mixed = (
            {k for k, _ in set.union(*knobs) - set.intersection(*knobs)} - {"seed"} - folders.FREE
        )
        if mixed or len(set(seeds)) < len(seeds):
            why = f"differ in {', '.join(sorted(mixed))}" if mixed else f"repeat a seed: {seeds}"
            paths = ", ".join(str(run["path"]) for run in group)
            raise ValueError(f"runs labelled {label} {why}; pass only one kind of {paths}")
    return rows


def table(runs: list[dict]) -> str:
    """Markdown: per (preset, device) a table, with a row per label over its finished runs."""
    lines = []
    for setting in sorted({run["setting"] for run in runs}):
        here = [run for run in runs if run["setting"] == setting]
        said = [", ".join(sorted({r["config"][k] for r in here})) for k in ("backend", "commit")]
        lines += ["**Preset {} on {}**, backend {}, commit {}".format(*setting, *said), HEAD]
        rows = _by_label(here)
        base = [*map(summarize, rows.get("bf16", []))]
        for label, group in rows.items():
            config, seeds = group[0]["config"], [*map(summarize, group)]
            mean, se = _mean(seeds, "deployed"), _se(seeds, "deployed")
            change, change_se = mean - _mean(base, "deployed"), hypot(se, _se(base, "deployed"))
            plain = label == "bf16" or isnan(change)
            gap, first = _mean(seeds, "gap_mean"), _mean(seeds, "gap_mean_first")
            own, own_se = _mean(seeds, "trainer"), _se(seeds, "trainer")
            cells = (
                f"{label} | {config['rollout']} | {config['trainer']}",
                f"{_text(100 * mean)} ± {_text(100 * se)} (n = {len(seeds)})",
                f"{_text(100 * own)} ± {_text(100 * own_se)}",
                "-" if plain else f"{100 * change:+.1f} ± {_text(100 * change_se)}",
                f"{_text(gap, '.3g')} (x {_text(gap / first if first else nan, '.2f')})",
                f"{sum(s['collapsed'] for s in seeds)}/{len(seeds)}",
                _text(_mean(seeds, "minutes")),
            )
            lines.append(f"| {' | '.join(cells)} |")
        dead = [(summarize(run), run["error"]) for run in here if not run["end"]]
        lines.append(f"\nUnfinished, in no mean: {len(dead)} of {len(here)} runs.")
        for s, error in dead:
            why = f" ({error['message']})" if error else ""
            lines[-1] += f" {s['label']} seed {s['seed']}: after step {s['steps']}{why}."
        lines[-1] += "\n"
    return "\n".join(lines).rstrip()


def figure(runs: list[dict], path: str | Path) -> None:
    """PNG or SVG, by suffix: pass@1 twice and the gap against steps; mean and range over seeds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figure needs matplotlib: pip install -e '.[plot]'") from None
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"figure: expected a name ending in .png or .svg, got {path}")
    settings = sorted({run["setting"] for run in runs if run["end"]})
    if len(settings) != 1:
        raise ValueError(f"figure needs finished runs of one preset and device, got {settings}")
    rows = _by_label(runs)
    fig = Figure(figsize=(11, 4.2), dpi=160, layout="constrained")
    panels = (
        ("pass@1 deployed, %", "evals", "deployed", 100),
        ("pass@1 trainer's arithmetic, %", "evals", "trainer", 100),
        ("mean |gap| per token, nats", "steps", "gap_mean", 1),
    )
    for ax, (title, events, key, scale) in zip(fig.subplots(1, 3), panels, strict=True):
        dashes = {}  # the labels of a mode share its color
        for label, group in rows.items():
            mode = group[0]["config"]["mode"]
            line = dashes.setdefault(mode, ["-", "--", "-.", *(":" * len(rows))]).pop(0)
            color = COLORS.get(mode, "#666666")
            curves = [{e["step"]: scale * e[key] for e in run[events]} for run in group]
            x = sorted(set.intersection(*map(set, curves)))
            y = [[curve[step] for curve in curves] for step in x]
            name = f"{label} (n = {len(group)})"
            ax.plot(x, [*map(fmean, y)], line, color=color, lw=1.2, label=name)
            ax.fill_between(x, [*map(min, y)], [*map(max, y)], color=color, alpha=0.15, lw=0)
        ax.set(title=title, xlabel="step", **({"ylim": (0, 100)} if scale == 100 else {}))
        ax.grid(alpha=0.3)
    ax.set_yscale("log")
    fig.suptitle("Preset {} on {}: mean over seeds, band from min to max".format(*settings[0]))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    fig.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser("report", description=table.__doc__, allow_abbrev=False)
    parser.add_argument("paths", nargs="+", help="log files, or folders searched for *.jsonl")
    parser.add_argument("--figure", help="also draw the curves, to a .png or .svg file")
    parser.add_argument("--labels", help="only these rows, separated by commas")
    args = parser.parse_args(argv)
    try:
        runs = [read_log(path) for path in find_logs(args.paths)]
        labels = {run["config"]["label"] for run in runs}
        wanted = set(args.labels.split(",")) if args.labels else labels
        if not wanted <= labels:
            raise ValueError(f"no run labelled {sorted(wanted - labels)}, only {sorted(labels)}")
        runs = [run for run in runs if run["config"]["label"] in wanted]
        print(table(runs))
        if args.figure:
            figure(runs, args.figure)
    except (ValueError, OSError) as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
