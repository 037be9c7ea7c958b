"""HTML that is escaped, and documents whose policy allows their own scripts only."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import sys
from itertools import product

import pytest
from services.cases import cases

from shadho_celery.charts import report as documents
from shadho_celery.charts.report import MODULES, STATIC, Html, document, element, joined
from shadho_celery.core.checks import printable

#: by role: least contrast with the ground, see WCAG 2.1, 1.4.3 and 1.4.11
CONTRAST = {"ink": 4.5, "muted": 4.5, "link": 4.5, "soft": 3.0, "failed": 3.0}
CONTRAST |= {f"class-{place}": 3.0 for place in range(6)}


def test_content_and_attributes_are_escaped() -> None:
    found = element("p", "<b>&", element("b", "1"), title='"><script>', data_label="x")
    assert found == '<p title="&quot;&gt;&lt;script&gt;" data-label="x">&lt;b&gt;&amp;<b>1</b></p>'


def test_a_document_in_an_attribute_is_ascii_and_otherwise_unchanged() -> None:
    page = Html("<p>\u2013\u200b</p>")
    assert element("iframe", srcdoc=page) == '<iframe srcdoc="&lt;p&gt;&#8211;&#8203;&lt;/p&gt;"></iframe>'


def test_characters_that_turn_a_text_around_are_visible() -> None:
    assert element("p", "\u202eabc\x00\ud800") == "<p>\\u202eabc\\x00\\ud800</p>"


@cases("is_embedded", [False, True])
def test_the_policy_has_the_hashes_of_the_scripts_and_of_the_style_and_no_more(is_embedded: bool) -> None:
    text = document("title", Html("<main></main>"), b"{}", is_embedded=is_embedded)
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert len(policy) == 1
    rules = dict(rule.strip().split(" ", 1) for rule in policy[0].split(";"))
    assert rules["default-src"] == "'none'"
    for rule, tag in (
        ("script-src", r"<script type=\"module\">(.*?)</script>"),
        ("style-src", "<style>(.*?)</style>"),
    ):
        bodies = re.findall(tag, text, re.DOTALL)
        if is_embedded and rule == "script-src":
            [packed] = re.findall(r'data-type="module">(.*?)</script>', text)
            bodies.insert(0, gzip.decompress(base64.b64decode(packed)).decode())
        hashes = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        assert rules[rule].split() == [f"'sha256-{each}'" for each in hashes]
    assert not re.search(r"<[a-z]+[^>]* on\w+=", text.partition("<body")[2].partition("<script")[0])


@cases("script", ["a</script>", "a</SCRIPT >", "<!-- a", "a\r\nb"])
def test_a_script_that_would_end_early_is_refused(script: str) -> None:
    with pytest.raises(ValueError, match="cannot stand"):
        documents._harmless(script)


def test_each_module_comes_after_those_that_it_imports() -> None:
    assert {*MODULES} == {path.name for path in STATIC.glob("*.js")}
    for place, name in enumerate(MODULES):
        text = (STATIC / name).read_text()
        lines = [line for line in text.splitlines() if line.startswith(("import", "export {", "export default"))]
        found = documents._IMPORT.findall(text)
        assert len(found) == len(lines), f"{name}: an import must be one line that names what it takes"
        assert {module for _, module in found} <= {*MODULES[:place]}


def test_scripts_set_no_html() -> None:
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc")
    assert [path.name for path in STATIC.glob("*.js") if forbidden.search(path.read_text())] == []


def test_the_script_of_others_is_the_one_that_is_noted() -> None:
    folder = STATIC / "vendor" / "echarts"
    noted = json.loads((folder / "origin.json").read_text())
    assert hashlib.sha256((folder / noted["script"]).read_bytes()).hexdigest() == noted["sha256"]
    assert {"LICENSE", "NOTICE", "LICENSE-d3"} <= {path.name for path in folder.iterdir()}


def test_colours_have_enough_contrast_in_light_and_dark() -> None:
    light, dark = (STATIC / "style.css").read_text().split("@media (prefers-color-scheme: dark)")[:2]
    for scheme, (name, least) in product((light, dark), CONTRAST.items()):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        assert contrast(colours[name], colours["ground"]) >= least, name


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_joined_elements_are_html() -> None:
    assert element("div", joined([element("b", "<"), element("b", ">")])) == "<div><b>&lt;</b><b>&gt;</b></div>"


def test_the_scripts_escape_the_characters_that_python_escapes() -> None:
    [found] = re.findall(r"^const UNPRINTABLE = /(\[.*\])/gu;$", (STATIC / "marks.js").read_text(), re.MULTILINE)
    pattern = re.sub(r"\\u\{(\w+)\}", lambda code: f"\\U{code[1]:0>8}", found)
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    escaped = [character for character in everything if printable(character) != character]
    assert re.findall(pattern, everything) == escaped
    assert "\u202e" in escaped
