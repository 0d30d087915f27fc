"""How long the first import of a machine takes: `import tejit` on an empty cache, in fresh interpreters.

    python tests/benchmarks/cold_import.py --arch 90a --rounds 3 --jobs 0 2

Prints, for each number of processors (0: all that there are), the seconds of every round from the end of `import torch`
to the end of `import tejit`, the processor time of the build, and when each unit began and ended, as ninja wrote it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

IMPORT = """
import glob, json, os, resource, sys, time
jobs = int(sys.argv[1])
if jobs:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:jobs])
begin = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - begin
units, started = {}, []
def watch(event, arguments):
    if event == "subprocess.Popen" and any(str(word).endswith("child.py") for word in arguments[1]):
        started.append(time.perf_counter() - begin_tejit)
    if event == "shutil.rmtree":
        for log in glob.glob(os.path.join(str(arguments[0]), "out", ".ninja_log")):
            lines = [line.split("\\t") for line in open(log) if not line.startswith("#")]
            times = {line[3]: [int(line[0]) / 1e3, int(line[1]) / 1e3] for line in lines}
            units[os.path.basename(lines[-1][3])] = times
sys.addaudithook(watch)
begin_tejit = time.perf_counter()
import tejit
seconds = time.perf_counter() - begin_tejit
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "torch": torch.__version__, "import_torch": torch_seconds, "import_tejit": seconds,
    "cpu": used.ru_utime + used.ru_stime, "children_started_after": started, "units": units,
    "loaded": tejit.jit.is_loaded(), "parts": {str(k): str(v) for k, v in tejit.jit.loader._state.parts.items()},
    "said": str(tejit.jit.host_error()),
}))
"""


def one(jobs: int, arch: str | None, package: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPATH": str(package), "TEJIT_CACHE_DIR": cache, "TEJIT_COMPILE": "import"}
        # What TEJIT_PREBUILT holds would be found.
        env.pop("TEJIT_PREBUILT", None)
        if arch:
            env["TEJIT_ARCH"] = arch
        command = [sys.executable, "-c", IMPORT, str(jobs)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=package, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        logs = sorted(Path(cache).glob("v1/*/build.log"))
        result["log_heads"] = [path.read_text().splitlines()[0] for path in logs]
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", help="such as 90a; without it: the GPUs present")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, nargs="+", default=[0], help="processors to use; 0: all")
    parser.add_argument("--package", type=Path, default=ROOT, help="another checkout, to compare with")
    options = parser.parse_args()
    print(f"{platform.node()}, {len(os.sched_getaffinity(0))} processors, python {platform.python_version()}")
    for jobs in options.jobs:
        for _ in range(options.rounds):
            got = one(jobs, options.arch, options.package)
            print(
                f"jobs {jobs or 'all'}: import torch {got['import_torch']:.2f} s, then import tejit "
                f"{got['import_tejit']:.2f} s (processor time {got['cpu']:.1f} s), loaded {got['loaded']}, "
                f"parts {got['parts']}, compilers started after "
                f"{', '.join(f'{at:.2f}' for at in got['children_started_after'])} s, torch {got['torch']}"
            )
        for head in got["log_heads"]:
            print(f"  {head}")
        for part, units in got["units"].items():
            for name, (begin, end) in sorted(units.items(), key=lambda unit: unit[1]):
                print(f"  {part:18} {name:22} {begin:6.2f} to {end:6.2f} s after ninja's start")


if __name__ == "__main__":
    main()
