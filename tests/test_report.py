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
