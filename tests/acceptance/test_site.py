"""The documentation site: it builds without a warning, opens without a network, and what its pages show runs.

The commands and blocks of its longer pages are run by test_readme.py and others (`services.documents`), and those of
all other pages here.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import services
import yaml
from acceptance.commands import ROOT, Desk, until
from acceptance.documents import COMMANDS, DOCUMENTS, OPERATE, SHORT, SITE, TEXTS, blocks, commands, shell
from services.browser import Opened
from services.cases import cases
from services.extras import needed

import shadho_celery
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

pytestmark = pytest.mark.timeout(240)

HERE = ROOT / ".docs"
OWN_COMMANDS = [line for page in SITE for line in commands(page)]
OWN_BLOCKS = [
    (f"{page.stem.replace('-', '_')}_{number}", block)
    for page in SITE
    for number, block in enumerate(blocks(page, "python"))
]

#: what runs those commands of the pages that are not in another document, too
RUN_BY = {
    "--loss val_loss": "test_the_script_with_arguments_is_searched",
    "run study.toml --code ship": "test_the_script_is_tuned_by_workers_that_slurm_starts",
    "--submit": "test_the_script_is_tuned_by_workers_that_slurm_starts",
    "fleet": "test_the_script_is_tuned_by_workers_that_slurm_starts",
    "kubectl": "test_the_commands_for_kubernetes_name_manifests_and_secrets_that_are_there",
    "worker": "test_the_workers_of_the_pages_start",
}

# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with each warning as an error."""
    needed("furo", "docs")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-W", "-q", "-d", f"{folder}/trees", str(HERE), f"{folder}/html"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200 * services.PATIENCE)
    assert done.returncode == 0, done.stderr
    return folder / "html"


class Page(HTMLParser):
    """What a page of the site loads, its links, and the places to which links may lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.places |= {known["id"]} if "id" in known else set()
        self.loads += [known["src"]] if "src" in known else []
        if "href" in known:
            (self.links if tag == "a" else self.loads).append(known["href"])


def test_pages_load_nothing_from_another_host_and_their_links_lead_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > len(SITE)
    for path, page in pages.items():
        assert [each for each in page.loads if urlsplit(each).netloc] == [], path
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            assert target.is_file(), (path, link)
            assert not to.fragment or target not in pages or unquote(to.fragment) in pages[target].places, (path, link)
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not [found for text in styles for found in re.findall(r"(?:url\(|@import)[\s\"']*(?:https?:)?//", text)]


@cases(
    "words, title",
    [
        ("how do I tune my PyTorch script on SLURM", "How do I tune my PyTorch script on SLURM?"),
        ("a GPU of mine is small", "How do I use a small GPU beside large ones?"),
        ("quarantined", "Messages and what to do"),
        ("max_cost", "Settings of a study"),
        ("see it in MLflow", "How do I send results to MLflow, W&B or TensorBoard?"),
    ],
)
def test_a_visitor_finds_a_page_by_the_search_of_a_site_that_was_opened_from_a_file(
    browser: Any, site: Path, words: str, title: str
) -> None:
    """It is among the first three results, with an excerpt of its text, also if it lacks a word of the question."""
    with Opened(browser, f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}") as opened:
        opened.page.wait_for_selector("#search-results li a")
        opened.page.wait_for_selector("#search-results li:nth-child(3) .context")
        found = opened.page.locator("#search-results li").all_inner_texts()
    assert any(each.startswith(title) and len(each) > len(title) + 100 for each in found[:3]), found


def test_every_document_is_on_the_site_and_those_beside_the_code_only_lead_there() -> None:
    assert {path for path in [*DOCUMENTS, OPERATE] if HERE not in path.parents} == {ROOT / "README.md"}
    assert len(SHORT) > 10
    for path in SHORT:
        assert ".docs/" in TEXTS[path]
        assert len(TEXTS[path].splitlines()) < 20


def test_the_reference_has_every_variable_that_the_package_reads() -> None:
    """Those that it sets for its own processes are left out."""
    reference = runpy.run_path(str(HERE / "reference.py"))
    listed = {*re.findall(r"^\| `(\w+)` \|", reference["environment"](), re.MULTILINE)}
    sources = [path.read_text(encoding="utf-8") for path in Path(shadho_celery.__file__).parent.rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'"(SHADHO_[A-Z_]*[A-Z])"', text)}
    assert read - listed - reference["OWN"] == {"SHADHO_SVM_DATA"}
    assert listed & reference["OWN"] == set()


def test_the_messages_of_the_page_about_messages_are_those_of_the_package() -> None:
    sources = " ".join(path.read_text(encoding="utf-8") for path in Path(shadho_celery.__file__).parent.rglob("*.py"))
    messages = re.findall(r"^### `(.*)`$", TEXTS[HERE / "faq.md"], re.MULTILINE)
    assert len(messages) > 15
    assert [text for text in messages if text not in sources] == []


# Commands


def test_every_command_of_the_pages_has_its_test() -> None:
    """A command that another document has, too, is run by the tests of that document."""
    missing = [line for line in {*OWN_COMMANDS} - {*COMMANDS} if not any(part in line for part in RUN_BY)]
    assert not missing
    assert set(RUN_BY.values()) <= {*globals()}


def test_the_first_study_of_the_quickstart_runs_and_is_shown(desk: Desk) -> None:
    [study] = blocks(HERE / "quickstart.md", "python")
    desk.write("my_study.py", study)
    run, *shown = [
        line for line in commands(HERE / "quickstart.md") if line.startswith("shadho-celery") and "my_" in line
    ][:3]
    assert "30 complete, 0 failed" in shell(desk, run)
    for line in shown:
        assert "rate" in desk.told(*shlex.split(line)[1:]).out


def script() -> str:
    """Return the script with arguments, as a page has it."""
    [found] = [block for block in blocks(HERE / "coming-from.md", "python") if "argparse" in block]
    return found


def test_the_script_with_arguments_is_searched(desk: Desk) -> None:
    """It prints its loss; the study in TOML does the same."""
    desk.write("train.py", script())
    [command] = {line for line in OWN_COMMANDS if "--loss val_loss" in line}
    assert "6 complete, 0 failed" in shell(desk, command)
    [study] = blocks(HERE / "coming-from.md", "toml")
    desk.write("study.toml", study)
    assert len(desk.told("run", "study.toml", "--dry-run", "2").out.splitlines()) == 2


def test_the_script_is_tuned_by_workers_that_slurm_starts(desk: Desk) -> None:
    """The sbatch of this test starts the job's worker here."""
    page = HERE / "recipes" / "slurm.md"
    start, variables, submit, run = commands(page)
    [study] = blocks(page, "toml")
    desk.write("study.toml", study)
    desk.write("train.py", script())
    begin = "cat > job.sh; setsid bash job.sh > job.log 2>&1 & echo $! > job.pid"
    desk.write("sbatch", f"#!/bin/bash\n{begin}\necho Submitted batch job 7\n").chmod(0o755)
    desk.environment = {name: value for name, value in desk.environment.items() if name != "XDG_STATE_HOME"}
    desk.environment["HOME"] = str(desk.folder)
    try:
        shell(desk, f"{start} --host 127.0.0.1 --port {services.free_port()}")
        line = submit.replace("--gpus 1", "--slots 2").replace("--count 4", "--count 1")
        assert "Submitted batch job 7" in shell(desk, f'{variables}; export PATH="$PWD:$PATH"; {line}')
        assert "6 complete, 0 failed" in shell(desk, f"{variables}; {run}"), (desk.folder / "job.log").read_text()
        assert {trial["compute_class"] for trial in desk.trials()} == {"gpu_large"}
    finally:
        shell(desk, "[ ! -e job.pid ] || kill $(cat job.pid); shadho-celery fleet stop")


