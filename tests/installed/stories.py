"""What is typed in an installed Lockstep: every verb so that it does its work, or ends in one sentence where what it needs isn't on this
machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from installed.typed import Line, Story, refused

BOTH = ("cli", "lowest")
SCRIPT = 'import os\nprint("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)\n'
JOB = """apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: hello}
spec:
  nodes: 2
  image: registry.example.com/team/trainer:1
  script: {path: /workspace/hello.py}
"""
LLAMA = """apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: llama-lora}
spec:
  nodes: 2
  training:
    model: {name: meta-llama/Llama-3.1-8B}
    lora: {rank: 16, alpha: 32, targetModules: [q_proj, k_proj, v_proj, o_proj]}
    zeroStage: Stage2
    data: {path: /datasets/train.jsonl, maxLength: 4096}
    optimization: {epochs: 2, learningRate: 1e-4, microBatchSize: 2, globalBatchSize: 64}
    evaluation: {everySteps: 200, holdout: 0.02}
    checkpoint: {everySteps: 200}
"""
IN_WORKSPACE = ".lockstep/workspace/workspace"
COMPLETING: Mapping[str, str] = {"_LOCKSTEP_COMPLETE": "complete_bash"}
NEVER_STARTED = "has never started, so it has no files yet"
NO_POD = "pod bakery-0 is not there: lockstep why bakery"
NO_ACCOUNT = "service account ml-dev-sa does not exist in namespace team"
NO_ROOT = "needs root"
ON = "--cluster lab -n team"

FILES = (
    Story("job files", (
        Line("init job demo", out=("Wrote demo.yaml",), files=("demo.yaml",)),
        Line("validate -f demo.yaml", out=("ok",), err=("warning: Placeholder",), fresh=True),
        refused("validate -f demo.yaml --set training.lora.rank=many", "spec.training.lora.rank"),
        refused("validate -f demo.yaml --set training.lora.rnak=8", "did you mean rank"),
        Line("render -f demo.yaml", out=("kind: StatefulSet", "lockstep_gang")),
        Line("render -f demo.yaml --explain", out=("nodes",)),
        Line("plan -f demo.yaml --offline", code=4, out=("demo without a cluster",)),
        Line("init job own --script", files=("own.yaml",)),
        Line("init script scripts", files=("scripts/train_multi_node.py", "scripts/ds_config.json")),
        refused("init job demo", "demo.yaml"),
    ), takes=8, locks=BOTH),
    Story("the job file of the README", (
        Line("validate -f llama.yaml", out=("ok",)),
        Line("plan -f llama.yaml --offline", code=4, out=("llama-lora",)),
        Line("plan -f llama.yaml --on 2x4xH100 --samples 48000", out=("a GPU needs about 63.8 GB of 80.0 GB", "about 1470 steps")),
    ), files={"llama.yaml": LLAMA}, takes=3),
    Story("cluster files", (
        Line("init cluster mine", out=("Wrote clusters/mine.yaml",), files=("clusters/mine.yaml",)),
        Line("cluster lint mine --offline", out=("nothing to fix",)),
        Line("cluster list", out=("mine", "local", "Kubernetes")),
        Line("deploy mine --dry-run", out=("name: trainingjobs.lockstep.dev", "kind: Deployment", "name: ml-dev-env"), fresh=True),
        Line("deploy local --dry-run --no-dev --monitoring", out=("kind: PrometheusRule", "name: lockstep-operator")),
        Line("init job demo --cluster mine", files=("demo.yaml",)),
        Line("validate -f demo.yaml", out=("ok",)),
        Line("use mine", out=("clusters/mine.yaml (lockstep use)",)),
        Line("use", out=("clusters/mine.yaml (lockstep use)",)),
        Line("render -f demo.yaml -o job", out=("kind: TrainingJob",)),
    ), takes=7),
    Story("hosts", (
        Line("init hosts old --from hostfile", files=("clusters/old.yaml",), out=("Wrote",)),
        Line("init hosts lab ada@lab0.invalid ada@lab1.invalid", out=("Wrote clusters/lab.yaml",), files=("clusters/lab.yaml",)),
        Line("doctor lab", code=1, out=("lab0.invalid", "2 hosts: 2 failures")),
        refused("hosts setup lab --dry-run", "host lab0.invalid can't be reached", code=1),
        refused("hosts setup lab", "host lab0.invalid can't be reached", code=1),
        refused("hosts trust lab", "lockstep hosts setup shows a key"),
    ), files={"hostfile": "lab0 slots=4\nlab1 slots=4\n"}, takes=7),
    Story("images", (
        Line("build operator --dry-run", out=("podman build -f", "lockstep-operator:")),
        Line("build trainer --dry-run", out=("podman build", "lockstep-trainer:")),
        Line("build operator --openshift --dry-run", out=("kind: BuildConfig", "instantiatebinary")),
        refused("build docs --dry-run", "site"),
    ), files={"bin/podman": ""}, takes=3),
    Story("words", (
        Line("--version", out=("0.1.0",), fresh=True),
        Line("--help", out=("Every day:", "lockstep init job NAME"), fresh=True),
        Line("help", out=("Every day:",)),
        Line("help job-files", out=("A job file is a TrainingJob",)),
        Line("help plan", out=("Say whether a job would fit",)),
        Line("cluster --help", out=("discover",)),
        refused("nonsense", "No such command 'nonsense'"),
        refused("valdate", "validate"),
        Line("--version", program="kubectl-lockstep", out=("0.1.0",), fresh=True),
        Line("", environment={**COMPLETING, "COMP_WORDS": "lockstep init ", "COMP_CWORD": "2"}, out=("cluster\nhosts\njob\nscript",),
            fresh=True),
        Line("", environment={"_LOCKSTEP_COMPLETE": "source_bash"}, out=("_lockstep_completion",)),
    ), takes=6),
    Story("no cluster", (
        refused("get", "the embedded cluster is not up"),
        refused("version", "the embedded cluster is not up"),
        refused("doctor", "the embedded cluster is not up"),
        refused("plan -f job.yaml --cluster local", "--offline"),
        refused("get --context other", "no cluster can be reached"),
        refused("sync", "the embedded cluster is not up"),
    ), files={"job.yaml": JOB, "workspace/hello.py": SCRIPT}, takes=4),
    Story("no root", (
        refused("devcluster up", NO_ROOT, as_root=False),
        refused("devcluster down", "only root", as_root=False),
        Line("devcluster status", code=1, out=("the cluster is down: lockstep devcluster up",), as_root=False),
        refused("devcluster up --hosts 3", NO_ROOT, as_root=False),
        refused("devcluster hosts up", "lockstep devcluster up --hosts N", as_root=False),
        refused("quickstart --hosts", NO_ROOT, as_root=False),
    ), takes=6),
)  # fmt: skip
"""What needs no cluster."""

CLUSTER = (
    Story("reading jobs", (
        Line(f"get {ON}", out=("bakery", "Running", "halted", "Suspended", "broken", "Failed"), fresh=True),
        Line("get -A -o wide --cluster lab", out=("0.8642",)),
        Line("get bakery -o yaml --cluster lab", out=("kind: TrainingJob",)),
        Line(f"describe bakery {ON}", out=("step 7", "attempt 1 starts")),
        Line(f"why broken {ON}", code=1, out=("broken: Failed", "no such column")),
        Line(f"top bakery --once {ON}", out=("step 7/20",)),
        Line(f"top --once {ON}", out=("GOODPUT",)),
        Line(f"wait done {ON}", out=("done: Complete",)),
        Line(f"logs bakery {ON}", out=("Step 7/20",)),
        Line("version --cluster lab", out=("operator     not installed", "v1.36.0")),
        Line("version --cluster lab -o json", out=('"operator": "not installed"', '"lockstep": "')),
    ), cluster=True, pods=True, takes=8, locks=BOTH),
    Story("changing jobs", (
        Line(f"stop halt {ON}", out=("halt: saved at step 7",), err=("lockstep: stop on cluster lab, namespace team",)),
        Line(f"resume halted {ON}", out=("halted: goes on",)),
        Line(f"scale grow 1 --yes {ON}", out=("grow: 2 → 1 node",)),
        Line(f"retry broken {ON}", out=("broken: retry 1",)),
        Line(f"delete gone --yes {ON}", out=("gone is deleted",)),
        refused(f"stop nothing {ON}", "there is no TrainingJob nothing"),
    ), cluster=True, takes=5,
        changes=(("PATCH", "halt", {"suspend": True}), ("PATCH", "halted", {"suspend": False}), ("PATCH", "grow", {"nodes": 1}),
            ("PATCH", "broken", {"restart": {"retry": 1}}), ("DELETE", "gone", {}))),
    Story("a cluster in use", (
        Line("use lab", out=("clusters/lab.yaml (lockstep use)",)),
        Line("get", out=("bakery",)),
        Line("delete gone", given="n\n", code=2, err=("lockstep: delete on cluster lab, namespace team (lockstep use)",)),
    ), cluster=True, takes=2),
    Story("files of jobs", (
        refused(f"sync grow {ON}", "no pod of job grow runs"),
        refused(f"cp job.yaml grow:/workspace/ {ON}", NEVER_STARTED),
        refused(f"adapter get done {ON}", NEVER_STARTED),
        refused(f"adapter merge done -o merged {ON}", NEVER_STARTED),
        refused(f"generate done hello {ON}", NEVER_STARTED),
        refused(f"chat done {ON}", NEVER_STARTED),
        refused(f"model get org/name --job done {ON}", NEVER_STARTED),
        refused(f"checkpoint done {ON}", NEVER_STARTED),
    ), files={"job.yaml": JOB, "workspace/hello.py": SCRIPT}, cluster=True, takes=5),
    Story("inside pods", (
        refused(f"shell grow {ON}", "grow-0 is not there", code=1),
        refused(f"vscode grow {ON}", "grow-0 is not there", code=1),
        refused(f"jupyter grow {ON}", "grow-0 is not there", code=1),
        refused(f"tensorboard grow {ON}", "grow-0 is not there", code=1),
        refused(f"debug grow hello.py {ON}", "grow-0 is not there", code=1),
        refused(f"stacks grow {ON}", "no rank of grow runs now"),
        refused(f"drill kill-rank --job grow --yes {ON}", "grow-1", code=1),
        refused(f"run --job grow {ON} hello.py", "scripts run only in jobs of type Interactive"),
    ), files={"hello.py": SCRIPT}, cluster=True, takes=5),
    Story("jobs for a cluster", (
        Line(f"plan -f job.yaml {ON}", code=1, out=("refused: TrainingCluster lab is not on the cluster; ",)),
        refused(f"run -f job.yaml --detach {ON}", "no operator is installed", code=1),
        refused(f"preflight -f job.yaml --timeout 1 {ON}", NO_ACCOUNT),
        refused(f"bench scaling -f llama.yaml --timeout 1 {ON}", "set spec.image"),
    ), files={"job.yaml": JOB, "llama.yaml": LLAMA}, cluster=True, takes=4),
    Story("a cluster", (
        Line("cluster discover found -n team", out=("clusters/found.yaml",), files=("clusters/found.yaml",)),
        Line("cluster lint lab", code=1, out=("cluster.namespace: there is no namespace team",)),
        Line("cluster status lab", code=1, out=("operator",)),
        refused("cluster gpus lab", "lockstep top JOB --once"),
        Line("doctor lab", code=1, out=("CRDs", "lockstep deploy lab")),
        Line("deploy lab --diff", code=1, out=("trainingjobs.lockstep.dev",)),
        refused("cluster calibrate lab --timeout 1", "image in the cluster file"),
        refused("cluster topology lab", "lockstep cluster calibrate CLUSTER --pairs"),
        refused("cluster rollback lab --yes", "there is nothing to go back to"),
        Line("cluster clean lab --yes", out=("The dev environment of namespace team is removed",)),
        Line("cluster uninstall lab --cluster-only --yes", out=("TrainingCluster lab is not on the cluster",)),
    ), cluster=True, takes=8),
)  # fmt: skip
"""What is asked of a cluster."""

MACHINE = (
    Story("quickstart", (
        Line("quickstart --local", out=("Complete", "eval loss after", "quickstart took"),
            err=("lockstep: from now on verbs without --cluster are about",), fresh=True),
        Line("get", out=("demo", "Complete", "100/100")),
        Line("why demo", out=("demo: Complete",)),
        Line("logs demo --tail 3", out=("Complete",)),
        Line("describe demo", out=("demo",)),
        Line("top demo --once", out=("demo  Complete  step 100",)),
        Line("wait demo", out=("demo: Complete",)),
        Line("adapter get demo got", files=("got/adapter_model.safetensors",)),
        Line("checkpoint demo", out=("step-100",)),
        Line("checkpoint ../home/state/lockstep/quickstart/workspace/runs/demo --verify", out=("step-100",)),
        Line("adapter export ../home/state/lockstep/quickstart/workspace/runs/demo -o exported",
            files=("exported/adapter_model.safetensors",)),
        Line("adapter merge ../home/state/lockstep/quickstart/workspace/runs/demo -o merged", files=("merged/*.safetensors",)),
        Line("adapter merge demo -o merged-there", files=("merged-there/*.safetensors", "merged-there/README.md")),
        refused("adapter push got org/name", "nobody can be asked whether to send these files: use --yes"),
        Line("generate demo 'What do people get from Mibo?' --max-tokens 4", out=("Honey",)),
    ), takes=60),
    Story("ranks on this machine", (
        Line("run -f job.yaml --local", out=("all 2 ranks run", "Complete"), fresh=True),
        Line("run --local --nproc-per-node 2 -- hello.py", out=("[rank 1] rank 1 of 2", "Complete")),
        Line("get --local", out=("hello", "Complete")),
        Line("why hello --local", out=("hello: Complete",)),
        Line("logs hello --local", out=("rank 0 of 2",)),
        Line("preflight -f job.yaml --local", out=("checks on 2 nodes passed",)),
        refused("stop hello --cluster .lockstep/workspace", "hello"),
    ), files={"job.yaml": JOB, "hello.py": SCRIPT, f"{IN_WORKSPACE}/hello.py": SCRIPT}, takes=20),
)  # fmt: skip
"""What runs on this machine."""

STORIES = (*FILES, *CLUSTER, *MACHINE)
