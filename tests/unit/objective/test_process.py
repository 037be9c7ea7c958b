"""A command that runs as a trial: its result, its errors, its stop, and the folder of the attempt."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shadho_celery.core.code import digest_of
from shadho_celery.core.trial import Memory, Outcome, TrialState
from shadho_celery.objective import process
from shadho_celery.objective.call import call
from shadho_celery.objective.command import Command
from shadho_celery.objective.context import LocalContext, TrialStopped

#: seconds that no test waits for
LONG = 60


class Runs:
    """Runs shell scripts as trials of commands in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "study"
        self.folder.mkdir()
        self.checkpoints = folder / "checkpoints" / "7"
        self.told: list[tuple[int, float]] = []

    @property
    def attempt(self) -> Path:
        return self.checkpoints.with_name("7.attempt-7.1")

    def run(self, script: str | list[str], params: object = None, *, is_left: bool = False, **given: Any) -> Outcome:
        words = ["sh", "-c", script] if isinstance(script, str) else script
        fields = {name: given.pop(name) for name in ("loss", "inputs", "outputs", "files") if name in given}
        command = Command(words=tuple(words), folder=self.folder, **fields)
        self.context = LocalContext(
            trial=7, checkpoints=self.checkpoints, on_report=lambda *each: self.told.append(each), **given
        )
        outcome = call(lambda each, context: process.run(command, words, each, context), lambda: params, self.context)
        assert is_left or not self.attempt.exists()
        return outcome

    def loss(self, script: str, **given: Any) -> float | None:
        outcome = self.run(script, **given)
        assert outcome.error is None
        return outcome.loss

    def error(self, script: str | list[str], **given: Any) -> str:
        outcome = self.run(script, **given)
        assert outcome.state is TrialState.FAILED
        assert outcome.error is not None
        assert "Traceback" not in outcome.error
        return outcome.error


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def after(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def test_a_json_line_is_the_result_with_its_metrics(runs: Runs) -> None:
    outcome = runs.run('echo begun; echo \'{"loss": 0.5, "accuracy": 0.9}\'')
    assert (outcome.loss, outcome.metrics) == (0.5, {"accuracy": 0.9})


def test_output_arrives_in_the_log_of_the_trial(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    runs.run("printf 'a\\rb'; echo c >&2; printf '\\377\\000'")
    out, err = capfd.readouterr()
    assert (out, err) == ("a\rb�\0", "c\n")


def test_the_command_runs_in_the_folder_of_the_study_with_its_variables(runs: Runs) -> None:
    runs.folder.joinpath("data").write_text("4")
    values = {"x": [1, {"y": None}]}
    script = 'test "$(cat $SHADHO_PARAMS)" = "$WANTED" && test $PYTHONUNBUFFERED = 1 && test -d $SHADHO_CHECKPOINT_DIR'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANTED", json.dumps(values))
        assert runs.loss(f"{script} && echo loss=$(cat data)", loss="loss", params=values) == 4


def test_reports_are_sent_when_they_come(runs: Runs) -> None:
    """The command waits until its first report has arrived."""
    runs.folder.joinpath("wait").touch()

    def sent(*report: Any) -> None:
        runs.told.append(report)
        runs.folder.joinpath("wait").unlink(missing_ok=True)

    script = 'echo \'{"step": 1, "loss": 3}\' >> $SHADHO_REPORTS; while test -e wait; do sleep .01; done; printf '
    context = {"timeout": LONG, "timed_out": after(LONG)}
    command = Command(words=("sh",), folder=runs.folder)
    local = LocalContext(checkpoints=runs.checkpoints, on_report=sent, **context)  # type: ignore[arg-type]
    arguments = ["sh", "-c", script + '\'{"step": 2, "loss": 2}\' >> $SHADHO_REPORTS']
    assert process.run(command, arguments, None, local) == {"loss": 2}
    assert runs.told == [(1, 3.0), (2, 2.0)]


def test_the_file_with_the_result_wins(runs: Runs) -> None:
    script = "cd $(dirname $SHADHO_PARAMS); echo '{\"loss\": 3}' | tee -a $SHADHO_REPORTS; echo 1 > performance.json"
    assert runs.loss(script) == 1
    runs.folder.joinpath("performance.json").write_text("9")
    assert runs.loss("echo loss=2", loss="loss") == 2, "a file in the folder of the study is not the attempt's"
    assert "performance.json cannot be read" in runs.error("echo '{' > $(dirname $SHADHO_PARAMS)/performance.json")


def damaged(compression: str) -> str:
    """Return a script that writes a damaged archive with a result after another file."""
    pack = f"seq 99999 > other; echo 1 > performance.json; tar c --{compression} -f out.tar.gz other performance.json"
    return f"{pack}; rm performance.json; yes | head -c 999 | dd of=out.tar.gz bs=1 seek=5000 conv=notrunc"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("mkfifo performance.json; setsid sleep 60 <> performance.json &", "has not printed a loss"),
        ("ln -s /dev/zero performance.json", "has not printed a loss"),
        ("ln -s none performance.json", "has not printed a loss"),
        ("mkdir performance.json", "has not printed a loss"),
        ("truncate -s 2G performance.json", "performance.json cannot be read: it has more than 1,000,000 bytes"),
        ("truncate -s 2M performance.json; tar czf out.tar.gz performance.json; rm p*", "more than 1,000,000 bytes"),
        ("ln -s /etc/hosts performance.json; tar cf out.tar.gz performance.json; rm p*", "cannot be read"),
        ("mkdir performance.json; tar cf out.tar.gz performance.json; rm -r p*", "cannot be read"),
        ("tar cf out.tar.gz *.json", "'performance.json' not found"),
        ("echo > out.tar.gz", "out.tar.gz cannot be read"),
        (damaged("gzip"), "out.tar.gz cannot be read: "),
        (damaged("xz"), "out.tar.gz cannot be read: "),
    ],
)
def test_a_result_that_is_no_file_or_too_large_is_not_read(runs: Runs, made: str, told: str) -> None:
    assert told in runs.error(f"cd $(dirname $SHADHO_PARAMS); {made}")


