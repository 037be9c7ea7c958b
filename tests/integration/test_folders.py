"""What trials leave is fetched from workers over a real Redis, piece by piece, and deleted if that is signed."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from services.cases import cases
from services.repeating import repeated

from shadho_celery.core.files import MAX_PIECE, sweep
from shadho_celery.core.hardware import Machine
from shadho_celery.core.system import SystemClock
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.control import (
    TO_WORKERS,
    Client,
    ReadFile,
    Requests,
    Sweep,
    WorkerAnswer,
    of_worker,
)
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.node import logs
from shadho_celery.node.logs import AnswerServer
from shadho_celery.session import fetching
from shadho_celery.session.control import TrialLogs
from shadho_celery.session.fetching import TrialFolder, fetch

SIGNER = Signer(b"a key of sixteen bytes")
STUDY, NAME = "0123456789abcdef", "cpu@h.1"
TRIAL: Any = SimpleNamespace(number=7, host="h", record=SimpleNamespace(folder=3))


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> Path:
    """The folder of trial 3 on a worker's disk; this process works in another one, and names the fleet."""
    monkeypatch.setenv(urls.REDIS, redis_url)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = tmp_path / "there" / STUDY / "3"
    found.mkdir(parents=True)
    return found


@contextmanager
def worker(
    client: Any, folder: Path, in_use: set[int] | None = frozenset(), signer: Signer = UNSIGNED
) -> Iterator[None]:
    """Let a worker that has this folder of a trial answer. If `in_use` is None, it refuses control."""
    Registry(client, Worker).announce(NAME, Worker(machine=Machine(host="h"), storage="s"))
    requests = Requests(client, of_worker(NAME), signer, TO_WORKERS)
    server = AnswerServer(requests, folder.parents[1], None if in_use is None else lambda study: in_use, SystemClock())

    def beat() -> None:
        server._was_asked = True
        server.beat()

    with repeated(beat):
        yield
    if server._answering is not None:
        server._answering.join()


def names(folder: Path = Path()) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def fetched(to: str = "copy", update: Callable[[int], object] = lambda size: None) -> TrialFolder:
    found = TrialFolder(TrialLogs(is_fleet=True, seconds=3.0), STUDY, TRIAL)
    fetch(found, Path(to), update)
    return found


def test_a_folder_is_fetched_in_pieces_of_which_redis_holds_one(client: Any, folder: Path) -> None:
    """Names need not be text, and links and pipes are left out. The origin's folder is that of a promoted trial."""
    content = {b"model": os.urandom(3 * MAX_PIECE + 5), b"a/b/empty": b"", b"odd\xff\n\x1b[2Jname": b"x"}
    for name, data in content.items():
        place = folder / os.fsdecode(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "linked").symlink_to("/etc")
    os.mkfifo(folder / "pipe")
    held = []

    def update(size: int) -> None:
        held.append(sum(client.memory_usage(key) or 0 for key in client.keys("shadho:*answer*")))
        assert size <= MAX_PIECE

    with worker(client, folder):
        found = fetched(update=update)
    assert (len(found.files), found.size) == (3, 3 * MAX_PIECE + 6)
    copied = {
        os.fsencode(each.relative_to("copy")): each.read_bytes() for each in Path("copy").rglob("*") if each.is_file()
    }
    assert copied == content
    assert len(held) == 5
    assert max(held) < 2 * MAX_PIECE
    assert client.keys("shadho:*answer*") == []
    assert names() == ["copy"]


def test_of_a_file_that_grows_the_listed_size_is_fetched(client: Any, folder: Path) -> None:
    (folder / "log").write_bytes(b"x" * (MAX_PIECE + 10))

    def grow(size: int) -> None:
        with (folder / "log").open("ab") as file:
            file.write(b"more")

    with worker(client, folder):
        fetched(update=grow)
    assert Path("copy/log").read_bytes() == b"x" * (MAX_PIECE + 10)


@cases(
    "change, says",
    [
        (lambda file: file.write_bytes(b"y" * 2 * MAX_PIECE), "was written while it was fetched"),
        (lambda file: file.write_bytes(b"x"), "became shorter"),
        (lambda file: file.unlink(), "the folder of trial 7 cannot be read: .*No such file"),
        (lambda file: (file.unlink(), file.symlink_to("/etc/passwd")), "the folder of trial 7 cannot be read: "),
    ],
)
def test_a_file_that_changes_is_refused_and_nothing_is_left(
    client: Any, folder: Path, change: Callable[[Path], object], says: str
) -> None:
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").write_bytes(b"x" * 2 * MAX_PIECE)
    with worker(client, folder), pytest.raises(ServiceError, match=says):
        fetched(update=lambda size: change(folder / "model"))
    assert names() == []


@cases(
    "path",
    [b"../x", b"/etc/x", b"a/../../x", b"a//b", b".", b"", b"a/", b"a\0b", b"./a"],
)
def test_no_name_leads_out_of_the_copy(folder: Path, path: bytes) -> None:
    """Whatever a worker answers."""
    (folder / "x").write_text("x")
    Path("copy").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="leads out of the folder"):
        fetching._inside(Path("copy").absolute(), path)


def test_a_worker_reads_nothing_outside_of_its_folder(folder: Path) -> None:
    (folder.parents[2] / "secret").write_text("secret")
    (folder / "out").symlink_to(folder.parents[2])
    folder.with_name("4").mkdir()
    folder.with_name("4").joinpath("x").touch()
    for path in (b"../../../secret", b"../4/x", b"out/secret", b"/etc/passwd", b"out", b".", b"nothing", b"a\0"):
        deed = ReadFile(study=STUDY, number=3, path=path, start=0, size=10)
        answer = logs.answered(folder.parents[1], deed)
        assert answer == WorkerAnswer(problem=answer.problem) != WorkerAnswer()


