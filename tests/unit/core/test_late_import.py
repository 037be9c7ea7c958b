"""A module that hardly anybody uses is loaded at its first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shadho_celery.core.late_import import load_late


def said(code: str) -> str:
    """What a fresh Python prints that runs this code."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("first", ["import shadho_celery.space.compile", "import hyperopt"])
def test_hyperopts_module_is_whole_whoever_imports_it_first(first: str) -> None:
    code = f"{first}\nimport hyperopt, shadho_celery.space.compile, inspect\nfrom hyperopt import atpe\n"
    assert said(f"{code}print(atpe.suggest.__module__, hyperopt.atpe.suggest is atpe.suggest)") == "hyperopt.atpe True"


def test_without_its_use_a_process_does_not_load_what_only_it_needs() -> None:
    assert said("import shadho_celery.space.compile, hyperopt, sys; print('scipy.stats' in sys.modules)") == "False"


def test_it_is_loaded_at_the_first_name_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    load_late("colorsys")
    import colorsys

    assert not hasattr(colorsys, "__file__")
    assert colorsys.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0.0)
    assert sys.modules["colorsys"].rgb_to_hsv is colorsys.rgb_to_hsv
    with pytest.raises(AttributeError, match="no_such_name"):
        colorsys.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_a_module_that_is_loaded_stays_as_it_is() -> None:
    import json

    load_late("json")
    assert sys.modules["json"] is json
