"""report.py on logs small enough to check by hand: what is averaged, what is left out and said."""

import json
import sys

import pytest

from quads_min import report

STEPS = (*range(10, 100, 10), *range(100, 1001, 50))
EVALS = [0.4, 0.5, 0.6, 0.6, 0.7, 0.75, 0.85]  # steps 0, 50, ...; mean of the last 5: 0.7


def write_log(at, label="quads", seed=0, trainer=EVALS, lost=0.1, end=1000, lr=1e-4, device="cpu"):
    """pass@1 deployed is `lost` below the trainer's."""
    events = [{"event": "config", "mode": label, "label": label, "seed": seed,
               "commit": "abc", "backend": "torch", "device": device, "rollout": "W4",
               "trainer": "W16", "config": {"preset": "tiny", "lr": lr, "seed": seed}}]  # fmt: skip
    events += [{"event": "step", "step": step, "gap_mean": step / 1000} for step in STEPS]
    for i, value in enumerate(trainer):
        events.append({"event": "eval", "step": 50 * i, "deployed": value - lost, "trainer": value})
    events += [{"event": "end", "step": end, "seconds": 90.0}] * (end > 0)
    at.mkdir(exist_ok=True)
    (at / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return at / "log.jsonl"


def runs_in(folder):
    return [report.read_log(path) for path in report.find_logs([folder])]


def cells(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines() if "|" in line]


@pytest.mark.parametrize(("best", "collapsed"), [(0.75, "yes"), (0.7499, "no")])
def test_a_fall_of_20_points_is_a_collapse_and_less_is_not(tmp_path, best, collapsed):
    """0.75 - 0.55 < 0.2 in floats, and is one; a deployment loss of 50 points is none."""
    path = write_log(tmp_path, trainer=[0.4, best, *[0.55] * 5], lost=0.5)
    row = report.row(report.summarize(report.read_log(path)))
    assert row.split() == ["quads", "0", "5.0", "55.0", "0.975", collapsed, "1.5", "torch"]
    assert row.index("torch") == report.header().index("backend")


def test_only_the_last_line_may_be_broken_and_a_config_must_be_there(tmp_path):
    path, cut = write_log(tmp_path, end=0), '{"event": "end", "st'
    config, rest = path.read_text().split("\n", 1)
    path.write_text(f"{config}\n{rest}{cut}")
    assert report.read_log(path)["end"] is None
    for text, said in (f"{config}\n{cut}\n", ":2: no 'event'"), (rest, ": the file ends"):
        path.write_text(text)
        with pytest.raises(ValueError, match="log.jsonl" + said):
            report.read_log(path)


def test_a_table_averages_over_seeds_and_compares_with_bf16(tmp_path):
    """bf16 at 58 and 62: std 2.83, se 2.0. naive, one seed, at 40: -20, and no se. The first tenth
    of the steps, 10 to 100, is ten lines of 28."""
    for label, seed, lost in ("bf16", 0, 0.12), ("bf16", 1, 0.08), ("naive", 0, 0.3):
        write_log(tmp_path / f"{label}-{seed}", label, seed, lost=lost)
    bf16, naive = cells(report.table(runs_in(tmp_path)))[2:]
    assert bf16[3:] == ["60.0 ± 2.0 (n = 2)", "70.0 ± 0.0", "-", "0.055 -> 0.975", "0/2", "1.5"]
    assert naive[:6] == ["naive", "W4", "W16", "40.0 ± - (n = 1)", "70.0 ± -", "-20.0 ± -"]


@pytest.mark.parametrize(("other", "said"), [
    ({}, "repeat a seed"), ({"seed": 1, "lr": 1}, "in lr"), ({"device": "H200"}, "devices"),
    ({"seed": 1, "end": 900}, "in steps"),
])  # fmt: skip
def test_runs_of_one_label_may_differ_in_the_seed_alone(tmp_path, other, said):
    write_log(tmp_path / "a")
    write_log(tmp_path / "b", **other)
    with pytest.raises(ValueError, match=said):
        report.table(runs_in(tmp_path))


def test_a_cross_table_takes_a_checkpoint_once_and_lines_of_one_kind(tmp_path):
    line = {"checkpoint": "quads-s0/x.pt", "pass@1": {"bf16": 0.8}}
    for odd in {}, {"checkpoint": "quads-s1/x.pt", "prompts": 9}:
        (tmp_path / "x").write_text(f"{json.dumps(line)}\n{json.dumps(line | odd)}\n")
        with pytest.raises(ValueError, match="a checkpoint twice, or lines of other"):
            report.cross_table(tmp_path / "x")


def test_the_command_draws_or_ends_in_one_line(tmp_path, capsys, monkeypatch):
    folder = str(write_log(tmp_path).parent)
    (tmp_path / "odd").write_text('{"event": "config"}\n')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for flags, said in (("--labels quad", "no log"), ("--measures x", "holds x"),
                        (f"{folder}/odd", "not logs that"),
                        ("--figure x.png", "pip install -e '.[plot]'")):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            report.main([folder, *flags.split()])
        assert said in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    report.main([folder, "--measures", "gap_mean,trainer", "--figure", f"{folder}/x.png"])
    assert (tmp_path / "x.png").stat().st_size > 10_000
