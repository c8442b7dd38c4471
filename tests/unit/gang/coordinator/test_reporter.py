"""Reports to the operator: a real HTTPS server in the test, a real coordinator that reports to it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lockstep_gang.contract.proof import is_report_signature
from lockstep_gang.contract.reply import Fact, FactType
from lockstep_gang.contract.report import RankCount, Report, Save, State, parse_report, report_body
from lockstep_gang.contract.run import JobIdentity, ReportTarget, RestartPolicy, WhenDone
from lockstep_gang.coordinator import https_post, reporter
from lockstep_gang.coordinator.https_post import Answer, Sender
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.lifecycle.gang import new_gang
from lockstep_gang.lifecycle.summary import summarize
from lockstep_spec.codec import to_json
from unit.gang.cases import KEY, Gang, free_port, gang, make_run
from unit.virtual_time import VirtualClock


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for 127.0.0.1: the file has the key too."""

    pem: str
    file: Path


REPORT = Report(JobIdentity("x", "ns", "job-uid"), "x-0", 5, 1, 0, State.RUNNING, "", (), RankCount(2, 2))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(folder: Path) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lockstep-operator")])
    today = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, today - datetime.timedelta(1), today + datetime.timedelta(1))
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = builder.add_extension(alternative, critical=False).add_extension(x509.BasicConstraints(True, None), critical=True)
    pem = signed.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()
    file = folder / "server.pem"
    file.write_text(private + pem)
    return Certificate(pem, file)


class Operator:
    """Takes reports as the operator would; `answers` are given first, then 200."""

    def __init__(self, certificate: Certificate, port: int) -> None:
        self.reports: list[Report] = []
        self.tokens: list[str] = []
        self.seen: list[int] = []
        self.connections: list[tuple[str, int]] = []
        """The sender's address, for each report."""
        self.headers: dict[str, str] = {}
        self.closes = False
        """True if each connection ends after its answer, which doesn't say so."""
        self.racks: list[str] = []
        self.facts: list[Fact] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.refuses: Callable[[Report], tuple[int, dict[str, Any]] | None] = lambda _: None
        self.news = threading.Condition()
        operator = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                operator.connections.append(self.client_address)
                status, answer = operator.take(body, self.headers["X-Lockstep-Signature"], self.headers["Authorization"])
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in operator.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = operator.closes

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.file)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def take(self, body: bytes, signature: str, authorization: str) -> tuple[int, dict[str, Any]]:
        with self.news:
            assert is_report_signature(KEY, body, signature)
            report = parse_report(body)
            self.seen.append(report.sequence)
            status, answer = self.refuses(report) or (self.answers.pop(0) if self.answers else (200, self.reply(report)))
            if status == 200:
                self.reports.append(report)
                self.tokens.append(authorization)
            self.news.notify_all()
            return status, answer

    def reply(self, report: Report) -> dict[str, Any]:
        return {"facts": [to_json(fact) for fact in self.facts], "racks": self.racks}

    def until(self, state: State) -> Report:
        with self.news:
            found = self.news.wait_for(lambda: [report for report in self.reports if report.state is state], 15)
            assert found, [report.state for report in self.reports]
            return found[0]

    def states(self) -> list[str]:
        """States in the order in which they came, each once."""
        return list(dict.fromkeys(report.state.value for report in self.reports))

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Gang]:
    with gang(tmp_path) as made:
        (tmp_path / "token").write_text("first\n")
        yield made


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def operator(certificate: Certificate, port: int) -> Iterator[Operator]:
    made = Operator(certificate, port)
    yield made
    made.close()


def target(agents: Gang, certificate: Certificate, port: int) -> ReportTarget:
    return ReportTarget(f"https://127.0.0.1:{port}/v1/report", certificate.pem, str(agents.folder / "token"))


def test_every_transition_is_reported_in_its_order(agents: Gang, certificate: Certificate, operator: Operator, port: int) -> None:
    agents.write('print("hello")', target(agents, certificate, port))
    agents.run(codes=[0, 0])
    states = operator.states()
    assert states[0] == "Waiting"
    assert states[-1] == "Complete"
    assert [state for state in states if state in ("Waiting", "Starting", "Complete")] == ["Waiting", "Starting", "Complete"]
    sequences = [report.sequence for report in operator.reports]
    assert sequences == sorted(set(sequences))
    assert set(operator.tokens) == {"Bearer first"}
    assert any("[rank 0] hello" in report.log for report in operator.reports)


