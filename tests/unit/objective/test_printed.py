"""The loss and the reports of a command are found in its output, and nothing else is taken for one."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from services.cases import cases

from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.process import MAX_LINE, MAX_MATCHED, CommandFailed, Lines, Printed
from shadho_celery.objective.result import read
from shadho_celery.objective.script import REPORTS


def printed(*lines: str, loss: str | re.Pattern[str] | None = None, **context: Any) -> Printed:
    found = Printed(loss, LocalContext(**context))
    for line in lines:
        found.feed("stdout", f"{line}\n".encode())
    return found


@cases(
    "parts, lines",
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"10 %\r50 %\r\nend\n"], ["10 %", "50 %", "end"]),
        ([b"val_", b"loss: ", b".3\n"], ["val_loss: .3"]),
        ([b"half"], []),
        ([b"\x00\xff\xfe\nloss\n"], ["\x00��", "loss"]),
        ([b"a" * MAX_LINE + b"\n"], ["a" * MAX_LINE]),
        ([b"a" * MAX_LINE, b"a\nb\n"], ["b"]),
        ([b"a" * 100_000] * 100 + [b"\nb\n"], ["b"]),
    ],
)
def test_output_is_divided_into_lines(parts: list[bytes], lines: list[str]) -> None:
    divided = Lines()
    assert [line for part in parts for line in divided.feed(part)] == lines


def test_the_tail_has_the_last_state_of_a_progress_bar() -> None:
    lines = Lines()
    lines.feed(b"x" * 10_000 + b"\n 1/9\r 9/9\r\nError\n")
    assert lines.tail.endswith("x\n 9/9\nError")
    assert len(lines.tail) < 6000


@cases(
    "line, loss",
    [
        ("val_loss=1e-05", 1e-05),
        ("epoch 3 - loss: 0.5 - val_loss: .3", 0.3),
        ('{"epoch": 1, "val_loss": 0.25}', 0.25),
        ("{'val_loss': -2}", -2.0),
        ("│    val_loss    │    0.75    │", 0.75),
        ("val_loss 3", 3.0),
        ("The val_loss is small: val_loss = 3.", 3.0),
        ("val_loss: -inf", -math.inf),
        ("val_loss: 12%", 12.0),
        ("my_val_loss: 3", None),
        ("test/val_loss: 3", None),
        ("val_loss_best: 3", None),
        ("val_loss3", None),
        ("val_loss: 3s", None),
        ("val_loss=0.25it/s", None),
        ("val_loss=1,234.5", None),
        ("val_loss=3/4", None),
        ("val_loss=0.5, acc=.9", 0.5),
        ("val_loss: \x1b[31m0.7\x1b[0m.", 0.7),
        ("val_loss: unknown", None),
    ],
)
def test_a_named_loss_is_the_number_after_its_name(line: str, loss: float | None) -> None:
    result = printed(line, loss="val_loss").result
    assert result == (None if loss is None else {**(result or {}), "loss": loss})


def test_a_loss_that_is_not_a_number_is_found_as_such() -> None:
    result = printed("val_loss: 0.1", "val_loss: nan", loss="val_loss").result
    assert result is not None
    assert math.isnan(result["loss"])


@pytest.mark.parametrize("line", ["loss=" + "1" * 60_000 + "x", "loss" + " " * 60_000, "loss:loss" * 7000])
def test_long_lines_are_searched_in_linear_time(line: str) -> None:
    """A pattern that takes quadratic time would need minutes for these."""
    assert printed(*[line] * 20, loss="loss").result is None


def test_a_pattern_of_the_user_is_not_searched_in_long_lines() -> None:
    pattern = re.compile(r"(\S+) loss")
    assert printed(*["x" * 60_000] * 20, f"{'1' * (MAX_MATCHED - 4)} loss", loss=pattern).result is None
    assert printed(f"{'1':>{MAX_MATCHED - 5}} loss", loss=pattern).result == {"loss": 1}


def test_a_pattern_finds_the_loss() -> None:
    pattern = re.compile(r"best: (\S+)")
    assert printed("best: 3 of 5", "best: 2 of 5", loss=pattern).result == {"loss": 2.0}
    with pytest.raises(CommandFailed, match="'low', which is not a number"):
        printed("best: low", loss=pattern)
    with pytest.raises(CommandFailed, match=r"None, which is not a number"):
        printed("best", loss=re.compile(r"best(\d)?"))


def test_two_losses_in_a_line_are_refused() -> None:
    with pytest.raises(CommandFailed, match=r"a line has 2 losses, '1' and '2': .* choose one by a pattern"):
        printed("loss: 1, best loss: 2", loss="loss")


def test_the_last_json_line_with_a_loss_is_the_result() -> None:
    lines = ["{}", '{"loss": 3}', "{'loss': 1}", '{"accuracy": 1}', '[{"loss": 0}]', '{"loss": 2, "kind": "last"}', "{"]
    assert printed(*lines).result == {"loss": 2, "kind": "last"}
    assert printed(" ").result is None
    assert printed("{" * 60_000).result is None


def test_lines_with_a_step_are_reports() -> None:
    told: list[tuple[int, float]] = []
    found = printed('{"step": 1, "loss": 3}', '{"step": 2, "loss": NaN}', on_report=lambda *each: told.append(each))
    assert told[0] == (1, 3.0)
    assert math.isnan(told[1][1])
    assert found.result is not None
    assert "step" not in found.result


def test_all_of_several_losses_are_reported() -> None:
    """A line with a step and losses by name is a report of all losses, in the order of the objectives, minimised."""
    told: list[Any] = []
    objectives = {"error": "minimize", "accuracy": "maximize"}
    line = '{"step": 1, "losses": {"accuracy": 5, "error": 0.5}}'
    printed(line, objectives=objectives, on_report=lambda _, loss: told.append(loss))
    assert told == [{"error": 0.5, "accuracy": -5.0}]
    with pytest.raises(CommandFailed, match=r"the loss is not a dict but 3; .* report {'error': ..., 'accuracy': ...}"):
        printed('{"step": 1, "loss": 3}', objectives=objectives)


def test_a_named_loss_is_that_of_the_only_objective() -> None:
    result = printed("accuracy: .9", loss="accuracy", objectives={"accuracy": "maximize"}).result
    assert result == {"loss": 0.9}
    assert read(result, {"accuracy": "maximize"}).losses == {"accuracy": -0.9}


@pytest.mark.parametrize("line", ['{"step": 1.5, "loss": 3}', '{"step": 1, "loss": "low"}', '{"step": "a", "loss": 3}'])
def test_a_report_that_is_not_one_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(CommandFailed, match=r"^the (step|loss) (is not|must be) .*, in the line "):
        printed(line)


def test_a_result_without_a_step_wins_and_then_the_file_of_reports() -> None:
    found = printed('{"step": 1, "loss": 1}')
    found.feed(REPORTS, b'{"step": 1, "loss": 2}\n')
    assert found.result == {"loss": 2}
    found.feed("stdout", b'{"loss": 3}\n')
    assert found.result == {"loss": 3}


def test_the_file_of_reports_has_json_objects_only() -> None:
    with pytest.raises(CommandFailed, match=r"SHADHO_REPORTS names is not a JSON object: 'loss: 1'; append lines"):
        printed().feed(REPORTS, b"loss: 1\n")
