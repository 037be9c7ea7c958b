"""The steps of deploy/Dockerfile, run as commands on a copy of this machine's file system, which then vanishes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from services.machine import run_on_a_copy

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def steps(target: str) -> list[tuple[str, str]]:
    """Return the instructions of a target and of those on which it is based, with their arguments."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    lines = [tuple(line.split(None, 1)) for line in text.splitlines() if line]
    begins = {line[1].split(" AS ")[1]: place for place, line in enumerate(lines) if line[0] == "FROM"}
    order = [*begins.values(), len(lines)]
    begin = begins[target]
    own = lines[begin + 1 : order[order.index(begin) + 1]]
    base = lines[begin][1].split(" AS ")[0]
    return [*(steps(base) if base in begins else []), *own]  # type: ignore[list-item]


def as_script(target: str, command: str) -> str:
    """Return the shell script that does a target's steps, then `command` as the image would."""
    # An index that is out of reach here is not asked again and again.
    lines, folder, user, before = ["export PIP_RETRIES=0 PIP_TIMEOUT=5"], "/", "", ""
    for instruction, rest in steps(target):
        if instruction == "COPY":
            *sources, goal = rest.split()
            lines.append(f"mkdir -p {goal if goal.endswith('/') else Path(goal).parent}")
            lines += [f"cp -r {ROOT / source} {goal}" for source in sources]
        elif instruction == "ENV":
            lines += [f"export {shlex.quote(word)}" for word in shlex.split(rest)]
        elif instruction == "WORKDIR":
            folder = rest
            lines.append(f"mkdir -p {folder} && cd {folder}")
        elif instruction == "USER":
            user = f"setpriv --reuid={rest} --regid={rest} --clear-groups env HOME=/tmp"
        elif instruction == "ENTRYPOINT":
            before = shlex.join(json.loads(rest))
        elif instruction == "RUN":
            lines.append(f"({rest})")
        else:
            assert instruction in {"CMD", "HEALTHCHECK"}, "tests/unit/test_deploy_containers.py reads them"
    return "\n".join([*lines, f"exec {user} {before} {command}"])


def test_the_steps_of_the_image_are_commands_that_work_and_it_runs_a_task(tmp_path: Path) -> None:
    """The user of the image runs `tasks.svm` with what the steps have installed, in the image's folder."""
    command = "shadho-celery run tasks.svm --trials 2 --workers cpu=1 --sampler random"
    assert "2 complete, 0 failed" in run_on_a_copy(as_script("cpu", command), tmp_path)