def test_a_failure_is_reported_with_its_rank_and_last_lines(agents: Gang, certificate: Certificate, operator: Operator, port: int) -> None:
    agents.write('import os\nif os.environ["RANK"] == "1": raise ValueError("boom")', target(agents, certificate, port))
    agents.run(codes=[1, 1])
    failure = operator.until(State.FAILED).failure
    assert (failure.rank, failure.exception, failure.last_lines[-1]) == (1, "ValueError", "ValueError: boom")


def test_an_operator_that_comes_late_hears_every_transition(agents: Gang, certificate: Certificate, port: int) -> None:
    agents.write('print("hello")', target(agents, certificate, port), when_done=WhenDone.WAIT)
    agents.start(0, 1)
    agents.until("the operator did not take the report")
    agents.until("Complete: all ranks are done")  # the job does not wait for it
    operator = Operator(certificate, port)
    try:
        operator.until(State.COMPLETE)
        assert operator.states()[0] == "Waiting"
    finally:
        operator.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_the_cluster_took_away_is_waited_for_and_costs_no_restart(
    agents: Gang, certificate: Certificate, operator: Operator, port: int, lost: int
) -> None:
    """Node 0 takes the coordinator along: the next one goes on from the record on the volume."""
    script = 'import signal\nprint("here", flush=True)\nsignal.pause()'
    agents.write(script, target(agents, certificate, port), when_done=WhenDone.WAIT, restart=RestartPolicy(0, 0))
    agents.start(0, 1)
    operator.until(State.RUNNING)
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    operator.facts = [Fact(FactType.NODE_LOST, lost, f"x-{lost}", "Unreachable", "Node b is NotReady", "pod", "b", since)]
    agents.processes[lost].kill()
    agents.start(lost)  # its replacement
    agents.until("attempt 2 starts")
    with operator.news:
        assert operator.news.wait_for(lambda: operator.reports[-1].attempt == 2, 15)
    report = operator.reports[-1]
    assert [(entry.failure.message, entry.counts) for entry in report.history] == [(f"node {lost} was lost: Node b is NotReady", False)]
    assert (report.restarts, report.restarts_counted) == (1, 0)


@pytest.mark.parametrize("status", [500, 421, 401])
def test_a_refused_report_is_repeated_until_it_is_taken(
    agents: Gang, certificate: Certificate, operator: Operator, port: int, status: int
) -> None:
    operator.answers = [(status, {})]
    agents.write("", target(agents, certificate, port), nodes=1)
    agents.run(codes=[0])
    assert operator.states()[0] == "Waiting"
    assert operator.seen[0] == operator.seen[1]


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("takes_smallest", [True, False])
def test_a_report_that_an_operator_cannot_read_holds_up_no_other(
    agents: Gang, certificate: Certificate, operator: Operator, port: int, status: int, takes_smallest: bool
) -> None:
    """As an older operator does, which knows no cause of the newest version."""
    bodies: list[Report] = []

    def refuse(report: Report) -> tuple[int, dict[str, Any]] | None:
        bodies.append(report)
        is_small = report.goodput is None and (report.failure is None or report.failure.cause is None)
        return None if is_small and takes_smallest else (status, {"message": "report.failure.cause is not known"})

    operator.refuses = refuse
    agents.write('raise ValueError("boom")', target(agents, certificate, port), nodes=1)
    agents.start(0)
    assert agents.codes() == [1]
    assert {report.state for report in bodies} >= {State.WAITING, State.FAILED}
    assert [report.state for report in operator.reports][-1:] == ([State.FAILED] if takes_smallest else [])
    whole, smallest = "the operator refuses a report (HTTP", "the operator refuses even the smallest report (HTTP"
    assert (agents.log(0).count(whole), agents.log(0).count(smallest)) == (1, 0 if takes_smallest else 1)


