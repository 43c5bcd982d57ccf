"""``docs/launching.md`` and ``examples/launch``: page and files are the same, and say what there is."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from ftopt.cli.main import VERBS
from tests.island.running import coordinator

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "examples" / "launch"
PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
ISLANDS = ROOT / "examples" / "islands.py"


def text_of(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def containers() -> dict[str, dict[str, Any]]:
    jobs = yaml.safe_load(text_of("jobset.yaml"))["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs}


def words_of(script: str) -> Iterator[list[str]]:
    """The commands of a shell script, one a line, and those that others are given in quotes."""
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        yield words
        for word in words:
            if " && " in word or word.startswith("ftopt "):
                yield from (shlex.split(part) for part in word.split(" && "))


def commands() -> list[list[str]]:
    """Every call of ftopt and torchrun, from its name on."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    inline = re.findall(r"`((?:ftopt|torchrun) [^`\s]+ [^`]+)`", PAGE)
    scripts = [text_of("slurm.sh"), yaml.safe_load(text_of("sky.yaml"))["run"], *blocks, *inline]
    lines = [words for script in scripts for words in words_of(script)]
    lines += [[*each["command"], *each.get("args", [])] for each in containers().values()]
    found = []
    for words in lines:
        starts = [i for i, word in enumerate(words) if word in ("ftopt", "torchrun")]
        if starts and words[starts[0] - 1 : starts[0]] != ["install"]:
            found.append([word for word in words[starts[0] :] if word != "&"])
    return found


def test_the_site_includes_the_files() -> None:
    assert {path.name for path in FILES.iterdir()} == {"slurm.sh", "jobset.yaml", "sky.yaml"}
    for name, kind in (("slurm.sh", "bash"), ("jobset.yaml", "yaml"), ("sky.yaml", "yaml")):
        assert f'```{kind}\n--8<-- "examples/launch/{name}"\n```\n' in PAGE, name


def test_every_option_of_ftopt_and_torchrun_exists() -> None:
    seen = []
    for words in commands():
        if words[0] == "torchrun":
            parsed = get_args_parser().parse_args(words[1:])  # type: ignore[no-untyped-call]
            assert parsed.training_script
        else:
            assert words[1] in VERBS
            parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
            importlib.import_module(f"ftopt.cli.{words[1]}").add(parser)
            parser.parse_args(words[2:])
        seen.append(" ".join(words[:2]))
    assert seen.count("ftopt coordinator") == 3
    assert sum(word.startswith("torchrun") for word in seen) == 3
    assert "ftopt replica" in seen


def test_slurms_script_is_bash_and_asks_for_what_the_page_explains() -> None:
    subprocess.run(["bash", "-n", str(FILES / "slurm.sh")], check=True)
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text_of("slurm.sh"), flags=re.MULTILINE)
    assert dict(options)["signal"] == "B:TERM@120"
    assert {"requeue", "array", "nodes"} <= dict(options).keys()


def test_the_jobset_names_its_coordinator_and_its_islands() -> None:
    jobset = yaml.safe_load(text_of("jobset.yaml"))
    name = jobset["metadata"]["name"]
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    jobs = {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["island"]}
    for job in jobs.values():
        pods = job["template"]["spec"]
        assert pods["template"]["spec"]["restartPolicy"] == "Never", "else podFailurePolicy is refused"
        assert pods["podReplacementPolicy"] == "Failed"
    each = containers()
    port = each["coordinator"]["command"][each["coordinator"]["command"].index("--bind") + 1].rpartition(":")[2]
    variables = {variable["name"]: variable.get("value") for variable in each["island"]["env"]}
    assert variables["FTOPT_COORDINATOR"] == f"http://{name}-coordinator-0-0.{name}:{port}"
    env = list(variables)
    assert env.index("ISLAND") < env.index("FTOPT_REPLICA"), "a variable is made of those above it"
    assert "FTOPT_TOKEN" in env and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in env


def test_skys_task_asks_for_the_id_and_the_address() -> None:
    task = yaml.safe_load(text_of("sky.yaml"))
    assert task["envs"]["FTOPT_REPLICA"] is task["envs"]["FTOPT_COORDINATOR"] is None
    assert task["resources"]["use_spot"] and task["resources"]["job_recovery"]["max_restarts_on_errors"] > 0


class ArrayTask:
    """One life of a task of an array, as SLURM starts it; `srun` and `scontrol` are the test's."""

    def __init__(self, folder: Path, url: str, number: int, job: int, life: int) -> None:
        self.out = folder / f"{number}.{life}.txt"
        settings = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(life),
            "FTOPT_COORDINATOR": url,
            "OMP_NUM_THREADS": "1",
        }
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                ["bash", str(FILES / "slurm.sh"), str(ISLANDS)],
                env=os.environ | settings,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.out.read_text(encoding="utf-8")

    def until(self, part: str) -> None:
        deadline = time.monotonic() + 100.0
        while part not in self.said():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()


def programs(folder: Path) -> None:
    """What SLURM would do: `srun` runs the command, as the process that it is; `scontrol requeue` is written down."""
    (folder / "bin").mkdir()
    srun = 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
    scontrol = f'if [[ $1 == show ]]; then echo localhost; else echo "$2" >> {folder}/requeued; fi\n'
    for name, text in (("srun", srun), ("scontrol", scontrol)):
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)


def free_job() -> int:
    """A job's id whose port is free."""
    for port in range(20000 + os.getpid() % 5000, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port - 20000
    raise AssertionError("no port is free")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_array_task_that_slurm_asks_to_leave_is_requeued_and_comes_back(tmp_path: Path) -> None:
    programs(tmp_path)
    first = free_job()
    with coordinator(tmp_path) as url, ExitStack() as ends:
        r0 = ArrayTask(tmp_path, url, 0, first, 0)
        ends.callback(r0.end)
        r1 = ArrayTask(tmp_path, url, 1, first + 1, 0)
        ends.callback(r1.end)
        r1.until("step 40")
        os.kill(r1.process.pid, signal.SIGTERM)  # the script alone, as with --signal=B:TERM
        assert r1.process.wait(60.0) != 0
        assert "SIGTERM" in r1.said() and "steps" not in r1.said().partition("lost")[2]
        assert (tmp_path / "requeued").read_text().split() == [str(first + 1)]
        again = ArrayTask(tmp_path, url, 1, first + 1, 1)
        ends.callback(again.end)
        for task in (r0, again):
            assert task.process.wait(200.0) == 0, task.said()
        digests = [line.split()[-1] for task in (r0, again) for line in task.said().splitlines() if "digest" in line]
        assert len(digests) == 2 and len(set(digests)) == 1
        assert (tmp_path / "requeued").read_text().split() == [str(first + 1)]
