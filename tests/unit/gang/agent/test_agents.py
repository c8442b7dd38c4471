"""Real agents, a real coordinator and small rank scripts, as processes on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from dataclasses import replace

import pytest

from lockstep_gang.agent.ranks import processes
from lockstep_gang.contract.proof import ranks_secret
from lockstep_gang.contract.run import HostPlace, JobIdentity, RestartPolicy, Timeouts, WhenDone, run_text
from lockstep_gang.coordinator.machine import boot_id
from lockstep_machine.limits import usable_cores
from unit.gang.cases import KEY, Gang, gone, now

SAY = 'import os, sys, time, signal\nR = os.environ["RANK"]\nF = os.environ["FOLDER"]\n'
PID = SAY + 'open(f"{F}/pid-{R}.new", "w").write(str(os.getpid()))\nos.rename(f"{F}/pid-{R}.new", f"{F}/pid-{R}")\n'
FOREVER = PID + 'print("here", R, flush=True)\nsignal.pause()\n'


def pid_of(agents: Gang, rank: int) -> int:
    return int((agents.folder / f"pid-{rank}").read_text())


def running(agents: Gang, *nodes: int) -> list[int]:
    """Start agents, and wait until rank 0 and 1 are up: their process ids."""
    agents.start(*nodes)
    for node in nodes:
        agents.until("] here", node)
    return [pid_of(agents, node) for node in nodes]


def test_two_nodes_complete_and_the_end_is_on_the_volume(agents: Gang) -> None:
    agents.write(SAY + 'print("done", R)')
    agents.run(codes=[0, 0])
    assert agents.record("end.json")["state"] == "Complete"
    assert [(line["attempt"], line["outcome"]) for line in agents.record("attempts.jsonl")] == [(1, "Complete")]
    assert "[rank 0] done 0" in agents.log(0)
    assert "[rank 1] done 1" in agents.log(1)


def test_ranks_get_torchrun_s_environment(agents: Gang) -> None:
    agents.write(SAY + "import json\nprint(json.dumps({k: v for k, v in os.environ.items()}))", ranks_per_node=2)
    agents.run(codes=[0, 0])
    line = next(line for line in agents.log(1).splitlines() if line.startswith("[rank 3]"))
    rank = json.loads(line.removeprefix("[rank 3] "))
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
            "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "uid-1", "TORCHELASTIC_RESTART_COUNT": "0",
            "NODE_RANK": "1",
        "NNODES": "2", "GPUS_PER_NODE": "0", "LOCKSTEP_ATTEMPT": "1", "LOCKSTEP_RUN": str(agents.run_path), "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, int(usable_cores() / 4)))),
    }  # fmt: skip
    assert {name: rank.get(name) for name in expected} == expected


def test_nodes_with_unlike_numbers_of_ranks_start_as_many_as_each_has(agents: Gang) -> None:
    agents.write(
        SAY + "import json\nprint(json.dumps({k: v for k, v in os.environ.items()}))", nodes=3, ranks_per_node=2, node_ranks=(2, 1, 1)
    )
    agents.run(codes=[0, 0, 0])
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "ROLE_RANK")
    ranks = []
    for node in range(3):
        for line in agents.log(node).splitlines():
            if line.startswith("[rank ") and "{" in line:
                environment = json.loads(line[line.index("{") :])
                ranks.append([node, *(int(environment[name]) for name in names)])
    assert sorted(ranks) == [
        [0, 0, 0, 2, 0, 3, 4, 0],
        [0, 1, 1, 2, 0, 3, 4, 1],
        [1, 2, 0, 1, 1, 3, 4, 2],
        [2, 3, 0, 1, 2, 3, 4, 3],
    ]
    assert "all 4 ranks run" in agents.log()


def test_a_rank_on_a_node_with_fewer_of_them_is_named_with_its_node(agents: Gang) -> None:
    agents.write(SAY + 'if R == "3": raise ValueError("boom")\nsignal.pause()', nodes=3, ranks_per_node=2, node_ranks=(2, 1, 1))
    agents.run(codes=[1, 1, 1])
    failure = agents.record("end.json")["failure"]
    assert (failure["rank"], failure["node"], failure["exception"]) == (3, 2, "ValueError")


def test_a_failed_rank_is_named_and_every_rank_is_dead_within_two_seconds(agents: Gang) -> None:
    agents.write(
        FOREVER.replace(
            "signal.pause()",
            'while not os.path.exists(f"{F}/fail"): time.sleep(0.01)\nif R == "1": raise ValueError("boom")\nsignal.pause()',
        )
    )
    pids = running(agents, 0, 1)
    (agents.folder / "fail").touch()
    assert gone(pids[1], 5)
    failed_at = now()
    assert gone(pids[0], 2)
    assert now() - failed_at < 2
    assert agents.codes() == [1, 1]
    failure = agents.record("end.json")["failure"]
    assert (failure["rank"], failure["node"], failure["exitCode"], failure["exception"]) == (1, 1, 1, "ValueError")
    assert failure["lastLines"][-1] == "ValueError: boom"
    assert "rank 1 | ValueError: boom" in agents.log(0)  # said in node 0's log though rank 1 is elsewhere


def test_a_descendant_that_is_just_starting_another_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of exec a process has no environment, and a moment later its marker."""
    monkeypatch.setattr(processes, "LOOKS", 5000)
    begins = ["sh", "-c", "sleep 0.2; LOCKSTEP_TEST_STRAY=here exec sleep 60"]
    with subprocess.Popen(begins, env={}, start_new_session=True) as stray:
        try:
            processes.kill_strays("LOCKSTEP_TEST_STRAY=here")
            assert stray.wait(5) == -signal.SIGKILL
        finally:
            stray.kill()


