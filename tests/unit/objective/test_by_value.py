"""A function by value: its version, its data, its limits, and who may unpickle it."""

from __future__ import annotations

import errno
import fcntl
import functools
import importlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import IO, Any

import numpy as np
import pandas as pd
import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery.core import files
from shadho_celery.core.code import CodeVersion
from shadho_celery.errors import UsageError
from shadho_celery.objective import by_value, study_file
from shadho_celery.objective.call import describe
from shadho_celery.objective.sources import contents, function_version, read_own

SPACE = {"x": hp.uniform("x", 0, 1)}
#: file name of a function in each of these tests
FILE = by_value.FUNCTIONS / "f.pickle"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {*sys.modules}
    yield
    for name in {*sys.modules} - known:
        if name.startswith("own_"):
            del sys.modules[name]


def program(text: str, **held: object) -> Callable[..., Any]:
    """Return the function `objective` of a program with this text, whose globals `held` are."""
    names: dict[str, Any] = {"__name__": "__main__", **held}
    exec(compile(text, "program.py", "exec"), names)
    found: Callable[..., Any] = names["objective"]
    return found


def in_a_slot(name: str) -> study_file.StudyFile:
    """Load the function as the process of a slot does."""
    with study_file.within(study_file.IN_A_TRIAL):
        return study_file.load(name)


def test_a_function_runs_with_its_globals_and_its_context_and_leaves_nothing() -> None:
    function = program("def objective(p, context): return p * N + context", N=3)
    with by_value.kept(function, SPACE) as file:
        assert Path(file.module).stat().st_mode & 0o777 == 0o600
        loaded = in_a_slot(file.module)
        assert loaded.objective(2, 1) == 7
        assert loaded.space.keys() == SPACE.keys()
        assert loaded.code == file.code
        assert file.recorded_module == ""
    assert not Path(".shadho").exists()


def test_a_failure_on_a_worker_shows_the_line_of_the_users_file() -> None:
    text = "def helper(p):\n    raise ValueError(p)\ndef objective(p):\n    return helper(p)\n"
    Path("program.py").write_text(text)
    with by_value.kept(program(text), SPACE) as file, pytest.raises(ValueError, match="2") as failed:
        in_a_slot(file.module).objective(2, None)
    assert 'File "program.py", line 2, in helper\n    raise ValueError(p)\n' in describe(failed.value)


def adding(n: int) -> Callable[[int], int]:
    return lambda p: p + n


@cases(
    "function",
    [lambda p: p + 1, functools.partial(lambda n, p: p + n, 1), adding(1), (1).__add__],
)
def test_lambdas_partials_closures_and_bound_methods_are_sent(function: Callable[..., Any]) -> None:
    with by_value.kept(function, SPACE) as file:
        assert in_a_slot(file.module).objective(2, None) == 3


def test_each_trial_gets_large_arrays_as_they_were_and_may_change_its_copy() -> None:
    """Arrays and data frames are written once, whatever their layout; only small ones are in the pickle."""
    data = np.arange(400_000.0)
    frame = pd.DataFrame({"a": np.ones(200_000), "b": np.zeros(200_000)})
    text = """
def objective(p):
    found = float(data[1] + frame["a"][1] + turned[1, 0])
    data[1], turned[1, 0] = 100, 100
    frame.loc[1, "a"] = 100
    return found
"""
    strided = np.arange(800_000.0).reshape(2, -1)[:, ::2]
    function = program(text, data=data, frame=frame, turned=strided)
    with by_value.kept(function, SPACE) as file:
        objective = in_a_slot(file.module).objective
        assert [objective(0, None) for _ in range(3)] == [1 + 1 + 400_000] * 3
        content = Path(file.module).read_bytes()
        assert len(content) < data.nbytes + frame.size * 8 + strided.nbytes + 100_000
    assert data[1] == 1


def test_a_tensor_is_mapped_too() -> None:
    torch = pytest.importorskip("torch")
    function = program("def objective(p):\n    data[0] += 1\n    return float(data[0])", data=torch.zeros(3_000_000))
    with by_value.kept(function, SPACE) as file:
        objective = in_a_slot(file.module).objective
        assert [objective(0, None) for _ in range(2)] == [1, 1]


TEXT = """
from own_helper import scale
import own_data
N = 2
def objective(p):
    import own_late
    return scale(p) * N
"""


def written_program(text: str = TEXT, **edited: str) -> Callable[..., Any]:
    """Return the objective of a program that uses modules of its folder."""
    files = {"own_helper": "import own_deep\ndef scale(x): return x", "own_deep": "", "own_late": "", **edited}
    for name, content in {**files, "own_data": "", "own_unused": ""}.items():
        Path(f"{name}.py").write_text(content)
    return program(text)


def version(function: Callable[..., Any]) -> CodeVersion:
    with by_value.kept(function, SPACE) as file:
        assert in_a_slot(file.module).code == file.code
        return file.code.with_space({"x": "uniform"})


