"""How long it takes to check files of clusters and of training jobs, and until the command line
answers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import ROOT, Line, fresh_process, in_turns, timed
from raypool.cluster.checks import check
from raypool.cluster.documents import read_documents
from raypool.errors import CloudError

TARGET_US = 100_000
FIRST_US = 500_000
FIRST_NOTE = "imports apart; loads boto3's description of EC2"
HELP_US = 300_000

CONFIG = """\
trainingInput:
  scaleTier: CUSTOM
  region: us-central1
  masterType: n1-highcpu-16
  masterConfig: {acceleratorConfig: {count: 4, type: NVIDIA_TESLA_T4}}
  workerCount: 9
  workerType: n1-highcpu-16
  workerConfig: {acceleratorConfig: {count: 4, type: NVIDIA_TESLA_T4}}
  parameterServerCount: 3
  parameterServerType: n1-highmem-8
"""


FIRST = """
import sys, time
from benchmarks.bench_cloud import is_right
started = time.perf_counter()
is_right(sys.argv[1])
print((time.perf_counter() - started) * 1e6)
"""


def run():
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG)
        files = [ROOT / "cluster.yaml", *sorted((ROOT / "cloud_examples").rglob("*.yaml")), config]
        checks = in_turns({file: timed(lambda file=file: is_right(file)) for file in files})
        firsts = in_turns(
            {file: lambda file=file: float(fresh_process(FIRST, file)) for file in files},
            rounds=3,
            warm_ups=0,
        )
        sizes = {file: f"{len(file.read_text().splitlines())} lines" for file in files}
    commands = {
        "help": ["--help"],
        "submit": ["submit", "--help"],
        "validate": ["cluster", "validate", "cluster.yaml"],
    }
    took = in_turns(
        {name: timed(lambda words=words: command(*words)) for name, words in commands.items()}
    )
    first = [max(values) for values in zip(*firsts.values(), strict=True)]
    return [
        *(
            Line(
                "cloud",
                f"check {file.name}",
                "100 ms",
                "us",
                checks[file],
                target=TARGET_US,
                note=sizes[file],
            )
            for file in files
        ),
        Line(
            "cloud",
            "the slowest of these as a process's first",
            "500 ms",
            "us",
            first,
            target=FIRST_US,
            note=FIRST_NOTE,
        ),
        Line(
            "cloud",
            "raypool --help",
            "300 ms",
            "us",
            took["help"],
            target=HELP_US,
            note="a new process",
        ),
        Line(
            "cloud",
            "raypool submit --help",
            "300 ms",
            "us",
            took["submit"],
            target=HELP_US,
            note="a new process",
        ),
        Line(
            "cloud",
            "raypool cluster validate cluster.yaml",
            "to be known",
            "us",
            took["validate"],
            note="a new process",
        ),
    ]


def is_right(file):
    """Check a file, without asking Kubernetes; what is still to be filled in is found, too, and is
    no other work.
    """
    try:
        for document in read_documents(file):
            check(document)
    except CloudError:
        return False
    return True


def command(*words):
    code = (
        "import sys; from raypool.cli.main import main; main(sys.argv[1:], prog_name='raypool',"
        " standalone_mode=False)"
    )
    subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