def test_grandchildren_of_ranks_die_with_the_attempt_even_in_a_session_of_their_own(agents: Gang) -> None:
    child = (
        'import subprocess\np = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True)\n'
    )
    agents.write(PID + child + 'print("child", p.pid, flush=True)\nsys.exit(3)', nodes=1)
    agents.start(0)
    pid = int(agents.until("child ").split()[-1])
    assert agents.codes() == [1]
    assert gone(pid, 2)


@pytest.mark.parametrize("alone", [False, True], ids=["in the background", "as a daemon"])
def test_a_script_that_leaves_what_it_started_is_told_so(agents: Gang, alone: bool) -> None:
    sleeps = f'import subprocess\nsubprocess.Popen(["/bin/sleep", "1000"], start_new_session={alone})\n'
    agents.write(SAY + "if R == '1':\n  " + sleeps.replace("\n", "\n  "))
    agents.run(codes=[0, 0])
    note = agents.record("end.json")["result"]["note"]
    assert note.startswith(
        "warning: rank 1 exited with 0 and left 1 program running (sleep 1000), ended with the attempt: a script has to wait"
    )
    assert f"Complete: all ranks are done; {note}" in agents.log()


def test_a_failure_is_restarted_in_place_under_the_next_attempt(agents: Gang) -> None:
    agents.write(SAY + 'sys.exit(1 if os.environ["LOCKSTEP_ATTEMPT"] == "1" and R == "1" else 0)', restart=RestartPolicy(1, 0))
    agents.run(codes=[0, 0])
    assert [(line["attempt"], line["restarts"], line["outcome"]) for line in agents.record("attempts.jsonl")] == [
        (1, 0, "Failed"),
        (2, 1, "Complete"),
    ]


def test_a_command_that_cannot_be_started_is_a_failure_with_its_name(agents: Gang) -> None:
    agents.write("", nodes=1, command=("/no/such/program",))
    agents.run(codes=[1])
    assert agents.record("end.json")["message"].endswith("exited with 127: FileNotFoundError: there is no program /no/such/program")


