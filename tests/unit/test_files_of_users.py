"""Every file that a user names is read within bounds: with a byte order mark, or refused at once in one line."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery.cli.control import points
from shadho_celery.cli.shared_options import environment
from shadho_celery.core.files import MAX_COLUMNS, MAX_NESTED, read_class_spec
from shadho_celery.dashboard.access import read_token
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.signing import read_keys
from shadho_celery.objective.study_file import literal_settings
from shadho_celery.results.warm_start import of_table
from shadho_celery.space.compile import compile_space

BOM = b"\xef\xbb\xbf"
SPACE = compile_space({"x": hp.uniform("x", 0, 1)})


def certificate(path: Path) -> object:
    os.environ[urls.CA] = str(path)
    return urls.tls("amqps://host").keys()


def url_file(path: Path) -> object:
    return environment(None, None, str(path))


def table(path: Path) -> object:
    return [(lesson.point, lesson.loss) for lesson in of_table(path, SPACE).trials]


#: by what the file is: the function that reads it, a valid content, and the beginning of the error for any other one
READERS: Mapping[str, tuple[Callable[[Path], Any], bytes, str]] = {
    "class spec": (read_class_spec, b"[classes.gpu]\nslots = 2\n", "the class spec {path}"),
    "points": (points, b'{"x": 0.5}\n', "the points in {path}"),
    "warm start": (table, b"x,loss\n0.5,1\n", "the warm start {path}"),
    "URLs": (url_file, b"SHADHO_REDIS_URL=redis://host\n", "the URL file {path}"),
    "key": (read_keys, b"k" * 40, "the signing key file {path}"),
    "token": (read_token, b"t" * 40, "--token-file {path}"),
    "certificate": (certificate, b"-----BEGIN CERTIFICATE-----", "SHADHO_TLS_CA: {path}"),
}
#: those that are no text for us, but only bytes
OF_BYTES = {"key", "certificate"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(urls.CA, "")
    monkeypatch.delenv("SHADHO_SIGNING_KEY_FILE", raising=False)


def written(content: bytes) -> Path:
    path = Path("given")
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_bytes(content)
    return path


def refusal(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read(path)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 500
    return said


@cases("kind", READERS)
def test_a_byte_order_mark_changes_nothing(kind: str) -> None:
    read, content, _ = READERS[kind]
    assert read(written(BOM + content)) == read(written(content))


def test_a_study_file_with_a_byte_order_mark_has_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("of_an_editor.py").write_bytes(BOM + b'STUDY = {"cores": 4}\n')
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert literal_settings("of_an_editor") == {"cores": 4}


@cases("kind", READERS)
def test_what_is_no_file_or_no_text_is_one_line_with_the_reason(kind: str) -> None:
    read, content, name = READERS[kind]
    os.mkfifo("pipe", 0o600)
    Path("folder").mkdir()
    sources = {
        "it is a pipe to which no process writes": Path("pipe"),
        "Is a directory": Path("folder"),
        "it has more than 1": Path("/dev/zero"),
        **({} if kind == "token" else {"No such file or directory": Path("missing")}),
    }
    if kind == "token":
        # Other users can read the device.
        del sources["it has more than 1"]
    elif kind == "key":
        sources["other users can read"] = sources.pop("it has more than 1")
    for reason, path in sources.items():
        said = refusal(read, path)
        assert name.format(path=path) in said
        assert reason in said
    Path("pipe").unlink()
    Path("folder").rmdir()
    if kind in OF_BYTES:
        return
    texts = [content.decode().encode(code) for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")]
    for data in (*texts, b"\x7fELF\x02\x01\x01\x00\x80", content + b"\xff", content + b"\x00"):
        assert refusal(read, written(data)).startswith(
            f"{name.format(path='given')} cannot be read: it is not text in UTF-8"
        )


def test_the_text_of_another_process_is_read_from_a_pipe() -> None:
    """As a shell gives it for ``<(command)``."""
    reading, writing = os.pipe()
    os.write(writing, BOM + b'{"x": 0.5}\n')
    os.close(writing)
    try:
        assert points(Path(f"/dev/fd/{reading}")) == [{"x": 0.5}]
    finally:
        os.close(reading)


DOTS, DEEP = "a" + ".a" * 49_900, MAX_NESTED + 1


@cases(
    ("kind", "text", "reason"),
    [
        *(
            ("class spec", text, f"a key has more than {MAX_NESTED} parts")
            for text in (f"{DOTS} = 1", f"[{DOTS}]", f"x = {{{DOTS} = 1}}", f"[['a' . {DOTS}]]", '"a".' * 60 + "b = 1")
        ),
        ("class spec", "x = " + "[" * 90_000, "is not TOML"),
        ("class spec", "x = " + "1" * 90_000, "is not TOML"),
        ("points", "{" + "".join(f'"{n}": 0, ' for n in range(75_000)) + '"74999": 1}', "'74999' occurs twice"),
        ("points", "[" * DEEP + "]" * DEEP, f"given has more than {MAX_NESTED} levels"),
        ("points", '{"x": ' * DEEP + "1" + "}" * DEEP, f"given has more than {MAX_NESTED} levels"),
        ("points", "[" * 90_000, "is not JSON"),
        ("points", "1" * 90_000, "is not JSON"),
        (
            "warm start",
            ",".join(f"c{n}" for n in range(100_000)) + "\n1" * 100_000,
            f"more than {MAX_COLUMNS:,} columns",
        ),
        ("warm start", "x,loss\n" + "1" * 200_000 + ",1\n", "field larger than field limit"),
        ("URLs", "x" * 1_000_001, "it has more than 1,000,000 bytes"),
        ("URLs", "x" * 900_000, "line 1 of given is neither"),
    ],
)
def test_a_file_for_which_a_reader_would_take_for_ever_is_refused_at_once(kind: str, text: str, reason: str) -> None:
    assert reason in refusal(READERS[kind][0], written(text.encode()))


@cases("cell", ["1" * 60_000 + "x", "1" * 60_000, " " * 60_000 + "x", "1e" + "9" * 60_000, "." * 60_000])
def test_a_long_cell_is_read_at_once(cell: str) -> None:
    [(point, loss)] = table(written(f"x,loss\n0.5,{cell}\n".encode()))  # type: ignore[misc]
    assert point == {"x": 0.5}
    assert loss in {cell, float("inf")}


def test_many_columns_and_short_rows_take_no_memory_for_what_is_not_there() -> None:
    names = ",".join(["x", "loss", *(f"c{n}" for n in range(MAX_COLUMNS - 2))])
    text = "\n".join([names, *["0.5,1"] * 20_000])
    assert table(written(text.encode())) == [({"x": 0.5}, 1)] * 20_000


class _Deep:
    """A part of a cycle, whose finalizer calls functions 500 deep."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        self._call(500)

    def _call(self, depth: int) -> None:
        if depth:
            self._call(depth - 1)


@pytest.mark.slow
def test_an_object_that_is_collected_at_the_recursion_limit_fails_no_test(tmp_path: Path) -> None:
    """Which object it is depends on the tests before, so it is no fault of this one (`filterwarnings`)."""
    path, before = tmp_path / "points", gc.get_threshold()
    path.write_text("[" * 90_000)
    try:
        for allocations in range(100, 900, 50):
            gc.collect()
            _Deep()
            gc.set_threshold(allocations)
            with pytest.raises(UsageError, match="is not JSON"):
                points(path)
    finally:
        gc.set_threshold(*before)