def test_modules_of_the_folder_belong_to_the_version() -> None:
    """Those that the function names, imports when it is called, or that these import; no others, and no libraries."""
    function = written_program()
    found = version(function)
    assert found.files.keys() == {"own_helper.py", "own_deep.py", "own_late.py"}
    assert found.function == function_version(function)
    assert found.digest != version(written_program(TEXT.replace("N = 2", "N = 3"))).digest


def test_a_function_that_uses_no_module_of_its_own_has_the_version_that_it_has_in_its_own_process() -> None:
    function = program("def objective(p): return N", N=1)
    assert version(function).digest == function_version(function) != ""


def test_the_version_does_not_depend_on_the_space_or_the_data() -> None:
    text = "def objective(p): return data[0]"
    assert version(program(text, data=[1])) == version(program(text, data=[2]))


def test_an_edited_module_is_another_version_without_a_restart() -> None:
    """The program that sends the function keeps what it has imported, and later imports get the edited file."""
    function = written_program()
    found = [version(function)]
    for name in ("own_late", "own_deep"):
        Path(f"{name}.py").write_text("X = 1")
        with by_value.kept(function, SPACE) as file:
            found.append(file.code.with_space({"x": "uniform"}))
    assert len({each.digest for each in found}) == 3
    Path("own_new.py").write_text("X = 1")
    with by_value.kept(program("def objective(p):\n    import own_new"), SPACE):
        Path("own_new.py").write_text("X = 2")
    assert importlib.import_module("own_new").X == 2


class OfGpu:
    """An object that raises an error of its own when it is pickled."""

    def __reduce__(self) -> str:
        raise RuntimeError("CUDA error: no device\nCompile with TORCH_USE_CUDA_DSA")


