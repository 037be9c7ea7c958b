"""The console for tables and live views, which shows every text without markup and makes it printable."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shadho_celery.core.checks import printable


class PrintableConsole(Console):
    """Console that does not interpret markup in texts, and escapes control characters in them.

    Its own styles and control codes are kept.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False)

    def __exit__(self, *error: object) -> None:
        """Write what was printed. If a program's stream cannot be written, the program goes on without it."""
        try:
            super().__exit__(*error)
        except OSError:
            self.quiet = True

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable` with printable texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
