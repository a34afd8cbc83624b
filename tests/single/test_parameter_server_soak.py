"""Thousands of pushes over a wire that damages, cuts, repeats and delays messages, with workers that restart or leave.

The wire never loses a message without a trace, because MPI does not, and no timer would send it again. A damaged
message is lost, but its receiver reports it, or its sender finds the answer damaged. Originals stay in order; copies
come at any time.
"""

import collections
import itertools

import numpy as np
import pytest

from hvd_sparse.parameter_server import METHODS, ParameterLayout, Server, ServerRefused, Worker

SHAPES = {"a": (23, 7), "b": (11,), "c": (90,), "scale": (1,)}
WORKERS, PUSHES = 5, 10_000  # pushes of all cases together


class Wire:
    """One direction of a pair: originals in order, with harm done to some, and copies at any later time."""

    def __init__(self, random, harm):
        self.random, self.harm, self.queue, self.late = random, harm, [], []

    def send(self, data):
        what = self.random.random() / self.harm if self.harm else 1.0
        if what < 0.25:
            data = data.copy()
            data[self.random.integers(data.size)] ^= 1 << self.random.integers(8)
        elif what < 0.5:
            data = data[: self.random.integers(data.size)]
        elif what < 0.6:
            data = np.append(data, np.uint8(self.random.integers(256)))
        elif what < 1.0:
            self.late.append(data)
        self.queue.append(data)

    def receive(self):
        if self.late and self.random.random() < 0.02:
            return self.late.pop(self.random.integers(len(self.late)))
        return self.queue.pop(0) if self.queue else None


