"""What trials leave is kept for the best ones, fetched from this folder and from workers elsewhere, and cleaned up."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk, until, worker_elsewhere

pytestmark = pytest.mark.timeout(180)

STUDY = """
import time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"classes": ["cpu"], "keep": {"best": 2}}

def objective(params, context):
    (context.checkpoint_dir / "model").write_text(str(context.trial))
    (context.checkpoint_dir / "more").mkdir()
    (context.checkpoint_dir / "more" / "large").write_bytes(bytes(2_500_000))
    return params["x"]
"""


def left(desk: Desk) -> dict[str, set[str]]:
    """The names of the folders of trials by study."""
    folders = desk.folder.glob(".shadho/checkpoints/*/")
    return {each.name: {trial.name for trial in each.iterdir()} for each in folders}


def put(desk: Desk, name: str) -> None:
    """Leave a file of five bytes in the folder of a trial."""
    (desk.folder / ".shadho/checkpoints" / name).mkdir(parents=True)
    desk.write(f".shadho/checkpoints/{name}/model", "12345")


def best_of(desk: Desk) -> list[int]:
    return [trial["number"] for trial in sorted(desk.trials(), key=lambda trial: trial["loss"])]


@pytest.mark.sample
def test_on_this_machine(desk: Desk) -> None:
    desk.write("my_study.py", STUDY)
    run = desk.launch("my_study", "--trials", "12", "--study", "s", "--workers", "cpu=2").wait(90)
    assert run.code == 0, desk.said()
    [(key, kept)] = left(desk).items()
    first, second, third, *_ = best_of(desk)
    assert kept == {str(first), str(second)}
    assert desk.told("show", "s", "--json").json()["in_force"]["keep"] == {"best": 2}

    fetched = desk.told("fetch", "s", "-o", "best")
    assert fetched.code == 0
    assert fetched.err == f"trial {first} of study s: 2 files, 2.5 MB\ncopied to best\n"
    assert (desk.folder / "best" / "model").read_text() == str(first)
    assert desk.told("fetch", "s", str(second), "-o", "deep/second").code == 0
    assert (desk.folder / "deep" / "second" / "more" / "large").stat().st_size == 2_500_000
    for words, says in {
        ("s", "-o", "best"): "best is not empty; give -o another folder",
        ("s", str(third), "-o", "third"): f"trial {third} has left no files, or they were deleted",
        ("s", "99", "-o", "none"): "has no trial 99",
        ("s", "-o", "my_study.py/x"): "cannot be written: ",
    }.items():
        refused = desk.told("fetch", *words)
        assert (refused.code, says in refused.err) == (2, True), refused.err
        assert "Traceback" not in refused.err
    assert f"folder: .shadho/checkpoints/{key}/{first}\n" in desk.told("best", "s").out
    assert f"folder: .shadho/checkpoints/{key}/{second}\n" in desk.told("trial", "s", str(second)).out
    assert "folder: " not in desk.told("trial", "s", str(third)).out

    assert desk.told("clean").out == "nothing to be deleted\n"
    other = "f" * 16
    for name in (f"{key}/{third}", f"{other}/0"):
        put(desk, name)
    asked = desk.told("clean")
    assert asked.code == 2, "nobody has answered"
    assert asked.out.splitlines() == [
        "this folder: 1 folder of study s, 5 bytes",
        "to be deleted: 1 folder, 5 bytes",
    ]
    assert left(desk) == {key: {*kept, str(third)}, other: {"0"}}
    assert desk.told("clean", "s", "--yes").out.endswith("deleted: 1 folder, 5 bytes\n")
    assert left(desk) == {key: kept, other: {"0"}}
    assert desk.told("clean", other, "--yes").out.endswith("deleted: 1 folder, 5 bytes\n")
    assert left(desk) == {key: kept}
    assert "no study named 'none'" in desk.told("clean", "none").err
    assert desk.told("clean", key, "--yes").out == "nothing deleted\n", "a study of the store needs what it keeps"
    assert left(desk) == {key: kept}


def test_on_a_signed_fleet(desk: Desk, tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> None:
    """The workers have another folder. A study of another store is left, and so is what a command without key asks."""
    folder = tmp_path_factory.mktemp("there")
    there, worker, signed, keyless = worker_elsewhere(desk, folder, STUDY, redis_url, "-c", "2")
    run = desk.launch("my_study", "--trials", "8", "--study", "s", **signed).wait(90)
    assert run.code == 0, desk.said()
    first, second, third, *_ = best_of(desk)
    fetched = desk.told("fetch", "s", "-o", "best", **signed)
    assert fetched.code == 0, fetched.err
    assert (desk.folder / "best" / "model").read_text() == str(first)
    assert (desk.folder / "best" / "more" / "large").read_bytes() == bytes(2_500_000)
    refused = desk.told("fetch", "s", "-o", "keyless", **keyless)
    assert (refused.code, "give the fleet's --signing-key-file" in refused.err) == (2, True)
    assert not (desk.folder / "keyless").exists()
    assert "below the working directory of its worker on" in desk.told("best", "s").out

    [study] = left(there)
    until(lambda: left(there)[study] == {str(first), str(second)}, 30, desk.said)
    put(there, f"{study}/{third}")
    put(there, f"{'f' * 16}/0")
    refused = desk.told("clean", "--yes", **keyless)
    assert "did not do it" in refused.out or refused.code == 2
    assert str(third) in left(there)[study]
    cleaned = desk.told("clean", "--yes", **signed)
    assert "1 folder of study s, 5 bytes\ndeleted: 1 folder, 5 bytes\n" in cleaned.out
    assert left(there) == {study: {str(first), str(second)}, "f" * 16: {"0"}}
    worker.interrupt()
    worker.wait()
    gone = desk.told("fetch", "s", "-o", "gone", **signed)
    assert (gone.code, "no worker is live on" in gone.err) == (2, True)
    assert desk.told("clean", "--yes", **signed).out == "nothing deleted\n"
