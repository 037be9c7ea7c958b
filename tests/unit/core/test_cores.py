"""The cores and the memory of a process are what its affinity, control groups, SLURM and SHADHO_CORES leave to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shadho_celery.core import hardware
from shadho_celery.core.hardware import Machine, detect, usable_cores, usable_memory

#: as a container sees them, and as other processes do; of version 1, the one of its cpu controller counts
CONTAINER, SERVICE, VERSION_1 = "0::/", "0::/a.slice/b.service", "5:memory:/other\n3:cpu,cpuacct:/docker/c\n0::/"

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control groups of a machine of eight processors."""
    for name in ("SHADHO_CORES", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "ram_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(hardware, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path / "cgroup"


def found(groups: Path, own: str, files: dict[str, str]) -> Machine:
    """Return the cores of a process of the control groups `own`."""
    (groups.parent / "own").write_text(own + "\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    return usable_cores()


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        (CONTAINER, {}, 8),
        (CONTAINER, {"cpu.max": "max 100000"}, 8),
        (CONTAINER, {"cpu.max": "200000 100000"}, 2),
        (CONTAINER, {"cpu.max": "50000 100000"}, 1),
        (CONTAINER, {"cpu.max": "250000 100000"}, 3),
        (CONTAINER, {"cpu.max": "6400000 100000"}, 8),
        (SERVICE, {"a.slice/cpu.max": "300000 100000", "a.slice/b.service/cpu.max": "max 100000"}, 3),
        (SERVICE, {"cpu.max": "400000 100000", "other/cpu.max": "100000 100000"}, 4),
        (VERSION_1, {"cpu/docker/c/cpu.cfs_quota_us": "150000", "cpu/docker/c/cpu.cfs_period_us": "50000"}, 3),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (CONTAINER, {"cpu.max": "5"}, 8),
        (CONTAINER, {"cpu.max": "much 0"}, 8),
        (CONTAINER, {"cpu.max": "1 0"}, 1),
        ("damaged", {}, 8),
    ],
)
def test_the_narrowest_quota_of_the_control_groups_limits_the_cores(
    groups: Path, own: str, files: dict[str, str], count: int
) -> None:
    assert found(groups, own, files).cores == count


def test_processes_share_cores_by_system_and_by_the_group_with_the_quota(
    groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = {"a.slice/cpu.max": "300000 100000"}
    free = found(groups, CONTAINER, {})
    wide = found(groups, SERVICE, {"a.slice/b.service/cpu.max": "800000 100000"})
    assert free.pool == wide.pool, "a quota that limits nothing"
    first, second = (found(groups, f"0::/a.slice/{name}", quota) for name in "bc")
    assert first.pool == second.pool != free.pool
    monkeypatch.setattr(hardware, "_GROUPS", groups / "a.slice")
    assert found(groups, CONTAINER, {}).pool == first.pool, "the same group, seen from within"
    monkeypatch.setattr(hardware, "_BOOT_ID", tmp_path / "boot_id")
    assert found(groups, CONTAINER, {}).pool, "a system without an id has its name"
    (tmp_path / "boot_id").write_text("another system")
    assert found(groups, CONTAINER, {}).pool not in (first.pool, free.pool)


@pytest.mark.parametrize(("told", "count"), [("1", 1), ("5", 2)])
def test_a_limit_of_ones_own_is_below_the_quota_and_of_the_same_cores(
    groups: Path, monkeypatch: pytest.MonkeyPatch, told: str, count: int
) -> None:
    monkeypatch.setenv("SHADHO_CORES", told)
    limited = found(groups, CONTAINER, {"cpu.max": "200000 100000"})
    assert (limited.cores, limited.is_limited) == (count, True)
    monkeypatch.delenv("SHADHO_CORES")
    assert usable_cores().pool == limited.pool


@pytest.mark.parametrize(
    ("processors", "variables", "cores", "is_limited"),
    [
        (8, {"SLURM_CPUS_ON_NODE": "1"}, 1, True),
        (8, {"SLURM_CPUS_ON_NODE": "3"}, 3, True),
        (2, {"SLURM_CPUS_ON_NODE": "2"}, 2, False),
        (1, {"SLURM_CPUS_ON_NODE": "2"}, 1, False),
        (8, {"SLURM_CPUS_ON_NODE": "many"}, 8, False),
        (8, {"SLURM_CPUS_ON_NODE": "0"}, 8, False),
        (8, {"SLURM_CPUS_ON_NODE": "4", "SHADHO_CORES": "2"}, 2, True),
    ],
)
def test_an_allocation_of_slurm_limits_the_cores_where_it_does_not_bind_processes(
    groups: Path,
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    variables: dict[str, str],
    cores: int,
    is_limited: bool,
) -> None:
    """Workers of two jobs on one node then have cores of their own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    found = usable_cores()
    assert (found.cores, found.is_limited) == (cores, is_limited)
    assert found.slots_for("cpu") == cores
    assert found.threads(cores, [(usable_cores(), cores)]) == 1


@pytest.mark.parametrize(
    ("own", "files", "variables", "gib"),
    [
        (CONTAINER, {}, {}, 64),
        (CONTAINER, {"memory.max": "max"}, {}, 64),
        (CONTAINER, {"memory.max": f"{8 * GIB}"}, {}, 8),
        (CONTAINER, {"memory.max": f"{100 * GIB}"}, {}, 64),
        (SERVICE, {"a.slice/memory.max": f"{4 * GIB}", "a.slice/b.service/memory.max": "max"}, {}, 4),
        (VERSION_1, {"memory/other/memory.limit_in_bytes": f"{6 * GIB}"}, {}, 6),
        (VERSION_1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, {}, 64),
        ("damaged", {"memory.max": "much"}, {}, 64),
        (CONTAINER, {}, {"SLURM_MEM_PER_NODE": "3072"}, 3),
        (CONTAINER, {}, {"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}, 2),
        (CONTAINER, {}, {"SLURM_MEM_PER_CPU": "512"}, 64),
        (CONTAINER, {}, {"SLURM_MEM_PER_NODE": "0"}, 64),
        (CONTAINER, {"memory.max": f"{2 * GIB}"}, {"SLURM_MEM_PER_NODE": "3072"}, 2),
        (CONTAINER, {"memory.max": "0"}, {"SLURM_MEM_PER_NODE": 5000 * "9"}, 64),
    ],
)
def test_the_memory_is_the_least_of_ram_limits_of_control_groups_and_an_allocation_of_slurm(
    groups: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], variables: dict[str, str], gib: int
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    found(groups, own, files)
    assert usable_memory() == detect().memory == gib * GIB
