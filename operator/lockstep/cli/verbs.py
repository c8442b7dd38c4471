"""The verbs: what the front page shows of them, the module of each, names that they had before, and other tools' words for them."""

from __future__ import annotations

from collections.abc import Mapping

DAY = ("init", "plan", "run", "get", "logs", "top", "why", "sync", "shell", "stop")
"""Verbs of a day, with a line each on the front page."""
GROUPS = {
    "Begin": ("quickstart", "doctor", "deploy"),
    "Before a job runs": ("validate", "render", "preflight"),
    "A job": ("describe", "wait", "resume", "retry", "scale", "delete"),
    "What is wrong or slow": ("stacks", "drill", "bench"),
    "Files and models": ("cp", "checkpoint", "adapter", "model", "generate", "chat"),
    "Inside a pod or host": ("vscode", "jupyter", "tensorboard", "debug"),
    "Clusters and hosts": ("use", "cluster", "hosts", "build", "devcluster", "version"),
    "Without Kubernetes": ("launch", "join"),
}
"""The others, with a line a group."""
MODULES: Mapping[str, str | tuple[str, Mapping[str, str]]] = {
    "plan": "jobs.plan.plan",
    "run": "jobs.run.run",
    "get": "jobs.get.get",
    "logs": "jobs.logs.logs",
    "top": "jobs.top.top",
    "why": "jobs.why.why",
    "sync": "files.sync.sync",
    "shell": "files.editor.shell",
    "stop": "jobs.change.stop",
    "quickstart": "clusters.quickstart.quickstart",
    "doctor": "clusters.doctor.doctor",
    "deploy": "clusters.deploy.deploy",
    "validate": "jobs.render.validate",
    "render": "jobs.render.render",
    "preflight": "jobs.preflight.preflight",
    "describe": "jobs.get.describe",
    "wait": "jobs.get.wait",
    "resume": "jobs.change.resume",
    "retry": "jobs.change.retry",
    "scale": "jobs.change.scale",
    "delete": "jobs.change.delete",
    "stacks": "jobs.why.stacks",
    "drill": "jobs.drill.drill",
    "cp": "files.cp.cp",
    "checkpoint": "files.checkpoint.checkpoint",
    "generate": "files.generate.generate",
    "chat": "files.chat.chat",
    "vscode": "files.editor.vscode",
    "jupyter": "files.editor.jupyter",
    "tensorboard": "files.editor.tensorboard",
    "debug": "files.editor.debug",
    "use": "clusters.clusters.use",
    "build": "clusters.build.build",
    "version": "clusters.version.version",
    "launch": "jobs.launch.launch",
    "join": "jobs.launch.join",
    "help": "topics.help_of",
    "init": (
        "Write a cluster, hosts, job or script file to start from.",
        {"cluster": "clusters.init.cluster", "hosts": "clusters.init.hosts", "job": "clusters.init.job", "script": "clusters.init.script"},
    ),
    "bench": ("Measure a job's training.", {"scaling": "jobs.bench.scaling"}),
    "adapter": (
        "Work with trained adapters.",
        {
            "export": "files.adapter.export",
            "merge": "files.adapter.merge",
            "push": "files.adapter.push",
            "get": "files.adapter.get_adapter",
        },
    ),
    "model": ("Work with base models.", {"get": "files.model.get_model"}),
    "cluster": (
        "Describe clusters, check, measure, and clean them up.",
        {
            "list": "clusters.clusters.list_clusters",
            "status": "clusters.overview.status",
            "discover": "clusters.discover.discover",
            "lint": "clusters.lint.lint",
            "calibrate": "clusters.calibrate.calibrate",
            "rollback": "clusters.clean.rollback",
            "clean": "clusters.clean.clean",
            "uninstall": "clusters.clean.uninstall",
        },
    ),
    "hosts": ("Set up machines that you reach over ssh.", {"setup": "clusters.hosts.setup"}),
    "devcluster": (
        "Run a real Kubernetes, or hosts, on this machine.",
        {"up": "clusters.devcluster.up", "down": "clusters.devcluster.down", "status": "clusters.devcluster.devcluster_status"},
    ),
}
"""Verb → module of this package, and the function in it; of a group of verbs its help, and the same of each."""

