"""report.py on logs small enough to check by hand: what is averaged, what is left out and said."""

import json
import sys

import pytest

from quads_min import report

EVALS = [0.4, 0.5, 0.6, 0.6, 0.7, 0.75, 0.85]  # steps 0, 50, ...; mean of the last 5: 0.7


def write_log(folder, label="quads", seed=0, trainer=EVALS, lost=0.1, end=True, **knobs):
    """Twenty steps with gaps .01, .02, ... .20; pass@1 as deployed is `lost` below `trainer`."""
    head = {"mode": label.split("+")[0], "label": label, "seed": seed, "commit": "abc123"}
    head |= {"device": knobs.pop("device", "cpu"), "backend": "torch (emulated)"}
    head |= {"config": {"preset": "tiny", "lr": 1e-4, "seed": seed, **knobs}}
    events = [{"event": "config", "rollout": "W nvfp4", "trainer": "W bf16", **head}]
    for i in range(1, 21):
        gaps = {"gap_mean": i / 100, "gap_p99": i / 10}
        gaps |= {key: float(i) for _, kind, key, _ in report.COLLAPSE_PANELS[2:] if kind == "steps"}
        events.append({"event": "step", "step": i, "seconds": 0.5 if i < 20 else 9.0, **gaps})
    for i, value in enumerate(trainer):
        events.append({"event": "eval", "step": 50 * i, "deployed": value - lost, "trainer": value})
    events += [{"event": "end", "step": 20, "seconds": 90.0}] if end else []
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder / "log.jsonl"


def runs_in(folder):
    return [report.read_log(path) for path in report.find_logs([folder])]


def test_a_summary_and_its_row_have_the_numbers_of_a_hand_calculation(tmp_path):
    s = report.summarize(report.read_log(write_log(tmp_path)))
    expected = {"deployed": 0.6, "trainer": 0.7, "trainer_best": 0.85, "minutes": 1.5, "steps": 20}
    expected |= {"gap_mean": 0.195, "gap_mean_first": 0.015, "steps_per_second": 2.0}
    expected |= {"gap_p99": 1.95, "gap_p99_first": 0.15, "finished": True, "collapsed": False}
    assert {key: s[key] for key in expected} == pytest.approx(expected)
    assert " ".join(report.row(s).split()[:8]) == "quads 0 60.0 70.0 0.195 1.95 no 1.5"
    assert report.row(s).index(" torch") == report.header().index(" backend")


@pytest.mark.parametrize(("best", "collapsed"), [(0.75, True), (0.7499, False)])
def test_a_fall_of_20_points_is_a_collapse_and_less_is_not(tmp_path, best, collapsed):
    """0.75 - 0.55 is below 0.2 in floats: the boundary belongs to the collapse all the same.

    Only the trainer's arithmetic counts: a deployment loss of 50 points changes nothing.
    """
    path = write_log(tmp_path, trainer=[0.4, best, *[0.55] * 5], lost=0.5)
    assert report.summarize(report.read_log(path))["collapsed"] == collapsed


@pytest.mark.parametrize(("last", "stable"), [(0.725, True), (0.72, False)])
def test_stable_means_within_a_point_and_a_half_of_the_best_five(tmp_path, last, stable):
    """Best five: 0.8. The last five: 0.785 with 0.725 at the end, 0.784 with 0.72."""
    path = write_log(tmp_path, trainer=[*[0.8] * 5, last])
    assert report.summarize(report.read_log(path))["stable"] == stable


def test_only_the_last_line_may_be_cut(tmp_path):
    path = write_log(tmp_path, end=False)
    path.write_text(path.read_text() + '{"event": "eval", "st')
    run = report.read_log(path)
    assert len(run["evals"]) == 7 and not report.summarize(run)["finished"]
    path.write_text(path.read_text() + '\n{"event": "resume"}\n')
    with pytest.raises(ValueError, match=r"log.jsonl:29: expected an event"):
        report.read_log(path)


def test_a_log_without_config_or_with_two_is_an_error(tmp_path):
    path = write_log(tmp_path)
    config, *rest = path.read_text().splitlines(keepends=True)
    for text, said in (("".join(rest), ":29: .*without a config"), (config * 2, ":2: a second")):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"log.jsonl" + said):
            report.read_log(path)


def test_the_table_orders_averages_and_names_what_it_leaves_out(tmp_path):
    """bf16 at 58 and 62: std 2.83, se 2.0. naive, one seed, at 40: -20, and no se."""
    quads, others = (
        [("quads", 0, 0.1), ("quads", 1, 0.1)],
        [("naive+tis", 0, 0.1), ("naive", 0, 0.3)],
    )
    for label, seed, lost in [*quads, *others, ("bf16", 0, 0.12), ("bf16", 1, 0.08)]:
        write_log(tmp_path / f"{label}-{seed}", label, seed, lost=lost)
    dead = write_log(tmp_path / "dead", "naive", 1, end=False)
    dead.write_text(dead.read_text() + '{"event": "error", "step": 21, "message": "loss is nan"}')
    lines = report.table(runs_in(tmp_path)).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert [cells[0] for cells in rows[2:]] == ["bf16", "naive", "naive+tis", "quads"]
    assert rows[2][3:6] == ["60.0 ± 2.0 (n = 2)", "70.0 ± 0.0", "-"]
    assert rows[3][1:6] == ["W nvfp4", "W bf16", "40.0 ± - (n = 1)", "70.0 ± -", "-20.0 ± -"]
    assert rows[5][5:] == ["+0.0 ± 2.0", "0.195 (x 13.00)", "0/2", "1.5"]
    assert lines[-1].endswith(": 1 of 7 runs. naive seed 1: after step 20 (loss is nan).")