def test_the_commands_for_kubernetes_name_manifests_and_secrets_that_are_there(desk: Desk) -> None:
    lines = [line for line in OWN_COMMANDS if line.startswith("kubectl")]
    made = {line.split()[4] for line in lines if "create secret" in line}
    named = [name for line in lines for name in re.findall(r"-f (\S+)", line)]
    manifests = [each for name in named for each in yaml.safe_load_all((ROOT / name).read_text())]
    text = json.dumps(manifests)
    assert made
    assert all(f'"{name}"' in text for name in made)
    desk.write("kubectl", '#!/bin/sh\necho "$@" >> typed\n').chmod(0o755)
    for line in lines:
        shell(desk, f'PATH="$PWD:$PATH"; {line}')
    assert len((desk.folder / "typed").read_text().splitlines()) == len(lines)


def test_the_workers_of_the_pages_start(desk: Desk, redis_url: str) -> None:
    desk.study()
    desk.environment |= {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    lines = [line for line in OWN_COMMANDS if line.startswith("shadho-celery worker")]
    assert lines
    for number, line in enumerate(lines):
        desk.start("bash", "-c", f"exec {line} --class class{number} --slots 1")
    registry = Registry(connect(redis_url), Worker)
    until(lambda: len(registry.living()) == len(lines), 60, desk.said)


# Programs and study files

#: runs two trials of a study file in this process
IN_PROCESS = """
import inspect
import {name} as file
from shadho_celery import minimize

# The last ones need workers.
known = {{*inspect.signature(minimize).parameters}} - {{"keep", "trial_timeout", "at_once"}}
settings = {{key: value for key, value in file.STUDY.items() if key in known}} if hasattr(file, "STUDY") else {{}}
settings |= {{"trials": 2, "seed": 0, "on_trial": getattr(file, "on_trial", None)}}
study = minimize(file.objective, file.SPACE, **settings)
print(len(study.trials) - study.count("FAILED"))
"""


@cases("name, block", OWN_BLOCKS)
def test_a_block_of_a_page_runs(desk: Desk, name: str, block: str) -> None:
    """A program prints something. A study file is accepted with its settings, and two of its trials end well."""
    for package in ("optuna", "xgboost"):
        if f"import {package}\n" in block:
            needed(package)
    desk.write(f"{name}.py", block)
    if "SPACE = " not in block:
        run = desk.ran(f"{name}.py")
        assert (run.code, run.out != "") == (0, True), run.err
    elif "launch(" in block or "gang(" in block:
        # In processes of its own, whose slots the trial needs.
        run = desk.launch(name, "--trials", "1", "--workers", "cpu=3").wait(120)
        assert "1 complete, 0 failed" in run.out, desk.said()
    else:
        desk.write("own.py", IN_PROCESS.format(name=name))
        assert desk.told("run", name, "--dry-run", "1").out.count("\n") == 1
        assert desk.ran("own.py").out.endswith("2\n")
