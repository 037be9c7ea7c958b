"""The commands that start workers get class and count in their environment, and none of them hangs the scaler."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from services.cases import cases

from shadho_celery.cli.group import commands
from shadho_celery.cli.scale import KILL_SECONDS, RETURN_SECONDS, _Starter
from shadho_celery.core.files import ClassSpec
from shadho_celery.fleet import urls

NAME = "gpu.large-1+a"


def starter(*words: str, is_slurm: bool = False, **spec: float) -> _Starter:
    return _Starter({NAME: ClassSpec(**spec)}, words, is_slurm=is_slurm)  # type: ignore[arg-type]


def failed(made: _Starter, now: float = 1.0) -> list[str]:
    """Reasons of the failures once no command runs, or after a while."""
    found: list[str] = []
    for _ in range(1000):
        found += [reason for _, reason in made.failures(now)]
        if found or not made.calling:
            return found
        time.sleep(0.02)
    return found


def test_a_command_gets_class_count_and_price_and_no_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import os, sys; open('got', 'w').write(repr([os.environ.get(n) for n in sys.argv[1:]]))"
    made = starter(sys.executable, "-c", code, "SHADHO_CLASS", "SHADHO_COUNT", "SHADHO_PRICE", "$HOME", price=2.4)
    made.start(NAME, 3, 0.0)
    assert failed(made) == []
    assert (tmp_path / "got").read_text() == repr([NAME, "3", "2.4", None])
    assert {path.name for path in tmp_path.iterdir()} == {"got"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sh", "-c", "echo first; echo no quota >&2; exit 3"], "the command ended with 3: no quota"),
        (["sh", "-c", "kill -9 $$"], "the command ended with SIGKILL: it has printed nothing"),
        (["sh", "-c", "printf '\\033[31mred'; exit 1"], "the command ended with 1: \\x1b[31mred"),
        (["/nowhere/start"], "the command cannot be called: No such file or directory"),
    ],
)
def test_a_command_that_fails_is_one_line(words: list[str], said: str) -> None:
    made = starter(*words)
    made.start(NAME, 1, 0.0)
    assert failed(made) == [said]
    assert failed(made) == []


def test_a_command_that_hangs_is_ended_and_what_it_has_started_is_not(tmp_path: Path) -> None:
    worker = tmp_path / "worker"
    made = starter("sh", "-c", f"sleep 300 & echo $! > {worker}; trap '' TERM; while true; do sleep 0.1; done")
    made.start(NAME, 1, 0.0)
    while not (worker.exists() and worker.read_text().strip()):
        time.sleep(0.02)
    assert [*made.failures(RETURN_SECONDS - 1)] == []
    assert [*made.calling] == [NAME]
    [(_, reason)] = made.failures(RETURN_SECONDS + 1)
    assert "did not return" in reason
    # It ignores SIGTERM.
    assert [*made.failures(RETURN_SECONDS + KILL_SECONDS + 2)] == []
    assert failed(made, RETURN_SECONDS + KILL_SECONDS + 2) == []
    assert not made.calling
    pid = int(worker.read_text())
    os.kill(pid, 0)
    os.kill(pid, 9)


def test_slurm_submits_what_the_command_slurm_prints_and_cancels_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (("sbatch", "cat > got; echo Submitted batch job 71"), ("scancel", 'echo "$@" > cancelled')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in (urls.BROKER, urls.REDIS):
        monkeypatch.setenv(name, "redis://127.0.0.1/0")
    made = starter("--for", "4h", "--", "--partition=long", is_slurm=True, memory_gib=1.5)
    made.check()
    made.start(NAME, 3, 0.0)
    assert failed(made) == []
    script = (tmp_path / "got").read_text()
    assert "#SBATCH --array=1-3\n" in script
    assert "#SBATCH --mem=1536M\n#SBATCH --partition=long\n" in script
    assert f"--class={NAME}" in script
    made.give_up(NAME)
    assert (tmp_path / "cancelled").read_text() == "--state=PENDING 71\n"


@cases(
    "words",
    [
        ("--command", "true"),
        ("--max", "0", "--command", "true"),
        ("--max", "2"),
        ("--max", "2", "--command"),
        ("--max", "2", "--command", "--slurm", "true"),
        ("--max", "2", "--command", "./no-such-program"),
        ("--max", "2", "--slurm"),
        ("--max", "2", "--cooldown", "soon", "--command", "true"),
        ("--max", "2", "--class-spec", "other.toml", "--command", "true"),
    ],
)
def test_bad_input_is_refused_with_its_remedy(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classes.toml").write_text("[classes.cpu]\n")
    given = () if "--class-spec" in words else ("--class-spec", "classes.toml")
    environment = {urls.BROKER: "redis://127.0.0.1/0", urls.REDIS: "redis://127.0.0.1/0"}
    result = CliRunner().invoke(commands, ["scale", *given, *words], env=environment)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("Error: ") == 1


def test_without_a_fleet_there_is_nothing_to_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (urls.BROKER, urls.OWN_BROKER, urls.REDIS):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "classes.toml"
    path.write_text("[classes.cpu]\n")
    result = CliRunner().invoke(commands, ["scale", "--class-spec", str(path), "--max", "1", "--command", "true"])
    assert (result.exit_code, result.stderr.partition(";")[0]) == (2, "Error: no fleet is named")


def test_an_option_of_scale_after_the_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be an argument of the command, and the scaler would run without it."""
    monkeypatch.setattr("shadho_celery.cli.scale._run", lambda *_: None)
    path = tmp_path / "classes.toml"
    path.write_text("[classes.cpu]\n")
    environment = {urls.BROKER: "redis://127.0.0.1/0", urls.REDIS: "redis://127.0.0.1/0"}
    words = (
        "scale",
        "--class-spec",
        str(path),
        "--max",
        "1",
        "--command",
        "true",
        "--redis=redis://:secret@h/0",
        "--own",
    )
    result = CliRunner().invoke(commands, words, env=environment)
    said = "Warning: --redis goes to true; if it is for scale, give it before --command\n"
    assert (result.exit_code, result.stderr) == (0, said)
