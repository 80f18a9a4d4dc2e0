"""The paper's claims: each verdict can go the other way, and (slow) each is rerun on tiny."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import rollout
from quads_min import analysis, checkpoint, claims, report
from quads_min.modes import MODES, Arithmetic

ROOT = Path(__file__).parent.parent
PASSED = {"bf16": 90, "fp8": 90, "naive": 10, "w4a16": 88, "w16a4": 50, "qat": 70, "rac": 80,
          "sym": 40, "quads": 90}  # fmt: skip


def rows(gap=0.5, collapsed=5, se=0.5, **changed):
    """Aggregates of five imagined seeds: pass@1 in percent by mode, gap growing from 0.1."""
    common = {"gap_mean": (gap, 0), "gap_mean_first": (0.1, 0), "gap_p99": (1, 0), "n": 5}
    common["gap_p99_first"] = (1, 0)
    return {
        mode: common
        | dict.fromkeys(("deployed", "trainer"), (value / 100, se / 100))
        | {"collapsed": collapsed * (mode == "naive")}
        for mode, value in (PASSED | changed).items()
    }


def curve(*means, p99=None, largest=(9, 8, 7)):
    """RAC ratios 0, 0.5 and 1, by block and by channel the same."""
    found = [
        {"ratio": r, "unit": "block", "gap_mean": m}
        for r, m in zip((0, 0.5, 1), means, strict=True)
    ]
    found.append(found[1] | {"unit": "channel"})
    top = dict(zip((0, 0.5, 1), largest, strict=True))
    more = [{"gap_p99": p99 or r["gap_mean"], "gap_max": top[r["ratio"]]} for r in found]
    return {"ratio": [r | m for r, m in zip(found, more, strict=True)]}


def errors(gauss, layers=None, gap=None):
    crossing = {"gauss": gauss, "layers": layers, "gap": gap}
    return {"crossing": crossing, "modes": {m: {"gap_mean": 0.1} for m in MODES}}


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        (claims.c1(rows(), []), "holds"),
        (claims.c1(rows(gap=0.05), []), "partly: no growth"),
        (claims.c1(rows(collapsed=4), []), "does not"),
        (claims.c2(rows()), "holds, because outliers are planted"),
        (claims.c2(rows(w16a4=79)), "does not"),  # 11 - 5 * 2 = 1, its error above 3
        (claims.c4(rows(), errors(0, 0, 0)), "holds"),
        (claims.c4(rows(), errors(0.03)), "partly: only above the crossing"),
        (claims.c4(rows(), errors(None)), "does not"),
        (claims.c5(rows()), "holds"),
        (claims.c5(rows(rac=89.5)), "partly: quads = rac within two errors"),
        (claims.c5(rows(qat=30)), "partly: QAT alone recovers little"),
        (claims.c5(rows(qat=85)), "does not"),
        (claims.c6(curve(3, 2, 1)), "holds"),
        (
            claims.c6(curve(3, 2, 1, largest=(9, 7, 8))),
            "partly: mean and p99 fall throughout, the max not",
        ),
        (claims.c6(curve(3, 1, 2)), "does not"),
        (claims.c6(curve(3, 1, 2, p99=1)), "partly: not every step falls"),
        (claims.c7(rows()), "holds"),
        (claims.c7(rows(quads=80)), "partly: stable, not level"),
        (claims.c7(rows(quads=20)), "does not"),
        (claims.c9(rows()), "holds"),
        (claims.c9(rows(fp8=88)), "partly: stable, more than 1 point below"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_each_verdict_follows_its_rule(claim, verdict):
    assert claim.verdict == verdict


def test_the_excess_of_c2_and_its_error_by_hand():
    """w16a4 loses 40, w4a16 2: 40 - 5 * 2 = 30. bf16 enters 1 - 5 = -4 times, and its error 4."""
    value, se = claims.excess(rows())
    assert value == pytest.approx(0.30) and se == pytest.approx(0.005 * (1 + 25 + 16) ** 0.5)


def run(mode, end=True, check=True, trainer="W nvfp4 / A bf16", rollout="W nvfp4 / A nvfp4"):
    config = {"mode": mode, "rollout": rollout, "trainer": trainer, "label": mode,
              "config": {"check_weights": check}, "seed": 0, "backend": "torch"}  # fmt: skip
    steps = [{"step": 30, "seconds": 1, "gap_mean": 1, "gap_p99": 1}]
    return {"config": config, "steps": steps, "evals": [{"deployed": 1, "trainer": 1}],
            "end": {"step": 30, "seconds": 1} if end else None}  # fmt: skip


def test_c3_counts_checked_syncs_alone_and_fails_with_a_run_that_stopped():
    unchecked = [run("quads", check=False), run("naive", trainer="W bf16 / A bf16")]
    unchecked.append(run("bf16", trainer="W bf16 / A bf16", rollout="W bf16 / A bf16"))
    assert "60 syncs of 2 runs" in claims.c3([run("quads"), run("qat"), *unchecked]).ours
    assert claims.c3([run("quads"), *unchecked]).verdict == "holds"
    assert claims.c3([run("quads"), run("qat", end=False)]).verdict == "does not"


# ---- on tiny, about 20 minutes on two cores


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Every mode, seeds 0 and 1: (all runs, their aggregates by label)."""
    out = tmp_path_factory.mktemp("tiny")
    flags = "--mode all --seeds 0,1 --jobs 2 --preset tiny --device cpu --checkpoint-every 100"
    command = [sys.executable, "train.py", *flags.split(), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    runs = [report.read_log(path) for path in report.find_logs([out])]
    return runs, claims.rows_of(runs)


@pytest.fixture(scope="module")
def gaps():
    policy, task = checkpoint.load_policy(rollout.SHIPPED / "tiny.pt", Arithmetic())
    engine = partial(rollout.Engine, backend="torch")
    return analysis.measure(policy, task, engine, rollout.held_out_prompts(task, 128))


@pytest.mark.slow
def test_c1_naive_collapses_on_both_seeds_and_bf16_on_none(tiny):
    """The gap does not grow on tiny, where it is as large from the start: not claimed here."""
    _, rows = tiny
    assert rows["naive"]["collapsed"] == 2 and rows["bf16"]["collapsed"] == 0
    assert claims.loss(rows, "naive")[0] > 0.5
    assert rows["naive"]["gap_mean"][0] > 100 * rows["bf16"]["gap_mean"][0]


@pytest.mark.slow
def test_c2_activation_error_costs_more_than_five_times_weight_error(tiny, gaps):
    """Only because of the planted outliers: equal without them, reversed with 1 / o."""
    value, se = claims.excess(tiny[1])
    assert value > se
    planted, none, weights = gaps["gains"]
    assert planted["w16a4"] > 2 * planted["w4a16"]
    assert 2 / 3 < none["w16a4"] / none["w4a16"] < 3 / 2
    assert weights["w4a16"] > 2 * weights["w16a4"]


@pytest.mark.slow
def test_c3_weights_were_identical_after_every_sync(tiny):
    claim = claims.c3(tiny[0])
    assert claim.verdict == "holds" and "2,400 syncs of 6 runs" in claim.ours


@pytest.mark.slow
def test_c4_symmetric_qat_mismatches_less_here_and_learns_nothing(tiny, gaps):
    """The paper's order holds for one Gaussian GEMM above a drift of 3 to 4 %, and only there."""
    assert 0.03 < gaps["crossing"]["gauss"] < 0.04
    assert gaps["modes"]["sym"]["gap_mean"] < gaps["modes"]["qat"]["gap_mean"]
    assert gaps["modes"]["quads"]["gap_mean"] < gaps["modes"]["sym"]["gap_mean"]
    assert claims.loss(tiny[1], "sym", "trainer")[0] > 0.5


@pytest.mark.slow
def test_c5_rac_recovers_most_and_qat_adds_to_it(tiny):
    """On tiny QAT alone recovers nothing that shows over naive, and adds to RAC clearly."""
    _, rows = tiny
    assert rows["rac"]["deployed"][0] > rows["qat"]["deployed"][0] + 0.4
    gain, se = report.difference(rows["quads"]["deployed"], rows["rac"]["deployed"])
    assert gain > 2 * se and gain > 0.02


@pytest.mark.slow
def test_c6_the_gap_falls_with_the_ratio_by_block_and_by_channel(gaps):
    """Two of the ratios select the same number of four blocks, so equal is allowed."""
    assert claims.c6(gaps).verdict in ("holds", "partly: mean and p99 fall throughout, the max not")
    first, *_, last = gaps["ratio"]
    assert last["gap_mean"] < first["gap_mean"] / 10


@pytest.mark.slow
def test_c7_quads_is_stable_and_within_ten_points_of_bf16(tiny):
    """Not within the paper's 0.3."""
    _, rows = tiny
    assert rows["quads"]["collapsed"] == 0 and claims.c7(rows).verdict.startswith("partly")
    assert 0 < claims.loss(rows, "quads")[0] < 0.1 < 0.5 < claims.loss(rows, "naive")[0]


@pytest.mark.slow
def test_c8_expert_weights_take_little_more_than_half_the_bytes_of_fp8(tiny):
    """The estimate's base: 4 bits + 8 / 16 a weight against 8 bits, and fp8's scale a row."""
    runs, _ = tiny
    size = {r["config"]["mode"]: r["config"]["weight_bytes"] for r in runs}
    weights = size["bf16"] / 2
    assert size["quads"] / weights == pytest.approx(4.5 / 8, rel=0.01)
    assert 1 < size["fp8"] / weights < 1 + 4 / 64 + 1e-9
    assert claims.c8(runs).verdict == "estimate only"


@pytest.mark.slow
def test_c9_fp8_is_stable_and_near_bf16(tiny):
    """Within 3 points: two seeds with a standard error near half a point each."""
    _, rows = tiny
    assert rows["fp8"]["collapsed"] == 0 and abs(claims.loss(rows, "fp8")[0]) < 0.03
