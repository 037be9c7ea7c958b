"""However often and in however many ways a server fails, its outage is one line, and so is its end."""

from __future__ import annotations

from shadho_celery.core.system import OVER_SECONDS, Outage


def test_an_outage_is_told_once_and_its_end_with_its_seconds_once_no_error_came_for_a_while() -> None:
    outage = Outage("Redis")
    told = [outage.see(None, 0.0), outage.see("refused", 1.0), outage.see("timed out", 30.0)]
    assert told == [None, "refused", None]
    # One command succeeds while another one still fails.
    assert [outage.see(None, 31.0), outage.see("denied", 68.0), outage.see(None, 69.0)] == [None, None, None]
    assert outage.see(None, 68.0 + OVER_SECONDS) == "Redis answers again, after 67 s"
    assert outage.see(None, 100.0) is None
    assert (outage.see("refused", 101.0), outage.count) == ("refused", 2)


def test_the_end_may_be_told_at_the_first_answer() -> None:
    outage = Outage("the broker", over_seconds=0.0)
    outage.see("refused", 1.0)
    assert outage.see(None, 74.0) == "the broker answers again, after 73 s"
