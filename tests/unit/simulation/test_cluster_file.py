"""A cluster file is understood, or refused in one line that names the key."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from services.cases import cases

from shadho_celery.errors import UsageError
from shadho_celery.simulate import main
from shadho_celery.simulation.cluster_file import (
    GIB,
    LARGEST,
    MOST_WORKERS,
    Cluster,
    Constant,
    HalfNormal,
    Law,
    LogNormal,
    NoStraggler,
    Samples,
    Slow,
    Uniform,
    load,
    parse,
)
from shadho_celery.simulation.example import example
from shadho_celery.simulation.executor import LEASE_SECONDS, Change

EXAMPLE = example()

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: the least that a file must say
LEAST = """\
seconds = 100
[classes.cpu]
workers = 2
[families.net]
seconds = { cpu = 10 }
"""

#: a number of every law
NUMBERS: Mapping[str, Mapping[str, Any]] = {
    "constant": {},
    "uniform": {"low": 0.5, "high": 4.0},
    "lognormal": {"sigma": 0.7},
    "samples": {"values": [1.0, 2.0, 9.0]},
    "none": {},
    "halfnormal": {"scale": 0.5},
    "slow": {"probability": 0.25, "factor": 3.0},
}

#: words that no number is
NO_NUMBERS = [
    "true",
    "false",
    '"4"',
    "[4]",
    "{ a = 4 }",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "1e400",
    "1979-05-27",
    "07:32:00",
]


def law(name: str, values: Mapping[str, Any]) -> Law:
    kinds = Constant | Uniform | LogNormal | Samples | NoStraggler | HalfNormal | Slow
    found: Law = msgspec.convert({"law": name, **values}, kinds)
    return found


def understood(text: str) -> Cluster:
    return parse(tomllib.loads(text))


def refusal(text: str, folder: Path) -> str:
    """What the command says of this file: one line, and exit code 2."""
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return refusal_of(path)


def refusal_of(path: Path, *words: str) -> str:
    result = CliRunner().invoke(main, [str(path), *words])
    assert isinstance(result.exception, SystemExit), result.output
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert str(path) in line
    return line.removeprefix(f"Error: {path}").removeprefix(": ")


def with_(what: str, *, top: str = "", text: str = LEAST) -> str:
    """The file with something put at its head and something at its end."""
    return f"{top}\n{text}\n{what}\n"


# What is understood


def test_the_least_file_leaves_the_rest_to_the_defaults() -> None:
    cluster = understood(LEAST)
    assert (cluster.slots, cluster.memory, cluster.changes) == ({"cpu": 2}, {"cpu": 0}, [])
    assert (cluster.seconds, cluster.trials, cluster.target, cluster.seed) == (100, None, None, 0)
    assert cluster.lease_seconds == LEASE_SECONDS
    assert (cluster.size, cluster.straggler) == (Constant(), NoStraggler())
    family = cluster.families["net"]
    assert (family.seconds, family.share, family.failure_rate, family.memory) == ({"cpu": 10}, 1, 0, 0)


def test_the_example_says_all_there_is_and_is_understood() -> None:
    cluster = understood(EXAMPLE)
    assert cluster.slots == {"gpu_large": 4, "gpu_small": 8, "cpu": 20}
    assert cluster.memory == {"gpu_large": 40 * GIB, "gpu_small": 11 * GIB, "cpu": 0}
    network, forest = cluster.families["network"], cluster.families["forest"]
    assert (network.share, network.memory, network.failure_rate, network.best) == (2, 6 * GIB, 0.02, 0.0)
    assert (forest.share, forest.memory, forest.failure_rate, forest.spread) == (1, 0, 0.1, 0.5)
    assert cluster.families["flat"].seconds_on("cpu", {"width": 0.5}) == 220.0
    assert cluster.changes == [
        Change(at=3600, compute_class="cpu", slots=-10),
        Change(at=5400, compute_class="cpu", slots=15),
    ]
    for key in ("seconds", "trials", "target", "seed", "failure_rate", "lease_seconds", "size", "straggler", "changes"):
        assert key in EXAMPLE


def test_what_the_example_has_commented_out_is_understood_too() -> None:
    cluster = understood(EXAMPLE.replace("# trials", "trials").replace("# target", "target"))
    assert (cluster.trials, cluster.target) == (1000, 0.001)


@cases("name", ["a b", "a.b", "größe", "文字", "[red]", "[/]", "", "a=b", "a,b", "a\\nb", "x" * 500, "1"])
def test_classes_and_families_may_be_called_anything(name: str, tmp_path: Path) -> None:
    text = f'trials = 12\n[classes."{name}"]\nworkers = 2\n[families."{name}"]\nseconds = {{ "{name}" = 10 }}\n'
    text += f'[families.other]\nseconds = {{ "{name}" = 10 }}\n[[changes]]\nat = 1\nclass = "{name}"\nworkers = 1\n'
    (tmp_path / "c.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(main, [str(tmp_path / "c.toml")])
    assert result.exit_code == 0, result.output
    assert " 12 " in result.stdout


def test_a_seed_keeps_all_its_digits() -> None:
    assert understood(with_("", top="seed = 9007199254740993")).seed == 9007199254740993


@cases("seed", [2**63, 2**64])
def test_a_seed_may_have_64_bits_and_no_more(seed: int, tmp_path: Path) -> None:
    assert understood(with_("", top=f"seed = {seed}")).seed == seed
    assert refusal(with_("", top=f"seed = {2**64 + 1}"), tmp_path).startswith("seed: ")


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert understood(LEAST.replace("workers = 2", "workers = 2.0")).slots == {"cpu": 2}


def test_a_class_may_have_no_workers_where_another_has_some_or_some_come_later() -> None:
    other = "[classes.gpu]\nworkers = 0\n[families.big]\nseconds = { cpu = 1, gpu = 1 }"
    text = LEAST.replace("{ cpu = 10 }", "{ cpu = 10, gpu = 5 }")
    assert understood(with_(other, text=text)).slots == {"cpu": 2, "gpu": 0}
    later = with_('[[changes]]\nat = 5\nclass = "cpu"\nworkers = 3', text=LEAST.replace("workers = 2", "workers = 0"))
    assert understood(later).slots == {"cpu": 0}


def test_a_familys_failure_rate_comes_before_the_clusters() -> None:
    text = with_("failure_rate = 0.5\n[families.forest]\nseconds = { cpu = 1 }", top="failure_rate = 0.25")
    families = understood(text).families
    assert [families[name].failure_rate for name in ("net", "forest")] == [0.5, 0.25]


# Keys that do not exist


@cases(
    ("text", "key"),
    [
        (with_("", top="second = 1"), "second"),
        (with_("[class.cpu]"), "class"),
        (with_(f"[a{'.a' * 29}]"), "a"),
        (LEAST.replace("workers = 2", "workers = 2\nworker = 2"), "classes.cpu.worker"),
        (with_("weight = 2"), "families.net.weight"),
        (with_("loss = { bets = 1 }"), "families.net.loss.bets"),
        (LEAST.replace("cpu = 10", "cpu = 10, gpu = 5"), "families.net.seconds.gpu"),
        (with_('[size]\nlaw = "constant"\nsigma = 1'), "size.sigma"),
        (with_('[size]\nlaw = "uniform"\nsigma = 1'), "size.sigma"),
        (with_('[straggler]\nlaw = "slow"\nprobability = 0.1\nfactor = 2\nscale = 1'), "straggler.scale"),
        (with_('[[changes]]\nat = 1\nclass = "cpu"\nworkers = 1\nslots = 1'), "changes.0.slots"),
    ],
)
def test_a_key_that_does_not_exist_is_named_with_those_that_do(text: str, key: str, tmp_path: Path) -> None:
    line = refusal(text, tmp_path)
    assert re.match(rf"{re.escape(key)}: there is no such key; (did you mean \w+\? )?known are ", line)


@cases(
    ("text", "known"),
    [
        (with_('[size]\nlaw = "constant"\nsigma = 1'), "law"),
        (with_('[straggler]\nlaw = "slow"\nscale = 1'), "law, probability, factor"),
        (with_("loss = { bets = 1 }"), "best, spread"),
    ],
)
def test_the_keys_that_do_exist_are_those_of_the_same_table(text: str, known: str, tmp_path: Path) -> None:
    line = refusal(text, tmp_path)
    assert "there is no such key;" in line
    assert f"known are {known};" in line


# Keys that need others


@cases(
    ("text", "key", "message"),
    [
        (
            LEAST.replace("workers = 2", "workers = 2\nreturn_seconds = 5"),
            "classes.cpu.return_seconds",
            "its workers stay; give preemption_seconds or for_seconds",
        ),
        (
            LEAST.replace("workers = 2", "workers = 2\nfor_seconds = 5\nnotice = false"),
            "classes.cpu.notice",
            "its workers are not preempted; give preemption_seconds",
        ),
        (
            with_("", top='checkpoints = "machine"\ncheckpoint_seconds = 5'),
            "checkpoint_seconds",
            "a trial goes on elsewhere only from a shared checkpoint",
        ),
    ],
)
def test_a_key_without_the_one_that_it_needs_is_refused(text: str, key: str, message: str, tmp_path: Path) -> None:
    found = refusal(text, tmp_path)
    assert found.startswith(f"{key}: ")
    assert message in found


# Keys that are missing


@cases(
    ("text", "key"),
    [
        ("", "classes"),
        ("seconds = 1\n", "classes"),
        ("seconds = 1\n[classes]\n[families.net]\nseconds = {}\n", "classes"),
        ("seconds = 1\n[classes.cpu]\nworkers = 1\n", "families"),
        ("seconds = 1\n[classes.cpu]\nworkers = 1\n[families]\n", "families"),
        (LEAST.replace("workers = 2", ""), "classes.cpu.workers"),
        (LEAST.replace("seconds = { cpu = 10 }", ""), "families.net.seconds"),
        (LEAST.replace("cpu = 10", ""), "families.net.seconds.cpu"),
        (with_("[classes.gpu]\nworkers = 1"), "families.net.seconds.gpu"),
        (LEAST.replace("seconds = 100", ""), "seconds"),
        (LEAST.replace("seconds = 100", "target = 0.5"), "seconds"),
        (with_("[size]"), "size.law"),
        (with_('[size]\nlaw = "uniform"\nlow = 1'), "size.high"),
        (with_('[size]\nlaw = "uniform"\nhigh = 1'), "size.low"),
        (with_('[size]\nlaw = "lognormal"'), "size.sigma"),
        (with_('[size]\nlaw = "samples"'), "size.values"),
        (with_('[straggler]\nlaw = "halfnormal"'), "straggler.scale"),
        (with_('[straggler]\nlaw = "slow"\nprobability = 0.1'), "straggler.factor"),
        (with_('[straggler]\nlaw = "slow"\nfactor = 2'), "straggler.probability"),
        (with_('[[changes]]\nclass = "cpu"\nworkers = 1'), "changes.0.at"),
        (with_("[[changes]]\nat = 1\nworkers = 1"), "changes.0.class"),
        (with_('[[changes]]\nat = 1\nclass = "cpu"'), "changes.0.workers"),
    ],
)
def test_a_key_that_is_missing_is_named(text: str, key: str, tmp_path: Path) -> None:
    assert refusal(text, tmp_path).startswith(f"{key}: ")


def test_a_cluster_without_workers_is_refused(tmp_path: Path) -> None:
    empty = LEAST.replace("workers = 2", "workers = 0")
    leaves = with_('[[changes]]\nat = 1\nclass = "cpu"\nworkers = -1', text=empty)
    for text in (empty, leaves):
        assert refusal(text, tmp_path).startswith("classes: there are no workers")


def test_where_there_are_no_classes_that_is_what_is_wrong_and_not_the_classes_that_families_name(
    tmp_path: Path,
) -> None:
    assert refusal(LEAST.replace("[classes.cpu]\nworkers = 2", "[classes]"), tmp_path).startswith("classes: ")


# Values that make no sense


#: every number of a file: what is put there in its stead stands at {}
PLACES = {
    "seconds": LEAST.replace("seconds = 100", "seconds = {}"),
    "trials": with_("", top="trials = {}"),
    "target": with_("", top="target = {}"),
    "seed": with_("", top="seed = {}"),
    "failure_rate": with_("", top="failure_rate = {}"),
    "lease_seconds": with_("", top="lease_seconds = {}"),
    "steps": with_("", top="steps = {}"),
    "classes.cpu.workers": LEAST.replace("workers = 2", "workers = {}"),
    "classes.cpu.memory_gib": LEAST.replace("workers = 2", "workers = 2\nmemory_gib = {}"),
    **{
        f"classes.cpu.{name}": LEAST.replace("workers = 2", f"workers = 2\n{name} = {{}}{rest}")
        for name, rest in {
            "worker_startup_seconds": "",
            "preemption_seconds": "",
            "for_seconds": "",
            "return_seconds": "\nfor_seconds = 9",
        }.items()
    },
    "checkpoint_seconds": with_("", top='checkpoints = "shared"\ncheckpoint_seconds = {}'),
    "families.net.seconds.cpu": LEAST.replace("cpu = 10", "cpu = {}"),
    "families.net.share": with_("share = {}"),
    "families.net.memory_gib": with_("memory_gib = {}"),
    "families.net.failure_rate": with_("failure_rate = {}"),
    "families.net.loss.best": with_("loss.best = {}"),
    "families.net.loss.spread": with_("loss.spread = {}"),
    "size.low": with_('[size]\nlaw = "uniform"\nlow = {}\nhigh = 9'),
    "size.high": with_('[size]\nlaw = "uniform"\nlow = 0\nhigh = {}'),
    "size.sigma": with_('[size]\nlaw = "lognormal"\nsigma = {}'),
    "size.values.1": with_('[size]\nlaw = "samples"\nvalues = [1, {}]'),
    "straggler.scale": with_('[straggler]\nlaw = "halfnormal"\nscale = {}'),
    "straggler.probability": with_('[straggler]\nlaw = "slow"\nprobability = {}\nfactor = 2'),
    "straggler.factor": with_('[straggler]\nlaw = "slow"\nprobability = 0.5\nfactor = {}'),
    "changes.0.at": with_('[[changes]]\nat = {}\nclass = "cpu"\nworkers = 1'),
    "changes.0.workers": with_('[[changes]]\nat = 1\nclass = "cpu"\nworkers = {}'),
}
WHOLE = ("trials", "seed", "steps", "classes.cpu.workers", "changes.0.workers")
SIGNED = ("target", "families.net.loss.best", "changes.0.workers")
ABOVE_ZERO = (
    "seconds",
    "trials",
    "classes.cpu.preemption_seconds",
    "classes.cpu.for_seconds",
    "families.net.seconds.cpu",
    "families.net.share",
    "straggler.factor",
    "size.high",
)
PARTS = ("failure_rate", "families.net.failure_rate", "straggler.probability")


def put(key: str, value: str) -> str:
    """The file with `value` at `key`."""
    before, _, after = PLACES[key].partition("{}")
    return before + value + after


@cases("key", PLACES)
def test_every_place_is_one_where_a_number_is_understood(key: str) -> None:
    """Or the refusals below would prove nothing."""
    understood(put(key, "1"))


@cases("key", PLACES)
def test_what_is_no_number_is_named(key: str, tmp_path: Path) -> None:
    for value in NO_NUMBERS:
        assert refusal(put(key, value), tmp_path).startswith(f"{key}: "), value


@cases("key", [key for key in PLACES if key not in SIGNED])
def test_a_negative_number_is_named(key: str, tmp_path: Path) -> None:
    assert refusal(put(key, "-1"), tmp_path).startswith(f"{key}: ")


@cases("key", ABOVE_ZERO)
def test_zero_is_named_where_it_makes_no_sense(key: str, tmp_path: Path) -> None:
    assert refusal(put(key, "0"), tmp_path).startswith(f"{key}: ")


@cases("key", WHOLE)
def test_a_part_of_a_whole_thing_is_named(key: str, tmp_path: Path) -> None:
    assert refusal(put(key, "1.5"), tmp_path) == f"{key}: 1.5 is not a whole number; --example shows the form"


@cases("key", PARTS)
def test_more_than_the_whole_is_named(key: str, tmp_path: Path) -> None:
    assert "at most 1" in refusal(put(key, "1.01"), tmp_path)


@cases("key", PLACES)
def test_a_number_that_nothing_can_hold_is_refused_in_one_short_line(key: str, tmp_path: Path) -> None:
    for value in ["1e30", "1e300", "1" + "0" * 400, "-1" + "0" * 400, "0x1" + "0" * 5000, "1" + "0" * 5000]:
        assert len(refusal(put(key, value), tmp_path)) < 400, value[:10]


@cases("sign", ["", "-"])
def test_more_workers_than_a_machine_can_count_are_refused(sign: str, tmp_path: Path) -> None:
    line = refusal(put("changes.0.workers", f"{sign}{MOST_WORKERS + 1}"), tmp_path)
    assert line.startswith("changes.0.workers: ")
    understood(put("changes.0.workers", f"{sign}{MOST_WORKERS}"))


@cases("value", ["5", "true", '"net"', "[1, 2]", "1979-05-27"])
@cases(
    ("key", "text"),
    [
        ("classes", "seconds = 1\nclasses = {}\n[families.net]\nseconds = {{ cpu = 10 }}"),
        ("classes.cpu", "seconds = 1\n[classes]\ncpu = {}\n[families.net]\nseconds = {{ cpu = 10 }}"),
        ("families", "seconds = 1\nfamilies = {}\n[classes.cpu]\nworkers = 1"),
        ("families.net", "seconds = 1\n[classes.cpu]\nworkers = 1\n[families]\nnet = {}"),
        ("families.net.seconds", "seconds = 1\n[classes.cpu]\nworkers = 1\n[families.net]\nseconds = {}"),
        ("families.net.loss", LEAST.replace("{", "{{").replace("}", "}}") + "loss = {}"),
        ("size", "size = {}\n" + LEAST.replace("{", "{{").replace("}", "}}")),
        ("straggler", "straggler = {}\n" + LEAST.replace("{", "{{").replace("}", "}}")),
        ("changes.0", "changes = [{}]\n" + LEAST.replace("{", "{{").replace("}", "}}")),
    ],
)
def test_what_should_be_a_table_and_is_none_is_named(key: str, text: str, value: str, tmp_path: Path) -> None:
    assert refusal(text.format(value), tmp_path).startswith(f"{key}: this is not a table but ")


@cases("value", ["5", "true", '"cpu"', "{ at = 1 }"])
def test_changes_that_are_no_list_are_named_with_their_form(value: str, tmp_path: Path) -> None:
    changes = refusal(with_("", top=f"changes = {value}"), tmp_path)
    assert changes.startswith("changes: this is not a list but ")
    assert "; write [[changes]] above each" in changes


@cases("value", ["5", "true", '"cpu"', "{ at = 1 }"])
def test_samples_that_are_no_list_are_named_with_their_form(value: str, tmp_path: Path) -> None:
    samples = refusal(with_(f'[size]\nlaw = "samples"\nvalues = {value}'), tmp_path)
    assert samples.startswith("size.values: this is not a list but ")
    assert "; write values = [1.0, 2.0]" in samples


@cases("bounds", ["low = 3\nhigh = 1", "low = 0\nhigh = 0"])
def test_bounds_that_are_none_are_refused_with_their_rule(bounds: str, tmp_path: Path) -> None:
    line = refusal(with_(f'[size]\nlaw = "uniform"\n{bounds}'), tmp_path)
    assert line.startswith("size.high: ")
    assert "is not allowed; it must be above 0 and not below low;" in line


def test_a_large_number_is_shown_without_all_its_digits(tmp_path: Path) -> None:
    for key in ("trials", "target", "families.net.seconds.cpu"):
        assert refusal(put(key, "1e300"), tmp_path).startswith(f"{key}: 1e+300 is not allowed; it must be at most 1e+")


@cases("value", ['"a"', "0"])
def test_the_seconds_of_a_family_are_refused_with_the_way_to_see_their_form(value: str, tmp_path: Path) -> None:
    assert refusal(put("families.net.seconds.cpu", value), tmp_path).endswith("; --example shows the form")


@cases("law", ['"gauss"', '"Uniform"', '""', "3", "true", '["uniform"]', "{ a = 1 }", "nan"])
@cases(("place", "known"), [("size", "lognormal"), ("straggler", "halfnormal")])
def test_a_law_that_does_not_exist_is_named_with_those_that_do(
    law: str, place: str, known: str, tmp_path: Path
) -> None:
    line = refusal(with_(f"[{place}]\nlaw = {law}"), tmp_path)
    assert line.startswith(f"{place}.law: there is no law ")
    assert known in line


@cases("law", ['"halfnormal"', '"slow"', '"none"'])
def test_a_law_of_stragglers_is_none_of_sizes(law: str, tmp_path: Path) -> None:
    assert refusal(with_(f"[size]\nlaw = {law}"), tmp_path).startswith("size.law: ")


@cases(
    ("law", "key"),
    [
        ('law = "uniform"\nlow = 2\nhigh = 1', "size.high"),
        ('law = "uniform"\nlow = 0\nhigh = 0', "size.high"),
        ('law = "samples"\nvalues = []', "size.values"),
        ('law = "samples"\nvalues = [0, 0.0]', "size.values"),
        ('law = "samples"\nvalues = [1, -1]', "size.values.1"),
        ('law = "lognormal"\nsigma = 5.1', "size.sigma"),
    ],
)
def test_a_law_of_which_no_mean_of_1_can_be_made_is_refused(law: str, key: str, tmp_path: Path) -> None:
    assert refusal(with_(f"[size]\n{law}"), tmp_path).startswith(f"{key}: ")


def test_a_straggler_is_not_faster_than_the_others(tmp_path: Path) -> None:
    line = refusal(with_('[straggler]\nlaw = "slow"\nprobability = 0.5\nfactor = 0.5'), tmp_path)
    assert line.startswith("straggler.factor: ")
    assert "it must be at least 1; a straggler takes longer" in line


@cases("name", ['"gpu"', '""', '"CPU"', "3", "true", '["cpu"]', "{ cpu = 1 }", "nan"])
def test_a_change_to_a_class_that_does_not_exist_is_named(name: str, tmp_path: Path) -> None:
    good = '[[changes]]\nat = 1\nclass = "cpu"\nworkers = 1'
    line = refusal(with_(f"{good}\n[[changes]]\nat = 1\nclass = {name}\nworkers = 1"), tmp_path)
    assert line.startswith("changes.1.class: there is no class ")
    assert line.endswith("there are cpu")


WIDE = LEAST.replace("workers = 2", "workers = 2\nslots = 4")


def test_workers_may_have_several_slots_and_trials_take_several_of_one_worker() -> None:
    change = '[[changes]]\nat = 1\nclass = "cpu"\nworkers = -1'
    params = 'gpus = "gpus"\n[families.net.params.gpus]\nlaw = "choice"\noptions = [1, 4]'
    cluster = understood(with_(f"{params}\n{change}", text=WIDE))
    assert (cluster.slots, cluster.per_worker) == ({"cpu": 8}, {"cpu": 4})
    assert cluster.changes == [Change(at=1, compute_class="cpu", slots=-4)]
    assert [cluster.families["net"].width({"gpus": gpus}) for gpus in (1, 4)] == [1, 4]
    assert (understood(LEAST).takes_gpus, understood(with_("gpus = 2", text=WIDE)).takes_gpus) == (False, True)


@cases("gpus", ["0", "-1", "5", "1.5", "true", '"2"', '"gpus"', "nan"])
def test_a_number_of_slots_that_no_worker_has_is_refused(gpus: str, tmp_path: Path) -> None:
    assert refusal(with_(f"gpus = {gpus}", text=WIDE), tmp_path).startswith("families.net.gpus: ")


def test_an_expression_that_gives_too_many_slots_is_refused(tmp_path: Path) -> None:
    params = '[families.net.params.gpus]\nlaw = "integer"\nlow = 1\nhigh = 8'
    line = refusal(with_(f'gpus = "gpus"\n{params}', text=WIDE), tmp_path)
    assert line.startswith("families.net.gpus: 'gpus' is refused: it gives ")
    assert "a trial takes 1 to 4 slots, those of the largest worker" in line


def test_more_families_than_a_search_tells_apart_are_refused(tmp_path: Path) -> None:
    def families(number: int) -> str:
        """So many beside the one that is there."""
        return with_("".join(f"[families.f{place}]\nseconds = {{ cpu = 1 }}\n" for place in range(number)))

    line = refusal(families(64), tmp_path)
    assert line.startswith("families: ")
    assert "65" in line
    assert len(understood(families(63)).families) == 64


# Files that are none


def test_a_file_that_is_not_there_is_one_line_with_the_way_to_begin(tmp_path: Path) -> None:
    assert "--example" in refusal_of(tmp_path / "missing.toml")


def test_a_folder_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in refusal_of(tmp_path)


@cases("content", [b"\xff\xfe\x00\x01", b"\x7fELF\x02\x01\x01\x00\x80", b"seconds = 1\n\xe9"])
def test_a_binary_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    assert "it is not text" in refusal_of(path)


@cases(
    "text",
    ["seconds", "seconds = ", "seconds 1", "[classes", '{"seconds": 1}', "a = 1\na = 2", "\x01", "x = " + "[" * 10_000],
)
def test_what_is_no_toml_is_one_line(text: str, tmp_path: Path) -> None:
    assert refusal(text, tmp_path).startswith(" is not TOML: ")


def test_a_file_that_cannot_be_read_is_named_from_python_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.toml cannot be read"):
        load(tmp_path / "missing.toml")


def test_what_stands_in_the_command_takes_the_files_place(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(LEAST.replace("seconds = 100", "seed = 1"))
    cluster = load(path, {"trials": 7, "seed": 2})
    assert (cluster.seconds, cluster.trials, cluster.seed) == (None, 7, 2)
    with pytest.raises(UsageError, match=r"trials: 0 is not allowed"):
        load(path, {"trials": 0})


# Laws


@cases("name", sorted({*NUMBERS} - {"slow"}))
def test_a_laws_draws_have_a_mean_of_1_and_none_is_negative(name: str) -> None:
    draws = law(name, NUMBERS[name]).draw(np.random.default_rng(3), 200_000)
    assert draws.shape == (200_000,)
    assert draws.dtype == float
    # The mean of so many has a standard error of a 450th of their deviation.
    assert float(draws.mean()) == pytest.approx(1.0, abs=5 * float(draws.std()) / math.sqrt(len(draws)) + 1e-12)
    assert float(draws.min()) >= 0


@cases("name", sorted(NUMBERS))
def test_a_law_draws_the_same_from_the_same_generator_and_any_number(name: str) -> None:
    drawn = law(name, NUMBERS[name])
    first, second = (drawn.draw(np.random.default_rng(3), 50) for _ in "12")
    assert np.array_equal(first, second)
    assert drawn.draw(np.random.default_rng(3), 0).shape == (0,)


@cases("name", ["uniform", "lognormal", "samples", "halfnormal", "slow"])
def test_a_law_of_chance_draws_different_factors(name: str) -> None:
    assert float(law(name, NUMBERS[name]).draw(np.random.default_rng(3), 1000).std()) > 0.1


def draws_of(name: str, **values: Any) -> Any:
    return law(name, values).draw(np.random.default_rng(3), 100_000)


def test_uniform_factors_span_low_to_high() -> None:
    draws = draws_of("uniform", low=1.0, high=3.0)
    assert (draws.min(), draws.max()) == (pytest.approx(0.5, abs=1e-3), pytest.approx(1.5, abs=1e-3))


def test_lognormal_factors_have_their_sigma() -> None:
    assert float(np.log(draws_of("lognormal", sigma=0.7)).std()) == pytest.approx(0.7, rel=0.02)


def test_sampled_factors_are_the_samples_over_their_mean() -> None:
    assert np.array_equal(np.unique(draws_of("samples", values=[1, 2, 9])), np.array([0.25, 0.5, 2.25]))


def test_halfnormal_factors_are_1_at_least_before_they_are_divided_by_their_mean() -> None:
    draws = draws_of("halfnormal", scale=0.5)
    assert float(draws.min()) == pytest.approx(1 / (1 + 0.5 * math.sqrt(2 / math.pi)), abs=1e-4)


def test_slow_trials_take_their_factor_and_the_others_1() -> None:
    draws = draws_of("slow", probability=0.25, factor=3.0)
    assert set(draws.tolist()) == {1.0, 3.0}
    assert float((draws == 3.0).mean()) == pytest.approx(0.25, abs=0.01)


def test_the_largest_numbers_of_every_law_are_still_numbers() -> None:
    """None is infinite, so that a simulation comes to its end."""
    for name, values in (
        ("uniform", {"low": LARGEST, "high": LARGEST}),
        ("lognormal", {"sigma": 5.0}),
        ("samples", {"values": [LARGEST, 0.0]}),
        ("halfnormal", {"scale": LARGEST}),
        ("slow", {"probability": 1.0, "factor": LARGEST}),
    ):
        assert np.isfinite(law(name, values).draw(np.random.default_rng(3), 1000)).all()


def test_a_list_of_slots_is_searched_and_expressions_of_seconds_may_name_the_number() -> None:
    text = WIDE.replace("cpu = 10", 'cpu = "8 / gpus"')
    assert text != WIDE
    cluster = understood(with_("gpus = [4, 1, 2]", text=text))
    assert (cluster.widths, cluster.takes_gpus, understood(WIDE).widths) == ([1, 2, 4], True, [])
    assert cluster.families["net"].seconds_on("cpu", {"gpus": 4.0}) == 2.0


@cases("gpus", ["[]", "[0]", "[1, 5]", "[1.5]", '["gpus"]', "[[1]]", "[true]"])
def test_a_list_with_a_number_that_no_worker_has_is_refused(gpus: str, tmp_path: Path) -> None:
    assert refusal(with_(f"gpus = {gpus}", text=WIDE), tmp_path).startswith("families.net.gpus")


def test_families_with_unlike_lists_are_refused(tmp_path: Path) -> None:
    more = "gpus = [1, 2]\n[families.other]\nseconds = { cpu = 1 }"
    assert "give all families the same list" in refusal(with_(more, text=WIDE), tmp_path)
