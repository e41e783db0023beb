"""How long files take to open, and how much memory that takes. Run by hand:

    python tests/benchmarks/opening.py MODEL.onnx ... [--rounds 7] [--command]

For each file, processes are started alternately: a bare onnxruntime session, `Model.load` with a first token,
and, with --command, `tformer-run` with one input. A cell is the least time of a round, and the processor time of the
same: other work on the machine makes both longer. Then the file is opened once more, and four worker processes are
forked: resident MB before, while and after opening, and of all five processes together (pages that several have count
once).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click

from tformer_runtime.base.extras import disable_telemetry

ROOT = Path(__file__).parents[2]
BARE = """
import onnxruntime
onnxruntime.InferenceSession({path!r}, providers=["CPUExecutionProvider"])
"""
OURS = """
from tformer_runtime import Model
from tformer_runtime.tasks import generates
model = Model.load({path!r}, "cpu")
if generates(model.manifest):
    model.generate([5, 6, 7], max_new_tokens=1)
"""
MEMORY = """
import json, os, re, resource, signal, time
import onnxruntime
from tformer_runtime import Model
def kilobytes(field):
    return int(re.search(rf"^{{field}}:\\s+(\\d+)", open("/proc/self/smaps_rollup").read(), re.M)[1])
before = kilobytes("Rss")
begin = time.perf_counter()
model = Model.load({path!r}, "cpu")
seconds = time.perf_counter() - begin
after, peak = kilobytes("Rss"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def work():
    from tformer_runtime.tasks import generates
    if generates(model.manifest):
        model.generate([5, 6, 7], max_new_tokens=4)
children = []
for _ in range(4):
    ready, go, answer = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        work()
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os.write(answer[1], str(kilobytes("Pss")).encode())
        signal.pause()
    children.append((child, ready, go, answer))
for _, ready, _, _ in children:
    os.read(ready[0], 1)
total = kilobytes("Pss")
for _, _, go, answer in children:
    os.write(go[1], b"1")
    total += int(os.read(answer[0], 20))
for child, *_ in children:
    os.kill(child, signal.SIGKILL)
print(json.dumps([before, peak, after, total, seconds]))
"""


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=7, show_default=True)
@click.option("--command", is_flag=True, help="Measure tformer-run as well.")
def main(files: tuple[Path, ...], rounds: int, command: bool) -> None:
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    flags = [flag for flag in ("avx2", "avx_vnni", "avx512_vnni", "amx_int8") if re.search(rf"\b{flag}\b", _flags())]
    click.echo(f"{processor[1] if processor else '?'}, {', '.join(flags)}, {os.cpu_count()} cores, {_load()}")
    for path in files:
        programs = {"bare session": _python(BARE, path), "Model.load, a token": _python(OURS, path)}
        if command:
            tool = [str(Path(sys.executable).with_name("tformer-run")), str(path)]
            programs["tformer-run"] = [*tool, "--ids", "5 6 7", "--max-new-tokens", "1", "--quiet"]
        least = dict.fromkeys(programs, (9e9, 9e9))
        for _ in range(rounds):
            for name, program in programs.items():
                least[name] = min(least[name], _seconds(program))
        click.echo(f"{path}, {path.stat().st_size / 1e6:.0f} MB")
        for name, (wall, processor_time) in least.items():
            click.echo(f"  {name:22} {wall:.3f} s, {processor_time:.3f} s of processor time")
        answer = subprocess.run(_python(MEMORY, path), capture_output=True, check=True, env=_environment()).stdout
        before, peak, after, total, seconds = json.loads(answer)
        held = after - before
        click.echo(
            f"  opened in {seconds:.2f} s: holds {held / 1000:.0f} MB, while opening {(peak - before) / held:.2f} ×"
        )
        click.echo(f"  with four forked workers {total / after:.2f} × the memory of the process")
    click.echo(_load())


def _python(program: str, path: Path) -> list[str]:
    return [sys.executable, "-c", program.format(path=str(path))]


def _environment() -> dict[str, str]:
    """Return the environment, with which Python keeps compiled modules, as it does for installed ones."""
    disable_telemetry()
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}


def _seconds(program: list[str]) -> tuple[float, float]:
    """Run a program. Return its time and its processor time."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run(program, check=True, capture_output=True, env=_environment())
    after, end = os.times(), time.perf_counter()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return end - begin, used


def _flags() -> str:
    return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
