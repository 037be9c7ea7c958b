"""The steps of deploy/Dockerfile, run as commands on a copy of this machine's file system, which then vanishes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import services

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

#: changes under the root stay in memory, and end with the mount namespace; pip finds what this environment has
_BEFORE = """
set -eu
mount -t tmpfs none {scratch}
mkdir {scratch}/upper {scratch}/work {scratch}/root
mount -t overlay none -o lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work {scratch}/root
for folder in proc dev; do mount --rbind /$folder {scratch}/root/$folder; done
mount -t tmpfs none {scratch}/root/tmp
chmod 1777 {scratch}/root/tmp
# The image's user may read them, where the home of root is closed.
for folder in {closed}; do chmod o+x {scratch}/root$folder; done
exec chroot {scratch}/root /bin/sh -eux /image.sh
"""


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
    lines, folder, user, before = [], "/", "", ""
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
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a copy of the file system")
    programs = {Path(sys.prefix), Path(sys.executable).resolve().parent, Path(pytest.__file__).resolve().parent}
    closed = {str(folder) for path in programs for folder in (path, *path.parents)}
    script = _BEFORE.format(scratch=tmp_path, closed=" ".join(sorted(closed)))
    command = "shadho-celery run tasks.svm --trials 2 --workers cpu=1 --sampler random"
    # In the copy, so that the checkout stays as it is.
    write = f"cat > {tmp_path}/root/image.sh <<'END'\n{as_script('cpu', command)}\nEND\nexec chroot"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHADHO", "CELERY"))},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script.replace("exec chroot", write)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=150 * services.PATIENCE,
    )
    if "unshare failed" in done.stderr or "mount: " in done.stderr:
        pytest.skip(f"no copy of the file system can be mounted: {done.stderr.strip()[-200:]}")
    if "Could not resolve" in done.stderr or "Temporary failure" in done.stderr:
        pytest.skip("no network")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2 complete, 0 failed" in done.stdout