class Books(Server):
    """A server that writes down what it applied, in order, and how often."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.applied, self.current = [], None

    def _push(self, message, record):
        self.current = (message.worker, message.incarnation, message.sequence)
        return super()._push(message, record)

    def _apply(self, update):
        super()._apply(update)
        self.applied.append((self.current, update))


class Run:
    """Workers and servers on wires, delivered in random order."""

    def __init__(self, method, servers, seed, harm):
        self.random, self.method, self.harm = np.random.default_rng(seed), method, harm
        self.layout = ParameterLayout(SHAPES, method.min_numel)
        self.start = self.random.standard_normal(self.layout.numel).astype(np.float32)
        self.time = 0.0
        options = {"silence": 1000.0, "servers": servers, "now": lambda: self.time}
        shards = self.layout.shards(servers)
        self.servers = [Books(self.layout, shard, method, self.start, WORKERS, **options) for shard in shards]
        pairs = list(itertools.product(range(WORKERS), range(servers)))
        self.up = {pair: Wire(self.random, harm) for pair in pairs}
        self.down = {pair: Wire(self.random, harm) for pair in pairs}
        self.workers, self.lives, self.pushed = {}, itertools.count(1), []

    def join(self, number):
        copies = {name: np.full(np.prod(shape), np.nan, np.float32) for name, shape in SHAPES.items()}
        worker = Worker(number, self.layout, self.method, copies, len(self.servers), next(self.lives) * 1000)
        self.workers[number] = worker
        self.send(number, worker.hello())

    def push(self, number):
        worker = self.workers[number]
        gradients = {name: array + self.noise(array.size) for name, array in worker.parameters.items()}
        messages = worker.push(gradients, dict.fromkeys(SHAPES, 0.05))
        self.pushed.append((number, worker._pushed[0]))
        self.send(number, messages)

    def noise(self, size):
        return self.random.standard_normal(size, np.float32)

    def send(self, number, messages):
        for server, data in messages.items():
            self.up[number, server].send(data)

    def deliver(self):
        """Let one message arrive, on a wire picked by chance; return whether there was any."""
        wires = [(wire, pair, True) for pair, wire in self.up.items() if wire.queue]
        wires += [(wire, pair, False) for pair, wire in self.down.items() if wire.queue]
        if not wires:
            return False
        wire, (number, server), is_up = wires[self.random.integers(len(wires))]
        data = wire.receive()
        if is_up:
            for _, answer in self.servers[server].handle(data, number):
                self.down[number, server].send(answer)
        elif number in self.workers:
            self.send(number, self.workers[number].receive(server, data))
        return True

    def settle(self):
        while self.deliver():
            pass

    def flat(self, worker):
        return self.layout.flatten(worker.parameters)

    def theirs(self, number):
        """What worker `number` should have: of each server, its mirror, or the values it was answered with."""
        parts = []
        for server in self.servers:
            mirrors = getattr(server._tracker, "_mirrors", None)
            parts.append(server.parameters if mirrors is None else mirrors[number])
        return np.concatenate(parts)


def check_books(run):
    """What servers hold is what they began with minus each push once, in order; every push of the living is there."""
    for server, (begin, end) in zip(run.servers, run.layout.shards(len(run.servers)), strict=True):
        expected = run.start[begin:end].copy()
        for _, update in server.applied:
            expected[update.at] -= update.values
        assert expected.tobytes() == server.parameters.tobytes()
        assert len(server.applied) == server.clock == server.statistics.pushes
        names = [name for name, _ in server.applied]
        assert len(set(names)) == len(names)


def applied_contents(run):
    """For each server, the updates applied that are not empty, as (worker, bytes)."""
    return [
        [(worker, _content(update, server.numel)) for (worker, *_), update in server.applied if update.values.size]
        for server in run.servers
    ]


def pushed_contents(run):
    found = []
    for server, (begin, end) in zip(run.servers, run.layout.shards(len(run.servers)), strict=True):
        parts = [(worker, update.part(begin, end)) for worker, update in run.pushed]
        found.append([(worker, _content(part, server.numel)) for worker, part in parts if part.values.size])
    return found


def _content(update, n):
    dense = np.zeros(n, np.float32)
    dense[update.at] = update.values
    return dense.tobytes()


CASES = {
    "dgs": METHODS["dgs"](density=0.05, min_numel=20),
    "dgs, 2 bits, secondary": METHODS["dgs"](density=0.1, min_numel=20, values="int2", pull_density=0.2),
    "gd_async, float16 both ways": METHODS["gd_async"](density=0.1, values="float16", pull_values="float16"),
    "dct_async": METHODS["dct_async"](density=0.1, min_numel=20, lifespan=4, drain=9),
    "gd_async, secondary": METHODS["gd_async"](density=0.1, min_numel=0, pull_density=0.05, scope="model"),
    "dgc_async, 2 bits down": METHODS["dgc_async"](density=0.1, min_numel=20, pull_values="int2"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_pushes_on_a_bad_wire(name, servers):
    """One in ten messages comes to harm; a life ends at times: restarts, departures, silence, late arrivals."""
    run = Run(CASES[name], servers, seed=servers, harm=0.1)
    lost = 0  # pushes whose worker went away before they were answered: applied, or not, or here and not there
    events = iter(sorted(run.random.choice(PUSHES, 60, replace=False)))
    event, pushes = next(events), 0
    for number in range(WORKERS - 1):
        run.join(number)
    while pushes < PUSHES // len(CASES) // 2:
        run.time += 1.0
        for number, worker in list(run.workers.items()):
            if not worker.is_waiting and run.random.random() < 0.3:
                run.push(number)
                pushes += 1
        for _ in range(run.random.integers(1, 9)):
            run.deliver()
        for number, worker in run.workers.items():
            if run.random.random() < 0.05:
                run.send(number, worker.alive())
        if pushes * len(CASES) * 2 >= event:
            event = next(events, 10**9)
            lost += disturb(run)
        for server in run.servers:
            server.tick()
    for number in set(range(WORKERS)) - set(run.workers):
        run.join(number)
    run.settle()
    for number, worker in run.workers.items():
        run.push(number)
        run.settle()
        assert not worker.is_waiting and run.flat(worker).tobytes() == run.theirs(number).tobytes()
    check_books(run)
    for applied, pushed in zip(applied_contents(run), pushed_contents(run), strict=True):
        missing = len(pushed) - len(applied)
        assert 0 <= missing <= lost
        assert not collections.Counter(applied) - collections.Counter(pushed)  # none twice
    refused = sum(server.statistics.refused for server in run.servers)
    assert refused > 50 and all(server.statistics.repeated > 20 for server in run.servers)


def disturb(run):
    """Let something happen to a worker's life; return how many pushes that may lose."""
    number = int(run.random.integers(WORKERS))
    worker = run.workers.get(number)
    if worker is None:
        run.join(number)  # late, or again
        return 0
    open_pushes = int(worker.is_waiting)
    what = run.random.integers(3)
    if what == 0:  # it starts again, and knows nothing
        run.join(number)
        return open_pushes
    if what == 1 and not worker.is_waiting:
        run.send(number, run.workers.pop(number).leave())
        return 0
    server = run.servers[run.random.integers(len(run.servers))]  # this one believes that the worker is dead
    if number in server._records:
        server._forget(number, "no sign of life")
    return 0


