"""Compare seeded runs of two checkouts to the bit: ``python tests/benchmarks/seeded_runs.py [OTHER_CHECKOUT ...]``.

Examples:
  python tests/benchmarks/seeded_runs.py                # print the digests of this checkout
  git worktree add /tmp/before HEAD~1 && python tests/benchmarks/seeded_runs.py /tmp/before   # exit 1 where they differ

Runs, all of them by public paths only: the simulator on three clusters under three policies, `minimize` on five spaces
with random search and TPE, and two embedded runs, of which the store's trials are compared by number, params and state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]

#: what follows the lines of each cluster file: a space of its families, and their seconds by class
FAMILIES = """
from hyperopt import hp

OPTIONS = [(share, {"family": name, "x": hp.uniform("x " + name, 0, 1)}) for name, (share, _) in FAMILIES.items()]
SPACE = hp.pchoice("family", OPTIONS)

def seconds(params, machine):
    return FAMILIES[params["family"]][1][machine.compute_class]

def loss(params):
    return (params["x"] - 0.3) ** 2
"""

CLUSTERS = {
    "changes": """
STUDY = {"seconds": 7200}
CLUSTER = {
    "classes": {
        "gpu_large": {"workers": 4, "memory_gib": 40}, "gpu_small": {"workers": 8, "memory_gib": 11},
        "cpu": {"workers": 20},
    },
    "changes": [{"at": 2000, "class": "cpu", "workers": -20}, {"at": 4000, "class": "cpu", "workers": 15}],
    "seed": 3,
}
FAMILIES = {
    "network": (0.5, {"gpu_large": 40, "gpu_small": 90, "cpu": 1200}),
    "forest": (0.25, {"gpu_large": 60, "gpu_small": 70, "cpu": 90}),
    "large": (0.25, {"gpu_large": 100, "gpu_small": 300, "cpu": 900}),
}
def memory_gib(params):
    return {"network": 6, "forest": 0, "large": 20}[params["family"]]
def failure_rate(params):
    return 0.03
def size(generator, count):
    return generator.lognormal(-0.125, 0.5, count)
def straggler(generator, count):
    return 1 + 7 * (generator.random(count) < 0.05)
""",
    "even": """
STUDY = {"trials": 1500}
CLUSTER = {"classes": {"a": {"workers": 10}, "b": {"workers": 30}}, "seed": 11}
FAMILIES = {"x": (0.5, {"a": 10, "b": 30}), "y": (0.5, {"a": 20, "b": 22})}
def straggler(generator, count):
    return (1 + abs(generator.normal(0, 0.7, count))) / 1.5585
""",
    "target": """
STUDY = {"seconds": 20000, "target": 0.0005}
CLUSTER = {"classes": {"cpu": {"workers": 3}}, "seed": 5}
FAMILIES = {"only": (1, {"cpu": 7})}
def failure_rate(params):
    return 0.2
def size(generator, count):
    return generator.uniform(0.5, 3, count) / 1.75
""",
}

STUDY = """
from hyperopt import hp

SMALL = {"model": "small", "rate": hp.loguniform("rate", -7, 0)}
LARGE = {"model": "large", "depth": hp.quniform("depth", 1, 9, 1), "width": hp.choice("width", [128, 256, 512])}
SPACE = hp.pchoice("model", [(0.4, SMALL), (0.6, LARGE)])


def objective(params, context):
    if params.get("depth") == 9:
        raise ValueError("too deep")
    context.report(1, 2.0)
    return {"loss": abs(params.get("rate", 0.3) - 0.1) + params.get("depth", 0) / 10, "size": params.get("width", 0)}