def test_a_command_that_reports_without_end_is_stopped(runs: Runs) -> None:
    line = json.dumps({"step": 1, "loss": 2, "more": "x" * 10_000})
    script = f"yes '{line}' >> $SHADHO_REPORTS"
    outcome = runs.run(script, timeout=0.5, timed_out=after(0.5))
    assert (outcome.state, outcome.loss) == (TrialState.COMPLETE, 2)
    assert outcome.seconds is not None
    assert outcome.seconds < LONG / 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo hi", "the command has not printed a loss; print a JSON line such as"),
        ("echo val_loss=1", "such as --loss val_loss for a command after --, which begins a new study, or"),
        ("echo '{\"loss\": 1}'; echo bad >&2; exit 3", "exit code 3; it last printed:\nbad"),
        ("kill -TERM $$", "the command was killed by signal: Terminated"),
        ("echo '{\"loss\": NaN}'", "'loss' is nan"),
        ("echo '{\"losses\": {}}'", "the study has no objectives"),
        ('echo \'{"step": 1, "loss": []}\'; sleep 60', "the loss is not a number"),
        ("echo loss >> $SHADHO_REPORTS; sleep 60", "is not a JSON object: 'loss'"),
        (
            "(sleep 60; echo 1 > $(dirname $SHADHO_PARAMS)/performance.json) & exit 0",
            "the command has not printed a loss",
        ),
        ("(sleep 60; echo '{\"loss\": 1}') & exit 0", "the command has not printed a loss"),
        ("head -c 10000000 /dev/zero", "the command has not printed a loss"),
        ("rm $SHADHO_REPORTS $SHADHO_PARAMS", "the command has not printed a loss"),
    ],
)
def test_a_command_without_a_loss_fails_with_the_reason(runs: Runs, script: str, error: str) -> None:
    assert error in runs.error(script)


def test_a_named_loss_that_is_missing_is_named(runs: Runs) -> None:
    assert runs.error("echo hi", loss="val_loss") == (
        "the command has not printed a number after 'val_loss'; it last printed:\nhi"
    )


