"""Damage: the decoders of the core, of the server and of the pipeline read mutated payloads and messages."""

import functools
import os
import re
import subprocess
import zlib
from pathlib import Path

import numpy as np
from scenario import ROOT, Found, Scenario

CORPUS = ROOT / "tests" / "native" / "corpus"
CHUNK = 200_000  # mutations of one process
MESSAGES = 20_000  # of one try


@functools.cache
def build(sanitize: str) -> Path:
    """Compile the decoder's fuzz target, with AddressSanitizer and UndefinedBehaviorSanitizer if ON; return it."""
    options = ["-DHVD_SPARSE_TESTS=ON", f"-DHVD_SPARSE_SANITIZE={sanitize}", "-DHVD_SPARSE_OPTIMIZE=-O2"]
    folder = ROOT / "build" / f"faults-sanitize-{sanitize}"
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", folder, "--target", "fuzz_payload_test", "-j", str(os.cpu_count())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "tests" / "native" / "fuzz_payload_test"


def payloads(sanitize: str):
    """Return what makes a try: payloads of the corpus, mutated, as many on each core.

    The target aborts where one is accepted that the second reader refuses, or the other way round.
    """

    def run(found: Found, number: int) -> None:
        fuzzer = build(sanitize)
        seeds = [int(np.random.SeedSequence().entropy % 2**32) for _ in range(os.cpu_count() or 1)]
        every = [
            subprocess.Popen(
                [fuzzer, CORPUS, str(CHUNK), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for seed in seeds
        ]
        for seed, one in zip(seeds, every, strict=True):
            output, _ = one.communicate()
            found.tries += CHUNK
            found.check(one.returncode == 0, f"seed {seed}: {output[-3000:]}")
            if counts := re.search(r"(\d+) payloads accepted, (\d+) refused", output):
                found.check(int(counts[2]) > 0, f"seed {seed}: nothing was refused")

    return run


def damaged(random, data: np.ndarray) -> np.ndarray:
    """Return bytes with something changed: bits, a byte, a run of them, cut, longer; never the same bytes."""
    while True:
        changed, what = data.copy(), random.integers(6)
        place = int(random.integers(data.size))
        if what == 0:
            changed[place] ^= 1 << random.integers(8)
        elif what == 1:
            changed[place] = random.integers(256)
        elif what == 2:
            changed[place : place + 16] = random.integers(0, 256, min(16, data.size - place))
        elif what == 3:
            changed = changed[:place]
        elif what == 4:
            changed = np.append(changed, random.integers(0, 256, 1 + random.integers(16)).astype(np.uint8))
        else:
            other = int(random.integers(data.size))
            changed[place], changed[other] = data[other], data[place]
        if changed.size != data.size or (changed != data).any():
            return changed


def server_messages(found: Found, number: int) -> None:
    """Damage what a worker sends: refused, and the server's parameters stay as they are, to the bit."""
    from hvd_sparse.parameter_server import METHODS, ParameterLayout, Server, Worker

    random = np.random.default_rng([number, 1])
    shapes = {"a": (23, 7), "b": (11,), "c": (90,)}
    method = METHODS["dgs"](density=0.1, min_numel=20, values=("float32", "int2")[number % 2])
    layout = ParameterLayout(shapes, method.min_numel)
    start = random.standard_normal(layout.numel).astype(np.float32)
    server = Server(layout, layout.shards(1)[0], method, start, 1, silence=None)
    worker = Worker(0, layout, method, {k: np.zeros(np.prod(s), np.float32) for k, s in shapes.items()}, 1, 7)
    for _, answer in server.handle(worker.hello()[0], 0):
        worker.receive(0, answer)
    for _ in range(MESSAGES // 1000):
        gradients = {name: random.standard_normal(part.size, np.float32) for name, part in worker.parameters.items()}
        message, before, clock = worker.push(gradients, dict.fromkeys(shapes, 0.05))[0], server.parameters.copy(), 0
        clock = server.clock
        for _ in range(1000):
            harmed = damaged(random, message)
            server.handle(harmed, 0)
            if server.clock != clock or server.parameters.tobytes() != before.tobytes():
                found.check(False, f"try {number}: accepted {harmed.tobytes().hex()}")
                return
        for _, answer in server.handle(message, 0):
            for _ in range(3):  # the answer, damaged: the push is sent again, and must not count again
                for again in worker.receive(0, damaged(random, answer)).values():
                    server.handle(again, 0)
            worker.receive(0, answer)
        applied = server.clock
        server.handle(message, 0)  # replayed
        found.check(server.clock == applied == clock + 1, f"try {number}: a push counted {server.clock - clock} times")
    found.tries += MESSAGES


def pipeline_messages(found: Found, number: int) -> None:
    """Damage what a stage sends: DamagedMessage, unless both of its checksums collide."""
    from hvd_sparse.mailbox import DamagedMessage
    from hvd_sparse.model_parallel import message
    from hvd_sparse.model_parallel.message import Head, Kind, Tensor

    random = np.random.default_rng([number, 2])
    mask = random.random((8, 32)) < 0.3
    array = (random.normal(size=(8, 32)) * mask).astype(("float32", "float16")[number % 2])
    tensors = [Tensor(array, str(array.dtype), mask, True), Tensor(np.ones((8, 2), np.float32), "float32", None, True)]
    data = message.encode(Head(Kind.FORWARD, 1, 0, 1, 8, 8), [0, 1], tensors)
    for _ in range(MESSAGES):
        harmed = damaged(random, data)
        try:
            _, text, body = message.decode_head(harmed)
            message.decode_tensors(text, body)
        except DamagedMessage:
            continue
        found.check(False, f"try {number}: accepted {harmed.tobytes().hex()}, crc {zlib.crc32(harmed.tobytes())}")
        return
    found.tries += MESSAGES


SCENARIOS = {
    "damage_payloads": Scenario(
        "8", "mutated payloads, core, AddressSanitizer and UBSan", 2_000_000, payloads("ON"), "payloads"
    ),
    "damage_payloads_plain": Scenario(
        "8", "the same without sanitizers, which is faster: both readers agree", 10_000_000, payloads("OFF"), "payloads"
    ),
    "damage_server": Scenario("8", "damaged and replayed pushes", 2_000_000, server_messages, "messages"),
    "damage_pipeline": Scenario("8", "damaged messages of a stage", 2_000_000, pipeline_messages, "messages"),
}
