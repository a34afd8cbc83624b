"""The callback for the Trainer of Transformers trains as a loop around DistributedDataParallel does, bit for bit."""

import os
import re
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import ALONE, shared_folder
from ddp_loop import Loop, assert_same, assert_same_memory, batches, dgc, needs, network
from torch.utils.data import default_collate

pytestmark = [needs("transformers"), needs("accelerate"), ALONE]


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, inputs, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layers(inputs), labels)}


class Training:
    """A Trainer with the callback. `given`: the batches that it gave this rank, in order."""

    def __init__(self, folder, make=dgc, log_every=None, **more):
        import transformers
        from accelerate.state import AcceleratorState, GradientState

        from hvd_sparse.torch.transformers import CompressionCallback

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        pairs = [pair for inputs, labels in batches(6) for pair in zip(inputs, labels, strict=True)]
        dist.broadcast_object_list(shared := [pairs])
        examples = [{"inputs": one, "labels": label} for one, label in shared[0]]
        plain = {"use_cpu": True, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
        quiet = {"save_steps": 3, "report_to": [], "disable_tqdm": True, "max_grad_norm": 0.0}
        arguments = transformers.TrainingArguments(output_dir=folder, **{**plain, **quiet, "max_steps": 3, **more})
        self.module, self.given = Classifier(), []
        self.trainer = transformers.Trainer(self.module, arguments, self.collate, examples)
        self.callback = CompressionCallback(self.trainer, make, log_every)
        self.trainer.add_callback(self.callback)

    def collate(self, examples):
        batch = default_collate(examples)
        self.given.append((batch["inputs"], batch["labels"]))
        return batch

    def train(self, **more):
        """Train, and return the batches that this rank got, first those of the steps."""
        self.given.clear()
        self.trainer.train(**more)
        return self.given


def prefixed(state):
    return {**state, "memory": {f"layers.{name}": buffers for name, buffers in state["memory"].items()}}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_trains_as_a_loop_and_a_second_training_continues(tmp_path, accumulate):
    training = Training(shared_folder(tmp_path), gradient_accumulation_steps=accumulate)
    loop = Loop(accumulate=accumulate)
    for _ in range(2):
        loop.train(training.train()[: 3 * accumulate])
        assert_same(training.module.layers, loop.module)
        assert_same_memory(training.callback.compression.state_dict(), prefixed(loop.compression.state_dict()))


def test_a_checkpoint_resumes_with_the_sum_of_all_ranks(tmp_path):
    """It trains as a loop that has loaded this sum, bit for bit."""
    folder = shared_folder(tmp_path)
    loop = Loop().train(Training(folder).train()[:3])
    assert os.path.exists(f"{folder}/checkpoint-3/compression.pt")
    later = Loop(loop.module)
    later.compression.load_state_dict(loop.compression.state_dict(summed=True))
    resumed = Training(folder, max_steps=6)
    later.train(resumed.train(resume_from_checkpoint=True)[-3:])
    assert_same(resumed.module.layers, later.module)
    assert_same_memory(resumed.callback.compression.state_dict(), prefixed(later.compression.state_dict()))


def test_a_state_that_only_some_ranks_find_is_refused_on_all(tmp_path):
    """As on hosts without a common file system, to which the checkpoint was copied by hand."""
    folder = shared_folder(tmp_path)
    Training(folder).train()
    own = f"{folder}/{dist.get_rank()}"
    shutil.copytree(f"{folder}/checkpoint-3", f"{own}/checkpoint-3")
    if dist.get_rank() > 0:
        os.remove(f"{own}/checkpoint-3/compression.pt")
    lacking = ", ".join(map(str, range(1, dist.get_world_size())))
    with pytest.raises(ValueError, match=f"compression.pt is missing on ranks {lacking}: copy it to all, or delete it"):
        Training(own, max_steps=6).train(resume_from_checkpoint=f"{own}/checkpoint-3")


def test_a_checkpoint_without_a_state_is_warned_of(tmp_path):
    folder = shared_folder(tmp_path)
    Training(folder).train()
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(f"{folder}/checkpoint-3/compression.pt")
    dist.barrier()
    resumed = Training(folder, max_steps=6)
    told = told_of(
        lambda: resumed.train(resume_from_checkpoint=True), "without .*compression.pt: residuals start empty"
    )
    assert told == (dist.get_rank() == 0) and resumed.callback.compression.state_dict()["step"] == 3


@pytest.mark.parametrize("every", [None, 2])
def test_rank_0_logs_by_the_trainer_which_goes_on_to_log_its_loss(tmp_path, every):
    """The numbers of each step are those of a loop, but for a few bytes: the Trainer sets find_unused_parameters."""
    training = Training(shared_folder(tmp_path), log_every=every, max_steps=6, logging_steps=3)
    loop, expected = Loop(), {}
    loop.compression.log_to(lambda numbers, step: expected.update({step: numbers}), 2)
    loop.train(training.train()[:6])
    history = training.trainer.state.log_history
    found = {one["step"]: one for one in history if "compression/ratio" in one}
    assert list(found) == ([2, 4, 6] if every and dist.get_rank() == 0 else [])
    for step, numbers in found.items():
        assert {name for name in numbers if name.startswith("compression/")} == expected[step].keys()
        for name in ("density", "residual_norm"):
            assert numbers[f"compression/{name}"] == expected[step][f"compression/{name}"] > 0.0
        assert 0 <= numbers["compression/payload_bytes"] - expected[step]["compression/payload_bytes"] <= 64
    assert [one["step"] for one in history if "loss" in one] == [3, 6]


def test_the_scaler_of_the_trainer_gives_the_loss_scale(tmp_path):
    """On the CPU, a Trainer makes none. Without its scale, a compressor with a momentum refuses the scaler's step."""
    training = Training(shared_folder(tmp_path))
    training.trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    loop = Loop(scale=64.0).train(training.train()[:3])
    assert training.callback.compression.loss_scale == 64.0
    assert_same(training.module.layers, loop.module)


def test_clipping_of_the_reduced_gradient_is_warned_of(tmp_path):
    folder, message = (
        shared_folder(tmp_path),
        "max_grad_norm clips.*Set it to 0.0, and use clip_norm of Compression.dgc",
    )
    assert told_of(Training(folder, max_grad_norm=1.0).train, message) == (dist.get_rank() == 0)
    assert told_of(Training(folder).train, "max_grad_norm") == 0


def test_a_model_that_is_not_in_distributed_data_parallel_is_refused(tmp_path, monkeypatch):
    """Such as FSDP's, which needs GPUs."""
    training = Training(shared_folder(tmp_path))
    monkeypatch.setattr("hvd_sparse.torch.transformers.distributed", lambda model: None)
    with pytest.raises(TypeError, match=r"got DistributedDataParallel\. With FSDP or DeepSpeed gradients cannot be"):
        training.train()
    monkeypatch.setattr("transformers.TrainingArguments.world_size", 1)
    message = "Transformers does not wrap a single process's model.*nothing is compressed"
    assert told_of(training.train, message) == 1
    assert training.callback.compression is None


def told_of(function, message):
    """Return how often a function warns with this message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return len([one for one in caught if re.search(message, str(one.message))])
