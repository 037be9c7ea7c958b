"""A copy of this machine that is thrown away: commands of root run in it, and change nothing here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.processes import PATIENCE

#: changes under the root stay in memory, and end with the mount namespace
_BEFORE = """
set -eu
mount -t tmpfs none {scratch}
mkdir {scratch}/upper {scratch}/work {scratch}/root
mount -t overlay none -o lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work {scratch}/root
for folder in proc dev; do mount --rbind /$folder {scratch}/root/$folder; done
# Sockets and pid files of what runs here are not those of the copy.
mount -t tmpfs none {scratch}/root/run
# Other users may read them, where the home of root is closed.
for folder in {closed}; do chmod o+x {scratch}/root$folder; done
cat > {scratch}/root/script
exec chroot {scratch}/root /bin/bash -eux /script
"""


def run_on_a_copy(script: str, scratch: Path, *, isolated: bool = False, seconds: float = 75) -> str:
    """Run a script as root on a copy of this machine's file system; return what it printed.

    Its processes end with it. If it is `isolated`, they have a network of their own, without other machines, in which
    this one is called head.example.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a copy of the file system")
    programs = {Path(sys.prefix), Path(sys.executable).resolve().parent, Path(pytest.__file__).resolve().parent}
    closed = {str(folder) for path in programs for folder in (path, *path.parents)}
    namespaces = ["--mount", "--pid", "--fork", "--kill-child", *(["--net", "--uts"] if isolated else [])]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHADHO", "CELERY", "PG"))
    }
    if isolated:
        network = "ip link set lo up; hostname head.example; echo 127.0.0.1 head.example head localhost > /etc/hosts"
        script = f"mount -t proc proc /proc; {network}\n{script}"
    command = ["unshare", *namespaces, "sh", "-c", _BEFORE.format(scratch=scratch, closed=" ".join(sorted(closed)))]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**environment, "PATH": path, "DEBIAN_FRONTEND": "noninteractive"},
    ) as process:
        try:
            said, _ = process.communicate(script, timeout=seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
    if "unshare failed" in said or re.search("^mount: .*(denied|permitted|wrong fs type)", said, re.MULTILINE):
        pytest.skip(f"no copy of the file system can be mounted: {said.strip()[-200:]}")
    if "Could not resolve" in said or "Temporary failure in name resolution" in said:
        pytest.skip("no network")
    assert process.returncode == 0, f"{process.returncode}: {said[-8000:]}"
    return said
