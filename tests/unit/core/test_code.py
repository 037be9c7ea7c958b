"""A code version is one text for all that decides about a study's values, and says in words how two differ."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shadho_celery.core.code import MAX_PROBLEM, CodeVersion, digest_of

ONE, OTHER, THEIRS = digest_of(b"one"), digest_of(b"other"), digest_of(b"theirs")
OURS = CodeVersion(root="/ours", files={"my_study.py": ONE, "layers.py": ONE}).with_space({"x": "uniform(0, 1)"})
OTHERS = replace(OURS, digest=THEIRS, root="/x")


def test_the_digest_covers_every_source_and_the_space_but_not_their_place() -> None:
    assert len(OURS.digest) == 12
    elsewhere = replace(OURS, root="/elsewhere", files=dict(reversed(OURS.files.items())))
    assert elsewhere.with_space({"x": "uniform(0, 1)"}).digest == OURS.digest
    for changed in (
        replace(OURS, files={**OURS.files, "layers.py": OTHER}).with_space({"x": "uniform(0, 1)"}),
        replace(OURS, files={"my_study.py": ONE}).with_space({"x": "uniform(0, 1)"}),
        OURS.with_space({"x": "uniform(0, 2)"}),
    ):
        assert changed.digest not in ("", OURS.digest)


def test_a_process_is_usable_unless_it_is_known_to_have_another_version_or_none() -> None:
    assert OURS.is_usable(OURS.digest)
    assert OURS.is_usable(""), "who names no version takes any"
    assert CodeVersion().is_usable(OURS.digest), "it has not imported it yet"
    assert not OURS.is_usable(OTHER)
    assert not OURS.with_problem("no module named torch").is_usable(OURS.digest)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            replace(OURS, digest=THEIRS, root="/x", files={**OURS.files, "my_study.py": OTHER}),
            ["/x/my_study.py differs;"],
        ),
        (
            replace(OURS, digest=THEIRS, root="/x", files={"my_study.py": OTHER}),
            ["/x/layers.py and 1 more files differ"],
        ),
        (replace(OURS.with_space({"x": "uniform(0, 2)"}), digest=THEIRS), ["SPACE differs", "a set", "sorted("]),
        (OURS.with_problem("my_study cannot be imported: why"), ["my_study cannot be imported: why"]),
    ],
)
def test_a_difference_names_the_file_and_both_versions_in_one_line(theirs: CodeVersion, words: list[str]) -> None:
    said = theirs.difference(OURS)
    assert all(word in said for word in words), said
    # Of each version one digest is shown: the one that status, trials and reports show.
    assert theirs.problem or re.findall("[0-9a-f]{12}", said) == [THEIRS, OURS.digest]
    assert "\n" not in said


@pytest.mark.parametrize("error", [ValueError("a\nb " * 1000), "half a pair: \ud800", RuntimeError()])
def test_any_problem_can_be_announced(error: object) -> None:
    found = OURS.with_problem(error)
    assert found.problem
    assert (len(found.problem) <= MAX_PROBLEM, found.digest) == (True, "")
    assert msgspec.json.decode(json.dumps(msgspec.to_builtins(found)), type=CodeVersion) == found


@pytest.mark.parametrize(
    "plain", [{"digest": "x"}, {"digest": ONE + "0"}, {"files": {"a": "../b"}}, {"problem": "x" * 501}]
)
def test_what_is_no_version_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, CodeVersion)
