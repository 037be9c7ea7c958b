"""The file of classes that are started on demand is data: what does not fit is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from services.cases import cases

from shadho_celery.core.files import ClassSpec, read_class_spec
from shadho_celery.errors import UsageError

SPEC = """
[classes.gpu_large]
slots = 2
max_workers = 4
memory_gib = 64
price = 2.40
startup_seconds = 120

[classes.cpu]
"""


def read(tmp_path: Path, text: str | bytes) -> dict[str, ClassSpec]:
    path = tmp_path / "classes.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_class_spec(path)


def test_the_classes_have_the_order_of_the_file(tmp_path: Path) -> None:
    found = read(tmp_path, SPEC)
    assert [*found] == ["gpu_large", "cpu"]
    assert found["gpu_large"] == ClassSpec(slots=2, max_workers=4, memory_gib=64.0, price=2.4, startup_seconds=120.0)
    assert found["gpu_large"].most == 8
    assert found["cpu"] == ClassSpec()


@cases(
    "text",
    [
        "",
        "classes = 3",
        "[classes]",
        "classes = []",
        "[classes.cpu",
        b"\xff\xfe",
        "[classes.cpu]\nslots = 0",
        "[classes.cpu]\nslots = 1.5",
        "[classes.cpu]\nslots = true",
        "[classes.cpu]\nslots = 1000000000000000000000000",
        "[classes.cpu]\nmax_workers = -1",
        "[classes.cpu]\nprice = -1",
        "[classes.cpu]\nprice = nan",
        "[classes.cpu]\nprice = inf",
        "[classes.cpu]\nstartup_seconds = nan",
        "[classes.cpu]\nstartup_seconds = 1e9",
        "[classes.cpu]\nmemory_gib = 'much'",
        "[classes.cpu]\ncommand = 'rm -rf /'",
        "[classes.'a,b']",
        '[classes."\\u001b[31m"]',
        "[classes.'']",
        f"[classes.{'x' * 61}]",
        "[other.cpu]",
        "[classes]\n" + "\n".join(f"c{place} = {{}}" for place in range(101)),
        "x = " + "[" * 5000,
        "#" * 100_001,
    ],
)
def test_bad_input_is_one_line_that_names_the_file(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the class spec .*classes\.toml") as caught:
        read(tmp_path, text)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 700


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_class_spec(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="Is a directory"):
        read_class_spec(tmp_path)
