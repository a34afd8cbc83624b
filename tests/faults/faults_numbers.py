"""Jobs whose ranks all survive: numbers that are not finite, different settings, many ranks, long runs."""

import re
import resource
import time
from pathlib import Path

import forked
import numpy as np
from faults_ranks import gradients
from scenario import Found, Scenario

SIZES = {"weight": 3000, "bias": 50}
SETTINGS = {"density": 0.01, "min_numel": 100, "dense_fallback": None}
FRAMEWORKS = ("torch", "tensorflow")


class TorchTrainer:
    """A model, its compressor, and steps with given gradients."""

    def __init__(self, dtype: str = "float32", sizes=SIZES, **settings):
        import horovod.torch as hvd
        import torch

        from hvd_sparse.torch import Compression

        torch.set_num_threads(1)
        self.hvd, self.torch, self.dtype = hvd, torch, getattr(torch, dtype)
        if not hvd.is_initialized():
            hvd.init()
        self.model = {name: torch.nn.Parameter(torch.zeros(n, dtype=self.dtype)) for name, n in sizes.items()}
        self.compression = Compression.gradient_dropping(self.model.items(), **{**SETTINGS, **settings})
        self.inner = torch.optim.SGD(list(self.model.values()), lr=1.0)
        self.optimizer = hvd.DistributedOptimizer(
            self.inner, self.model.items(), compression=self.compression, op=hvd.Sum
        )

    def reduce(self, values: dict) -> dict[str, np.ndarray]:
        """Return the reduced gradients of these; do not apply them."""
        self.optimizer.zero_grad()
        parts = [self.model[name] for name in values]
        given = [self.torch.from_numpy(np.array(one)).to(self.dtype) for one in values.values()]
        self.torch.autograd.backward([one.view_as(one) for one in parts], given)
        self.optimizer.synchronize()
        return {name: self.model[name].grad.double().numpy() for name in values}

    def waiting(self, name: str) -> np.ndarray:
        """Return this rank's residual, float64[n]; zeros where there is none."""
        memory = self.compression.state_dict()["memory"][name]
        return np.asarray(memory.get("residual", np.zeros(SIZES[name])), np.float64)

    def total(self, values) -> np.ndarray:
        """Return a sum over the ranks, in float64."""
        return self.hvd.allreduce(self.torch.from_numpy(np.array(values, np.float64)), op=self.hvd.Sum).numpy()


class TensorFlowTrainer:
    """The same in TensorFlow."""

    def __init__(self, dtype: str = "float32", sizes=SIZES, **settings):
        import horovod.tensorflow as hvd
        import tensorflow as tf

        from hvd_sparse.tensorflow import Compression

        self.hvd, self.tf, self.dtype = hvd, tf, dtype
        if not hvd.is_initialized():
            tf.config.threading.set_intra_op_parallelism_threads(1)
            hvd.init()
        self.model = {name: tf.Variable(tf.zeros([n], dtype), name=name) for name, n in sizes.items()}
        self.compression = Compression.gradient_dropping(list(self.model.values()), **{**SETTINGS, **settings})

        @tf.function
        def reduce(values):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(self.model[name] * one) for name, one in values.items()])
            tape = hvd.DistributedGradientTape(tape, compression=self.compression, op=hvd.Sum)
            return dict(zip(values, tape.gradient(loss, [self.model[name] for name in values]), strict=True))

        self._reduce = reduce

    def reduce(self, values: dict) -> dict[str, np.ndarray]:
        """Return the reduced gradients of these."""
        reduced = self._reduce({name: self.tf.constant(one, self.dtype) for name, one in values.items()})
        return {name: one.numpy().astype(np.float64) for name, one in reduced.items()}

    def waiting(self, name: str) -> np.ndarray:
        """Return this rank's residual, float64[n]; zeros where there is none."""
        residual = self.compression.state_dict()["memory"][name].get("residual", np.zeros(SIZES[name]))
        return np.asarray(residual, np.float64)

    def total(self, values) -> np.ndarray:
        """Return a sum over the ranks, in float64."""
        return self.hvd.allreduce(self.tf.constant(np.array(values, np.float64)), op=self.hvd.Sum).numpy()


TRAINERS = {"torch": TorchTrainer, "tensorflow": TensorFlowTrainer}


