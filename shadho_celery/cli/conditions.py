"""What is wrong with servers and workers: said when it begins, and when it is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

#: seconds for which something must be in order again before that is said
OVER_SECONDS = 5.0


class Conditions:
    """Warnings of what may pass by itself."""

    def __init__(self) -> None:
        #: by name, the warnings that were said, and the moment at which one of them was last true
        self._said: dict[str, list[str]] = {}
        self._seen_at: dict[str, float] = {}

    def see(self, found: Mapping[str, str], now: float) -> Iterator[str]:
        """Yield what to say of the warnings that are true `now`: those that are new, and those that are over."""
        for name, warning in found.items():
            self._seen_at[name] = now
            if warning not in (said := self._said.setdefault(name, [])):
                said.append(warning)
                yield warning
        for name in [name for name, seen_at in self._seen_at.items() if now - seen_at >= OVER_SECONDS]:
            del self._seen_at[name]
            yield f"over: {self._said.pop(name)[-1].removeprefix('Warning: ').partition(';')[0]}"
