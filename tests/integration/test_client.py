"""A pool from outside of the cluster, over Ray Client: everything as inside, on a real head with
its client server.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
from collections.abc import Callable
from pathlib import Path
from socket import AF_INET
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from raypool.backends.ray.session import LOOPBACK_ONLY

LAPTOP = """
import os, json, sys, time, signal
from raypool import *
from raypool.cluster import connect
connect.ANSWER_S = 60.0  # the head may be busy
HEAD, TOKEN, TMP = os.environ["HEAD"], os.environ["TOKEN"], os.environ["TMP_OF_TEST"]
def pool_of(n, **changes):
    return parpool(n, **{"address": HEAD, "token_file": TOKEN, "quiet": True, **changes})
"""

Laptop = Callable[..., Any]


@pytest.fixture
def laptop(head: Any, laptop_at: Laptop) -> Laptop:
    """Run code in a process that knows the cluster by its address only; return what it puts into
    `said`.
    """
    return lambda code, **env: laptop_at(head, code, **env)


@pytest.fixture
def laptop_at(run_python: Any, tmp_path: Path) -> Laptop:
    """The same for any head."""

    def run(head: Any, code: str, **env: str) -> Any:
        given = {
            "HEAD": head.client,
            "TOKEN": str(head.token_file),
            "TMP_OF_TEST": str(tmp_path),
            "HOME": str(tmp_path),
        }
        done = run_python(f"{LAPTOP}\n{code}\nprint('SAID', json.dumps(said))", **{**given, **env})
        line = next(line for line in done.stdout.splitlines() if line.startswith("SAID "))
        return json.loads(line.removeprefix("SAID "))

    return run


CALLS = """
def twice(x):
    print("doing", x)
    report(loss=x)
    return 2 * x
def fail():
    raise ZeroDivisionError("on purpose")
def die_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "lived"
def fill(queue, number):
    for value in range(number):
        queue.put(value)
def save(x):
    folder = current_task().checkpoint_dir
    (folder / "state").write_text(str(x))
    return str(folder)
import numpy as np
said = {}
with pool_of(2) as pool:
    results = pool.parfor(twice, range(200))
    said["values"], said["losses"] = list(results), sorted(results.metrics["loss"])
    future = pool.parfeval(twice, 7)
    future.result()
    said["diary"] = future.diary
    try:
        pool.parfeval(fail).result()
    except ZeroDivisionError as error:
        said["error"] = str(error)
    said["lived"] = pool.parfeval(die_once, TMP + "/once").result()
    future = pool.parfeval(time.sleep, 600)
    while future.state != "running":
        time.sleep(0.01)
    future.cancel()
    said["after"] = list(pool.parfor(abs, [-1, -2]))
    queue, narrow = DataQueue(), DataQueue(maxsize=2)
    pool.parfeval(fill, queue, 4)
    pool.parfeval(fill, narrow, 4)
    said["queue"] = [queue.get(300) for _ in range(4)] + [narrow.get(300) for _ in range(4)]
    pool.store["key"] = 3
    said["store"] = pool.store["key"]
    constant = pool.constant(os.getpid)
    said["constant"] = len(set(pool.parfor(lambda _: constant.value, range(20)))) <= 2
    array = np.arange(2_000_000, dtype=float)
    said["large"] = float((pool.parfeval(lambda x: 2 * x, array).result() == 2 * array).mean())
    saved = list(pool.parfor(save, [1, 2], run_dir=TMP + "/run"))
    said["saved"] = sorted(open(folder + "/state").read() for folder in saved)
    again = pool.parfor(save, [1, 2, 3], run_dir=TMP + "/run")
    said["again"] = len(again)
    pool.resize(1)
    said["resized"] = pool.num_workers
    said["hosts"] = len(pool.device_table())
    try:
        pool_of(9)
    except ResourceError as error:
        said["too_many"] = str(error)
    try:
        parpool(gpus=[0], quiet=True)
    except InvalidValueError as error:
        said["not_here"] = str(error)
"""


def test_calls_loops_and_what_tasks_say(laptop: Laptop) -> None:
    said = laptop(CALLS)
    assert said["values"] == [2 * x for x in range(200)]
    assert said["losses"] == list(range(200))
    assert said["diary"] == "doing 7\n"
    assert said["error"] == "on purpose"
    assert said["lived"] == "lived"
    assert said["after"] == [1, 2]
    assert said["queue"] == [0, 1, 2, 3] * 2
    assert said["store"] == 3
    assert said["constant"]
    assert said["large"] == 1
    assert said["saved"] == ["1", "2"]
    assert said["again"] == 3
    assert said["resized"] == 1
    assert said["too_many"].startswith("GPU: requested 9, available ")
    assert "ClusterProbe" not in said["too_many"]
    assert said["not_here"].startswith("gpus=[0] are GPUs of this machine, which is not a node of")


FAR = """
import platform
platform.node = lambda: "laptop"
def save(x):
    folder = current_task().checkpoint_dir
    (folder / "state").write_text(str(x))
    return x