def not_finite(framework: str, steps: int, dtype: str):
    """Return what makes a try: a job in which a random rank has NaN or infinity in a third of the steps.

    Such a step gives NaN in every gradient on every rank; what was finite waits. In the end what all ranks put in is
    what came out, plus what waits, to the last bit: gradients are small whole numbers.
    """

    def train(rank: int, number: int) -> list[str]:
        trainer, wrong = TRAINERS[framework](dtype), []
        draw, own = np.random.default_rng([number, 99]), np.random.default_rng([number, rank])
        put_in, came_out = np.zeros(SIZES["weight"]), np.zeros(SIZES["weight"])
        for step in range(steps):
            values = {name: own.integers(-2, 3, n).astype(np.float32) for name, n in SIZES.items()}
            is_bad, who, name = draw.random() < 1 / 3, int(draw.integers(3)), ("weight", "bias")[draw.integers(2)]
            place, what = int(draw.integers(SIZES[name])), (np.nan, np.inf, -np.inf, 1e6)[draw.integers(4)]
            is_bad = is_bad and (dtype == "float16" or np.isnan(what) or np.isinf(what))  # 1e6 overflows float16 alone
            if is_bad and who == rank:
                values[name][place] = what
            reduced = trainer.reduce(values)
            nan = [bool(np.isnan(one).all()) for one in reduced.values()]
            finite = [bool(np.isfinite(one).all()) for one in reduced.values()]
            if not (all(nan) if is_bad else all(finite)):
                wrong.append(f"step {step}: bad {is_bad}, NaN {nan}, finite {finite}")
            put_in += np.where(np.isfinite(values["weight"]) & (np.abs(values["weight"]) < 65520), values["weight"], 0)
            came_out += 0 if is_bad else reduced["weight"]
        left = trainer.total(put_in) - came_out - trainer.total(trainer.waiting("weight"))
        if np.abs(left).max() > 0:
            wrong.append(f"lost {left[left != 0][:5]}")
        if np.abs(trainer.total(came_out) - 3 * came_out).max() > 0:
            wrong.append("ranks differ")
        trainer.hvd.shutdown()
        return wrong

    def run(found: Found, number: int) -> None:
        forked.preload(framework)
        job = forked.run(lambda rank: train(rank, number), 3, limit=60 + 0.5 * steps)
        found.tries += steps
        if found.check(all(one.status == 0 for one in job.ranks), job.describe()):
            for one in job.ranks:
                found.check(not one.result, str(one.result[:5]))

    return run


DIFFERENCES = {
    "density": ({"density": 0.02}, r"constant\(0.02\)"),
    "values": ({"values": "float16"}, "values = 'float16'"),
    "seed": ({"seed": 7}, "seed = 7"),
    "min_numel": ({"min_numel": 3}, "min_numel = 3"),
    "exchange": ({"exchange": "reduce_scatter"}, "exchange = 'reduce_scatter'"),
    "version": ({}, "hvd_sparse = 9.9.9"),
}


def refused(framework: str):
    """Return what makes a try: a job in which one rank differs; every rank must say in what."""

    def train(rank: int, what: str, who: int) -> None:
        settings, _ = DIFFERENCES[what]
        if what == "version" and rank == who:
            from hvd_sparse.algorithms import base

            base.__version__ = "9.9.9"
        trainer = TRAINERS[framework](**(settings if rank == who else {}))
        trainer.total([0.0])  # all ranks are here
        began = time.monotonic()
        try:
            trainer.reduce(gradients(0, rank))
        finally:
            print(f"after {time.monotonic() - began:.3f} s", flush=True)

    def run(found: Found, number: int) -> None:
        what, who = list(DIFFERENCES)[number % len(DIFFERENCES)], number // len(DIFFERENCES) % 3
        forked.preload(framework)
        job = forked.run(lambda rank: train(rank, what, who), 3, limit=90.0)
        told = [bool(re.search(DIFFERENCES[what][1], one.error)) for one in job.ranks]
        found.check(all(told) and not job.hung, f"{what} on rank {who}: told {told}\n{job.describe()}")
        seconds = [float(one) for rank in job.ranks for one in re.findall(r"after ([\d.]+) s", rank.output)]
        found.worst = max(found.worst, *seconds, 0.0)

    return run


