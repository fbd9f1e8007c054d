"""The driver's side of the node agents (see `node_agent`): it starts them, asks them and ends them.

Each node with workers of the pool has one agent, started with the first of these.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray

from raypool.backends.ray import client, fork_server, mps
from raypool.backends.ray.calls import (
    answer_to,
    answered,
    aside,
    later,
    on_node,
    unless_ended,
    when_done,
)
from raypool.backends.ray.claims import Claim, locate
from raypool.backends.ray.node_agent import OFFERED, NodeAgent
from raypool.backends.ray.nodes import LOOK_S
from raypool.backends.ray.packing import snapshot
from raypool.backends.ray.worker import Introduction, name_of_agent
from raypool.channel.exchange import POOL_ENDED
from raypool.channel.hub import Hub
from raypool.channel.queues import offer
from raypool.channel.records import NodeDevices, NodeGpus, WorkerInfo
from raypool.core.messages import Signal
from raypool.errors import PoolClosedError, WorkerLostError
from raypool.gpus.devices import Inventory
from raypool.worker.folders import token_of

logger = logging.getLogger("raypool")

FINISH_TIMEOUT_S = 5.0
"""How long to wait at the end for the last messages of workers [s]."""

ANSWER_S = 3.0
"""How long to wait for a node's answer about its GPUs [s]."""

END_TIMEOUT_S = 60.0
"""An agent that has not ended a worker or a cancelled task by then answers nobody any more [s]; far
above what it may take.
"""

NODE_NEWS_S = 5.0
"""How long after an agent's loss calls may show its node's loss too [s]; Ray takes about 1 s."""

Chore = Callable[[], object]


class MemoryLimit(NamedTuple):
    """A worker's memory limit [bytes]; `on_over` is told its memory use above that."""

    limit: int
    on_over: Callable[[int], object]


class OfferAnswers:
    """Answers to values offered to queues: `send` takes those that come after the first reply."""

    def __init__(self, send: Callable[[int, str], object]) -> None:
        self._send = send
        self._known: list[tuple[int, str]] = []
        self._is_late = False
        self._lock = threading.Lock()  # any thread may answer

    def give(self, ticket: int, outcome: str) -> None:
        """Add one; from any thread."""
        with self._lock:
            if not self._is_late:
                self._known.append((ticket, outcome))
                return
        self._send(ticket, outcome)

    def at_once(self) -> list[tuple[int, str]]:
        """Return those known by now; later ones are sent."""
        with self._lock:
            self._is_late = True
            return self._known