def test_jobs_that_an_operator_did_not_hear_come_back_at_different_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their coordinators doubled the same waits; each now takes from half of it to all."""
    waits: list[list[float]] = []

    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        waits[-1].append(seconds)
        if len(waits[-1]) == 10:
            raise Enough

    async def deliver() -> None:
        reporter = Reporter(ReportTarget("https://127.0.0.1:1/", "", str(tmp_path / "none")), KEY, lambda reply: None, lambda text: None)
        reporter.transition(summarize(new_gang(make_run()), make_run()))
        with pytest.raises(Enough):
            await reporter.run()

    monkeypatch.setattr("lockstep_gang.coordinator.reporter.asyncio.sleep", sleep)
    for _ in range(20):
        waits.append([])
        asyncio.run(deliver())
    for number, longest in enumerate((0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0)):
        times = [wait[number] for wait in waits]
        assert longest / 2 <= min(times) < max(times) <= longest


@pytest.fixture
def sender(certificate: Certificate, operator: Operator, port: int, tmp_path: Path) -> Iterator[Sender]:
    (tmp_path / "token").write_text("first")
    with contextlib.closing(
        Sender(ReportTarget(f"https://127.0.0.1:{port}/v1/report", certificate.pem, str(tmp_path / "token")), KEY)
    ) as made:
        yield made


def test_all_reports_go_over_one_connection(sender: Sender, operator: Operator) -> None:
    for _ in range(3):
        assert sender.post(REPORT.job, report_body(REPORT)).status == 200
    assert len(operator.connections) == 3
    assert len(set(operator.connections)) == 1


def test_a_connection_that_the_operator_has_closed_meanwhile_is_replaced_at_once(sender: Sender, operator: Operator) -> None:
    operator.closes = True
    answers = [sender.post(REPORT.job, report_body(REPORT)) for _ in range(3)]
    assert [(answer.status, answer.is_repeated) for answer in answers] == [(200, False), (200, True), (200, True)]
    assert len(set(operator.connections)) == 3


def test_a_replica_that_is_named_gets_a_connection_of_its_own(sender: Sender, operator: Operator, port: int) -> None:
    for address in (None, f"127.0.0.1:{port}", f"127.0.0.1:{port}", None):
        sender.post(REPORT.job, report_body(REPORT), address)
    assert len(set(operator.connections)) == 3


def delivered(answers: list[Answer], tmp_path: Path) -> tuple[list[int], list[float]]:
    """Numbers of the reports that one delivery sent, and its waits."""
    sent, waits = list[int](), list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def post(report: Report) -> Answer:
        sent.append(report.sequence)
        return answers.pop(0)

    made = Reporter(ReportTarget("https://127.0.0.1:1/", "", str(tmp_path / "none")), KEY, lambda reply: None, lambda text: None)
    made._post = post  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter.asyncio, "sleep", sleep)
        asyncio.run(made._deliver(REPORT))
    return sent, waits


@pytest.mark.parametrize(("asked", "least"), [(7.0, 7.0), (3600.0, 30.0), (0.0, 0.0)])
def test_a_job_that_reports_too_often_comes_again_when_the_operator_says(tmp_path: Path, asked: float, least: float) -> None:
    sent, waits = delivered([Answer(429, b"{}", asked), Answer(200, b"{}")], tmp_path)
    assert len(set(sent)) == 1
    assert len(waits) == 1
    assert least < waits[0] <= least + 0.2


@pytest.mark.parametrize(("is_repeated", "times"), [(True, 1), (False, 2)])
def test_a_report_that_was_sent_twice_and_is_not_newer_has_arrived(tmp_path: Path, is_repeated: bool, times: int) -> None:
    sent, _ = delivered([Answer(409, b'{"sequence": 1}', is_repeated=is_repeated), Answer(200, b"{}")], tmp_path)
    assert len(sent) == times


def test_the_replica_that_another_one_names_is_asked_from_then_on(
    agents: Gang, certificate: Certificate, operator: Operator, port: int
) -> None:
    other_port = free_port()
    leader = Operator(certificate, other_port)
    try:
        operator.answers = [(421, {"leader": f"127.0.0.1:{other_port}"})]
        agents.write("", target(agents, certificate, port), nodes=1)
        agents.run(codes=[0])
        assert len(operator.seen) == 1
        assert leader.states()[-1] == "Complete"
        assert "did not take the report" not in agents.log(0)
    finally:
        leader.close()


def test_a_named_replica_without_the_operator_s_certificate_hears_nothing_and_the_first_one_is_asked_again(
    agents: Gang, certificate: Certificate, operator: Operator, port: int, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other_port = free_port()
    stranger = Operator(make_certificate(tmp_path / "other"), other_port)
    try:
        operator.answers = [(421, {"leader": f"127.0.0.1:{other_port}"})]
        agents.write("", target(agents, certificate, port), nodes=1)
        agents.run(codes=[0])
        assert stranger.seen == []
        assert operator.states()[-1] == "Complete"
    finally:
        stranger.close()


def test_a_number_that_is_not_newer_is_followed_by_one_that_is(
    agents: Gang, certificate: Certificate, operator: Operator, port: int
) -> None:
    newest = 4_000_000_000_000_000_000
    operator.answers = [(409, {"sequence": newest})]
    agents.write("", target(agents, certificate, port), nodes=1)
    agents.run(codes=[0])
    assert operator.reports[0].sequence > newest
    assert operator.states()[0] == "Waiting"


def test_the_token_is_read_again_for_every_report(agents: Gang, certificate: Certificate, operator: Operator, port: int) -> None:
    agents.write('import os, time\nwhile not os.path.exists("go"): time.sleep(0.01)', target(agents, certificate, port), nodes=1)
    agents.start(0)
    operator.until(State.RUNNING)
    (agents.folder / "token").write_text("renewed")
    (agents.folder / "go").touch()
    assert agents.codes() == [0]
    assert operator.tokens[-1] == "Bearer renewed"


STEPPING = """
import json, os, signal, socket, sys
report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
def tell(event, **fields):
    report.send(json.dumps({"event": event, "rank": int(os.environ["RANK"]), **fields}).encode())
