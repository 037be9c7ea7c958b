"""Each trial's log has that trial's output, wherever a read of the pipe ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from termios import FIONREAD

import pytest
import services

from shadho_celery.runner import output
from shadho_celery.runner.output import Output, TrialLog, unstamped
from shadho_celery.runner.protocol import NO_ORDER, boundary

MARK = "0123456789abcdef"


class Pipe:
    """The process's end of an output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.complaints: list[str] = []
        self.output = Output(MARK, self.complaints.append)
        self.output.start()

    def expect(self, *orders: int) -> None:
        for order in orders:
            self.output.expect(order, str(self.folder / f"{order}.log"))

    def write(self, data: bytes) -> None:
        os.write(self.output.end.fileno(), data)

    def begin(self, order: int) -> None:
        self.write(boundary(MARK, order))

    def end(self) -> None:
        self.write(boundary(MARK, NO_ORDER))

    def close(self) -> None:
        self.output.end.close()
        self.output.join()

    def logged(self) -> dict[str, str]:
        return {path.stem: unstamped(path.read_text()) for path in self.folder.glob("*.log")}


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    made = Pipe(tmp_path)
    yield made
    made.close()


def test_what_lies_between_two_boundaries_is_that_trials(pipe: Pipe) -> None:
    pipe.expect(1, 2, 3)
    pipe.write(b"before the first\n")
    pipe.begin(1)
    pipe.write(b"of the first\nand its last word")
    pipe.end()
    pipe.write(b"of none\n")
    pipe.begin(2)
    pipe.end()
    pipe.begin(3)
    pipe.write(b"of the third\n")
    pipe.end()
    pipe.close()
    assert pipe.logged() == {"1": "of the first\nand its last word\n", "3": "of the third\n"}
    assert pipe.complaints == []


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_boundary_may_come_in_parts(pipe: Pipe, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(output, "READ", size)
    monkeypatch.setattr(output, "REST_SECONDS", 0.0)
    pipe.write(b"-")  # It waits in a read of the earlier size.
    pipe.expect(1, 2)
    for order in (1, 2):
        pipe.begin(order)
        pipe.write(f"of {order} \0 with a NUL\n".encode())
        pipe.end()
    pipe.close()
    assert pipe.logged() == {"1": "of 1  with a NUL\n", "2": "of 2  with a NUL\n"}


def test_a_trial_that_prints_the_mark_alone_does_not_divide_its_output(pipe: Pipe) -> None:
    pipe.expect(1)
    pipe.begin(1)
    pipe.write(f"SHADHO_RUNNER={MARK}\0{MARK} 7\n".encode())
    pipe.end()
    pipe.close()
    assert pipe.logged() == {"1": f"SHADHO_RUNNER={MARK}{MARK} 7\n"}


def test_the_last_lines_of_a_trial_are_there_once_it_has_ended(pipe: Pipe) -> None:
    pipe.expect(1, 2)
    pipe.begin(1)
    pipe.write(b"said\n" * 1000)
    pipe.end()
    pipe.begin(2)
    pipe.end()
    assert unstamped(pipe.output.last_lines(1)).splitlines()[-1] == "said"
    assert pipe.output.last_lines(2) == ""


def test_the_last_lines_of_a_process_that_died_are_those_of_its_trial(pipe: Pipe) -> None:
    pipe.expect(1, 2)
    pipe.begin(1)
    pipe.write(b"of the first\n")
    pipe.end()
    pipe.begin(2)
    pipe.write(b"about to die")
    pipe.close()
    assert unstamped(pipe.output.last_lines(2)) == "about to die"
    assert unstamped(pipe.output.last_lines(1)) == "of the first"


def test_of_a_process_that_died_before_its_trial_they_are_its_own(pipe: Pipe) -> None:
    pipe.expect(1)
    pipe.write(b"it cannot begin\n")
    pipe.close()
    assert unstamped(pipe.output.last_lines(1)) == "it cannot begin"
    assert pipe.logged() == {}


def test_an_order_that_was_recalled_leaves_nothing(pipe: Pipe) -> None:
    pipe.expect(1, 2, 3)
    pipe.begin(3)
    pipe.write(b"of the third\n")
    pipe.end()
    pipe.close()
    assert pipe.logged() == {"3": "of the third\n"}
    assert pipe.output._paths.keys() == {3}


def test_an_error_of_the_reader_does_not_stop_the_trials(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(log: TrialLog, data: bytes) -> None:
        raise MemoryError

    pipe.expect(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(TrialLog, "write", fail)
        pipe.begin(1)
        for _ in range(100):
            pipe.write(b"x" * 4000)
        pipe.write(b"\n")
        services.wait_until(
            lambda: pipe.output._held == b"" and fcntl.ioctl(pipe.output.end, FIONREAD, b"\0" * 4) == b"\0" * 4
        )
    pipe.end()
    pipe.begin(2)
    pipe.write(b"said\n")
    pipe.end()
    pipe.close()
    assert pipe.logged()["2"] == "said\n"


def test_who_asks_is_told_why_a_log_is_not_complete(pipe: Pipe) -> None:
    pipe.output.expect(1, str(pipe.folder))
    pipe.begin(1)
    pipe.write(b"said\n")
    pipe.end()
    pipe.close()
    assert pipe.complaints == ["logs of trials are incomplete: Is a directory"]
    assert unstamped(pipe.output.last_lines(1)) == "said"
