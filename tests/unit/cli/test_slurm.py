"""The script of `slurm` is valid, runs one worker with what the user gave, and has no secret."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from services.cases import cases

from shadho_celery.cli.group import commands
from shadho_celery.cli.slurm import CARRIED
from shadho_celery.core.units import seconds_of
from shadho_celery.node.stay import Stay

URLS = {"CELERY_BROKER_URL": "amqp://me:s3cret@host", "SHADHO_REDIS_URL": "redis://:s3cret@host/0"}
LARGE = ("--class", "gpu_large", "--for", "4h")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHADHO_")]:
        monkeypatch.delenv(name)
    # --price sets it.
    for name, value in {**URLS, "SHADHO_PRICE": ""}.items():
        monkeypatch.setenv(name, value)


def told(*words: str) -> Result:
    return CliRunner().invoke(commands, ["slurm", *words])


def script(*words: str) -> str:
    """The printed script, which bash can parse."""
    result = told(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)
    return result.stdout


def ran(text: str, tmp_path: Path) -> tuple[dict[str, str], list[str]]:
    """Run a script with a stand-in for Python; the variables and words that it gets."""
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/bash\nenv -0 > environment\nprintf '%s\\0' \"$@\" > words\n")
    stand_in.chmod(0o755)
    head = f"exec {shlex.quote(sys.executable)} "
    assert text.count(head) == 1
    subprocess.run(["bash"], input=text.replace(head, f"exec {stand_in} "), text=True, cwd=tmp_path, check=True)
    pairs = (tmp_path / "environment").read_text().split("\0")[:-1]
    return dict(each.split("=", 1) for each in pairs), (tmp_path / "words").read_text().split("\0")[:-1]


def directives(text: str) -> list[str]:
    return re.findall("^#SBATCH (.*)$", text, re.MULTILINE)


def test_the_signal_comes_before_the_end_by_the_grace_and_is_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = script(*LARGE, "--count", "3", "--grace", "90s")
    assert {"--array=1-3", "--requeue", "--time=240", "--signal=B:USR1@100"} <= {*directives(text)}
    environment, _ = ran(text, tmp_path)
    for name, value in environment.items():
        if name.startswith("SHADHO_"):
            monkeypatch.setenv(name, value)
    stay = Stay.configured()
    assert stay.grace == 90
    assert {each.name for each in stay.signals} == {"SIGUSR1", "SIGTERM"}
    # SLURM may send the signal a minute early.
    assert stay.seconds == seconds_of("4h") - 70


def test_the_command_is_a_worker_that_the_options_of_worker_allow(tmp_path: Path) -> None:
    (tmp_path / "my urls").write_text("CELERY_BROKER_URL=amqp://me:s3cret@host\n")
    (tmp_path / "my urls").chmod(0o600)
    text = script(*LARGE, "--import", "my_study", "--import", "my;other", "--url-file", str(tmp_path / "my urls"))
    _, (_, module, name, *words) = ran(text, tmp_path)
    assert (module, name) == ("shadho_celery", "worker")
    worker = commands.get_command(click.Context(commands), "worker")
    assert worker is not None
    given = worker.make_context("worker", words).params
    assert given["imports"] == ("my_study", "my;other")
    assert given["url_file"] == str(tmp_path / "my urls")


HOSTILE = ("a b", "$(touch /tmp/x)", "`id`", "it's", '"', "-x", "--help", "#SBATCH", "a;b", "\\", "!", "*", "ä", "%j")


@cases("name", ["gpu_large", "ä", "_a.b+c-d", "7"])
def test_any_class_reaches_the_worker_as_it_is(name: str, tmp_path: Path) -> None:
    text = script("--class", name, "--for", "4h")
    assert ran(text, tmp_path)[1][-1] == f"--class={name}"
    assert re.fullmatch(r"--job-name=shadho-[A-Za-z0-9_.-]+", directives(text)[0])


@cases("name", [*{*HOSTILE} - {"ä"}, "", "a,b", "a\nb", "a\n#SBATCH --uid=0", "x" * 61, "\x1b[31m", "a\u202eb"])
def test_a_class_that_is_none_is_refused(name: str) -> None:
    result = told("--class", name, "--for", "4h")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


@cases(
    "words",
    [
        ("--partition", "a\n#SBATCH --x"),
        ("--partition", "a\\"),
        ("--partition", ""),
        ("--gpus", "1 --wrap=x"),
        ("--gpus", "'"),
        ("--gpus", ""),
        ("--gpus", "0"),
        ("--gpus", "-1"),
        ("--gpus", "a100:"),
        *(("--", f"{name}=3") for name in ("--time", "--tim", "--t", "--time-min", "--time-m", "--signal", "--sig")),
        ("--", "--sig", "USR2@5"),
        ("--", "-p", "x"),
        ("--", "-t1"),
        ("--", "--", "--mem=1"),
        ("--", "--comment=a\\ --time=1"),
        ("--", "--comment=a\r--time=1"),
        ("--", "--comment=a\x1b[31m"),
        ("--", "script.sh"),
        ("--grace", "4h"),
        ("--for", "3m"),
        ("--python", ""),
        ("--python", "/a\x1bb"),
        ("--price", "much"),
        ("--price", "-1"),
    ],
)
def test_bad_input_is_one_line_with_its_remedy(words: tuple[str, ...]) -> None:
    given = LARGE[:2] if "--for" in words else LARGE
    result = told(*given, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


@cases("gpus", ["2", "1g.5gb:1", "a100:2,v100:1"])
def test_numbers_of_gpus_may_have_a_type(gpus: str) -> None:
    assert f"--gpus={gpus}" in directives(script(*LARGE, "--gpus", gpus))


@cases("value", ["a|b", "[a*2&b*1]", "a&(b|c)", "a b # --time=1", "it's", 'say "x"', "$(x) `y`", "ä", "%x-%j.out"])
def test_sbatch_gets_each_value_as_it_is(value: str) -> None:
    """sbatch reads quotes and comments as a shell does, except for backslashes."""
    text = script(*LARGE, "--partition", value, "--", f"--constraint={value}", "--threads-per-core=1")
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")][-3:]
    read = [shlex.split(line.removeprefix("#SBATCH "), comments=True) for line in lines]
    assert read == [[f"--partition={value}"], [f"--constraint={value}"], ["--threads-per-core=1"]]


def test_slots_price_and_python_of_the_nodes_are_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option counts before the same setting of the environment."""
    monkeypatch.setenv("SHADHO_PRICE", "7")
    (tmp_path / "my python").symlink_to("python")
    text = script(*LARGE, "--slots", "3", "--price", "0.12", "--python", str(tmp_path / "my python"))
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/bash\nenv -0 > {tmp_path}/environment\nprintf '%s\\0' \"$@\" > {tmp_path}/words\n")
    stand_in.chmod(0o755)
    subprocess.run(["bash"], input=text, text=True, check=True)
    assert "SHADHO_PRICE=0.12\0" in (tmp_path / "environment").read_text()
    assert "--slots=3\0" in (tmp_path / "words").read_text()