def test_each_preset_and_device_has_its_own_table_and_figure(tmp_path):
    write_log(tmp_path / "a")
    write_log(tmp_path / "b", device="NVIDIA H200")
    text = report.table(runs_in(tmp_path))
    assert "Preset tiny on cpu" in text and "Preset tiny on NVIDIA H200" in text
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="one preset and device"):
        report.figure(runs_in(tmp_path), tmp_path / "x.png")


@pytest.mark.parametrize(
    ("other", "said"), [({}, "repeat a seed"), ({"seed": 1, "lr": 1}, "in lr")]
)
def test_runs_of_one_label_may_differ_in_the_seed_alone(tmp_path, other, said):
    write_log(tmp_path / "a")
    write_log(tmp_path / "b", **other)
    with pytest.raises(ValueError, match=said):
        report.table(runs_in(tmp_path))


def test_the_command_prints_the_table_or_one_line_of_error(tmp_path, capsys):
    write_log(tmp_path / "a")
    assert report.main([str(tmp_path), "--labels", "quads"]) == 0
    assert "| quads |" in capsys.readouterr().out
    for bad in ([str(tmp_path / "no")], [str(tmp_path), "--labels", "quad"]):
        assert report.main(bad) == 2
        assert capsys.readouterr().err.startswith("report: error: no ")


def test_a_figure_is_written_or_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_log(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[plot\]'"):
        report.figure(runs_in(tmp_path), tmp_path / "x.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    for name in ("x.png", "x.svg"):
        report.figure(runs_in(tmp_path), tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000


def test_where_a_run_fell_is_20_points_below_the_best_before(tmp_path):
    evals = [{"step": 50 * i, "trainer": v} for i, v in enumerate([0.4, 0.6, 0.41, 0.4, 0.9])]
    assert report.fell_at(evals) == 150
    assert report.fell_at(evals[:3]) != report.fell_at(evals[:3])  # NaN


def test_the_first_and_last_tenth_are_of_steps_and_not_of_lines(tmp_path):
    """Of lines every 10 steps up to 100 and every 50 up to 1,000, all but two lie in the last
    90 %: the first tenth is ten lines, the last two."""
    run = report.read_log(write_log(tmp_path))
    at = [*range(10, 101, 10), *range(150, 1001, 50)]
    run["steps"] = [dict(run["steps"][0], step=s, gap_mean=float(s)) for s in at]
    s = report.summarize(run)
    assert s["gap_mean_first"] == 55 and s["gap_mean"] == 975


def test_modes_against_a_knob_take_no_run_with_another_switch(tmp_path):
    for label, lr, seed in [("quads", 1e-4, 0), ("quads", 1e-4, 1), ("quads+lr=0.0003", 3e-4, 0),
                            ("naive+tis", 1e-4, 0), ("bf16", 1e-4, 0)]:  # fmt: skip
        write_log(tmp_path / f"{label}-{seed}", label, seed, lr=lr)
    lines = report.by_knob(runs_in(tmp_path), "lr").splitlines()
    assert lines[0] == "| lr | 0.0001 | 0.0003 |" and len(lines) == 4
    assert lines[2] == "| bf16 | 60.0 ± - (1) | - |"
    assert lines[3] == "| quads | 60.0 ± 0.0 (2) | 60.0 ± - (1) |"


def test_the_cross_table_has_a_row_per_mode_and_a_column_per_arithmetic(tmp_path):
    lines = [("quads-s0", 0.8, 0.5), ("quads-s1", 0.9, 0.7), ("bf16-s0", 0.9, 0.1)]
    lines.append(("checkpoints", 0.4, 0.2))
    path = tmp_path / "cross.jsonl"
    found = [{"checkpoint": f"{n}/x.pt", "pass@1": {"bf16": a, "w4a4+rac": b}} for n, a, b in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    rows = report.cross_table(path).splitlines()
    assert rows[0] == "| trained in | bf16 | w4a4+rac |"
    assert rows[2] == "| warm start (n = 1) | 40.0 ± - | 20.0 ± - |"
    assert rows[3] == "| bf16 (n = 1) | **90.0 ± -** | 10.0 ± - |"
    assert rows[4] == "| quads (n = 2) | 85.0 ± 5.0 | **60.0 ± 10.0** |"
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match=r"cross.jsonl:5: expected a line of rollout.py --eval"):
        report.cross_table(path)


def test_a_run_that_learned_and_fell_is_seen_at_four_moments(tmp_path):
    """Evaluations every 50 steps: best at 250, 20 points lost at 350, the end at 400."""
    run = report.read_log(write_log(tmp_path, trainer=[0.4] * 5 + [0.9, 0.75, 0.6, 0.5]))
    run["steps"] = [dict(run["steps"][0], step=s, entropy=float(s)) for s in range(1, 401)]
    seen = {k: (v[0]["step"], v[-1]["step"]) for k, v in report.moments(run).items()}
    assert seen == {"start": (1, 100), "at its best": (151, 250), "fallen": (251, 350),
                    "end": (301, 400)}  # fmt: skip
    table = report.collapse_table([run])
    assert (
        "| quads, learned, then fell | fallen | 1 |" in table and " 300 |" in table
    )  # mean of 251 .. 350: 300.5
    run["evals"][-1]["trainer"] = run["evals"][-2]["trainer"] = run["evals"][-3]["trainer"] = 0.9
    assert [*report.moments(run)] == ["start", "end"]