class Agents:
    """The agents of a pool, and a thread for their answers.

    Args:
        hub: Collects reports and printed text of tasks.
        cancel_grace_s: How long a cancelled task has to end [s].
        stays: Whether a node is alive, and not about to go.
        inventory: The GPUs of a machine.
        is_up: Whether the pool's Ray is there.
    """

    def __init__(
        self,
        hub: Hub,
        cancel_grace_s: float,
        stays: Callable[[str], bool],
        inventory: Inventory,
        is_up: Callable[[], bool],
    ) -> None:
        self._hub = hub
        self._stays = stays
        self._is_up = is_up
        self.is_far = client.is_far()
        self._inventory = inventory
        self._cancel_grace_s = cancel_grace_s
        self._agents: dict[str, Any] = {}  # by node
        self._store_key = f"raypool-{uuid.uuid4().hex}"
        self._num_made: Counter[str] = Counter()  # by node
        # the agent of its node, and the reference of its answer to `watch`
        self._by_worker: dict[int, tuple[Any, Any]] = {}
        # references: dropping one while Ray shuts down would end this process
        self._outlived: list[Any] = []
        # with their actors
        self._workers: dict[int, tuple[Introduction, Any, MemoryLimit | None]] = {}
        self._introductions: dict[int, Introduction] = {}  # the last one of each place
        self._tokens: dict[str, str | OSError] = {}  # of folders of this machine, if it is far
        self._told: set[str] = set()
        # who waits for the GPUs of nodes that were asked and have not answered yet
        self._waiting_for_gpus: dict[str, list[Callable[[NodeGpus], object]]] = {}
        self._making = threading.Lock()  # any thread may ask for an agent; each node has one
        self._is_closed = False
        self._pid = os.getpid()  # a forked child has neither Ray's threads nor the one below
        self._silent = threading.Semaphore(0)  # counts agents that have nothing more to pass on
        self._chores: queue.SimpleQueue[Chore | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="raypool-agents", daemon=True).start()

    def later(self, chore: Chore) -> None:
        """Do something in the agents' thread: Ray's own threads must not call Ray."""
        self._chores.put(chore)

    def _later_by(self, delay_s: float, chore: Chore) -> threading.Timer:
        return later(delay_s, functools.partial(self.later, chore))

    def _work(self) -> None:
        while (chore := self._chores.get()) is not None:
            try:
                with unless_ended(self._is_up):
                    chore()
            except Exception:  # the other chores are not to suffer
                logger.exception("This is a bug in raypool; the pool continues.")

    def _answered(self, ref: Any, take: Callable[[Any], object]) -> None:
        when_done(ref, lambda answer: self._chores.put(functools.partial(take, answer)))

    # --- agents -----------------------------------------------------------------------------------

    def attach(
        self,
        worker_id: int,
        introduction: Introduction,
        actor: Any,
        memory: MemoryLimit | None = None,
    ) -> None:
        """Let a worker be watched over, and tell it its agent and the home agent."""
        self._workers[worker_id] = introduction, actor, memory
        self._introductions[introduction.info.index] = introduction
        agent = self._agent_on(introduction.node_id)
        watched = agent.watch.remote(worker_id, introduction.process, introduction.info.gpus, actor)
        self._by_worker[worker_id] = agent, watched
        nodes = introduction.node_id, client.home_node()
        # what a `Succession` takes: the agent first, since making one changes its number
        here, home = (
            (self._agent_on(node_id), self._names_on(node_id), self._num_made[node_id])
            for node_id in nodes
        )
        actor.attach.remote(here, home, self.is_far)
        if introduction.mps_problem is not None:
            self._tell(
                introduction.mps_problem,
                mps.turns(introduction.info.host, introduction.mps_problem),
            )
        if introduction.fork_problem is not None:
            words = fork_server.NOT_FORKED % introduction.fork_problem
            self._tell(introduction.fork_problem, words, logging.INFO)
        if memory is not None:

            def take(used: Any) -> None:
                if isinstance(used, int):  # else it has ended, or the agent has
                    memory.on_over(used)

            self._answered(agent.oversee.remote(watched, worker_id, memory.limit), take)

    def for_mps(self, claim: Claim) -> Any:
        """Return the agent that starts MPS for a worker of this claim; None if it is of no use."""
        if not claim.demand.worker_gpus:
            return None
        if claim.demand.workers_per_claim == 1:
            self._tell(mps.NOT_SHARED, mps.NOT_SHARED)
            return None
        node_id = locate(claim)
        if node_id is None:
            self._tell(
                "nowhere",
                "mps=True: a worker was started before its node was known, so it uses its GPU"
                " without MPS and takes turns with the others there. Open the pool again to use"
                " MPS.",
            )
            return None
        return self._agent_on(node_id)

    def _tell(self, what: str, words: str, level: int = logging.WARNING) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.log(level, words)

    def utilization(
        self, worker_id: int, since: float, until: float, take: Callable[[float | None], object]
    ) -> None:
        """Pass to `take` how busy a worker's (first) GPU was; see `Telemetry.utilization`.

        In the agents' thread, within `ANSWER_S`; None: unknown.
        """
        agent, _ = self._by_worker.get(worker_id, (None, None))
        worker = self._workers.get(worker_id)
        if agent is None or worker is None or worker[0].info.gpu is None:
            self._chores.put(functools.partial(take, None))
            return
        ref = agent.utilization.remote(worker[0].info.gpu, since, until)
        self.within(
            ANSWER_S, ref, lambda answer: take(answer if isinstance(answer, float) else None)
        )

    def devices(self) -> list[NodeDevices]:
        """Return the GPUs of the nodes with workers; None where one does not answer in time."""
        workers: dict[str, list[WorkerInfo]] = {}
        for introduction in list(self._introductions.values()):
            workers.setdefault(introduction.node_id, []).append(introduction.info)
        asked = {}
        for node_id in workers:
            agent = self._agents.get(node_id)
            if agent is not None and self._is_up():
                asked[node_id] = agent.devices.remote()
        if asked:
            # one limit for all nodes together; those that have not answered by then are unknown
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        found = {node_id: answered(ref) for node_id, ref in asked.items()}
        return [
            NodeDevices(infos[0].host, found.get(node_id), infos)
            for node_id, infos in workers.items()
        ]

    def gpu_readings(self, take: Callable[[NodeGpus], object]) -> None:
        """Pass the last readings of GPUs to `take`; in the agents' thread, for each node."""
        nodes: dict[str, list[WorkerInfo]] = {}
        for introduction in list(self._introductions.values()):
            if introduction.info.gpus:
                nodes.setdefault(introduction.node_id, []).append(introduction.info)
        for node_id, workers in nodes.items():
            self.later(functools.partial(self._ask_gpus, node_id, workers, take))

    def _ask_gpus(
        self, node_id: str, workers: Sequence[WorkerInfo], take: Callable[[NodeGpus], object]
    ) -> None:
        agent = self._agents.get(node_id)
        if agent is None or not self._is_up():
            return
        # a node that has not answered is not asked again: its answer is for all who wait
        waiting = self._waiting_for_gpus.setdefault(node_id, [])
        is_asked = bool(waiting)
        if take not in waiting:
            waiting.append(take)
        if is_asked:
            return

        def pass_on(answer: Any) -> None:
            for each in self._waiting_for_gpus.pop(node_id):
                if isinstance(answer, dict):  # else the agent has gone
                    each(NodeGpus(workers[0].host, answer, {on.index: on.gpus for on in workers}))

        self._answered(agent.gpu_readings.remote(), pass_on)

    def _agent_on(self, node_id: str) -> Any:
        with self._making:
            if self._is_closed or not self._is_up():  # asking anything of it would start a new one
                raise PoolClosedError(POOL_ENDED)
            agent = self._agents.get(node_id)
            if agent is None:
                is_home = node_id == client.home_node()
                driver = client.driver_process() if is_home else None
                # many of its calls wait
                options = on_node(node_id) | {"num_gpus": 0, "max_concurrency": 100_000}
                self._num_made[node_id] += 1
                name = name_of_agent(self._names_on(node_id), self._num_made[node_id])
                agent = (
                    ray.remote(NodeAgent)
                    .options(**options, name=name)
                    .remote(driver, self._inventory, self._store_key)
                )
                self._agents[node_id] = agent
                self._take(agent)
                if is_home:
                    for folder, token in self._tokens.items():
                        agent.learn.remote(folder, token)
            return agent

    def _names_on(self, node_id: str) -> str:
        return f"{self._store_key}-{node_id}"

    def home(self) -> Any:
        """Return the agent with the pool's exchange, on the driver's or Ray Client's node."""
        return self._agent_on(client.home_node())

    def share(self, folder: str) -> None:
        """Let workers find out whether they see a folder of this machine; the home agent tells.

        Needed only where this process is on another machine than that agent.
        """
        if not self.is_far or folder in self._tokens:
            return
        token: str | OSError
        try:
            token = token_of(folder)
        except OSError as error:
            token = error
        self._tokens[folder] = token
        # waited for, so that it is known before a worker asks
        ray.wait([self.home().learn.remote(folder, token)], timeout=ANSWER_S)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the pool's exchange, and wait for its answer.

        Raises:
            PoolClosedError: The pool was shut down.
            WorkerLostError: The agent has died.
        """
        if self._is_closed or os.getpid() != self._pid or not self._is_up():
            raise PoolClosedError(POOL_ENDED)
        try:
            return answer_to(self.home().exchange.remote(method, *args), self._is_up)
        except WorkerLostError:
            if self._is_closed:
                raise PoolClosedError(POOL_ENDED) from None
            raise

    def pack(self, value: Any, what: str) -> bytes:
        """Pickle a value as it is now."""
        return snapshot(value, what)

    def unpack(self, packed: bytes) -> Any:
        """Return the value that was pickled."""
        return pickle.loads(packed)

    # --- messages from workers --------------------------------------------------------------------

    def _take(self, agent: Any, answers: Sequence[tuple[int, str]] = ()) -> None:
        self._answered(agent.take.remote(answers), functools.partial(self._on_mail, agent))

    def _on_mail(self, agent: Any, mail: Any) -> None:
        # that was all; or it is gone, or Ray is
        if mail is None or isinstance(mail, BaseException):
            self._replace(agent)
            return

        def answer(ticket: int, outcome: str) -> None:
            if not self._is_closed and self._is_up():
                agent.exchange.remote("answer", ticket, outcome)

        # in this thread: Ctrl-C in that of a reader would leave the worker without an answer
        answers = OfferAnswers(lambda *given: self.later(functools.partial(answer, *given)))
        for worker_id, number, content in mail:
            if worker_id == OFFERED:
                offer(content[0], content[1], functools.partial(answers.give, number))
        # first: workers wait for these answers; the rest is not urgent
        self._take(agent, answers.at_once())
        for worker_id, number, content in mail:
            if worker_id != OFFERED:
                self._hub.deliver(worker_id, number, content)

    def catch_up(self, sent: dict[int, int]) -> None:
        """Wait for the messages of ended calls, and for these batches (by worker id)."""
        self._hub.catch_up()
        for worker_id, number in sent.items():
            wait = self._hub.waiter(worker_id, number)
            if wait is not None:
                wait()

    def _replace(self, lost: Any) -> None:
        """Start another agent for one that was killed; its values, such as the store, are lost."""
        with self._making:
            nodes = [node_id for node_id, agent in self._agents.items() if agent is lost]
            for node_id in nodes:
                del self._agents[node_id]
        if not nodes:  # the pool ends, and `close` waits for it
            self._silent.release()
        for node_id in nodes:  # whether the node goes too, the next looks at the nodes will show
            self._later_by(2 * LOOK_S, functools.partial(self._attach_again, node_id))

    def _attach_again(self, node_id: str) -> None:
        # no actor can start on a node that has gone, or is about to go
        if not self._is_up() or self._is_closed or not self._stays(node_id):
            return
        logger.warning(
            "The agent of a node died and was replaced. Values in pool.store may be lost."
        )
        for worker_id, worker in list(self._workers.items()):
            if self._stays(worker[0].node_id):
                self.attach(worker_id, *worker)

    # --- end of workers and agents ----------------------------------------------------------------

    def signal(
        self, worker_id: int, attempt_id: int, task_id: int, wish: Signal, on_stuck: Chore
    ) -> None:
        """Pass on a wish; `on_stuck` is called if a canceled task still runs after the grace."""
        if not self._is_up():  # asking anything of it would start a new one
            return
        agent, watched = self._by_worker.get(worker_id, (None, None))
        if agent is None:
            return

        def take(is_stuck: Any) -> None:
            # If the agent does not answer, or has gone, nobody can interrupt the worker any more.
            # But it goes with its node most often, and then the call itself tells what has become
            # of the worker: that is what counts, and is not to be hidden.
            if is_stuck is True or (isinstance(is_stuck, TimeoutError) and wish is Signal.CANCEL):
                on_stuck()
            elif isinstance(is_stuck, BaseException) and wish is Signal.CANCEL:
                self._later_by(NODE_NEWS_S, on_stuck)

        with unless_ended(self._is_up):
            told = agent.signal.remote(
                watched, worker_id, attempt_id, task_id, wish, self._cancel_grace_s
            )
            self.within(self._cancel_grace_s + END_TIMEOUT_S, told, take)

    def end(self, worker_id: int, actor: Any, then: Chore) -> None:
        """Kill the rest of a worker, children too; then `then` is called, in some thread."""
        agent, watched = self._by_worker.pop(worker_id, (None, None))
        self._workers.pop(worker_id, None)

        def ended(answer: Any) -> None:
            if not isinstance(answer, BaseException):
                then()
                return
            # a silent agent is killed, so that another takes its place; else it has gone itself
            late = [agent] if isinstance(answer, TimeoutError) else []
            aside(functools.partial(self.kill, [*late, actor], then))

        if self._is_up():
            with unless_ended(self._is_up):
                # one has the exchange, which may wait for this worker
                for other in list(self._agents.values()):
                    other.exchange.remote("forget", worker_id)
                if agent is None:
                    aside(functools.partial(self.kill, [actor], then))
                else:
                    self.within(END_TIMEOUT_S, agent.end.remote(watched, worker_id), ended)
                return
        self._outlived.append(watched)
        then()

    def within(self, timeout_s: float, ref: Any, take: Callable[[Any], object]) -> None:
        """Pass the answer to a call to `take`, or a TimeoutError if none comes in time."""
        # a lock taken once, never released: answer or timeout, whichever comes first
        first = threading.Lock()

        def take_once(answer: Any) -> None:
            if first.acquire(blocking=False):
                timer.cancel()
                take(answer)

        timer = self._later_by(timeout_s, lambda: take_once(TimeoutError()))
        self._answered(ref, take_once)

    def close(self) -> None:
        """Take the last messages of workers, and end the agents."""
        with self._making:  # no thread adds another behind this list
            self._is_closed = True
            agents = list(self._agents.values())
            self._agents.clear()
        try:
            if self._is_up():
                for agent in agents:
                    agent.finish.remote()
                deadline = time.monotonic() + FINISH_TIMEOUT_S
                for _ in agents:  # all, before one is killed: any of them may be the first
                    self._silent.acquire(timeout=max(deadline - time.monotonic(), 0))
                self.kill(agents)
        finally:
            self._chores.put(None)

    def kill(self, actors: Sequence[Any], then: Chore = lambda: None) -> None:
        """Kill actors, as far as Ray is still there; then call `then`."""
        for actor in actors:
            with contextlib.suppress(Exception):  # Ray may have died meanwhile
                if self._is_up():
                    ray.kill(actor)
        then()