def kill(pid):
    os.kill(pid, signal.SIGKILL)
said = {}
with pool_of(2) as pool:
    said["saved"] = pool.parfeval(save, 5).result()
    said["shared"] = list(pool.parfor(save, [1], run_dir=TMP + "/run"))
    os.chdir(TMP)
    try:
        pool.parfor(save, [1], run_dir="/proc/self/cwd/own")  # another folder for each process
    except InvalidValueError as error:
        said["refused"] = str(error)
    before = [info.pid for info in pool.workers]
    os.kill(before[1], signal.SIGKILL)  # it is idle, so that no call comes back to tell of it
    deadline = time.monotonic() + 300
    while before[1] in (after := [info.pid for info in pool.workers]) and time.monotonic() < deadline:
        time.sleep(0.05)
    said["same"] = [pid in before for pid in after]
    said["values"] = list(pool.options(retries=0).parfor(abs, [-1, -2]))
"""


def test_a_laptop_is_another_machine(laptop: Laptop) -> None:
    said = laptop(FAR)
    assert said["saved"] == 5
    assert said["shared"] == [1]  # as on a cluster whose login node and nodes share a file system
    assert (
        "opened the pool, which is outside of the cluster. Use a folder that all machines share"
        in said["refused"]
    )
    assert said["same"] == [True, False]
    assert said["values"] == [1, 2]


RANKS = """
import warnings
import numpy as np, torch
def meet(context, part=None):
    ones = context.all_reduce(np.ones(3))
    return float(ones.sum()) + (0 if part is None else part)
def loop(config):
    import ray.train
    for step in range(3):
        ray.train.report({"loss": step})
    return ray.train.get_context().get_world_size()
said = {}
with pool_of(2, fast_multinode=True, env={"NCCL_DEBUG": "INFO"}) as pool:
    composite = pool.spmd(meet)
    said["parts"] = [composite[rank] for rank in range(2)]
    with_parts = pool.spmd(meet, composite)
    said["with_parts"] = [with_parts[rank] for rank in range(2)]
    said["nccl"] = pool.parfeval(lambda: [os.environ["NCCL_IB_DISABLE"], os.environ["NCCL_DEBUG"]]).result()
    said["trained"] = pool.train(loop).result().metrics["loss"]
    data = torch.rand(64, 2), torch.rand(64, 1)
    said["fitted"] = type(pool.fit(torch.nn.Linear(2, 1), data, torch.nn.functional.mse_loss).result().model).__name__
"""


@pytest.mark.long
def test_ranks_composites_and_trainings(laptop: Laptop) -> None:
    said = laptop(RANKS)
    assert said["parts"] == [6, 6]
    assert said["with_parts"] == [12, 12]
    assert said["nccl"] == ["0", "INFO"]
    assert said["trained"] == 2
    assert said["fitted"] == "Linear"


SHIPPED = """
import pathlib
folder = pathlib.Path(TMP) / "code"
folder.mkdir()
(folder / "lab_module.py").write_text("def answer():\\n    return 42\\n")
(folder / "data.csv").write_text("1\\n")
(folder / "secret.csv").write_text("2\\n")
(folder / ".rayignore").write_text("secret.csv\\n")
def look():
    import lab_module
    return lab_module.answer(), sorted(os.listdir("."))
said = {}
with pool_of(1, working_dir=str(folder)) as pool:
    said["seen"] = pool.parfeval(look).result()
    with pool_of(1, working_dir=str(folder)) as other:
        said["again"] = other.parfeval(look).result()[0]
    try:
        pool_of(1, working_dir=TMP)
    except StartupError as error:
        said["another"] = str(error)
    try:
        pool_of(1, address="ray://127.0.0.1:1")
    except StartupError as error:
        said["elsewhere"] = str(error)
"""


def test_a_folder_travels_with_the_connection(laptop: Laptop) -> None:
    said = laptop(SHIPPED)
    assert said["seen"][0] == said["again"] == 42
    assert "data.csv" in said["seen"][1]
    assert "secret.csv" not in said["seen"][1]
    assert said["another"].startswith(
        "working_dir can be sent only when this process connects to Ray"
    )
    assert said["elsewhere"].startswith(
        "This process is connected to another Ray than the one at ray://127.0.0.1:1"
    )


REFUSED = """
import pathlib
wrong = pathlib.Path(TMP) / "wrong"
wrong.write_text("0" * 64)
said = {}
def try_it(name, **changes):
    try:
        parpool(1, **{"address": HEAD, "quiet": True, **changes})
    except StartupError as error:
        said[name] = str(error)