def many_ranks(ranks: int):
    """Return a function that makes a try: a tiny model on more ranks than cores, with exact sums."""

    def train(rank: int, number: int) -> str:
        trainer = TorchTrainer()
        put_in, came_out = np.zeros(SIZES["weight"]), np.zeros(SIZES["weight"])
        for step in range(5):
            values = gradients(1000 * number + step, rank)
            put_in += values["weight"]
            came_out += trainer.reduce(values)["weight"]
        left = trainer.total(put_in) - came_out - trainer.total(trainer.waiting("weight"))
        agree = trainer.total(came_out) - ranks * came_out
        trainer.hvd.shutdown()
        return "" if not left.any() and not agree.any() and came_out.any() else f"lost {left.any()}, {agree.any()}"

    def run(found: Found, number: int) -> None:
        forked.preload("torch")
        job = forked.run(lambda rank: train(rank, number), ranks, limit=420.0)
        found.check(all(one.status == 0 and one.result == "" for one in job.ranks), job.describe()[:3000])
        found.worst = max(found.worst, *(one.seconds for one in job.ranks))
        found.note("seconds: of the whole job")

    return run


def resident() -> float:
    """Return MiB that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def settled(steps: int) -> int:
    """Return the step of a long run from which on its memory must not grow."""
    return min(2000, steps // 10)


def soak(tensors: int, numel: int, steps: int, bucket_bytes: int = 1 << 22):
    """Return what makes a try: a long run, in which memory and open files must not grow."""

    def train(rank: int, steps: int) -> dict:
        sizes = {f"t{i:03d}": numel for i in range(tensors)}
        trainer = TorchTrainer(sizes=sizes, bucket_bytes=bucket_bytes)
        draw, series, began = np.random.default_rng(rank), [], time.monotonic()
        values = {name: draw.standard_normal(n).astype(np.float32) for name, n in sizes.items()}
        for step in range(steps):
            trainer.reduce(values)
            if step in (settled(steps), steps // 2, steps - 1):
                series.append((step, resident(), len(list(Path("/proc/self/fd").iterdir()))))
        rate = steps / (time.monotonic() - began)
        digest = [float(trainer.reduce(values)["t000"].sum())]
        trainer.hvd.shutdown()
        return {"series": series, "rate": rate, "digest": digest}

    def run(found: Found, number: int) -> None:
        done = min(steps, found.asked)
        forked.preload("torch")
        job = forked.run(lambda rank: train(rank, done), 3, limit=120 + done)
        found.tries += done
        if not found.check(all(one.status == 0 for one in job.ranks), job.describe()):
            return
        found.check(len({str(one.result["digest"]) for one in job.ranks}) == 1, "ranks differ")
        growth = [one.result["series"][-1][1] / one.result["series"][0][1] - 1 for one in job.ranks]
        files = [one.result["series"][-1][2] - one.result["series"][0][2] for one in job.ranks]
        found.check(max(growth) < 0.01, f"memory grew: {[one.result['series'] for one in job.ranks]}")
        found.check(max(files) <= 0, f"open files: {files}")
        found.note(f"RSS {100 * max(growth):+.2f} % from step {settled(done):,} to {done:,}, open files +{max(files)}")
        found.note(f"{job.ranks[0].result['rate']:.0f} steps/s")

    return run


SCENARIOS = {
    **{
        f"not_finite_{framework}_{dtype}": Scenario(
            "5", f"NaN, infinity or overflow on a random rank, {dtype}, {framework}", 500,
            not_finite(framework, 500, dtype), "steps")
        for framework in FRAMEWORKS for dtype in ("float32", "float16")
    },
    **{
        f"refused_{framework}": Scenario("9", f"one rank with other settings, {framework}", 18, refused(framework))
        for framework in FRAMEWORKS
    },
    "soak": Scenario("6", "a long run of a small model at 3 ranks", 4_000, soak(4, 1000, 100_000), "steps"),
    "soak_300": Scenario("6", "300 tensors, each in a separate bucket: fused all-gathers", 200,
                         soak(300, 2000, 10_000, bucket_bytes=1), "steps"),
    "ranks_64": Scenario("7", "64 ranks on one machine", 1, many_ranks(64)),
}  # fmt: skip