def test_torch_s_error_file_names_the_exception_of_a_user_s_script(agents: Gang) -> None:
    error = {"message": {"message": "KeyError: 'loss'", "extraInfo": {"py_callstack": "Traceback…"}}}
    agents.write(SAY + f'import json\njson.dump({error!r}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))\nsys.exit(1)', nodes=1)
    agents.run(codes=[1])
    assert (agents.record("end.json")["failure"]["exception"], agents.record("end.json")["message"][-15:]) == (
        "KeyError",
        "KeyError: 'loss'"[-15:],
    )


REPORTING = (
    SAY + 'import json, socket\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])\n'
)


def test_what_a_rank_says_before_its_end_comes_before_its_end(agents: Gang) -> None:
    events = [{"rank": 0, "event": "step", "step": n, "totalSteps": 50} for n in range(1, 51)]
    events += [
        {"rank": 0, "event": "checkpoint", "step": 50, "path": "/c/step-50.a1"},
        {"rank": 0, "event": "end", "result": {"adapter": "/a"}},
    ]
    agents.write(REPORTING + f"for e in {events!r}: s.send(json.dumps(e).encode())", nodes=1, training={})
    agents.run(codes=[0])
    end = agents.record("end.json")
    assert (end["state"], end["result"], end["checkpoint"]["path"]) == ("Complete", {"adapter": "/a"}, "/c/step-50.a1")


def test_a_malformed_report_is_left_out_and_said_once(agents: Gang) -> None:
    agents.write(REPORTING + 's.send(b"nonsense")\ns.send(b"[]")\ns.send(b"{" * 60001)', nodes=1)
    agents.run(codes=[0])
    assert agents.log().count("ignored a malformed report") == 1


def test_only_this_user_reaches_the_report_socket(agents: Gang) -> None:
    script = (
        'import stat\np = os.environ["LOCKSTEP_REPORT_SOCKET"]\nprint("mode", oct(stat.S_IMODE(os.stat(p).st_mode)),'
        " oct(stat.S_IMODE(os.stat(os.path.dirname(p)).st_mode)))"
    )
    agents.write(SAY + script, nodes=1)
    agents.run(codes=[0])
    assert "mode 0o600 0o700" in agents.log()


def test_ranks_of_all_nodes_have_one_secret_in_a_file_of_this_user_s_and_nowhere_else(agents: Gang) -> None:
    script = """
import hashlib, stat
path = os.environ["LOCKSTEP_SECRET_FILE"]
secret = open(path).read()
elsewhere = [*os.environ.values(), open("/proc/self/cmdline").read(), open("/proc/%d/cmdline" % os.getppid()).read()]
digest = hashlib.sha256(secret.encode()).hexdigest()[:8]
print("secret", digest, len(secret), oct(stat.S_IMODE(os.stat(path).st_mode)), any(secret in text for text in elsewhere))
"""
    agents.write(SAY + script, nodes=2)
    agents.run(codes=[0, 0])
    of_node = [next(line.partition("secret ")[2] for line in agents.log(node).splitlines() if "secret " in line) for node in (0, 1)]
    assert of_node == [f"{hashlib.sha256(ranks_secret(KEY, 'uid-1').encode()).hexdigest()[:8]} 64 0o600 False"] * 2


def test_hostile_output_does_nothing_to_the_log(agents: Gang) -> None:
    agents.write(SAY + r'sys.stdout.buffer.write(b"\x1b[2J\xff\x00end\nprogress\rbar\r\n" + b"x" * 20000 + b"\nlast")', nodes=1)
    agents.run(codes=[0])
    lines = [line.removeprefix("[rank 0] ") for line in agents.log().splitlines() if line.startswith("[rank 0] ")]
    assert lines == [r"\x1b[2J\xff\x00end", "progress", "bar", "x" * 8192, "x" * 8192, "x" * 3616, "last"]


SAVING = FOREVER.replace(
    "signal.pause()", 'signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nprint("armed", flush=True)\nwhile True: signal.pause()'
)


EXITS = pytest.mark.parametrize("saving", [SAVING, SAVING.replace("75", "0")], ids=["exit code 75", "exit code 0"])


