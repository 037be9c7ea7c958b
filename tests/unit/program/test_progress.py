"""The bar of a search stays with its last state and a line of summary, where somebody can see it."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from services.cases import cases

from shadho_celery import hp, minimize
from shadho_celery.cli.messages import say

SPACE = hp.uniform("x", -10, 10)


class Terminal(io.StringIO):
    """A text file that is a terminal."""

    def isatty(self) -> bool:
        return True


def in_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return the terminal that is standard error from now on. A fixture could not set it: pytest sets it after them."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return found


def parabola(x: float) -> float:
    return (x - 3) ** 2


def test_in_a_terminal_the_last_state_and_a_summary_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = in_terminal(monkeypatch)
    study = minimize(parabola, SPACE, trials=5, seed=0, study="mine")
    *_, last_state, summary, end = terminal.getvalue().split("\n")
    assert "5/5" in last_state
    best = f"best loss {study.best_loss:.6g} (trial {study.best.number}: {study.best.values:.5g})"
    assert summary.removeprefix("\x1b[?25h").strip() == f"study mine: 5 complete, 0 failed of 5 trials; {best}"
    assert end == ""


def test_an_interrupted_search_has_its_summary_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = in_terminal(monkeypatch)

    def interrupted(x: float) -> float:
        if x > 0:
            raise KeyboardInterrupt
        return x

    with pytest.warns(UserWarning, match="interrupted: "):
        study = minimize(interrupted, SPACE, trials=50, seed=1, study="mine")
    ended = study.counts["COMPLETE"]  # type: ignore[index]
    assert f"study mine: {ended} complete, 0 failed of 50 trials; " in terminal.getvalue().splitlines()[-1]


def test_a_search_that_is_not_to_be_seen_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = in_terminal(monkeypatch)
    minimize(parabola, SPACE, trials=3, seed=0, progress=False)
    assert terminal.getvalue() == ""


def test_without_a_terminal_only_a_bar_that_was_asked_for_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    minimize(parabola, SPACE, trials=3, seed=0)
    assert capsys.readouterr() == ("", "")
    minimize(parabola, SPACE, trials=3, seed=0, progress=True)
    [line] = capsys.readouterr().err.splitlines()
    assert "3/3" in line


def test_in_a_notebook_the_line_of_summary_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    minimize(parabola, SPACE, trials=3, seed=0, study="<b>mine")
    assert stream.getvalue().startswith("study <b>mine: 3 complete, 0 failed of 3 trials; best loss ")


class Full(io.StringIO):
    """Standard error on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@cases("stream", [None, Full()])
def test_a_search_does_not_need_standard_error(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert minimize(parabola, SPACE, trials=3, seed=0, progress=True).count("COMPLETE") == 3
    say("a warning", err=True)
