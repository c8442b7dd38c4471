"""What every place where jobs run is asked: three jobs from their start to their end, each verb about them in a table of answers and exit
codes.

Three jobs of two ranks on two nodes: `runs` waits, `done` is complete, `broke` failed on rank 1; there is no `nosuch`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.api.names import JOB_NAME_MAX
from support.checkout import ROOT
from support.clusters.cluster_jobs import SCRIPTS
from support.in_process import Told, lockstep

CHECKED = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  nodes: 2
  ranksPerNode: 1
  gpusPerNode: 0
  script: {script}
  restart: {{maxRestarts: {restarts}, backoffSeconds: 0}}
"""
STREAMS: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
JOBS = {"runs": "wait.py", "done": "ok.py", "broke": "fail.py"}
LONGEST = "l1-" * (JOB_NAME_MAX // 3) + "x"
ODD, ARGUMENTS = 'an odd folder/it\'s "1" $(id).py', ("-x", "--", "", "two words", "a\nb", "Grüße →", "'\"$(id)\\")
"""Path and arguments that a shell, or a program that splits them, would take for something else."""
PRINTS_AND_WAITS = f"import json, sys\nprint('got', json.dumps(sys.argv[1:]), flush=True)\n{SCRIPTS['wait.py']}"
PROGRAMS = {**{path: SCRIPTS[path] for path in JOBS.values()}, ODD: PRINTS_AND_WAITS}
"""Scripts of the jobs, by their paths in a workspace."""
PODS, ALONE, HOSTS, HERE, PROCESSES = "pods", "pods without an operator", "hosts", "here", "processes"
REMOTE = (PODS, ALONE, HOSTS)
TOLD = (PODS, HOSTS, PROCESSES, HERE)
"""Places that know of a job that has ended how it did, without a look at its volume."""
KEPT = (*REMOTE, PROCESSES)
"""Places where a job outlives the command that started it."""
HEADS = r"NAME +NODES +RANKS +STEP +PROGRESS +RESTARTS +STATE +AGE\n"
FAILED = "rank 1 on node 1 exited with 1: ValueError: the data is not there"
KILLED = "rank 1 on node 1 was ended by SIGKILL"
EARLY = r"(\[lockstep\] (node 1 is here \(1 of 2\)|waiting for [^\n]*|the coordinator did not run for \d+ s[^\n]*)\n)*"
"""Lines that may stand before node 0's own: its coordinator listens for all nodes at once, and on a busy machine another one is the first
to come.
"""
NO_JOB = "lockstep: there is no {noun} nosuch {where}: {have} broke, done, runs{elsewhere}\n"
NOTHING_TO_STOP = "lockstep: job done is complete: there is nothing to stop and nothing to go on with (lockstep describe done {again})\n"
HAS_FAILED = "lockstep: job broke has failed: lockstep why broke {again} explains why, lockstep retry broke {again} starts it again\n"
NO_ADAPTER = (
    "lockstep: {folder}/runs/runs in {node} has no adapter and no commit: lockstep why runs {again} tells how far the job has come\n"
)
NO_RANK = "lockstep: there is no rank 9: the job has 2 ranks, 0 to 1\n"
NO_SCRIPT = r"spec\.script\.path: there is no file \S*nothing\.py on node 0( \(\S+\))? +put it there, or correct the path"
SCRIPT_AGAIN = r"start the script again \(it goes on if it looks for its own checkpoints; transformers: resume_from_checkpoint\)"
SCALED = (
    r"(lockstep: . of 2 pods run.*\n)?(Complete|Failed): scaled to zero; kubectl delete configmap \w+-run-\w+ -n \S+ removes all but.*\n"
)
NO_NODE = "lockstep: job runs has no node 9: its 2 nodes are 0 to 1\n"


WRITTEN, WRITTEN_SECONDS = ("logs ", "wait runs --for Running", f"wait {LONGEST} --for Running"), 20.0
"""Beginnings of rows about what a job is about to write, and the time that it has for that."""


@dataclass(frozen=True)
class Row:
    """What is typed, and what every place answers."""

    typed: str
    code: int
    says: str = ""
    """Text at the end of standard error, with the place's words in braces, and … for the rest of a line; '': nothing is compared."""
    shows: str = ""
    """Pattern that standard output matches from its beginning."""
    places: tuple[str, ...] = (*KEPT, HERE)


@dataclass(frozen=True)
class Where:
    """A place, its words, and words that lead there on a command line."""

    kind: str
    again: tuple[str, ...]
    where: str
    noun: str = "job"
    have: str = "it has"
    elsewhere: str = ""
    folder: str = "/workspace"
    node: str = "pod [a-z0-9-]+"
    root: Path = Path()
    """Workspace of this machine; none elsewhere."""
    scripts: str = ""
    """Beginning of the paths of its scripts."""
    spec: str = ""
    """More of a job file's spec."""
    starts: tuple[str, ...] = ()
    """More words of a command line that starts a job there."""
    program: tuple[str, ...] = ("-m", "lockstep.cli.main")
    """Options of Python that run the command line in a process of its own."""

    def pattern(self, text: str, folder: Path) -> str:
        """Pattern of a text of the table, as this place says it."""
        places = {"again": " ".join(self.again), "where": self.where, "folder": self.folder, "tmp": str(folder)}
        escaped = re.escape(text)
        for name, word in {**places, "noun": self.noun, "have": self.have, "elsewhere": self.elsewhere}.items():
            escaped = escaped.replace(re.escape(f"{{{name}}}"), re.escape(word))
        return escaped.replace(re.escape("{node}"), self.node).replace("…", ".*")

    def lockstep(self, typed: str, folder: Path) -> Told:
        """Type the verb about a job of this place. `folder` stands for {tmp}."""
        return lockstep(*self.words(typed, folder))

    def alone(self, typed: str, folder: Path) -> Told:
        """Type the verb in a process of its own, whose programs may print, and wait for its end."""
        with self.begin(typed, folder) as process:
            output, errors = process.communicate(timeout=300)
        return Told(process.returncode, output, errors)

    def words(self, typed: str, folder: Path) -> list[str]:
        return [*typed.format(tmp=folder).split(), *(self.starts if typed.startswith("run ") else ()), *self.again]

    @contextmanager
    def begin(self, typed: str, folder: Path, **streams: Any) -> Iterator[subprocess.Popen[str]]:
        """Type the verb in a process of its own, whose standard output can be read. It is killed in the end. `streams`: other ones."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/operator:{ROOT}/workspace:{ROOT}/tests", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *self.program, *self.words(typed, folder)]
        with subprocess.Popen(command, env=environment, **STREAMS | streams) as process:
            try:
                yield process
            finally:
                process.kill()

    def bring(self, folder: Path) -> None:
        """Write what the rows name below {tmp}: folders to send, and job files to check."""
        (folder / "empty").mkdir(exist_ok=True)
        (folder / "code").mkdir(exist_ok=True)
        (folder / "code" / "sent.py").write_text("print(1)\n")
        for name, path in {**JOBS, "checked": JOBS["runs"], "lacks": "nothing.py", f"{LONGEST}x": JOBS["runs"]}.items():
            self.write(folder, name, path, restarts=4 * (name == "runs"))
        self.write(folder, LONGEST, ODD, *ARGUMENTS)

    def write(self, folder: Path, name: str, path: str, *arguments: str, restarts: int = 0) -> None:
        """Write the file of a job: two nodes, a rank each."""
        script = json.dumps({"path": f"{self.scripts}{path}", "args": arguments})
        (folder / f"{name}.yaml").write_text(CHECKED.format(name=name, script=script, restarts=restarts) + self.spec)


def _no_job(typed: str, places: tuple[str, ...] = (*KEPT, HERE)) -> Row:
    return Row(typed, 2, NO_JOB, places=places)


STARTED = [
    Row("run -f {tmp}/done.yaml", 0, shows=r"(?s).*\[rank 0\] hello from 0\n.*\[lockstep\] Complete: all ranks are done\n{scaled}$"),
    Row("run -f {tmp}/broke.yaml", 1, shows=rf"(?s).*\[lockstep\] Failed: {FAILED}\n{{scaled}}$"),
]  # fmt: skip
"""Rows that start jobs and follow them to their end."""
UNDISTURBED = [
    Row("wait runs --for Running --timeout 60", 0, shows="runs: Running: all ranks run\n$"),  # its log may say so before its status
    Row(f"run -f {{tmp}}/{LONGEST}x.yaml", 2, f"x.yaml:3: metadata.name: must be at most {JOB_NAME_MAX} characters\n"),
    *map(_no_job, (
        "get nosuch", "describe nosuch", "why nosuch", "wait nosuch", "logs nosuch", "stacks nosuch", "stop nosuch", "resume nosuch",
            "retry nosuch", "delete nosuch --yes",
    )),
    _no_job("top nosuch --once", REMOTE), _no_job("adapter get nosuch {tmp}/adapter", REMOTE), _no_job("shell nosuch", REMOTE),
    _no_job("adapter merge nosuch -o {tmp}/model", REMOTE), _no_job("adapter push nosuch org/name", REMOTE),
    Row("get runs", 0, shows=HEADS + r"runs +2/2 +2/2 +- +- +0 +Running +\d"),
    Row("get", 0, shows=HEADS + r"broke +2 +2 +- +- +0 +Failed .*\ndone +2 +2 +- +- +0 +Complete .*\nruns +2/2 +2/2 .* Running ",
        places=TOLD),
    Row("get", 0, shows=HEADS + r"broke +0/2 .* NoPods .*\ndone +0/2 .* NoPods .*\nruns +2/2 +2/2 .* Running ", places=(ALONE,)),
    Row("get -o name", 0, shows=r"trainingjob\.lockstep\.dev/broke\n", places=TOLD),
    Row("get -o name", 0, shows=r"configmap/broke-run-\w+\n", places=(ALONE,)),
    Row("get broke -o json", 0,
        shows=r'(?s)(?=.*"exitCode": 1\b)(?=.*"rank": 1\b)(?=.*"node": 1\b).*"lastLines": \[[^]]*the data is not there', places=TOLD),
    Row("get -o wide", 0, shows=HEADS[:-2] + r" +CLUSTER +TRANSPORT +CHECKPOINT +LEFT +LOSS +MESSAGE\n"),
    Row("describe runs", 0, shows=r"Name        runs \({where}, \w+ old\)\nWork        (script \S*wait\.py|nothing is asked for).*\n"
                                  r"(Cluster .*\n)?Ranks       2 of 2 ready, on 2 of 2 nodes\n"),
    Row("describe broke", 0, shows=rf"(?s).*\nFailure     UserCode: {FAILED}\n.*\n  Progressing +False +Failed +{FAILED}\n",
        places=TOLD),
    Row("why runs", 0, shows=r"runs: Running: all ranks run, attempt 1\nnext         lockstep logs runs {again} -f   # follow it\n"
                             r" +lockstep stacks runs {again}   # "),
    Row("why done", 0, shows=r"(?s)done: Complete: .*\nnext         lockstep describe done {again}   # shows where its results are\n"),
    Row("why broke", 1, shows=rf"(?s)broke: Failed: {FAILED}\nfirst cause  rank 1 on node 1.*: UserCode \(ValueError\)\nlast lines   rank 1"
                              rf" begins\n.*\nlost         1 failure \(1 UserCode\): 0 steps lost\n"),
    Row("wait runs --for Complete --timeout 1", 1, "lockstep: job runs is not Complete after 1 s: Running: all ranks run\n"),
    Row("wait done", 0, shows="done: Complete: the job is complete\n$"),
    Row("wait done --for Running", 1, "lockstep: job done has ended, so it will not become Running: Complete: the job is complete\n"),
    Row("wait broke", 1, shows=f"broke: Failed: {FAILED}\n$"),
    Row("logs runs --rank 9", 2, NO_RANK),
    Row("logs runs --node 9", 2, NO_NODE),
    Row("logs runs --previous", 2, "lockstep: job runs has had 1 attempt: there is no previous one\n"),
    Row("logs runs --errors", 0, shows="no rank of job runs has failed\n$"),
    Row("logs done -f", 0, shows=rf"{EARLY}\[lockstep\] node 0 is here \([12] of 2\)\n(?s:.*)\[lockstep\] Complete: all ranks are done\n$",
        places=TOLD),
    Row("logs done --rank 0", 0, shows=r"\[rank 0\] hello from 0\n$"),
    Row("logs done --node 1", 0, shows=r"(?s)(?!.*\[rank 0\]).*\[rank 1\] hello from 1\n"),
    Row("logs broke -f", 1, shows=rf"(?s).*\[lockstep\] Failed: {FAILED}\n$", places=TOLD),
    Row("logs broke --errors", 0, shows=r"first: rank 1 on node 1 \(UserCode\): exited with 1: ValueError: the data is not there\n  \| rank"
                                        r" 1 begins\n", places=TOLD),
    Row("top runs --once", 0, shows=r"(?s)runs  Running  no step yet, 2 of 2 ranks\n.*\nNODE +(HOST|POD) .*RANKS +CPU +MEMORY +NIC +IN Gb/s"
                                    r" +OUT Gb/s\n.*\nRANK +NODE +CPU +MEMORY\n0 +0 .*\n1 +"),
    Row("top broke --once", 0, shows=rf"broke  Failed  no step yet, 0 of 2 ranks\n  {FAILED}\n", places=TOLD),
    Row("stacks runs", 0, shows=r"ranks 0-1: main thread \(most recent call first\)\n"),
    Row("stacks runs --rank 9", 2, NO_RANK),
    Row("stacks done --rank 1", 2, "lockstep: no rank 1 of done runs now: lockstep why done {again}\n"),
    Row("stacks done", 2, "lockstep: no rank of done runs now: lockstep why done {again}\n"),
    Row("retry runs", 2, "lockstep: job runs has not failed, so there is nothing to retry: Running: all ranks run\n",
        places=TOLD),
    Row("retry runs", 2, "lockstep: runs runs without the operator: lockstep retry -f FILE --in-namespace {again}\n", places=(ALONE,)),
    *(Row(f"{verb} done", 2, NOTHING_TO_STOP, places=TOLD) for verb in ("stop", "resume")),
    *(Row(f"{verb} broke", 2, HAS_FAILED, places=TOLD) for verb in ("stop", "resume")),
    Row("retry done", 2, "lockstep: job done is complete: there is nothing to retry (…); to run it anew: … {again}\n",
        places=(PODS, HOSTS, PROCESSES)),
    Row("retry broke", 2, "lockstep: a run on this machine is retried as it was started: lockstep run -f {tmp}/broke.yaml {again}\n",
        places=(HERE,)),
    Row("resume runs", 0, shows="runs is not suspended\n$", places=(PODS, HOSTS, PROCESSES)),
    Row("resume runs", 2, "/runs.yaml {again}\n", places=(HERE,)),
    Row("stop runs nosuch --no-wait", 2, NO_JOB),
    Row("delete done nosuch --yes", 2, NO_JOB),
    Row("delete done --files", 2, "lockstep: --files removes /workspace/runs/done {where} for good: use --yes to confirm it\n",
        places=TOLD),
    Row("delete runs --files --yes", 2,
        "lockstep: job runs may still write its files, so --files removes none: first lockstep stop runs {again}\n"),
    Row("delete runs", 2, "lockstep: job runs has not ended: use --yes to delete it anyway\n"),
    *(Row(f"run -f {{tmp}}/{name}.yaml", 2, "   # runs yours under another name\n") for name in ("done", "broke")),
    Row("run -f {tmp}/runs.yaml --detach", 0,
        "lockstep: job runs is {where} already, as {tmp}/runs.yaml describes it, and has not ended\n…\n", places=(PODS,)),
    Row("run -f {tmp}/runs.yaml --detach", 2, " follows it, lockstep stop runs {again} stops it\n", places=(HOSTS,)),
    Row("run -f {tmp}/runs.yaml", 2, "/runs/runs: wait for it, or stop it with Ctrl-C\n", places=(HERE,)),
    Row("run -f {tmp}/runs.yaml", 2, " follows it, lockstep stop runs {again} stops it\n", places=(PROCESSES,)),
    Row("run -f {tmp}/runs.yaml", 2,
        "lockstep: StatefulSet runs already exists {where} and runs: follow it: lockstep logs runs {again} -f, or stop it: …\n",
        places=(ALONE,)),
    Row("cp runs:/workspace/nothing {tmp}/a", 1, "not copied: {folder}/nothing does not exist\n", places=REMOTE),
    Row("cp {tmp} runs:/etc/x", 2, "lockstep: /etc/x is not on a volume of the job: choose a path below /datasets, /workspace\n",
        places=REMOTE),
    Row("sync runs {tmp}/nothing", 2, " is not a folder: name the folder to send\n", places=REMOTE),
    Row("sync runs {tmp}/empty", 0, shows=r"(\S.*: nothing to do\n)+$", places=REMOTE),
    Row("sync runs {tmp}/code", 0, shows=r"(\S.*: 1 sent \(\d+ bytes\), 0 removed\n)+$", places=REMOTE),
    Row("sync runs {tmp}/code", 0, shows=r"(\S.*: nothing to do\n)+$", places=REMOTE),
    Row("scale runs 2", 0, shows="runs has 2 nodes already\n$", places=(PODS,)),
    Row("scale done 1", 2, "lockstep: job done has ended: give a new job the number of nodes it should have\n", places=(PODS,)),
    _no_job("sync nosuch {tmp}/code", (PODS,)), _no_job("scale nosuch 2", (PODS,)),
    Row("cp {tmp}/code nosuch:/workspace/code", 2, f"{NO_JOB[:-1]}; before its first start: lockstep cp -f FILE SRC nosuch:\n",
        places=(PODS,)),
    # (before its first start)
    Row("sync nosuch {tmp}/code", 0, shows=r"(host bed\d: (nothing to do|1 sent \(\d+ bytes\), 0 removed)\n){3}$", places=(HOSTS,)),
    Row("cp {tmp}/code nosuch:/workspace/code", 0, shows=r"(host bed\d: 1 of 1 file copied \(9 B\), to /workspace/code\n){3}$",
        places=(HOSTS,)),
    Row("preflight -f {tmp}/checked.yaml", 0, shows=r"(?s).*\n paths +ok +\n.*\n\d+ checks on 2 nodes passed \(\d+\.\d s\)\n$"),
    Row("preflight -f {tmp}/lacks.yaml", 1,
        shows=rf"(?s).*\n paths +0 +Error +{NO_SCRIPT}.*\n\d+ checks on 2 nodes found errors: the job would not start \(\d+\.\d s\)\n$"),
    Row("checkpoint runs", 0, shows="no commit is there; what a script saves by itself isn't listed\n"),
    Row("checkpoint runs --verify", 2, " holds no commit that a start would choose\n"),
    *(Row(typed, 1, NO_ADAPTER, places=REMOTE) for typed in (
        "adapter get runs {tmp}/adapter", "adapter merge runs -o {tmp}/model", "adapter push runs org/name", "generate runs Once",
        "chat runs",
    )),
    Row("shell runs --node 9", 2, NO_NODE, places=REMOTE),
    *(_no_job(typed, REMOTE) for typed in (
        "generate nosuch Once", "chat nosuch", "checkpoint nosuch", "checkpoint nosuch --verify", "tensorboard nosuch", "jupyter nosuch",
            "vscode nosuch", "debug nosuch train.py",
    )),
    _no_job("drill kill-rank --job nosuch --yes"),
    Row("drill kill-rank --job runs", 2,
        "lockstep: kill-rank on job runs {where} ends one rank by SIGKILL: all ranks restart. Use --yes to do it\n"),
    Row("drill kill-rank --job runs --rank 9 --yes", 2, NO_RANK),
    Row("drill kill-rank --job done --yes", 2,
        "lockstep: kill-rank on job done: the job is not running (Complete: the job is complete): "
        "drills are for jobs whose ranks all run\n", places=TOLD),
    Row("drill fill-disk --job runs --yes", 2,
        "lockstep: fill-disk on job runs: this drill needs a job of Lockstep's trainer (spec.training): Lockstep doesn't know how a script"
        " saves\n"),
    # (what a place hasn't got)
    Row("stop runs --now", 2,
        "lockstep: --now is for hosts: on a cluster, kubectl delete pod runs-0 {again} --grace-period=0 ends a pod without a save\n",
        places=(PODS,)),
    Row("stop runs --run", 2,
        "lockstep: --run is about the script of a dev environment, which only a cluster has: lockstep stop runs {again} stops the job\n",
        places=(HOSTS, PROCESSES, HERE)),
    Row("why runs --bundle {tmp}/b", 2, ": on hosts, lockstep cp runs:runs/runs/logs FOLDER {again} copies the logs\n", places=(HOSTS,)),
    Row("why runs --bundle {tmp}/b", 2, ": all that is known of runs is in …/workspace/runs/runs\n", places=(HERE,)),
    Row("get -l a=b", 2, "lockstep: -l selects by labels, which a cluster has: name the jobs {where}\n", places=(HOSTS,)),
    *(Row(f"get {option}", 2, "a workspace has neither namespaces nor labels\n", places=(HERE,)) for option in ("-A", "-l a=b")),
    Row("cp --from bed0 a runs:/workspace/a", 2, " which only a cluster file with platform: hosts has: name that file with --cluster\n",
        places=(PODS,)),
    Row("drill kill-operator --job runs --yes", 2,
        "lockstep: kill-operator needs an operator, and a job {where} has none: choose another fault\n", places=(HOSTS, PROCESSES, HERE)),
]  # fmt: skip
"""Rows that leave the jobs as they are."""
HURT = [
    Row("drill kill-rank --job runs --yes", 0, shows=f"(?s)kill-rank: recovered\n.*  named as +Killed: {KILLED} "),
    Row("get runs", 0, shows=HEADS + r"runs +2/2 +2/2 +- +- +1 +Running +\d"),
    Row("logs runs --errors", 0, shows=r"first: rank 1 on node 1 .*was ended by SIGKILL.*\n  \| rank 1 of attempt 1\n"),
    Row("logs runs --rank 1", 0, shows=r"\[rank 1\] rank 1 of attempt 1\n"),
    Row("drill lose-node --job runs --yes", 0, shows="(?s)lose-node: recovered\n", places=(HOSTS, PROCESSES)),
    Row("drill lose-node --job runs --yes", 2,
        " nothing on this machine would start it again: choose another fault, or a job on a cluster\n",
        places=(HERE,)),
]  # fmt: skip
"""Rows that hurt the job that runs."""
STOPPED = [
    Row("stop runs", 0),
    Row("get runs", 0, shows=HEADS + r"runs +0/2 +0/2 +- +- +[12] +Suspended +\d"),
    Row("wait runs --for Suspended --timeout 20", 0),
    Row("stacks runs", 2, "lockstep: no rank of runs runs now: lockstep why runs {again}\n"),
    Row("stop runs --no-wait", 0, shows="runs is stopped already\n$"),
    Row("logs runs --rank 1", 0, shows=r"\[rank 1\] rank 1 of attempt 1\n\[rank 1\] rank 1 of attempt 2\n"),
    Row("logs runs --rank 1 --tail 1", 0, shows=r"\[rank 1\] rank 1 of attempt [23]\n$"),
    Row("logs runs --attempt 1 --rank 1", 0, shows=r"\[rank 1\] rank 1 of attempt 1\n$"),
    Row("logs runs --previous --rank 1", 0, shows=r"\[rank 1\] rank 1 of attempt \d\n$"),
    Row("resume runs", 0, shows="runs: goes on; see it with: lockstep logs runs -f {again}\n$", places=KEPT),
    Row("wait runs --for Running --timeout 90", 0, places=KEPT),
    Row("retry broke", 0, shows=rf"broke: retry 1, to {SCRIPT_AGAIN}; see it with: lockstep logs broke -f {{again}}\n$", places=KEPT),
    Row("logs broke --attempt 1 --rank 1", 0, shows=r"\[rank 1\] rank 1 begins\n"),
]  # fmt: skip
"""Rows that stop a job and let it go on, in this order. A run without an operator is started again instead."""
DELETED = [
    Row("retry -f {tmp}/lacks.yaml --in-namespace --cluster local", 2,
        "lockstep: there is no run lacks without an operator {where}: start it with lockstep run -f FILE --in-namespace\n",
        places=(ALONE,)),
    Row("retry -f {tmp}/broke.yaml --in-namespace --cluster local", 1,
        shows=rf"(?s).*\[lockstep\] attempt 2 starts.*\[lockstep\] Failed: {FAILED}\n{{scaled}}$", places=(ALONE,)),
    Row("scale runs 1", 0, shows=r"runs: 2 → 1 node; see it with: lockstep get runs {again}\n$", places=(PODS,)),
    Row("get runs -o json", 0, shows=r'(?s).*"nodes": 1,', places=(PODS,)),
    Row("delete done --files --yes", 0, shows="/workspace/runs/done is removed\ndone is deleted with its files\n$", places=TOLD),
    Row("delete done --yes", 0, shows="done is deleted; its claims stay\n$", places=(ALONE,)),
    Row("delete broke runs broke --yes", 0, shows="broke is deleted; .* stays?\nruns is deleted; .* stays?\n$"),
    Row("get", 0, shows="there is no {noun} {where}\n$"),
]  # fmt: skip
"""Rows that change what may be gone afterwards, and remove all, in this order."""
AT_THE_LIMITS = [
    Row(f"wait {LONGEST} --for Running --timeout 60", 0, shows=f"{LONGEST}: Running: all ranks run\n$"),
    Row(f"get {LONGEST}", 0, shows=HEADS + rf"{LONGEST} +2/2 +2/2 +- +- +0 +Running +\d"),
    Row(f"logs {LONGEST} --rank 1 --tail 2", 0,
        shows=rf"\[rank 1\] got {re.escape(json.dumps(ARGUMENTS))}\n\[rank 1\] rank 1 of attempt 1\n$"),
    Row(f"why {LONGEST}", 0, shows=rf"{LONGEST}: Running: all ranks run, attempt 1\nnext         lockstep logs {LONGEST} {{again}} -f "),
    Row(f"run -f {{tmp}}/{LONGEST}.yaml", 2, f" follows it, lockstep stop {LONGEST} {{again}} stops it\n", places=(HOSTS, PROCESSES)),
    Row(f"run -f {{tmp}}/{LONGEST}.yaml", 2, f"/runs/{LONGEST}: wait for it, or stop it with Ctrl-C\n", places=(HERE,)),
    Row(f"stop {LONGEST}", 0),
    Row(f"get {LONGEST}", 0, shows=HEADS + rf"{LONGEST} +0/2 +0/2 +- +- +0 +Suspended +\d"),
    Row(f"delete {LONGEST} --yes", 0, shows=rf"{LONGEST} is deleted; .* stays?\n$"),
    Row("get", 0, shows="there is no {noun} {where}\n$"),
]  # fmt: skip
"""Rows of a job with the longest name, an odd path and odd arguments, in this order."""


def workspace(root: Path) -> Path:
    """Make a workspace of this machine, with the scripts of the jobs."""
    (root / "datasets").mkdir(parents=True)
    for path, text in PROGRAMS.items():
        (root / "workspace" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "workspace" / path).write_text(text)
    return root


def live(where: Where, folder: Path, settled: Callable[[], object] = lambda: None) -> None:
    """Start the jobs of this place, and type every row. Raises AssertionError, with what was answered otherwise.

    `settled`: wait until nothing of jobs that have ended is there.
    """
    where.bring(folder)
    wrong = [*differences(where, STARTED, folder, where.alone)]
    rows = [*UNDISTURBED, *HURT, *(STOPPED if where.kind != ALONE else ()), *DELETED]
    wrong += _while_runs(where, folder, "runs", "all 2 ranks run", rows, settled)
    assert not wrong, "\n".join(wrong)


def live_at_the_limits(where: Where, folder: Path) -> None:
    """Start a job whose names are as odd and as long as they may be, and type every row about it. Raises AssertionError as `live`."""
    where.bring(folder)
    wrong = _while_runs(where, folder, LONGEST, "rank 0 of attempt 1", AT_THE_LIMITS)
    assert not wrong, "\n".join(wrong)


def _while_runs(
    where: Where, folder: Path, job: str, says: str, rows: list[Row], settled: Callable[[], object] = lambda: None
) -> list[str]:
    """Start a job, leave it with Ctrl-C once its log says this where it outlives that, and return what rows were answered otherwise."""
    with where.begin(f"run -f {{tmp}}/{job}.yaml", folder) as process:
        assert process.stdout is not None and any(says in line for line in process.stdout), process.communicate()
        if where.kind != HERE:  # (whose ranks are the command's own)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        settled()
        return [*differences(where, rows, folder, where.lockstep)]


def differences(where: Where, rows: list[Row], folder: Path, typed: Callable[[str, Path], Told]) -> Iterator[str]:
    """Type every row of this place, and yield what it answered otherwise. Lines of a log, and all that a job that runs says of itself, are
    there within seconds, so they are asked for until they are.
    """
    for row in rows:
        if where.kind not in row.places:
            continue
        shows = row.shows.replace("{again}", re.escape(" ".join(where.again))).replace("{where}", re.escape(where.where))
        shows = shows.replace("{noun}", where.noun).replace("{scaled}", SCALED if where.kind == ALONE else "")
        says = where.pattern(row.says, folder) + r"\Z"
        end = time.monotonic() + WRITTEN_SECONDS * row.typed.startswith(WRITTEN)
        while not (
            (told := typed(row.typed, folder)).returncode == row.code and re.match(shows, told.stdout) and re.search(says, told.stderr)
        ):
            if time.monotonic() < end:
                time.sleep(0.2)
                continue
            yield f"lockstep {row.typed}\n  must be {row.code} {row.says or row.shows!r}\n  but is {told}"
            break