@EXITS
def test_sigterm_to_the_agents_lets_the_ranks_save_and_stop(agents: Gang, saving: str) -> None:
    agents.write(saving, nodes=2, when_done=WhenDone.WAIT)
    agents.start(0, 1)
    for node in (0, 1):
        agents.until("armed", node)
    for node in (0, 1):
        agents.signal(node, signal.SIGTERM)
    assert agents.codes() == [75, 75]
    assert agents.record("attempts.jsonl")[-1]["outcome"] == "Stopped"
    assert not (agents.folder / "run" / "gang" / "end.json").exists()


def test_a_rank_is_asked_to_save_only_once(agents: Gang) -> None:
    count = 'n = []\nsignal.signal(signal.SIGTERM, lambda *_: (n.append(1), print("asked", flush=True)))\nprint("armed", flush=True)\n'
    wait = 'while not os.path.exists(f"{F}/go"): time.sleep(0.01)\nsys.exit(75 if len(n) == 1 else 9)'
    agents.write(SAY + count + wait, when_done=WhenDone.WAIT)
    agents.start(0, 1)
    for node in (0, 1):
        agents.until("armed", node)
    agents.signal(1, signal.SIGTERM)  # node 1 asks its own rank at once, and the coordinator then orders all nodes to
    agents.until("asked", 0)
    agents.until("saving and stopping attempt 1", 1)
    (agents.folder / "go").touch()
    assert agents.processes[1].wait(10) == 75


@EXITS
def test_one_node_that_leaves_lets_the_ranks_of_all_nodes_save(agents: Gang, saving: str) -> None:
    agents.write(saving, nodes=2, when_done=WhenDone.WAIT)
    agents.start(0, 1)
    for node in (0, 1):
        agents.until("armed", node)
    agents.signal(1, signal.SIGTERM)
    agents.until("waiting for node 1 of 2")
    assert agents.processes[1].wait(10) == 75
    agents.start(1)  # its successor: the gang goes on
    agents.until("attempt 2 starts")


def test_a_second_sigterm_ends_ranks_that_do_not_listen(agents: Gang) -> None:
    agents.write(PID + 'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint("here", flush=True)\nwhile True: signal.pause()', nodes=1)
    running(agents, 0)
    agents.signal(0, signal.SIGTERM)
    agents.until("saving and stopping")
    agents.signal(0, signal.SIGTERM)
    assert agents.codes() == [1]


def test_a_killed_agent_leaves_no_rank_behind_and_fails_the_attempt_by_its_name(agents: Gang) -> None:
    agents.write(FOREVER, when_done=WhenDone.WAIT)
    pids = running(agents, 0, 1)
    agents.processes[1].kill()
    assert gone(pids[1], 2)
    agents.start(1)  # as the kubelet would
    agents.until("Failed: node 1 was lost")
    assert gone(pids[0], 2)


def test_a_killed_coordinator_is_followed_by_one_that_goes_on_from_the_record(agents: Gang) -> None:
    agents.write(FOREVER, when_done=WhenDone.WAIT, restart=RestartPolicy(1, 0))
    pids = running(agents, 0, 1)
    agents.processes[0].kill()
    assert gone(pids[0], 2)
    agents.start(0)
    agents.until("attempt 2 starts: 2 ranks on 2 nodes, restart 1 of at most 1")
    assert gone(pids[1], 2)


def test_a_finished_job_is_never_started_again_in_a_new_pod(agents: Gang) -> None:
    agents.write(SAY + 'open(f"{F}/starts-{R}", "a").write("start ")')
    agents.run(codes=[0, 0])
    agents.run(codes=[0, 0])
    assert (agents.folder / "starts-0").read_text() == "start "
    assert len(agents.record("attempts.jsonl")) == 1