try_it("none")
try_it("missing", token_file=TMP + "/nix")
try_it("wrong", token_file=str(wrong))
try_it("nobody", token_file=TOKEN, address="ray://127.0.0.1:1")
try_it("not a client server", token_file=TOKEN, address=f"ray://{os.environ['GCS']}")
try_it("no control store", token_file=TOKEN, address=HEAD.removeprefix("ray://"))
import psutil
addresses, psutil.net_if_addrs = psutil.net_if_addrs, dict
try_it("no node", token_file=TOKEN, address=os.environ["GCS"])
psutil.net_if_addrs = addresses
import ray, raypool
ray.__version__, version = "2.59.0", ray.__version__
try_it("version", token_file=TOKEN)
ray.__version__ = version
raypool.__version__, version = "0.0.9", raypool.__version__
try_it("raypool", token_file=TOKEN)
raypool.__version__ = version
with pool_of(1) as pool:
    said["in the end"] = pool.parfeval(abs, -1).result()
said["afterwards"] = ray.is_initialized()
"""


def test_what_is_in_the_way_is_said_within_seconds(laptop: Laptop, head: Any) -> None:
    said = laptop(REFUSED, GCS=head.address)
    expected = {
        "none": f"The cluster at {head.client} requires a token, but there is none in ",
        "missing": "could not be read: No such file or directory",
        "wrong": "wrong, which may be another cluster's, or out of date.",
        "nobody": "Nothing answers at ray://127.0.0.1:1",
        "not a client server": "is not a working Ray Client server",
        "no control store": "is not a working Ray control store",
        "no node": f"This machine is not a node of the cluster at {head.address} (its nodes: ",
        "version": "runs Ray 2.60.0 and Python 3.",
        "raypool": "this process 0.0.9. Both need the same version:",
    }
    for name, words in expected.items():
        assert words in said[name], name
    assert said["in the end"] == 1  # a process whose token was wrong can mend it
    assert said["afterwards"] is False  # the pool has made the connection, and ends it


BROKEN = """
import psutil
import ray, traceback
said = {"begun": []}
with pool_of(2) as pool:
    ray.init = lambda *args, **options: said["begun"].append(traceback.format_stack())
    pids = [info.pid for info in pool.workers]
    future = pool.parfeval(time.sleep, 600)
    while future.state != "running":
        time.sleep(0.01)
    for process in psutil.process_iter():
        try:
            if "specific-server" in " ".join(process.cmdline()) and process.environ().get("RAY_AUTH_TOKEN_PATH") == TOKEN:
                process.kill()
        except psutil.Error:
            pass
    from raypool.backends.ray import client, nodes, session
    said["ours"] = session.is_ours()  # asks nobody
    try:
        future.result(300)
    except RaypoolError as error:
        said["error"] = type(error).__name__, f"{error} {error.__cause__!r}"
    said["asked"] = []
    for ask in (nodes.look, client.home_node):
        try:
            ask()
        except RaypoolError as error:
            said["asked"].append(type(error).__name__)
"""


def test_a_connection_that_breaks_ends_the_pool(laptop: Laptop) -> None:
    said = laptop(BROKEN, RAY_CLIENT_RECONNECT_GRACE_PERIOD="1")
    name, words = said["error"]
    assert name == "PoolBrokenError"
    assert (
        "The connection to the cluster has ended" in words
        or "The cluster has not answered for" in words
    )
    # Ray starts a new one on this machine if it is asked anything afterwards
    assert not said["begun"], "".join(said["begun"][0])
    assert said["asked"] == ["PoolClosedError"] * 2
    assert said["ours"] is True


LEFT = """
with pool_of(2) as pool:
    def work():
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        open(TMP + f"/{os.getpid()}-{child.pid}", "w").close()
        time.sleep(600)
    futures = [pool.parfeval(work) for _ in range(2)]
    time.sleep(600)
"""


def test_a_laptop_that_is_gone_leaves_nothing_running(
    head: Any, start_python: Any, tmp_path: Path, eventually: Callable[..., bool]
) -> None:
    env = {
        "HEAD": head.client,
        "TOKEN": str(head.token_file),
        "TMP_OF_TEST": str(tmp_path),
        "HOME": str(tmp_path),
    }
    process = start_python(LAPTOP + LEFT, **env, RAY_CLIENT_RECONNECT_GRACE_PERIOD="1")
    assert eventually(lambda: len(list(tmp_path.glob("*-*"))) == 2)
    pids = [int(pid) for path in tmp_path.glob("*-*") for pid in path.name.split("-")]
    process.process.kill()
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)))


# --- encrypted ------------------------------------------------------------------------------------

TLS = """
def tls(name, authority="ours"):
    return Tls(certificate=f"{TMP}/{name}.pem", key=f"{TMP}/{name}.key", authority=f"{TMP}/{authority}.pem")
