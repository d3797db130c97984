"""What does a sandbox cost a rollout, and do 64 of them at once on two cores hold?

One rollout opens a sandbox, runs three programs, takes a snapshot and closes it. Beside it the same three programs in a
temporary folder without any sandbox, and each under bubblewrap by hand. Then many sandboxes at once, a thread each:
throughput, the most memory that the machine had less, whether every answer was right, and what was left behind.
Medians; the order of the ways changes from round to round, since other work on the machine changes too.

    python benchmarks/sandbox.py [--rounds 30] [--at-once 64] [--backends namespaces bubblewrap subprocess]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agenttrain.errors import SandboxError
from agenttrain.sandbox.plugin import built_in
from agenttrain.sandbox_protocol import SandboxBackend, SandboxFile, SandboxRequest

FILES = {"src/a.py": b"print(6 * 7)\n", "tests/t.py": b"assert True\n", "README": b"x" * 4096}
PROGRAMS = (["python", "-I", "-S", "src/a.py"], ["python", "-I", "-S", "tests/t.py"], ["cat", "src/a.py"])
EXPECTED = "42\nprint(6 * 7)\n"


def sandboxed(backend: SandboxBackend, times: dict[str, list[float]] | None = None) -> None:
    """One rollout's use of a sandbox."""
    clock = [time.perf_counter()]

    def note(what: str) -> None:
        clock.append(time.perf_counter())
        if times is not None:
            times.setdefault(what, []).append(clock[-1] - clock[-2])

    request = SandboxRequest(name="bench", files={path: SandboxFile(data=data) for path, data in FILES.items()})
    sandbox = backend.open(request)
    note("open")
    printed = "".join(sandbox.run(program).stdout for program in PROGRAMS)
    note("3 runs")
    assert len(sandbox.snapshot()) == 5
    note("snapshot")
    sandbox.close()
    note("close")
    assert printed == EXPECTED, printed


def bare(prefix: list[str]) -> None:
    """The same programs in a folder of the machine, each behind a prefix."""
    with tempfile.TemporaryDirectory() as folder:
        for path, data in FILES.items():
            Path(folder, path).parent.mkdir(exist_ok=True)
            Path(folder, path).write_bytes(data)
        printed = ""
        for program in PROGRAMS:
            words = [sys.executable, *program[1:]] if program[0] == "python" else program
            before = [word.replace("FOLDER", folder) for word in prefix]
            printed += subprocess.run([*before, *words], cwd=folder, capture_output=True, text=True, check=True).stdout
        for _, _, names in os.walk(folder):
            len(names)
    assert printed == EXPECTED


def bubblewrap() -> list[str]:
    """A usual command line: the machine read-only, a folder to write, namespaces of its own."""
    words = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    return [*words, "--bind", "FOLDER", "FOLDER", "--unshare-all", "--die-with-parent", "--chdir", "FOLDER"]


def available(names: list[str]) -> dict[str, SandboxBackend]:
    """Backends that work here; for each other, why not."""
    found = {}
    for name in names:
        try:
            backend = built_in(name)
            backend.isolation(SandboxRequest(name="bench"))
        except SandboxError as error:
            print(f"{name}: {error}")
            continue
        found[name] = backend
    return found


def per_rollout(backends: dict[str, SandboxBackend], rounds: int) -> None:
    """Print what one rollout's use costs, as ratios of programs without any sandbox."""
    parts: dict[str, dict[str, list[float]]] = {name: {} for name in backends}
    ways: dict[str, Callable[[], None]] = {"no sandbox": lambda: bare([])}
    if shutil.which("bwrap"):
        ways["bwrap for each program, by hand"] = lambda: bare(bubblewrap())
    for name, backend in backends.items():
        ways[name] = lambda name=name, backend=backend: sandboxed(backend, parts[name])
    took: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in random.sample(list(ways), len(ways)):
            began = time.perf_counter()
            ways[way]()
            took[way].append(time.perf_counter() - began)
    base = statistics.median(took["no sandbox"])
    print(f"\nOne rollout (open, 3 programs, snapshot, close), median of {rounds}:")
    for way, seconds in took.items():
        median = statistics.median(seconds)
        inner = ", ".join(f"{part} {statistics.median(each) * 1000:.1f}" for part, each in parts.get(way, {}).items())
        print(f"  {way:32} {median * 1000:7.1f} ms  {median / base:5.2f} x  {inner}")


def at_once(backend: SandboxBackend, n: int, each: int = 3) -> None:
    """Print how n sandboxes that are open together fare."""
    barrier, low = threading.Barrier(n), [free_mib()]
    before, done = free_mib(), threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            low[0] = min(low[0], free_mib())

    def one(i: int) -> bool:
        request = SandboxRequest(name=f"bench-{i}", files={"mine": SandboxFile(data=str(i).encode())})
        sandbox = backend.open(request)
        barrier.wait(300)
        try:
            words = ["python", "-I", "-S", "-c", "print(int(open('mine').read()) ** 2)"]
            return all(sandbox.run(words).stdout == f"{i * i}\n" for _ in range(each))
        finally:
            sandbox.close()

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    with ThreadPoolExecutor(n) as threads:
        right = list(threads.map(one, range(n)))
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    print(
        f"  {backend.name:12} {sum(right)} of {n} right, {seconds:.2f} s, {n / seconds:.0f} sandboxes/s, "
        f"{n * each / seconds:.0f} runs/s, {(before - low[0]) / n:.1f} MiB each at most, left behind: {left()}"
    )


def free_mib() -> float:
    """Memory that programs could have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def left() -> str:
    """What this process's sandboxes left on the machine."""
    time.sleep(0.5)  # a process that has ended is gone in a moment
    me = str(os.getpid())
    parents = {path.parent.name: parent_of(path) for path in Path("/proc").glob("[0-9]*/stat")}
    below = [pid for pid, parent in parents.items() if parents.get(parent) == me]
    groups = [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if f"agenttrain-{me}-" in folder]
    folders = list(Path(tempfile.gettempdir()).glob(f"agenttrain-{me}-*"))
    return f"{len(below)} processes, {len(groups)} control groups, {len(folders)} folders"


def parent_of(stat: Path) -> str:
    """The process id of a process's parent. Empty: it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--backends", nargs="+", default=["namespaces", "bubblewrap", "subprocess"])
    args = parser.parse_args()
    backends = available(args.backends)
    per_rollout(backends, args.rounds)
    print(f"\n{args.at_once} open at once, 3 runs each, on {os.cpu_count()} cores:")
    for backend in backends.values():
        at_once(backend, args.at_once)


if __name__ == "__main__":
    main()