def test_another_job_of_the_same_name_starts_anew(agents: Gang) -> None:
    run = agents.write(SAY + 'open(f"{F}/starts-{R}", "a").write("start ")')
    agents.run(codes=[0, 0])
    agents.run_path.write_text(run_text(replace(run, job=JobIdentity("x", "ns", "uid-2"))))
    agents.run(codes=[0, 0])
    assert (agents.folder / "starts-0").read_text() == "start start "
    assert [line["attempt"] for line in agents.record("attempts.jsonl")] == [1, 2]


def test_an_agent_with_another_key_is_refused_and_told_so(agents: Gang) -> None:
    run = agents.write(SAY)
    (agents.folder / "other-key").write_text("00" * 32)
    other = agents.folder / "other.json"
    other.write_text(run_text(replace(run, key_file=str(agents.folder / "other-key"))))
    agents.start(0)
    agents.until("node 0 is here")
    agents.start(1, run_path=other)
    assert "the other side's proof does not fit this job's key" in agents.until("refused a connection from 127.0.0.1")
    agents.signal(1, signal.SIGTERM)
    assert not (agents.folder / "run" / "gang" / "attempts.jsonl").exists()


def test_an_agent_on_a_host_gives_up_once_node_0_is_away_for_longer_than_hosts_are_waited_for(agents: Gang) -> None:
    """It was off when the job ended or was deleted, and is not to wait for ever with the job's key."""
    agents.write(SAY, timeouts=Timeouts(start_seconds=1, return_seconds=0), host=HostPlace(""))
    agents.start(1)
    assert agents.codes() == [1]
    assert (
        "nothing heard from node 0 for 1s, longer than hosts wait for each other (away_seconds, startTimeoutSeconds): this agent ends"
        in agents.log(1)
    )
    assert not (agents.folder / "key").exists()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({"nodes": "two"}, 'run.json.nodes is "two", but must be a whole number ≥ 1'),
        ({"keyFile": "/no/such/key"}, "No such file or directory: '/no/such/key'"),
    ],
)
def test_an_agent_that_was_given_something_wrong_says_what_and_exits_with_78(agents: Gang, damage: dict[str, str], sentence: str) -> None:
    agents.write(SAY)
    agents.run_path.write_text(json.dumps(json.loads(agents.run_path.read_text()) | damage))
    agents.run(codes=[78])
    assert sentence in agents.log()


def test_a_volume_that_cannot_be_written_is_told_and_nothing_starts(agents: Gang) -> None:
    (agents.folder / "run").mkdir()
    (agents.folder / "run" / "gang").write_text("a file where a folder should be")
    agents.write(SAY + 'open(f"{F}/started", "w")', nodes=1)
    agents.start(0)
    agents.until("cannot write the job's record")
    agents.signal(0, signal.SIGTERM)
    agents.codes()
    assert not (agents.folder / "started").exists()


def test_a_start_on_an_empty_volume_takes_no_number_again_that_another_volume_has(agents: Gang) -> None:
    """Node 0 is another machine than before, whose volume knows of no attempt: no commit of the job has a name twice."""
    (agents.folder / "commits").mkdir()
    commit = 'import os; os.mkdir("{FOLDER}/commits/step-5.a{LOCKSTEP_ATTEMPT}.r{RANK}".format(**os.environ))'
    for volume, attempts_before in (("first", 6), ("second", 7)):
        agents.write(commit, run_dir=str(agents.folder / volume), attempts_before=attempts_before)
        agents.run(codes=[0, 0])
    commits = sorted(path.name for path in (agents.folder / "commits").iterdir())
    assert commits == ["step-5.a7.r0", "step-5.a7.r1", "step-5.a8.r0", "step-5.a8.r1"]
    assert [json.loads(line)["attempt"] for line in (agents.folder / "second/gang/attempts.jsonl").read_text().splitlines()] == [8]


def test_the_record_of_an_attempt_has_the_start_of_each_node_s_machine(agents: Gang) -> None:
    agents.write(SAY)
    agents.run(codes=[0, 0])
    assert agents.record("attempts.jsonl")[0]["boots"] == [boot_id(), boot_id()]