said = {}
def try_it(name, **changes):
    try:
        pool_of(1, **changes)
    except StartupError as error:
        said[name] = str(error)
before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
try_it("none")
try_it("their certificate", tls=tls("theirs-node"))
try_it("their authority", tls=tls("node", "theirs"))
with pool_of(1, tls=tls("node")) as pool:
    said["values"] = list(pool.parfor(abs, [-1, -2, -3])), pool.parfeval(len, bytes(3_000_000)).result()
try_it("not to that one", tls=tls("node"), address=os.environ["PLAIN"], token_file=os.environ["PLAIN_TOKEN"])
with pool_of(1, address=os.environ["PLAIN"], token_file=os.environ["PLAIN_TOKEN"]) as pool:
    said["plain"] = list(pool.parfor(abs, [-4]))
with parpool(1, quiet=True, resources=WorkerResources(gpus=0)) as pool:
    said["own"] = list(pool.parfor(abs, [-5]))
said["left"] = [name for name in os.environ if "TLS" in name]
"""


@pytest.mark.long
def test_an_encrypted_cluster(
    head: Any, run_head: Callable[..., Any], laptop_at: Laptop, tmp_path: Path
) -> None:
    for authority, node in (("ours", "node"), ("theirs", "theirs-node")):
        make_certificates(tmp_path, authority, node)
    env = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(tmp_path / "node.pem"),
        "RAY_TLS_SERVER_KEY": str(tmp_path / "node.key"),
        "RAY_TLS_CA_CERT": str(tmp_path / "ours.pem"),
    }
    with run_head({"num-cpus": 2, "num-gpus": 1}, env) as encrypted:
        said = laptop_at(encrypted, TLS, PLAIN=head.client, PLAIN_TOKEN=str(head.token_file))
    assert said["values"] == [[1, 2, 3], 3_000_000]
    expected = {
        "none": "encrypts its connections, but this process has no certificate.",
        "their certificate": (
            "rejected this machine's certificate, or this machine rejected the server's ("
        ),
        "their authority": (
            "rejected this machine's certificate, or this machine rejected the server's ("
        ),
        "not to that one": "does not encrypt. Leave tls (and RAY_USE_TLS) out",
    }
    for name, words in expected.items():
        assert words in said[name], (name, said[name])
    assert said["plain"] == [4]
    assert said["own"] == [5]  # a Ray on this machine, after all that
    assert said["left"] == []


def make_certificates(folder: Path, authority: str, node: str) -> None:
    """Write an authority's certificate, and a certificate with its key for this machine that it has
    signed.
    """
    signer, root = new_key(), subject(f"{authority} authority")
    extension = x509.BasicConstraints(ca=True, path_length=None)
    write_certificate(folder / f"{authority}.pem", root, root, signer, signer, extension)
    key = new_key()
    addresses = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == AF_INET
    }
    names = x509.SubjectAlternativeName(
        [
            x509.DNSName("localhost"),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in sorted(addresses)),
        ]
    )
    write_certificate(folder / f"{node}.pem", subject(node), root, key, signer, names)
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (folder / f"{node}.key").write_bytes(text)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def write_certificate(
    path: Path,
    name: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(hours=1),
        not_valid_after=now + datetime.timedelta(days=1),
    )
    certificate = builder.add_extension(extension, critical=True).sign(signer, hashes.SHA256())
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


# --- a machine of the cluster goes ----------------------------------------------------------------

LOSS = """
import psutil
def where(x):
    import ray
    time.sleep(0.3)
    return x, ray.get_runtime_context().get_node_id()
said = {}
with pool_of(4, retries=3, resources=WorkerResources(gpus=0)) as pool:
    futures = [pool.parfeval(where, x) for x in range(40)]
    while len({future.result()[1] for future in futures if future.state == "finished"}) < 2:
        time.sleep(0.01)
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAYPOOL_TEST_PROCESS") == os.environ["SECOND"]:
                process.kill()
        except psutil.Error:
            pass
    answers = [future.result(300) for future in futures]
    said["items"], said["nodes"] = [item for item, _ in answers], len({node for _, node in answers})
    said["nodes after"] = len({node for _, node in pool.parfor(where, range(8))})
"""


@pytest.mark.long
def test_a_machine_that_is_lost(
    run_head: Callable[..., Any], second_node: Callable[..., str], laptop_at: Laptop
) -> None:
    health = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
    with run_head({"num-cpus": 2, "num-gpus": 0}, {**health, LOOPBACK_ONLY: "1"}) as head:
        said = laptop_at(head, LOSS, SECOND=second_node(head, {"num-cpus": 2, "num-gpus": 0}))
    assert said["items"] == list(range(40))
    assert said["nodes"] == 2
    assert said["nodes after"] == 1