"""


def spaces() -> dict[str, Any]:
    """Five spaces: one number, several laws, a tree, a flat choice, nested choices."""
    from hyperopt import hp

    return {
        "line": hp.uniform("x", -10, 10),
        "laws": {"a": hp.lognormal("a", 0, 1), "b": hp.qloguniform("b", 0, 5, 2), "c": hp.randint("c", 7)},
        "tree": hp.choice("kind", [{"u": hp.normal("u", 0, 2)}, {"v": hp.uniform("v", 0, 1), "w": hp.randint("w", 3)}]),
        "flat": {"option": hp.choice("option", list("abcdef")), "x": hp.uniform("x", 0, 1)},
        "nested": hp.choice("p", [hp.choice("q", [hp.uniform("y", 0, 1), 5]), {"r": hp.quniform("r", 0, 9, 3)}, 2]),
    }


def total(values: Any) -> float:
    """Make a loss of any params: the sum of their numbers."""
    if isinstance(values, Mapping):
        return sum(map(total, values.values()))
    if isinstance(values, (list, tuple)):
        return sum(map(total, values))
    return float(len(values) if isinstance(values, str) else values)


def objective(values: Any) -> float:
    loss = total(values)
    if round(1000 * loss) % 13 == 0:
        raise ValueError("unlucky")
    return abs(loss - 1.0)


def simulated() -> Iterator[tuple[str, Any]]:
    for name, text in CLUSTERS.items():
        Path("cluster.py").write_text(text + FAMILIES)
        for policy in ("cost", "paper", "fifo"):
            out = Path("trials.csv")
            command = [sys.executable, "-m", "shadho_celery.simulate", "cluster.py", "--policy", policy]
            done = subprocess.run([*command, "--json", "--out", out], capture_output=True, text=True, check=True)
            said = json.loads(done.stdout)
            for volatile in ("cpu_seconds", "peak_mib"):
                del said[volatile]
            yield f"simulate {name} {policy}", [said, out.read_text()]


def minimised() -> Iterator[tuple[str, Any]]:
    import shadho_celery

    for name, space in spaces().items():
        for sampler in ("random", "tpe"):
            study = shadho_celery.minimize(objective, space, trials=60, seed=7, sampler=sampler)
            rows = [(t.number, dict(t.params), str(t.state), t.loss, t.seed, t.subspace) for t in study.trials]
            yield f"minimize {name} {sampler}", [rows, study.best and study.best.number]


def embedded() -> Iterator[tuple[str, Any]]:
    import sqlalchemy as sa

    # Where trials fail, or two classes take turns, which trial is drawn next is a matter of time; the set is not.
    for name, source, workers in (("numbered", STUDY.replace("== 9", "== 99"), "a=1"), ("set", STUDY, "a=1,b=1")):
        Path("compared_study.py").write_text(source)
        Path("runs.db").unlink(missing_ok=True)
        words = f"compared_study --trials 60 --seed 4 --sampler random --workers {workers} --store sqlite:///runs.db"
        command = [sys.executable, "-m", "shadho_celery.launch", *words.split(), "--json"]
        subprocess.run(command, capture_output=True, text=True, check=True)
        engine = sa.create_engine("sqlite:///runs.db")
        with engine.connect() as connection:
            rows = connection.execute(sa.text("SELECT number, params, state FROM trials ORDER BY number")).fetchall()
        engine.dispose()
        kept = [list(row) for row in rows] if name == "numbered" else sorted([row[1], row[2]] for row in rows)
        yield f"embedded {name}", kept


def digests() -> dict[str, str]:
    """Run everything in the current folder: name -> digest of what came of it."""
    found = {}
    for runs in (simulated, minimised, embedded):
        for name, result in runs():
            found[name] = hashlib.sha256(json.dumps(result, default=str).encode()).hexdigest()[:16]
    return found


def of_checkout(checkout: Path) -> dict[str, str]:
    """The digests of another process that imports from `checkout`."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", Path(__file__).absolute(), "--here"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(checkout.absolute())},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return dict(json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="*", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(digests()))
        return 0
    ours = of_checkout(HERE)
    differing = 0
    for name, digest in ours.items():
        print(f"{name:32s} {digest}")
    for other in arguments.others:
        theirs = of_checkout(other)
        different = [name for name in ours if theirs.get(name) != ours[name]]
        differing += len(different)
        print(f"{other}: {len(ours) - len(different)} of {len(ours)} equal", *different, sep="\n  ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