class Holder:
    """An object with a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def method(self, p: float) -> float:
        return p


def locked(lock: object) -> Callable[..., Any]:
    return lambda p: (lock, p)


@cases(
    "make, said",
    [
        (lambda: program("def objective(p): return L", L=threading.Lock()), "its global L is a _thread.lock: cannot"),
        (
            lambda: locked(OfGpu()),
            "its variable lock is a tests.unit.objective.test_by_value.OfGpu: CUDA error: no device",
        ),
        (lambda: locked(threading.Lock()), "its variable lock is a _thread.lock: cannot"),
        (lambda: Holder().method, "its object.lock is a _thread.lock: cannot pickle '"),
        (lambda: functools.partial(lambda n, p: p, threading.Lock()), "its argument 0 is a _thread.lock: cannot"),
        (
            lambda: program("def f(): return L\ndef objective(p): return f()", L=threading.Lock()),
            "its global f is a builtins.function: cannot pickle '_thread.lock'",
        ),
    ],
)
def test_what_cannot_be_pickled_is_named_with_its_place(make: Callable[[], Callable[..., Any]], said: str) -> None:
    with pytest.raises(UsageError) as refused, by_value.kept(make(), SPACE):
        pass
    assert f"the function cannot be sent to workers: {said}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path(".shadho").exists()


def test_a_socket_is_refused() -> None:
    with socket.socket() as opened, pytest.raises(UsageError, match=r"its global S is a socket.socket: cannot"):
        by_value.sent(program("def objective(p): return S", S=opened), SPACE)


def test_a_tensor_of_another_device_is_refused() -> None:
    torch = pytest.importorskip("torch")
    function = program("def objective(p): return data", data=torch.zeros(3, device="meta"))
    with pytest.raises(UsageError, match=r"its global data is a torch.Tensor: it is on meta.*\.cpu\(\)$"):
        by_value.sent(function, SPACE)


def test_a_space_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(UsageError, match=r"its space is a builtins.dict: cannot pickle"):
        by_value.sent(abs, {"x": hp.choice("x", [threading.Lock()])})


def test_the_largest_globals_are_named_with_their_sizes() -> None:
    names = {"words": b"w" * 17_000_000, "few": b"f" * 2_000_000}
    function = program("def objective(p): return (words, few)", **names)
    with pytest.raises(UsageError) as refused, by_value.kept(function, SPACE):
        pass
    assert str(refused.value) == (
        "the function has 19 MB beside large arrays, and workers of this machine get at most 16 MB: global words "
        "17 MB, global few 2 MB; let the function read it from a file"
    )


def test_a_fleet_gets_at_most_a_megabyte_with_arrays() -> None:
    function = program("def objective(p): return data[0]", data=np.zeros(200_000))
    with pytest.raises(
        UsageError, match=r"the function has 1.6 MB, and workers of a fleet get at most 1 MB: global dat"
    ):
        by_value.sent(function, SPACE)


def test_a_function_that_is_sent_to_a_fleet_is_loaded_from_the_folder_of_shipped_code(tmp_path: Path) -> None:
    file = by_value.sent(program("def objective(p): return p + N", N=1), SPACE)
    [(name, content)] = file.data.items()
    assert name == file.module
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / name).write_bytes(content)
    sys.path.insert(0, str(folder))
    assert in_a_slot(name).objective(1, None) == 2


def test_a_module_that_was_edited_after_its_import_is_sent_as_it_is_now() -> None:
    function = written_program()
    read_own(["own_helper"], Path.cwd(), are_imported=True)
    Path("own_helper.py").write_text("def scale(x): return -x")
    assert contents(by_value.sent(function, SPACE).code)["own_helper.py"] == b"def scale(x): return -x"


def test_only_the_process_of_a_slot_unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_value.pickle, "loads", lambda *_, **__: pytest.fail("it was unpickled"))
    with by_value.kept(lambda p: p, SPACE) as file:
        with pytest.raises(UsageError, match="only the program itself can run its study"):
            study_file.load(file.module)
        study_file.check_modules([file.module])
        assert study_file.literal_settings(file.module) == {}
        assert study_file.cores_per_trial([file.module]) == 1
        assert study_file.read_sources(file.module).function == file.code.function
        assert not study_file.is_program(file.module)
    with pytest.raises(UsageError, match="there is no file"):
        study_file.check_modules([file.module])


@cases(
    "content, mode, said",
    [
        (b"", 0o600, "is not the file of a function"),
        (b"\x80\x05.", 0o600, "is not the file of a function"),
        (b"{}\n", 0o600, "is not the file of a function"),
        (
            b'{"function":"","modules":[],"python":"3.1","sizes":[0,0]}\n',
            0o600,
            "needs Python 3.1, and this worker has",
        ),
        (
            b'{"function":"","modules":[],"python":"3.1","sizes":[0]}\n',
            0o600,
            "is not the file of a function: Expected",
        ),
        (b'{"function":"","modules":[],"python":"3.1","sizes":[0,0]}\n', 0o622, "written by another user"),
    ],
)
def test_a_file_that_is_not_a_function_is_refused(content: bytes, mode: int, said: str) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_bytes(content)
    FILE.chmod(mode)
    with pytest.raises(UsageError, match=said):
        in_a_slot(str(FILE))
    assert study_file.read_sources(str(FILE)).digest == ""


def test_a_file_that_another_user_could_have_exchanged_since_is_not_loaded() -> None:
    with by_value.kept(written_program(), SPACE) as file:
        loaded = in_a_slot(file.module)
        Path(file.module).chmod(0o666)
        with pytest.raises(UsageError, match="could have been written by another user"):
            loaded.objective({"x": 1.0}, None)


def test_a_module_that_the_worker_lacks_is_named() -> None:
    with by_value.kept(written_program(), SPACE) as file:
        del sys.modules["own_helper"]
        Path("own_helper.py").unlink()
        with pytest.raises(
            UsageError, match="cannot be loaded here: ModuleNotFoundError: No module named 'own_helper'"
        ):
            in_a_slot(file.module)


def test_what_a_killed_program_has_left_is_removed_by_the_next_one_but_not_what_is_in_use() -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    for left in (FILE, FILE.with_name(".f.pickle.0123.part")):
        left.write_text("pickle")
    begun = FILE.with_name("begun.pickle")
    begun.touch()
    with by_value.kept(lambda p: p, SPACE) as first, by_value.kept(lambda p: p, SPACE) as second:
        assert first.module != second.module
        used = {Path(first.module).name, Path(second.module).name, begun.name}
        assert {path.name for path in FILE.parent.iterdir()} == used
    assert list(FILE.parent.iterdir()) == [begun], "its program has not locked it yet"


def test_a_folder_that_another_program_removes_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    removals = iter(range(3))

    @contextmanager
    def replacing(path: Path, mode: int) -> Iterator[IO[bytes]]:
        if next(removals, None) is not None:
            FILE.parent.rmdir()
        with files.replacing(path, mode) as file:
            yield file

    monkeypatch.setattr(by_value, "replacing", replacing)
    with by_value.kept(lambda p: p, SPACE) as file:
        assert Path(file.module).exists()
    assert not Path(".shadho").exists()


def test_where_locks_are_unknown_no_file_of_another_program_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with by_value.kept(lambda p: p, SPACE) as first, by_value.kept(lambda p: p, SPACE):
        assert Path(first.module).exists()


def test_a_folder_that_cannot_be_written_is_told_in_one_line() -> None:
    Path(".shadho").write_text("a file")
    told = pytest.raises(UsageError, match=r"cannot be written to \.shadho/functions: Not a directory; make room")
    with told, by_value.kept(lambda p: p, SPACE):
        pass


def test_the_name_of_the_file_shows_that_of_the_function() -> None:
    def training(p: float) -> float:
        return p

    with by_value.kept(training, SPACE) as file:
        assert Path(file.module).name.startswith("training_")
    with by_value.kept(FunctionType(training.__code__, {}, "größe/.."), SPACE) as file:
        assert Path(file.module).name.startswith("function_")
    assert not [*Path().iterdir()]
