"""The README is a program: commands parse, paths exist, numbers are those of the logs."""

import re
import shlex
from pathlib import Path

import pytest

import rollout
import train
from quads_min import report
from quads_min.modes import ARITHMETICS, MODES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```(?:bash)?\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if re.match(r"(python3?|pip|bash) ", line)
]


def python_commands():
    parts = [part.strip() for command in COMMANDS for part in command.split("&&")]
    return [shlex.split(p)[1:] for p in parts if re.match(r"python3? (?!-m venv|-m pytest)", p)]


@pytest.mark.parametrize("argv", python_commands(), ids=" ".join)
def test_every_command_parses(argv, monkeypatch):
    """Each flag is one that its program takes today; nothing is run."""
    program, args = argv[0], argv[1:]
    if program == "train.py":
        train.parse([*args, "--device", "cpu"])
    elif program == "rollout.py":
        seen = []
        for name in ("run", "report_self_check"):
            monkeypatch.setattr(rollout, name, lambda args: seen.append(args) or True)
        assert rollout.cli(args) == 0 and seen
    elif program == "tests/bench.py":
        assert not args
    else:
        assert argv[:2] == ["-m", "quads_min.report"]


def test_paths_exist_and_the_file_map_is_complete():
    """Every path named in `code` is there, and every module has its row in the reading order."""
    for path in re.findall(
        r"`((?:quads_min|tests|\.ci)/[\w./-]*)`|\]\((?!http|#)([^)]+)\)", README
    ):
        assert (ROOT / (path[0] or path[1])).exists(), path
    rows = set(re.findall(r"^\| `([\w./]+)` \|", README, re.M))
    modules = {p.name for p in ROOT.glob("*.py")}
    modules |= {f"quads_min/{p.name}" for p in (ROOT / "quads_min").glob("[!_]*.py")}
    assert rows == modules | {"tests/"}


def test_tables_are_those_of_the_logs():
    """The marked tables are what the report prints from the shipped logs, to the character."""
    marked = re.findall(r"<!-- table: (.+?) -->\n(.*?)\n<!-- end -->", README, re.S)
    assert marked
    for argument, text in marked:
        runs = [report.read_log(path) for path in report.find_logs([ROOT / argument])]
        assert report.table(runs) == text.strip(), argument


def test_the_table_of_modes_in_train_py_is_that_of_modes_py():
    rows = re.findall(r"^    (\w+) +(\w+ / \w+(?:\+RAC)?) +(\w+ / \w+) +\w", train.__doc__, re.M)
    said = {mode: (rollout_side, trainer_side) for mode, rollout_side, trainer_side in rows}

    def text(name):
        a = ARITHMETICS[name]
        return f"{a.weights} / {a.activations}" + ("+RAC" if a.rac_ratio else "")

    assert said == {mode: tuple(map(text, pair)) for mode, pair in MODES.items()}
