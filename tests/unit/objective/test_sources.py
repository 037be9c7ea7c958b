"""A study's sources are read once: what is digested is what is imported, whatever happens to the files meanwhile."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shadho_celery.core.code import CodeVersion, digest_of
from shadho_celery.errors import UsageError
from shadho_celery.objective import sources
from shadho_celery.objective.sources import DiskWatch
from shadho_celery.objective.study_file import failed_sources, load, read_sources

STUDY = "SPACE = {'x': 1}\ndef objective(params): return 0.0\n"
NAMES = {"mine_a", "mine_b", "mine_c", "mine_pack"}


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    forget()
    yield write
    forget()


def test_the_sources_are_the_module_and_what_it_imports_below_its_folder(write: Callable[[str, str], Path]) -> None:
    """Inside functions and relatively, too; not libraries, this package, or what nothing imports."""
    write(
        "mine_a.py", "import os, numpy, shadho_celery, mine_pack.deep.one as d\ndef f(): from mine_b import x\n" + STUDY
    )
    write("mine_b.py", "x = 1")
    write("mine_c.py", "not_imported = 1")
    write("mine_pack/__init__.py", "from . import side")
    write("mine_pack/side.py", "from .deep.two import *")
    write("mine_pack/deep/one.py", "")
    write("mine_pack/deep/two.py", "")
    write("site-packages/numpy.py", "")
    code = load("mine_a").code
    deep = {"mine_pack/deep/one.py", "mine_pack/deep/two.py"}
    assert code.files.keys() == {"mine_a.py", "mine_b.py", "mine_pack/__init__.py", "mine_pack/side.py", *deep}
    assert code.files["mine_b.py"] == digest_of(b"x = 1")
    assert code.root == str(Path.cwd())


def test_modules_below_the_working_directory_count_wherever_python_finds_them(
    write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """A folder such as src is on Python's path; of two modules of one name the one that Python takes counts."""
    sys.path.insert(0, str(tmp_path / "src"))
    write("mine_a.py", "import mine_b, mine_c, mine_pack.one\n" + STUDY)
    write("src/mine_b.py", "another = 1")
    write("src/mine_c.py", "x = 1")
    write("src/mine_pack/__init__.py", "")
    write("src/mine_pack/one.py", "")
    write("mine_b.py", "x = 2")
    code = load("mine_a").code
    found = {"src/mine_c.py", "src/mine_pack/__init__.py", "src/mine_pack/one.py"}
    assert code.files.keys() == {"mine_a.py", "mine_b.py", *found}
    assert sources.contents(code)["src/mine_c.py"] == b"x = 1"
    assert sys.modules["mine_b"].x == 2
    sys.path.insert(0, "/usr")
    assert read_sources("mine_a").files == code.files, "what lies elsewhere is no part of the study"


def test_a_star_may_import_the_modules_of_a_package(write: Callable[[str, str], Path]) -> None:
    write("mine_a.py", "from mine_pack import *\n" + STUDY)
    write("mine_pack/__init__.py", "__all__ = ['one']")
    write("mine_pack/one.py", "")
    assert load("mine_a").code.files.keys() == {"mine_a.py", "mine_pack/__init__.py", "mine_pack/one.py"}


def test_a_study_may_be_a_package_or_lie_in_one(write: Callable[[str, str], Path]) -> None:
    write("mine_pack/__init__.py", "from mine_pack import other\n" + STUDY)
    write("mine_pack/other.py", STUDY)
    files = {"mine_pack/__init__.py", "mine_pack/other.py"}
    assert load("mine_pack").code.files.keys() == files
    assert load("mine_pack/").code.files.keys() == files
    assert load("mine_pack/other.py").code.files.keys() == files