def save(*_):
    if os.environ["RANK"] == "0":
        tell("checkpoint", step=7, path="/c/step-7")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
tell("step", step=7)
print("step 7 is done", flush=True)
while True:
    signal.pause()
"""


def test_the_last_report_tells_how_the_stop_went(agents: Gang, certificate: Certificate, operator: Operator, port: int) -> None:
    agents.write(STEPPING, target(agents, certificate, port), when_done=WhenDone.WAIT)
    agents.start(0, 1)
    for node in (0, 1):
        agents.until("step 7 is done", node)
    for node in (0, 1):
        agents.signal(node, signal.SIGTERM)
    assert agents.codes() == [75, 75]
    stop = operator.reports[-1].stop
    assert (stop.save, stop.message, stop.lost_steps) == (Save.SAVED, "saved at step 7 and stopped", 0)


def test_ranks_of_one_rack_are_neighbors(agents: Gang, certificate: Certificate, operator: Operator, port: int) -> None:
    operator.racks = ["a", "b", "a"]
    say = 'import os\nprint("place", *(os.environ[n] for n in ("RANK", "GROUP_RANK", "LOCKSTEP_NODE")))'
    agents.write(say, target(agents, certificate, port), nodes=3, ranks_per_node=2, rack_grouped=True)
    agents.run(codes=[0, 0, 0])
    agents.until("ranks follow the racks: node 0, 2 (rack a), then 1 (rack b)")
    places = [sorted(line.split("place ")[1] for line in agents.log(node).splitlines() if "place " in line) for node in range(3)]
    assert places == [["0 0 0", "1 0 0"], ["4 2 1", "5 2 1"], ["2 1 2", "3 1 2"]]


def test_a_server_whose_certificate_the_run_does_not_know_gets_no_report(agents: Gang, operator: Operator, port: int) -> None:
    unrelated = make_certificate(agents.folder)
    agents.write("", target(agents, unrelated, port), nodes=1)
    agents.start(0)
    agents.until("certificate verify failed")
    assert operator.reports == []


def test_the_same_trouble_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = VirtualClock(), list[float]()
    monkeypatch.setattr(reporter, "time", clock)
    made = Reporter.__new__(Reporter)
    made._trouble_text, made._complained_at, made._say = "", 0.0, lambda line: told.append(clock.now - 1000.0)
    for _ in range(130):
        made._complain("HTTP 503")
        clock.sleep(1.0)
    made._complain("HTTP 401")
    assert told == [0, 60, 120, 130]


def test_a_replica_of_the_operator_that_is_gone_is_given_up_after_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def connect(address: object, seconds: float) -> None:
        limits.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(https_post.socket, "create_connection", connect)
    connection = https_post._ConnectionTo("10.0.0.1:8443", urlsplit("https://operator:8443"), ssl.create_default_context())
    with pytest.raises(TimeoutError):
        connection.connect()
    assert (limits, connection.timeout) == ([3.0], 10.0)
