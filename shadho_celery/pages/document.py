"""HTML: elements whose content is escaped, and documents that open without a network."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from pathlib import Path

from shadho_celery.core.checks import printable

#: folder of scripts and styles
STATIC = Path(__file__).parent / "static"
#: scripts of pages, each after those that it imports
MODULES = ("numbers.js", "theme.js", "marks.js", "table.js", "draw.js", "timeline.js", "figure.js", "page.js")

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:function|const|class) (\w+))", re.MULTILINE)


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: str | int) -> Html:
    """Return an element. Content that is not `Html` is escaped. Values of attributes are escaped in any case.

    Characters that control a terminal or turn a text around are shown as escapes, except in `Html`. An underscore at
    the end of an attribute's name is left out, and others become hyphens: ``class_``, ``data_label``.
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(each)}"' for key, each in attributes.items())
    inner = "".join(each if isinstance(each, Html) else _text(each) for each in content)
    return Html(f"<{name}{given}>{inner}</{name}>")


def joined(parts: list[Html]) -> Html:
    """Return several elements as one text."""
    return Html("".join(parts))


def document(title: str, body: Html, data: bytes, *, is_embedded: bool = False) -> Html:
    """Return an HTML file with its scripts, styles and data in itself.

    `data` is JSON without the character <. The policy of the file allows these scripts by their hashes, and no request.
    A page that `is_embedded` in another one has no margins.
    """
    library, own = vendored(), own_script()
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(own)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        element("title", title),
        f"<style>{style}</style>",
    ]
    content = [
        body,
        f'<script type="application/json" id="data">{data.decode()}</script>',
        f"<script>{library}</script>",
        f'<script type="module">{own}</script>',
    ]
    marked = ' class="embedded"' if is_embedded else ""
    return Html(
        "\n".join(
            [
                '<!DOCTYPE html>\n<html lang="en">\n<head>',
                *head,
                f"</head>\n<body{marked}>",
                *content,
                "</body>\n</html>\n",
            ]
        )
    )


@cache
def vendored() -> str:
    """Return the script of ECharts."""
    return _harmless((STATIC / "vendor" / "echarts" / "echarts.min.js").read_text(encoding="utf-8"))


@cache
def own_script() -> str:
    """Return our modules as one script, because a file cannot import other files. Each module keeps its own scope."""
    parts = ["const modules = {};"]
    for name in MODULES:
        text = (STATIC / name).read_text(encoding="utf-8")
        exported = ", ".join(_EXPORT.findall(text))
        text = _IMPORT.sub(r'const \1 = modules["\2"];', _EXPORT.sub("", text))
        parts.append(f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();')
    return _harmless("\n".join(parts))


def _harmless(script: str) -> str:
    """Return a script that ends where it should in an HTML file. Raises ValueError for any other."""
    if "\r" in script or re.search(r"</script|<!--", script, re.IGNORECASE):
        raise ValueError("this script cannot stand in an HTML file")
    return script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _value(value: str | int) -> str:
    # A notebook may be saved in another encoding, which would change the hashes of the scripts in it.
    found = escape(value) if isinstance(value, Html) else _text(str(value))
    return found.encode("ascii", "xmlcharrefreplace").decode()


def _text(text: str) -> str:
    return escape(printable(text))
