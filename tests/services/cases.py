"""Many cases of one test as one node: collecting and reporting thousands of nodes costs more than running them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Test = Callable[..., None]


def cases(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each of the values, as `pytest.mark.parametrize` does, but within one node.

    A failure names its case. The cases share the test's fixtures, so none may depend on what another has left there.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    found = [(value,) if len(arguments) == 1 else tuple(value) for value in values]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run_all(*given: Any, **fixtures: Any) -> None:
            for case in map(dict, (zip(arguments, value, strict=True) for value in found)):
                try:
                    test(*given, **fixtures, **case)
                except Exception as error:
                    raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in arguments]
        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_all

    return decorate