_SEND = "lockstep run -f job.yaml runs a job and follows it"
_STOP = "lockstep stop JOB saves and stops, lockstep delete JOB removes"
_LIST = "lockstep get shows jobs, lockstep cluster list shows cluster files"
HINTS = {
    "ls": _LIST,
    "list": _LIST,
    "ps": "lockstep get shows jobs",
    "jobs": "lockstep get shows jobs",
    "queue": "lockstep get shows jobs, and lockstep plan -f job.yaml says whether one would wait",
    "submit": _SEND,
    "apply": _SEND,
    "create": f"lockstep init job NAME writes a job file; {_SEND}",
    "train": f"lockstep init job NAME writes a job file; {_SEND}",
    "up": "lockstep deploy CLUSTER installs the operator; lockstep devcluster up starts the embedded cluster",
    "install": "lockstep deploy CLUSTER installs the operator",
    "upgrade": "lockstep deploy CLUSTER replaces an older version",
    "exec": "lockstep shell JOB opens a shell, lockstep run SCRIPT runs a script on all nodes of a dev environment",
    "ssh": "lockstep shell JOB opens a shell",
    "attach": "lockstep logs JOB -f follows a job, lockstep shell JOB opens a shell",
    "metrics": "lockstep top JOB shows a job's speed and load",
    "status": f"{_LIST}, lockstep cluster status CLUSTER looks at one",
    "uninstall": "lockstep cluster uninstall CLUSTER removes the operator, lockstep cluster clean the dev environment",
    "suspend": _STOP,
    "cancel": _STOP,
    "kill": _STOP,
    "rm": "lockstep delete JOB removes a job",
    "down": "lockstep delete JOB removes a job, lockstep cluster uninstall CLUSTER the operator",
    "start": "lockstep resume JOB goes on with a stopped job",
    "check": "lockstep doctor CLUSTER checks a cluster or hosts, lockstep validate job.yaml a job file",
    "fleet": "lockstep cluster list shows cluster files, lockstep doctor CLUSTER checks hosts over ssh",
    "offer": "lockstep plan -f job.yaml says which nodes would fit now",
    "events": "lockstep describe JOB shows a job's events",
    "diff": "lockstep plan -f job.yaml shows what would change",
    "diff-runs": "compare two runs in TensorBoard: lockstep tensorboard JOB shows all runs of a volume",
    "edit": "change the file, see lockstep plan -f job.yaml, then kubectl apply -f job.yaml",
    "login": (
        "log in as for kubectl (oc login, or your provider's command); --context chooses among logins; lockstep hosts setup CLUSTER for"
        " hosts over ssh"
    ),
    "cluster ls": "lockstep cluster list",
    "hosts check": "lockstep doctor CLUSTER",
    "hosts trust": "lockstep hosts setup shows a key that ssh doesn't know, and pins it after your yes",
    "hosts login": "lockstep hosts setup lets you answer what ssh asks, for eight hours",
    "cluster import": "lockstep init hosts NAME --from FILE",
    "cluster gpus": "lockstep top JOB --once shows the GPUs of a job's pods, lockstep top --cluster NAME those of hosts",
    "cluster topology": "lockstep cluster calibrate CLUSTER --pairs names what is slow, nvidia-smi topo -m on a node what its GPUs share",
    "devcluster start": "lockstep devcluster up",
    "devcluster stop": "lockstep devcluster down",
    "devcluster prepare": "lockstep devcluster up builds what it needs; make cluster-programs builds only that, in a checkout",
    "devcluster kubeconfig": "lockstep devcluster status prints the line that sets KUBECONFIG",
    "devcluster hosts": "lockstep devcluster up --hosts N, lockstep devcluster status and lockstep devcluster down",
}
"""Other tools' words (kubectl, SkyPilot, dstack, Slurm, Helm) → what to type here."""
_MEASURES = "calibrate measures all rails, by RDMA where it can; --mode tcp measures by sockets"
_CONTEXT = "--context chooses the cluster's context; if its API server has another name, write that into cluster.api of its file"
REMOVED = {
    "--workspace": "--cluster ./FOLDER names a workspace of this machine",
    "cluster calibrate --over": _MEASURES,
    "cluster calibrate --rail": _MEASURES,
    "cluster calibrate --seconds": "calibrate chooses the seconds by the number of nodes and rails",
    "cluster calibrate --max-size": "calibrate measures up to 1Gi on GPUs and 16Mi on CPUs",
    "cluster calibrate --no-save": "leave it out",
    "cluster calibrate --image": "image in the cluster file names the pods' image",
    "cluster clean --force": _CONTEXT,
    "cluster discover --force": "remove the file, or name another one with -o",
    "cluster rollback --force": _CONTEXT,
    "cluster uninstall --force": _CONTEXT,
    "deploy --timeout": "Ctrl-C ends the wait, and the deployment goes on in the cluster",
    "hosts setup --wheelhouse": "environment.wheelhouse of the cluster file names the folder",
    "init hosts --shared": "storage.mode: rwx in the file says it",
    "init hosts --user": "write USER@HOST, or defaults.user into the file",
    "run --render": "lockstep init job NAME --script writes a job file for a program",
    "scale --nodes": "lockstep scale JOB NODES",
    "launch --fresh": "--set training.checkpoint.resumeFrom=None trains from step 0",
    "sync --no-gitignore": "an empty .lockstepignore in the folder sends what .gitignore names",
    "model get --claim": "a job file names the claim in storage.workspaceClaimName: lockstep model get -f FILE",
    "model get --token-secret": "a job file names it in training.model.tokenSecret: lockstep model get -f FILE",
    "plan --anyway": "leave it out: lockstep run has it",
    "top --interval": "it looks every two seconds",
    "version --client": "lockstep --version",
    "preflight --nodes": "change nodes in the job file",
    "stop --timeout": "Ctrl-C ends the wait, and the request to stop stays",
    "adapter get --node": "node 0 has the adapter",
    "jupyter --folder": "open the folder in Jupyter",
    **{f"{verb} --port": "a free port is chosen if the usual one is taken" for verb in ("vscode", "jupyter", "tensorboard", "debug")},
    "debug --pod-port": "let your script wait on port 5678",
    "run --attach": "lockstep logs JOB -f follows a run, and lockstep why JOB says how it ended",
}
"""Option that no verb has any more, or verb and option that it no longer has → what to type instead."""
FIRST = {
    "lockstep quickstart": "train a small model on this machine, from nothing",
    "lockstep init job NAME": "write NAME.yaml, to edit",
    "lockstep run -f NAME.yaml": "train, and follow the log",
}
"""Commands for a new user."""
SENTENCE = "Fine-tune with DeepSpeed on the nodes of your own cluster, or your own hosts."
OPTIONS = {
    "lockstep VERB --help": "what a verb takes, with an example",
    "lockstep help TOPIC": "cluster-files, job-files, exit-codes, words",
    "--version": "print the version",
    "--install-completion": "complete verbs and names in this shell",
}


def front_page(day: Mapping[str, str], places: Mapping[str, str]) -> str:
    """`day`: help texts of the verbs that have a line of their own. `places`: options that say where a verb acts, and their texts."""
    lines = ["Usage: lockstep [OPTIONS] VERB [ARGS]...", "", SENTENCE, "", "The first time:", *_table(FIRST), "", "Every day:"]
    lines += _table({verb: text.strip().partition("\n")[0] for verb, text in day.items()})
    lines += ["", "And also:", *_table({group: ", ".join(verbs) for group, verbs in GROUPS.items()})]
    lines += ["", "Where, before the verb or after it:", *_table(places), "", "More:", *_table(OPTIONS)]
    return "\n".join(lines) + "\n"


def _table(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name:{width}}  {text}" for name, text in rows.items()]