def test_an_edit_of_the_same_size_and_time_is_seen(write: Callable[[str, str], Path]) -> None:
    """Python's cached bytecode would still be that of the first text."""
    space = "SPACE = ['adam', 'sgd']\ndef objective(params): return 0.0\n"
    path = write("mine_a.py", space)
    before = path.stat()
    first = load("mine_a")
    write("mine_a.py", space.replace("['adam', 'sgd']", "['sgd', 'adam']"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    forget()
    second = load("mine_a")
    assert (first.space, second.space) == (["adam", "sgd"], ["sgd", "adam"])
    assert first.code.files != second.code.files


def test_what_is_imported_is_what_was_read_though_the_file_is_edited_in_between(
    write: Callable[[str, str], Path],
) -> None:
    write("mine_a.py", "def late():\n    import mine_b\n    return mine_b.x\n" + STUDY)
    path = write("mine_b.py", "x = 'as it was read'")
    loaded = load("mine_a")
    path.write_text("x = 'edited'")
    assert sys.modules["mine_a"].late() == "as it was read"
    assert loaded.code.files["mine_b.py"] == digest_of(b"x = 'as it was read'")
    assert read_sources("mine_a").files == loaded.code.files, "it stays imported as it was"


def test_a_module_of_the_same_name_elsewhere_is_not_mistaken_for_it(
    write: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("mine_a.py", STUDY + "here = 1")
    load("mine_a")
    forget()
    write("elsewhere/mine_a.py", "here = 2")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *sys.path])
    assert importlib.import_module("mine_a").here == 2


@pytest.mark.parametrize("text", ["this is no Python", "x = '\0'", "(" * 5000, "# -*- coding: nonsense -*-"])
def test_a_source_that_cannot_be_compiled_is_digested_and_its_import_says_why(
    write: Callable[[str, str], Path], text: str
) -> None:
    write("mine_a.py", text)
    with pytest.raises(UsageError, match="mine_a cannot be imported"):
        load("mine_a")
    assert read_sources("mine_a").files == {"mine_a.py": digest_of(text.encode())}


def test_a_source_that_cannot_be_read_has_no_digest_and_its_import_says_why(
    write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its permissions: root reads everything."""
    unreadable = write("mine_b.py", "x = 1")
    write("mine_a.py", "import mine_b\n" + STUDY)
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == unreadable:
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert load("mine_a").code.files["mine_b.py"] == ""


@pytest.mark.parametrize("name", ["__main__", "my_notebook.ipynb"])
def test_what_no_worker_could_import_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(UsageError, match=r"save SPACE and objective in their own file, such as my_study\.py"):
        load(name)


def test_the_watch_names_the_edited_file_and_not_one_that_was_only_touched(write: Callable[[str, str], Path]) -> None:
    write("mine_a.py", "import mine_b\n" + STUDY)
    path = write("mine_b.py", "x = 1")
    code, watch = load("mine_a").code, DiskWatch()
    assert watch.edited(code) is None
    os.utime(path)
    assert watch.edited(code) is None
    path.write_text("x = 2")
    assert watch.edited(code) == str(path)
    path.write_text("x = 1")
    assert watch.edited(code) is None, "it is as it was"
    path.unlink()
    assert watch.edited(code) == str(path)


@pytest.mark.parametrize("edited", ["mine_a.py", "mine_b.py"])
@pytest.mark.parametrize("importer", [load, importlib.import_module])
def test_a_study_that_was_edited_after_its_import_is_refused(
    write: Callable[[str, str], Path], importer: Callable[[str], object], edited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has imported it: `load`, or Python itself, whose cached bytecode tells so."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write("mine_a.py", "import mine_b\n" + STUDY)
    write("mine_b.py", "x = 1")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    importer("mine_a")
    path = Path.cwd() / edited
    path.write_text(path.read_text() + "y = 1\n")
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"^{path} was edited after this Python imported it; restart Python"):
            load("mine_a")


@pytest.mark.parametrize("importer", [load, importlib.import_module])
def test_a_study_that_is_as_it_was_imported_may_be_loaded_again(
    write: Callable[[str, str], Path], importer: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = write("mine_a.py", STUDY)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    importer("mine_a")
    for _ in range(2):
        assert load("mine_a").code.files == {"mine_a.py": digest_of(path.read_bytes())}


def test_a_module_that_is_reloaded_is_as_it_is_on_the_disk(write: Callable[[str, str], Path]) -> None:
    path = write("mine_a.py", STUDY)
    load("mine_a")
    path.write_text(STUDY.replace("1", "2"))
    importlib.reload(sys.modules["mine_a"])
    loaded = load("mine_a")
    assert (loaded.space, loaded.code.files) == ({"x": 2}, {"mine_a.py": digest_of(path.read_bytes())})


def test_a_missing_module_counts_as_edited_once_it_is_there(write: Callable[[str, str], Path]) -> None:
    code, watch = read_sources("mine_pack.a"), DiskWatch()
    assert (code, watch.edited(code)) == (sources.absent("mine_pack.a"), None)
    path = write("mine_pack/a.py", STUDY)
    assert watch.edited(code) == str(path)


def test_a_study_counts_as_edited_once_the_module_that_it_lacked_is_there(write: Callable[[str, str], Path]) -> None:
    write("mine_a.py", "import mine_b\n" + STUDY)
    with pytest.raises(UsageError, match="No module named 'mine_b'") as lacking:
        load("mine_a")
    code, watch = failed_sources("mine_a", lacking.value), DiskWatch()
    assert watch.edited(code) is None
    path = write("mine_b.py", "")
    assert watch.edited(code) == str(path)


def test_an_unchanged_file_is_not_read_again(
    write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("mine_a.py", STUDY)
    code, watch = load("mine_a").code, DiskWatch()
    watch.edited(code)
    monkeypatch.delattr(Path, "read_bytes")
    assert watch.edited(code) is None


def test_a_code_without_files_is_never_edited() -> None:
    assert DiskWatch().edited(CodeVersion()) is None
