"""analysis.py: listening in changes nothing, and what it reports can be recomputed by hand."""

import copy
from functools import partial

import pytest
import torch

import rollout
from quads_min import analysis, checkpoint, qat
from quads_min.modes import ARITHMETICS, Arithmetic

ENGINE = partial(rollout.Engine, backend="torch")


def shipped(name):
    return checkpoint.load_policy(rollout.SHIPPED / f"{name}.pt", Arithmetic())


@pytest.fixture(scope="module")
def at():
    policy, task = shipped("tiny")
    return analysis.Setting(policy, task, ENGINE, rollout.held_out_prompts(task, 12), 0)


@pytest.mark.parametrize("name", ARITHMETICS)
def test_an_engine_that_is_listened_to_samples_the_same_bits(at, name):
    heard, _ = analysis.roll_out(at, ARITHMETICS[name])
    alone, _ = rollout.sample(ENGINE(at.policy, ARITHMETICS[name]), at.task, at.prompts)
    assert all(map(torch.equal, heard, alone))


def test_two_equal_sides_have_no_error_and_a_changed_expert_shows(at):
    """Slots in another order change nothing; down weights of layer 1 doubled: an error of 0.5."""
    completions, _ = analysis.roll_out(at, Arithmetic())
    _, choice, heard = analysis.read(at, Arithmetic(), completions)
    live = torch.ones(len(choice), choice.shape[2], dtype=torch.bool)
    flipped = {name: [c._replace(returned=c.returned.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))
                      for c in calls] for name, calls in heard.items()}  # fmt: skip
    same = analysis.layer_errors(at.policy, live, (choice.flip(-1), flipped), (choice, heard))
    assert same == dict.fromkeys(("input", "output", "choice"), [0.0] * 3)
    other = copy.deepcopy(at.policy)
    other.layers[1].down.weight.data *= 2
    _, *changed = analysis.read(at._replace(policy=other), Arithmetic(), completions)
    found = analysis.layer_errors(at.policy, live, (choice, heard), changed)
    assert found["input"][:2] == [0, 0] and found["output"][:2] == [0, pytest.approx(0.5)]
    assert found["input"][2] > 0


def test_planted_channels_can_be_zeroed(at):
    _, heard = analysis.roll_out(at, analysis.W4A4, zero_planted=True)
    planted = at.policy.layers[0].gate_up.outliers != 1
    x = torch.cat([call.consumed for call in heard["layers.0.gate_up"]])
    assert (x[:, planted] == 0).all() and (x[:, ~planted] != 0).any()


@pytest.mark.parametrize("name", ["tiny", "base"])
def test_98_percent_of_the_planted_channels_weights_round_to_zero(name):
    """They carry nothing that NVFP4 keeps, as the README tells a sceptic."""
    experts = [layer.gate_up for layer in shipped(name)[0].layers]
    v = [qat.encode_operand(e.scaled_weight(), "nvfp4", "tensor").plane for e in experts]
    planted = [plane[..., e.outliers != 1] for plane, e in zip(v, experts, strict=True)]
    assert 0.975 < (torch.stack(planted) == 0).float().mean() < 0.985


def test_a_crossing_is_interpolated_or_absent():
    rows = [{"drift": 0.1, "x": [1.0, 2.0]}, {"drift": 0.2, "x": [5.0, 2.0]}]
    found = [analysis.crossing(part, "x") for part in (rows, rows[1:], rows[:1])]
    assert found == [pytest.approx(0.125), 0.2, None]  # 0.2: no better from the first row on


def test_the_command_logs_and_prints(monkeypatch, tmp_path, capsys):
    """No RAC, its default and no drift are the same numbers wherever they occur; drift widens the
    gap of quads."""
    monkeypatch.setattr(analysis, "DRIFTS", (0.0, 0.1))
    log = tmp_path / "errors.jsonl"
    assert rollout.cli(f"--errors --prompts 8 --device cpu --log {log}".split()) == 0
    (line,) = analysis.report.read_lines(log, "errors")
    assert analysis.text(line["errors"]) in capsys.readouterr().out
    ratio, drift, modes = (line["errors"][key] for key in ("ratio", "drift", "modes"))
    means = [modes[mode]["gap_mean"] for mode in ("sym", "qat", "quads")]
    assert drift[0]["gap"] == means == [means[0], ratio[0]["gap_mean"], ratio[5]["gap_mean"]]
    assert means[2] < drift[1]["gap"][2]