@pytest.mark.parametrize("most", [2 * MAX_PIECE, None])
def test_without_room_nothing_is_left(client: Any, folder: Path, most: int | None) -> None:
    """Neither if that is known before, nor if the file system refuses to go on in the middle."""
    (folder / "model").write_bytes(b"x" * 3 * MAX_PIECE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with worker(client, folder):
        found = TrialFolder(TrialLogs(is_fleet=True), STUDY, TRIAL)
        found.size = 3 * MAX_PIECE if most else 10 * 2**40
        resource.setrlimit(resource.RLIMIT_FSIZE, (most or soft, hard))
        try:
            with pytest.raises(UsageError, match="copy cannot be written: File too" if most else "has room for") as no:
                fetch(found, Path("copy"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(no.value)
    assert names() == []


def test_ten_gigabytes_are_listed_and_deleted(client: Any, folder: Path) -> None:
    with (folder / "model").open("wb") as file:
        file.truncate(10 * 2**30)
    with worker(client, folder):
        assert TrialFolder(TrialLogs(is_fleet=True), STUDY, TRIAL).size == 10 * 2**30
        found = asked(client, UNSIGNED, Sweep(studies={STUDY: b"\xff"}, is_sure=True))
    assert found.swept == {STUDY: (1, 10 * 2**30)}
    assert not folder.exists()


def test_a_worker_that_ends_in_the_middle_is_named_and_nothing_is_left(client: Any, folder: Path) -> None:
    (folder / "model").write_bytes(b"x" * 3 * MAX_PIECE)
    with (
        worker(client, folder),
        pytest.raises(ServiceError, match="no worker is live on h, where the folder of trial 7"),
    ):
        fetched(update=lambda size: Registry(client, Worker).withdraw(NAME))
    assert names() == []


def test_a_folder_is_refused_if_there_is_none_or_the_copy_would_replace_something(client: Any, folder: Path) -> None:
    with worker(client, folder):
        with pytest.raises(ServiceError, match="trial 7 has left no files, or they were deleted"):
            fetched()
        (folder / "x").write_text("x")
        Path("copy").mkdir()
        fetched()
        with pytest.raises(UsageError, match="copy is not empty; give -o another folder"):
            fetched()


def test_a_folder_of_many_files_is_refused(client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (folder / f"{number:04}").touch()
    for module in (logs, fetching):
        monkeypatch.setattr(module, "MAX_FILES", 29)
    with worker(client, folder), pytest.raises(UsageError, match="over 29 files; copy it by hand"):
        TrialFolder(TrialLogs(is_fleet=True), STUDY, TRIAL)


def asked(client: Any, signer: Signer, sweep: Sweep, seconds: float = 5.0) -> Any:
    asker = Client(client, signer, TO_WORKERS)
    request = asker.request(of_worker(NAME), "me@here", sweep)
    asker.send(request)
    return asker.wait(request, seconds)


def test_folders_are_deleted_only_if_the_request_is_sure_and_signed(client: Any, folder: Path) -> None:
    other = "f" * 16
    left = [f"{STUDY}/4.attempt-6.1", f"{STUDY}/3.attempt-3.2"]
    for name in (f"{STUDY}/4", *left, f"{STUDY}/logs", f"{other}/0", "of a user"):
        (folder.parents[1] / name).mkdir(parents=True)
        (folder.parents[1] / name / "file").write_text("12345")
    (folder / "file").write_text("123")
    (folder.parent / "5").symlink_to(folder.parents[2] / "here")
    Path("mine").touch()
    listing, sure = (Sweep(studies={STUDY: b"\xff"}, is_sure=is_sure) for is_sure in (False, True))
    with worker(client, folder, in_use={4}, signer=SIGNER):
        assert asked(client, SIGNER, listing) == WorkerAnswer(is_done=True, swept={STUDY: (2, 8)})
        assert asked(client, UNSIGNED, sure, 0.5) is None
        assert folder.is_dir()
        assert asked(client, SIGNER, sure) == WorkerAnswer(is_done=True, swept={STUDY: (2, 8)})
        assert names(folder.parent) == ["4", "4.attempt-6.1", "5", "logs"]
        found = asked(client, SIGNER, Sweep(studies={STUDY: None, other: b"\x00"}, is_sure=True))
        assert found == WorkerAnswer(is_done=True, swept={STUDY: (0, 0), other: (0, 0)})
    assert Path("mine").exists(), "links are not followed"
    with worker(client, folder, signer=SIGNER):
        asked(client, SIGNER, Sweep(studies={STUDY: None}, is_sure=True))
    assert names(folder.parents[1]) == [other, "of a user"]


def test_a_worker_that_refuses_control_deletes_nothing(client: Any, folder: Path) -> None:
    with worker(client, folder, in_use=None):
        assert asked(client, UNSIGNED, Sweep(studies={STUDY: None}, is_sure=True)) == WorkerAnswer()
    assert folder.is_dir()


def test_a_linked_folder_of_a_study_is_left(folder: Path) -> None:
    (folder.parents[1] / "linked").symlink_to(folder.parent)
    for unneeded in (b"\xff", None):
        assert sweep(folder.parents[1], "linked", unneeded) == (0, 0)
    assert folder.is_dir()
