"""A log has a trial's lines with their moments, bounded in size, whatever the trial prints and the disk does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import MAX_LOG
from shadho_celery.runner import output
from shadho_celery.runner.output import TrialLog, log_path, read_log, unstamped

#: 2001-09-09, and a quarter of a second
CLOCK = ManualClock(1_000_000_000.25)
STAMP = "2001-09-09T01:46:40.250Z "


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return log_path(tmp_path, "study", 12, 3)


def logged(path: Path, *output: bytes) -> str:
    """What the file has of this output, without time stamps."""
    log = TrialLog(path, CLOCK)
    for part in output:
        log.write(part)
    log.close()
    return unstamped(path.read_text())


def test_each_line_has_its_moment(path: Path) -> None:
    log = TrialLog(path, CLOCK)
    log.write(b"first\nsecond\n\nfourth")
    log.close()
    assert path.read_text() == f"{STAMP}first\n{STAMP}second\n{STAMP}\n{STAMP}fourth\n"
    assert log.last_lines == path.read_text().rstrip("\n")


def test_a_trial_that_prints_nothing_has_no_file(path: Path) -> None:
    log = TrialLog(path, CLOCK)
    log.close()
    assert not path.parent.exists()
    assert log.last_lines == ""
    assert read_log(path) is None


def test_others_cannot_read_it(path: Path) -> None:
    logged(path, b"secret\n")
    assert path.stat().st_mode & 0o077 == 0


def test_a_line_that_comes_in_parts_is_one(path: Path) -> None:
    assert logged(path, b"one ", b"line", b"\nand", b" another\n") == "one line\nand another\n"


def test_of_a_progress_bar_the_last_state_is_kept(path: Path) -> None:
    bar = [f"\r{percent:3}%|".encode() for percent in range(101)]
    assert logged(path, b"begins\n", *bar, b"\nends\n") == "begins\n100%|\nends\n"
    assert logged(path, b"".join(bar) + b"\r\nends\n") == "100%|\nends\n"


def test_a_progress_bar_without_an_end_takes_no_memory(path: Path) -> None:
    log = TrialLog(path, CLOCK)
    for _ in range(1000):
        log.write(b"\r" + b"x" * 1000)
    assert len(log._line) == 1000
    log.close()


def test_bytes_that_are_no_text_are_escaped_and_control_sequences_left_out(path: Path) -> None:
    output = b"\x1b[31mred\x1b[0m \xff\x00\x07 gr\xc3\xbc\xc3\x9fe \x1b]0;title\x07tab\there\r\n"
    assert logged(path, output) == "red \\xff grüße tab\there\n"


def test_a_line_without_an_end_is_broken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINE", 100)
    lines = logged(path, *[b"x" * 60] * 5).splitlines()
    assert [len(line) for line in lines] == [120, 120, 60]


def test_of_a_long_log_the_head_and_the_tail_are_kept_and_it_says_how_much_is_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "HEAD", 1000)
    monkeypatch.setattr(output, "TAIL", 1000)
    log = TrialLog(path, CLOCK)
    written = 0
    for number in range(1000):
        line = f"line {number}\n".encode()
        written += len(STAMP) + len(line)
        log.write(line)
        assert path.stat().st_size < 3000 + 100
    log.close()
    text = path.read_text()
    head, _, rest = text.partition("[")
    gap, _, tail = rest.partition("\n")
    assert unstamped(head).splitlines() == [f"line {number}" for number in range(len(head.splitlines()))]
    last = len(tail.splitlines())
    assert unstamped(tail).splitlines() == [f"line {number}" for number in range(1000 - last, 1000)]
    assert gap == f"{written - len(head) - len(tail)} bytes are left out here]"
    assert 900 < len(head) <= 1000
    assert 900 < len(tail) <= 1000


def test_who_follows_a_log_reads_each_line_once_though_parts_of_it_are_left_out_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "HEAD", 1000)
    monkeypatch.setattr(output, "TAIL", 1000)
    log = TrialLog(path, CLOCK)
    seen, position = "", 0
    for number in range(1000):
        log.write(f"line {number}\n".encode())
        if number % 20 == 0:
            text, position = read_log(path, position) or ("", 0)
            seen += text
    log.close()
    seen += (read_log(path, position) or ("", 0))[0]
    assert unstamped(seen) == "".join(f"line {number}\n" for number in range(1000))


def test_who_follows_too_slowly_is_told_what_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "HEAD", 1000)
    monkeypatch.setattr(output, "TAIL", 1000)
    log = TrialLog(path, CLOCK)
    log.write(b"first\n")
    text, position = read_log(path) or ("", 0)
    assert unstamped(text) == "first\n"
    for place in (position, 1500):
        for number in range(1000):
            log.write(f"line {number}\n".encode())
        text, _ = read_log(path, place) or ("", 0)
        assert "bytes are left out here]\n" in text
        assert unstamped(text).endswith("line 999\n")
    log.close()


def test_a_trial_cannot_forge_what_is_left_out(path: Path) -> None:
    text = logged(path, b"[5 bytes are left out here]\nmore\n")
    assert text == "[5 bytes are left out here]\nmore\n"
    assert read_log(path, 10**6) == ("", path.stat().st_size)


def test_on_a_full_disk_it_says_how_much_is_missing_and_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    room = 60

    def pwrite(file: int, data: bytes, place: int) -> int:
        if place + len(data) <= room:
            return real(file, data, place)
        if place < room:
            return real(file, data[: room - place], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    log = TrialLog(path, CLOCK)
    for word in (b"first\n", b"second\n", b"third\n", b"fourth\n"):
        log.write(word)
    assert path.read_text() == f"{STAMP}first\n", "whole lines only"
    assert log.trouble == "No space left on device"
    room = 10_000
    log.write(b"fifth\n")
    log.close()
    missing = len(f"{STAMP}second\n{STAMP}third\n{STAMP}fourth\n")
    assert unstamped(path.read_text()) == (
        f"first\n[{missing} bytes could not be written here: No space left on device]\nfifth\n"
    )
    assert unstamped(log.last_lines) == "first\nsecond\nthird\nfourth\nfifth"


def test_where_no_file_can_be_made_the_last_lines_are_there_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "study").write_text("in the way")
    log = TrialLog(log_path(tmp_path, "study", 1, 1), CLOCK)
    log.write(b"said\n")
    log.close()
    assert log.trouble
    assert unstamped(log.last_lines) == "said"


def test_the_last_lines_are_whole_lines_of_limited_length(path: Path) -> None:
    log = TrialLog(path, CLOCK)
    log.write(b"Extension modules: " + b"x, " * 10_000 + b"(total: 10000)\n")
    for number in range(1000):
        log.write(f"line {number}\n".encode())
    log.close()
    lines = log.last_lines.splitlines()
    assert len(log.last_lines) <= MAX_LOG
    assert [unstamped(line) for line in lines] == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) > 50