def test_options_of_sbatch_are_passed_on() -> None:
    text = script(*LARGE, "--partition", "long", "--gpus", "a100:2", "--", "--mem=32G", "--exclusive")
    assert directives(text)[-4:] == ["--partition=long", "--gpus=a100:2", "--mem=32G", "--exclusive"]


def test_variables_are_exported_without_secrets_and_without_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "shadho.key"
    key.write_text("k3y" * 16)
    key.chmod(0o600)
    carried = {name: f"value of {name}" for name in CARRIED} | {"SHADHO_PRICE": "2.5"}
    for name, value in carried.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHADHO_HOST", "login")
    monkeypatch.setenv("SHADHO_SIGNING_KEY_FILE", str(key))
    text = script(*LARGE, "--idle-exit", "10m")
    assert "s3cret" not in text
    assert "k3y" not in text
    environment, _ = ran(text, tmp_path)
    assert {name: environment[name] for name in CARRIED} == carried
    assert environment["SHADHO_SIGNING_KEY_FILE"] == str(key)
    assert environment["SHADHO_IDLE_EXIT"] == "600s"
    assert "SHADHO_HOST" not in environment
    # By sbatch, from the environment.
    assert environment["SHADHO_REDIS_URL"] == URLS["SHADHO_REDIS_URL"]


def test_a_job_without_a_fleet_is_warned_of_and_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in URLS:
        monkeypatch.delenv(name)
    printed, refused = told(*LARGE), told(*LARGE, "--submit")
    assert (printed.exit_code, printed.stderr.partition(";")[0]) == (0, "Warning: no fleet is named")
    assert (refused.exit_code, refused.stderr.partition(";")[0]) == (2, "Error: --submit: no fleet is named")


def sbatch(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for sbatch on PATH."""
    path = folder / "sbatch"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_submit_gives_the_script_to_sbatch_and_says_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch(tmp_path, f"cat > {tmp_path}/got; echo Submitted batch job $(($# + 7))", monkeypatch)
    result = told(*LARGE, "--submit")
    assert (result.exit_code, result.stdout) == (0, "Submitted batch job 7\n")
    assert (tmp_path / "got").read_text() == script(*LARGE)


def test_an_error_of_sbatch_is_shown_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch(tmp_path, "cat > /dev/null; printf 'sbatch: error: invalid\\n partition\\n' >&2; exit 1", monkeypatch)
    result = told(*LARGE, "--submit")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: sbatch ended with 1: sbatch: error: invalid partition\n"


def test_without_sbatch_submit_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = told(*LARGE, "--submit")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: --submit: there is no sbatch on PATH; ")