@pytest.mark.each_value
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_servers_that_forget_workers_at_any_time_lose_and_repeat_nothing(name, servers):
    run = Run(CASES[name], servers, seed=9, harm=0.05)
    for number in range(WORKERS):
        run.join(number)
    for _ in range(250):
        for number, worker in run.workers.items():
            if not worker.is_waiting:
                run.push(number)
        for _ in range(12):
            run.deliver()
        number, server = run.random.integers(WORKERS), run.servers[run.random.integers(servers)]
        if number in server._records and run.random.random() < 0.3:
            server._forget(int(number), "no sign of life")
    run.settle()
    check_books(run)
    assert sum(worker.incarnation % 1000 for worker in run.workers.values()) > 20
    assert [sorted(one) for one in applied_contents(run)] == [sorted(one) for one in pushed_contents(run)]
    for number, worker in run.workers.items():
        run.push(number)
        run.settle()
        assert run.flat(worker).tobytes() == run.theirs(number).tobytes()


def test_questions_are_asked_again_on_a_bad_wire():
    run = Run(CASES["dgs"], 3, seed=4, harm=0.3)
    run.join(0)
    run.settle()
    for _ in range(100):
        run.push(0)
        run.settle()
        run.send(0, run.workers[0].ask("state"))
        run.settle()
        assert not run.workers[0].is_waiting
        found = [arrays["parameters"] for _, (_, arrays) in sorted(run.workers[0].answers.items())]
        assert (np.concatenate(found) == run.theirs(0)).all()
        assert (run.flat(run.workers[0]) == run.theirs(0)).all()
    check_books(run)


def test_a_worker_that_nothing_reaches_gives_up():
    run = Run(CASES["dgs"], 1, seed=0, harm=0.0)
    run.join(0)
    run.settle()
    run.push(0)
    with pytest.raises(ServerRefused, match="nothing arrives undamaged after 10 tries"):
        for _ in range(12):
            run.workers[0].receive(0, np.zeros(60, np.uint8))


def test_a_worker_that_is_forgotten_each_time_gives_up():
    run = Run(CASES["dgs"], 1, seed=0, harm=0.0)
    run.join(0)
    run.settle()
    run.push(0)
    with pytest.raises(ServerRefused, match="after 10 attempts to join again"):
        while run.servers[0]._records.pop(0, None) is None or run.deliver():
            run.deliver()


def test_warm_up_goes_on_where_a_worker_joins_again():
    method = METHODS["gd_async"](density=0.01, warmup=40, min_numel=0, scope="model")
    run, sizes = Run(method, 2, seed=0, harm=0.0), []
    run.join(0)
    run.settle()
    for step in range(60):
        if step == 30:
            run.servers[1]._forget(0, "no sign of life")
        run.push(0)
        sizes.append(run.pushed[-1][1].values.size)
        run.settle()
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 10 * sizes[-1]