def test_a_program_that_cannot_run_is_named(runs: Runs) -> None:
    runs.folder.joinpath("plain.sh").write_text("echo 1")
    assert "No such file or directory: 'no-such-program'; install the program there" in runs.error(["no-such-program"])
    assert "Permission denied: './plain.sh'; install" in runs.error(["./plain.sh"])


def test_a_python_error_is_that_of_the_script(runs: Runs) -> None:
    outcome = runs.run([sys.executable, "-c", "raise MemoryError"])
    assert outcome.error is not None
    assert outcome.error.startswith("the command ended with exit code 1; it last printed:\nTraceback")
    assert outcome.out_of_memory is Memory.HOST


@pytest.mark.parametrize(
    ("script", "memory"),
    [
        ("kill -KILL $$", Memory.HOST),
        ("echo 'torch.OutOfMemoryError: CUDA out of memory' >&2; exit 1", Memory.GPU),
        ("exit 137", None),
    ],
)
def test_memory_that_ran_out_is_recognised(runs: Runs, script: str, memory: Memory | None) -> None:
    assert runs.run(script).out_of_memory is memory


def test_the_memory_of_the_process_counts(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it may be that of the process that has started it."""
    told: list[int] = []
    runs.run("true", on_ranks=lambda host, gpu: told.append(host))
    assert told == []
    monkeypatch.setattr(process.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=0))
    runs.run("true", on_ranks=lambda host, gpu: told.append(host))
    assert told[0] > 1_000_000


def test_a_late_command_gets_a_signal_and_what_it_reported_counts(runs: Runs) -> None:
    script = "trap 'echo saved > state; exit 1' TERM; echo '{\"step\": 1, \"loss\": 2}'; while :; do sleep .01; done"
    outcome = runs.run(script, timeout=0.2, timed_out=after(0.2), outputs=("state", "missing"))
    assert (outcome.state, outcome.loss) == (TrialState.COMPLETE, 2)
    assert outcome.warning is not None
    assert "stopped at its time limit of 0.2 s" in outcome.warning
    assert "the command has written no output missing" in outcome.warning
    assert runs.checkpoints.joinpath("state").read_text() == "saved\n"
    error = runs.error("sleep 60", timeout=0.1, timed_out=after(0.1))
    assert error.startswith("timed out after 0.1 s (trial timeout)\nthe command has not printed a loss")


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc")
def test_a_stopped_command_that_ignores_signals_is_killed_with_its_children(runs: Runs) -> None:
    runs.folder.joinpath("begun").touch()
    script = "trap '' TERM; sleep 60 & echo $! > child; rm begun; while :; do sleep .01; done"
    outcome = runs.run(script, stopped=lambda: not runs.folder.joinpath("begun").exists())
    assert outcome.state is TrialState.CANCELLED
    child = Path("/proc", runs.folder.joinpath("child").read_text().strip(), "stat")
    for _ in range(1000):
        # It is a zombie until its new parent, which is not this process, has collected it.
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("its child is alive")


def test_an_interrupted_objective_still_waits_for_the_command(runs: Runs) -> None:
    """A worker interrupts the main thread by a signal, at any point."""

    def interrupt(number: int, frame: object) -> None:
        raise TrialStopped("pruned")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGVTALRM))
    timer.start()
    try:
        assert runs.loss("sleep .3; echo loss=1", loss="loss") == 1
    finally:
        timer.join()
        signal.signal(signal.SIGVTALRM, before)


def test_an_interrupt_while_interrupts_are_held_back_leaves_them_allowed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = signal.pthread_sigmask

    def interrupted(how: int, mask: set[int]) -> None:
        hold(how, mask)
        if how == signal.SIG_BLOCK:
            raise TrialStopped("pruned")

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    assert "TrialStopped: pruned" in str(runs.run("sleep 60").error)
    assert signal.SIGVTALRM not in hold(signal.SIG_BLOCK, ())


def test_a_preempted_command_that_asks_gets_no_signal(runs: Runs) -> None:
    script = (
        "import sys; from shadho_celery.objective import script as sh\n"
        "asked, begun = sh.should_stop(), open('begun', 'w')\n"
        "while not sh.should_stop(): pass\n"
        "(sh.checkpoint_dir() / 'saved').touch()"
    )
    outcome = runs.run([sys.executable, "-c", script], preempted=lambda: runs.folder.joinpath("begun").exists())
    assert outcome.state is TrialState.CANCELLED
    assert runs.checkpoints.joinpath("saved").exists()
    outcome = runs.run("touch begun; sleep 60", preempted=after(0.1), outputs=("begun",))
    assert outcome.state is TrialState.CANCELLED
    assert not runs.checkpoints.joinpath("begun").exists(), "its result does not count"


def test_inputs_are_copied_into_a_folder_of_the_attempt(runs: Runs) -> None:
    runs.folder.joinpath("data").mkdir()
    files = {"data/x.csv": "3", "main.py": "import shadho_worker, os; shadho_worker.run(lambda p: float(p['x']))"}
    files |= {"performance.json": "9", "SHADHO_REPORTS": '{"loss": 9}'}
    for name, content in {**files, "secret": ""}.items():
        runs.folder.joinpath(name).write_text(content)
    digests = {name: digest_of(content.encode()) for name, content in files.items()}
    given: dict[str, Any] = {"inputs": ("data/*",), "files": digests, "params": {"x": 3}}
    assert runs.loss("cat hyperparameters.json; echo loss=$(cat data/x.csv)", loss="loss", **given) == 3
    runs.folder.joinpath("data/x.csv").chmod(0o555)
    assert runs.loss("echo 4 >> data/x.csv; echo loss=$(tail -1 data/x.csv)", loss="loss", **given) == 34
    assert runs.folder.joinpath("data/x.csv").read_text() == "3", "the file of the user is unchanged"
    assert "a number after 'loss'" in runs.error("ls -a | grep secret; true", loss="loss", **given)
    runs.folder.with_name("other.py").touch()
    given["files"] = {**digests, "../other.py": digest_of(b"")}
    assert runs.loss(f"{sys.executable} main.py", **given) == 3
    assert not runs.checkpoints.with_name("other.py").exists(), "nothing is written outside of the folder"
    assert runs.loss(f"{sys.executable} main.py; rm performance.json", **given) == 3, "the archive has it too"


@pytest.mark.parametrize("is_copy", [False, True])
def test_what_earlier_attempts_have_left_is_removed(runs: Runs, is_copy: bool) -> None:
    """Unless this is a copy, beside which an earlier attempt runs. An earlier one may also begin after its copy."""
    attempts = [runs.attempt.with_name(f"7.attempt-7.{number}") for number in (1, 2, 3)]
    for each in attempts:
        each.mkdir(parents=True)
        (each / "file").touch()
    runs.run("true", attempt=2, is_copy=is_copy, is_left=True)
    assert [each.exists() for each in attempts] == [is_copy, False, True]


def test_outputs_are_copied_to_the_checkpoints(runs: Runs) -> None:
    script = "mkdir -p out/deep; echo 1 > out/deep/a; echo 2 > b.txt; echo loss=1"
    outcome = runs.run(script, loss="loss", outputs=("out", "*.txt", "none/*"))
    assert outcome.warning == "the command has written no output none/*"
    kept = {str(path.relative_to(runs.checkpoints)) for path in runs.checkpoints.rglob("*") if path.is_file()}
    assert kept == {"out/deep/a", "b.txt"}
    other = runs.folder / ".shadho" / "checkpoints" / "other.txt"
    other.parent.mkdir(parents=True)
    other.touch()
    runs.run(script, loss="loss", outputs=("**/*.txt", "*"))
    assert not [*runs.checkpoints.rglob("other.txt")], "what another trial has left is not copied"


def test_values_that_json_lacks_are_refused(runs: Runs) -> None:
    assert "cannot be written as JSON: 'function' object has no" in runs.error("true", params={"f": after})


def test_a_folder_that_cannot_be_written_is_told(runs: Runs) -> None:
    runs.checkpoints.parent.touch()
    outcome = runs.run("true")
    assert outcome.error is not None
    assert outcome.error.startswith(f"the command cannot run in {runs.folder}: [Errno ")
