"""Expressions of a cluster file compute what arithmetic says, and are refused where they are anything else."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from services.cases import cases

from shadho_celery.errors import UsageError
from shadho_celery.simulate import main
from shadho_celery.simulation.cluster_file import parse
from shadho_celery.simulation.params import Expression
from shadho_celery.simulation.simulation import simulate

PARAMS: dict[str, float | str] = {"w": 0.5, "d": 4, "model": "net"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20 + 400 * w", 220.0),
        ("-w + 2 ** 3 - d // 3 % 2", 6.5),
        ("log(exp(w)) + sqrt(d) + log2(8) + log10(100)", 7.5),
        ("max(w, d, 3) + min(w, d) + abs(-1) + floor(1.5) + ceil(1.5)", 8.5),
        ("10 if model == 'net' else 20", 10.0),
        ("10 if w > 0.7 else 20 if d <= 4 else 30", 20.0),
        ("{'net': 3 * w, 'forest': 7}[model]", 1.5),
        ("+w + " + " + ".join(["w"] * 99), 50.0),
    ],
)
def test_it_computes(text: str, value: float) -> None:
    assert Expression(text, PARAMS)(PARAMS) == pytest.approx(value)


@cases("text", [
        "__import__('os')", "w.real", "(lambda: 1)()", "[x for x in (1,)]", "open('f')", "exec('1')", "w if d", "",
        "z", "w = 1", "'a' 'b'[0]", "f'{w}'", "max(*w)", "max(w, key=abs)", "{w: 1}[w]", "w[0]", "1j", "b'1'", "not w",
        "None", "print(1)", "eval('1')", "math.exp(1)", "w := 1", "+".join(["w"] * 1500),
        "-" * 500 + "w", "\x00", "w; d", "w" + ".a" * 900, "not " * 450 + "w", "~" * 900 + "w", "w" + "()" * 900,
    ])  # fmt: skip
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it |param|key|no "):
        Expression(text, PARAMS)


@pytest.mark.parametrize(
    "text", ["1 / (w - 0.5)", "10 ** 400", "log(0)", "model * 2", "{'x': 1}[model]", "exp(1000)", "1" + "0" * 400]
)
def test_what_gives_no_finite_number_is_an_error_that_says_for_what(text: str) -> None:
    with pytest.raises(ValueError, match=r"for \{'w'"):
        Expression(text, PARAMS)(PARAMS)


def test_another_process_gets_it_as_it_is() -> None:
    there = pickle.loads(pickle.dumps(Expression("20 + 400 * w", PARAMS)))
    assert there(PARAMS) == 220.0
    assert there == Expression("20 + 400 * w", PARAMS)


def test_a_power_of_huge_numbers_is_computed_in_floats() -> None:
    with pytest.raises(ValueError, match="cannot be computed"):
        Expression("9 ** 9 ** 9", PARAMS)(PARAMS)


def flat(seconds: dict[str, Any], params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "seconds": 3600,
        "classes": {"gpu": {"workers": 2}, "cpu": {"workers": 4}},
        "families": {"net": {"seconds": seconds, "params": params}},
        **more,
    }


W = {"law": "uniform", "low": 0, "high": 1}
ALL = {
    "w": W,
    "b": {"law": "loguniform", "low": 8, "high": 512},
    "n": {"law": "integer", "low": 1, "high": 3},
    "m": {"law": "choice", "options": ["x", "y"]},
}


@pytest.mark.slow
def test_trials_take_the_seconds_of_their_params() -> None:
    seconds = {"gpu": "10 + 5 * w + n", "cpu": "{'x': 20, 'y': 60}[m] + 200 / b"}
    found = simulate(parse(flat(seconds, ALL)), policy="cost", seed=1)
    assert found.trials > 300
    for trial in found.study.trials:
        w, b, n, m = (trial.params[f"{name} of net"] for name in "wbnm")
        expected = 10 + 5 * w + n if trial.compute_class == "gpu" else [20, 60][int(m)] + 200 / b
        assert trial.outcome.seconds == pytest.approx(expected)
        assert 8 <= b <= 512
        assert n in {1, 2, 3}


def test_a_simulation_tells_which_options_went_where(tmp_path: Path) -> None:
    """In the words of the cluster file, and not by the places of the options."""
    file = tmp_path / "c.toml"
    file.write_text(
        "seconds = 3000\n[classes]\ngpu.workers = 4\ncpu.workers = 8\n[families.net.seconds]\n"
        """gpu = 20\ncpu = "{'x': 20, 'y': 300}[m]"\n"""
        '[families.net.params]\nm = { law = "choice", options = ["x", "y"] }\n'
    )
    shown = CliRunner().invoke(main, [str(file)]).output
    assert re.search(r"placed by m of net x -> cpu \d+ %, y -> gpu \d+ %|placed by m of net y -> gpu", shown), shown


def test_a_limit_on_trials_gives_every_policy_the_same_set() -> None:
    described = parse(flat({"gpu": "10 + w", "cpu": "10 + 90 * w"}, {"w": W}, trials=200))
    sets = [
        {(t.params["w of net"], t.seed) for t in simulate(described, policy=policy).study}
        for policy in ("cost", "fifo")
    ]
    assert sets[0] == sets[1]
    assert len(sets[0]) == 200


@pytest.mark.parametrize(
    ("seconds", "params", "about"),
    [
        ({"gpu": "20 * z", "cpu": 1}, {"w": W}, "families.net.seconds.gpu: '20 * z' is refused: there is no param 'z'"),
        ({"gpu": "20 * w - 30", "cpu": 1}, {"w": W}, "families.net.seconds.gpu"),
        ({"gpu": "20 * w", "cpu": 1}, {}, "families.net.seconds.gpu"),
        ({"gpu": 1, "cpu": 1}, {"w": {"law": "gauss"}}, "families.net.params.w.law: there is no law 'gauss'"),
        ({"gpu": 1, "cpu": 1}, {"w": {"law": "uniform", "low": 2, "high": 1}}, "families.net.params.w.high"),
        ({"gpu": 1, "cpu": 1}, {"w": {"law": "loguniform", "low": 0, "high": 1}}, "families.net.params.w.low"),
        ({"gpu": 1, "cpu": 1}, {"w": {"law": "choice", "options": []}}, "families.net.params.w.options"),
        ({"gpu": 1, "cpu": 1}, {"a b": W}, "families.net.params.a b: expressions cannot name 'a b'"),
    ],
)
def test_a_law_that_makes_no_sense_is_refused_with_its_key(
    seconds: dict[str, Any], params: dict[str, Any], about: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(flat(seconds, params))
    assert about in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_says_it_in_one_line_and_ends_with_2(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        "seconds = 9\n[classes.cpu]\nworkers = 1\n[families.net]\nseconds = { cpu = '__import__(\"os\")' }\n"
        "[families.net.params]\nw = { law = 'uniform', low = 0, high = 1 }\n"
    )
    done = CliRunner().invoke(main, [str(file)])
    assert done.exit_code == 2
    assert "families.net.seconds.cpu" in done.output
