"""Lightning's callback and Accelerate's `compress` train as a loop around DistributedDataParallel does, bit for bit."""

import importlib
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import ALONE, assert_ranks_agree, shared_folder
from ddp_loop import Loop, assert_same, assert_same_memory, batches, dgc, loss_of, needs, network

from hvd_sparse.torch.ddp import Compression


class Lightning:
    """Fits of one LightningModule. package: the module to take Lightning from; more: arguments of each Trainer."""

    def __init__(self, package="lightning.pytorch", **more):
        self.package = importlib.import_module(package)
        self.more, self.module = more, self.new_module()

    def new_module(self):
        class Module(self.package.LightningModule):
            def __init__(self):
                super().__init__()
                self.layers = network()

            def training_step(self, batch, index):
                return loss_of(self.layers, batch)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Module()

    def trainer(self, callbacks, epochs=1, **more):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        devices = {"accelerator": "cpu", "strategy": "ddp", "devices": int(os.environ.get("LOCAL_WORLD_SIZE", 1))}
        own = {**quiet, **devices, "logger": False, "use_distributed_sampler": False, "barebones": False}
        return self.package.Trainer(callbacks=callbacks, max_epochs=epochs, **{**own, **self.more, **more})

    def fit(self, callback, own, module=None, checkpoint=None, further=(), **more):
        """Fit with a new Trainer; return it."""
        trainer = self.trainer([callback, *further], **more)
        loader = torch.utils.data.DataLoader(own, batch_size=None)
        trainer.fit(module or self.module, loader, ckpt_path=checkpoint)
        return trainer


def callback_of(make=dgc, **settings):
    from hvd_sparse.torch.lightning import CompressionCallback

    return CompressionCallback(make, **settings)


def prefixed(state):
    """Return the state of a Loop with the names that the parameters have in a LightningModule."""
    return {**state, "memory": {f"layers.{name}": buffers for name, buffers in state["memory"].items()}}


@needs("lightning")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_trains_as_a_loop(package, accumulate):
    """`pytorch_lightning` is a copy of the code of `lightning.pytorch`, with other classes."""
    lightning, callback = Lightning(package, accumulate_grad_batches=accumulate), callback_of()
    assert callback.compression is None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hvd_sparse")
        lightning.fit(callback, batches(6))
    loop = Loop(accumulate=accumulate).train(batches(6))
    assert callback.compression.stats()["steps"] == 6 // accumulate
    assert_same(lightning.module.layers, loop.module)
    assert_same_memory(callback.compression.state_dict(), prefixed(loop.compression.state_dict()))


@needs("lightning")
def test_a_fit_sets_the_loss_scale():
    """Without it, a compressor with a momentum refuses the scaler's step."""
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    lightning, callback = Lightning(plugins=[MixedPrecision("16-mixed", "cpu", scaler)]), callback_of()
    lightning.fit(callback, batches(3))
    assert callback.compression.loss_scale == scaler.get_scale() == 128.0
    assert_ranks_agree(lightning.module)


@needs("lightning")
def test_a_second_fit_continues_with_the_residuals_of_the_first():
    lightning, callback = Lightning(), callback_of()
    lightning.fit(callback, batches(3))
    first = callback.compression
    lightning.fit(callback, batches(3, first=3))
    assert callback.compression is not first
    loop = Loop().train(batches(6))
    assert_same(lightning.module.layers, loop.module)
    assert_same_memory(callback.compression.state_dict(), prefixed(loop.compression.state_dict()))


@needs("lightning")
def test_a_fit_of_another_module_starts_anew():
    lightning, callback = Lightning(), callback_of()
    lightning.fit(callback, batches(3))
    other = lightning.new_module()
    lightning.fit(callback, batches(3, first=3), module=other)
    loop = Loop().train(batches(3, first=3))
    assert_same(other.layers, loop.module)
    assert_same_memory(callback.compression.state_dict(), prefixed(loop.compression.state_dict()))


@needs("lightning")
def test_a_checkpoint_resumes_with_the_sum_of_all_ranks(tmp_path):
    """At the start no bit of the sum has changed; then it trains as a loop that has loaded this sum, bit for bit.

    A fit after that continues from its own residuals, and not from the checkpoint's.
    """
    from lightning.pytorch import Callback

    path = f"{shared_folder(tmp_path)}/fit.ckpt"
    lightning, callback = Lightning(), callback_of()
    lightning.fit(callback, batches(3)).save_checkpoint(path)
    saved = callback.compression.state_dict(summed=True)

    class Probe(Callback):
        def on_train_start(self, trainer, pl_module):
            self.state = resumed.compression.state_dict(summed=True)

    again, resumed, probe = Lightning(), callback_of(), Probe()
    again.fit(resumed, batches(3), checkpoint=path, further=[probe], epochs=2)
    assert_same_memory(probe.state, saved)
    loop = Loop().train(batches(3))
    later = Loop(loop.module)
    later.compression.load_state_dict(loop.compression.state_dict(summed=True))
    later.train(batches(3))
    assert_same(again.module.layers, later.module)
    assert_same_memory(resumed.compression.state_dict(), prefixed(later.compression.state_dict()))
    again.fit(resumed, batches(3, first=3))
    assert_same(again.module.layers, later.train(batches(3, first=3)).module)


@needs("lightning")
def test_a_checkpoint_of_dense_training_starts_from_empty_residuals(tmp_path):
    """Also in a second fit: the weights are the checkpoint's, not those that its residuals belong to."""
    from lightning.pytorch import Callback

    path = f"{shared_folder(tmp_path)}/dense.ckpt"
    lightning, callback = Lightning(), callback_of()
    lightning.fit(Callback(), batches(3)).save_checkpoint(path)
    lightning.fit(callback, batches(3))
    lightning.fit(callback, batches(3), checkpoint=path, epochs=2)
    assert callback.compression.state_dict()["step"] == 3


def recorder():
    """Return a logger of Lightning that keeps what it is given."""
    from lightning.pytorch.loggers.logger import Logger

    class Recorder(Logger):
        name, version = "recorder", 0

        def __init__(self):
            super().__init__()
            self.steps = []

        def log_hyperparams(self, *_, **__): ...

        def log_metrics(self, metrics, step=None):
            if "compression/ratio" in metrics:
                assert metrics["compression/ratio"] > 1.0 and metrics["compression/residual_norm"] > 0.0
                self.steps.append(step)

    return Recorder()


@needs("lightning")
@pytest.mark.parametrize("every", [None, 2])
def test_rank_0_logs_to_every_logger(every):
    loggers = [recorder(), recorder()]
    Lightning(logger=loggers).fit(callback_of(log_every=every), batches(6))
    expected = [2, 4, 6] if every and dist.get_rank() == 0 else []
    assert [logger.steps for logger in loggers] == [expected, expected]


@needs("lightning")
def test_one_device_warns_once_that_nothing_is_compressed(tmp_path):
    """What a checkpoint of several ranks has is kept for a later run with several."""
    path = f"{shared_folder(tmp_path)}/fit.ckpt"
    ddp, several = Lightning(), callback_of()
    ddp.fit(several, batches(3)).save_checkpoint(path)
    lightning, callback = Lightning(strategy="auto", devices=1), callback_of()
    with pytest.warns(UserWarning, match="does not wrap a single process's model.*nothing is compressed") as caught:
        trainer = lightning.fit(callback, batches(3), checkpoint=path, epochs=2)
        lightning.fit(callback, batches(3))
    assert len([one for one in caught if "hvd_sparse" in str(one.message)]) == 1
    assert trainer.world_size == 1 and callback.compression is None
    assert_same_memory(callback.state_dict(), several.state_dict())
    assert callback_of().state_dict() == {}


@needs("lightning")
@ALONE
def test_strategies_other_than_ddp_are_refused():
    """Those of Lightning (FSDP, DeepSpeed, ModelParallel) need GPUs; this one does not wrap the model either."""
    from lightning.pytorch.strategies import DDPStrategy

    class ShardedStrategy(DDPStrategy):
        def configure_ddp(self): ...

    with pytest.raises(TypeError, match=r"got ShardedStrategy\..*set Trainer\(strategy=\"ddp\"\)"):
        Lightning(strategy=ShardedStrategy()).fit(callback_of(), batches(1))


@needs("lightning")
def test_clipping_of_the_reduced_gradient_is_warned_of():
    def dropping(named):
        return Compression.gradient_dropping(named, density=0.01)

    remedies = {dgc: "use clip_norm of Compression.dgc", dropping: "gradient_dropping has no clip_norm: try a larger"}
    for make, remedy in remedies.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Lightning(gradient_clip_val=0.5).fit(callback_of(make), batches(1))
            Lightning(gradient_clip_val=0.0).fit(callback_of(make), batches(1))
            Lightning().fit(callback_of(make), batches(1))
        told = [one for one in caught if "gradient_clip_val clips" in str(one.message)]
        assert len(told) == (dist.get_rank() == 0)
        assert all(remedy in str(one.message) and one.filename == __file__ for one in told)


@needs("lightning")
def test_a_function_that_returns_no_compressor_is_refused():
    """Such as one of `hvd_sparse.torch.Compression`, for Horovod."""
    with pytest.raises(TypeError, match=r"hvd_sparse\.torch\.ddp\.Compression, such as.*it returned list"):
        Lightning().fit(callback_of(list), batches(1))


def test_without_lightning_the_import_says_so(monkeypatch):
    for package in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "hvd_sparse.torch.lightning", raising=False)
    with pytest.raises(ImportError, match=r"hvd_sparse\.torch\.lightning needs Lightning: pip install lightning"):
        importlib.import_module("hvd_sparse.torch.lightning")


@needs("pytorch_lightning")
def test_with_pytorch_lightning_alone_its_callback_is_the_base(monkeypatch):
    import pytorch_lightning

    for package in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "hvd_sparse.torch.lightning", raising=False)
    alone = importlib.import_module("hvd_sparse.torch.lightning")
    monkeypatch.delitem(sys.modules, "hvd_sparse.torch.lightning")
    assert alone.CompressionCallback.__bases__ == (pytorch_lightning.Callback,)


class Accelerated:
    """A model that Accelerate trains. scale: that of a loss scaler; on the CPU, Accelerate itself makes none."""

    def __init__(self, make=dgc, accumulate=1, scale=None):
        from accelerate import Accelerator

        from hvd_sparse.torch.accelerate import compress

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        self.module = network()
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.module, optimizer)
        self.compression = compress(self.accelerator, self.model, make)

    def train(self, own):
        for batch in own:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, batch))
                self.optimizer.step()
                self.optimizer.zero_grad()  # before backward, it would discard the passes in no_sync
        return self


@pytest.fixture
def fresh():
    """Let a test make a new Accelerator: all share one state, those of later tests too."""
    from accelerate.state import AcceleratorState, GradientState

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


@needs("accelerate")
@ALONE
@pytest.mark.parametrize(("accumulate", "scale"), [(1, None), (2, None), (1, 64.0)])
def test_accelerate_trains_as_a_loop(fresh, accumulate, scale):
    """With a loss scaler, too: without its scale, a compressor with a momentum would refuse the scaler's step."""
    accelerated = Accelerated(accumulate=accumulate, scale=scale).train(batches(6))
    loop = Loop(accumulate=accumulate, scale=scale).train(batches(6))
    assert accelerated.compression.stats()["steps"] == 6 // accumulate
    assert accelerated.compression.loss_scale == (scale or 1.0)
    assert_same(accelerated.module, loop.module)
    assert_same_memory(accelerated.compression.state_dict(), loop.compression.state_dict())


@needs("accelerate")
@ALONE
def test_the_trackers_of_accelerate_get_the_numbers_of_rank_0(fresh):
    accelerated, found = Accelerated(), []
    log = lambda numbers, step: found.append((step, numbers["compression/ratio"] > 1.0))  # noqa: E731
    accelerated.accelerator.trackers = [SimpleNamespace(name="tracker", log=log)]  # as init_trackers sets them
    if accelerated.accelerator.is_main_process:
        accelerated.compression.log_to(accelerated.accelerator.log, every=2)
    accelerated.train(batches(4))
    assert found == ([(2, True), (4, True)] if dist.get_rank() == 0 else [])


@needs("accelerate")
@ALONE
def test_accelerate_resumes_with_the_sum_of_all_ranks(fresh, tmp_path):
    """No bit of the sum has changed after `load_state`; then it trains as a loop that has loaded this sum."""
    folder = shared_folder(tmp_path)
    first = Accelerated().train(batches(3))
    first.accelerator.save_state(folder)
    saved = first.compression.state_dict(summed=True)
    second = Accelerated()
    second.accelerator.load_state(folder)
    assert_same_memory(second.compression.state_dict(summed=True), saved)
    second.train(batches(3, first=3))
    loop = Loop().train(batches(3))
    later = Loop(loop.module)
    later.compression.load_state_dict(loop.compression.state_dict(summed=True))
    later.train(batches(3, first=3))
    assert_same(second.module, later.module)
    assert_same_memory(second.compression.state_dict(), later.compression.state_dict())


@needs("accelerate")
@ALONE
def test_accelerate_refuses_models_that_it_did_not_wrap(fresh):
    from accelerate import Accelerator

    from hvd_sparse.torch.accelerate import compress

    with pytest.raises(TypeError, match=r"got Sequential with distributed_type .*MULTI_CPU\. Pass what prepare"):
        compress(Accelerator(cpu=True), network(), dgc)


@needs("accelerate")
@ALONE
def test_accelerate_compresses_a_model_that_torch_compile_has_wrapped(fresh):
    """As with `dynamo_backend`."""
    from accelerate import Accelerator

    from hvd_sparse.torch.accelerate import compress

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    compression = compress(accelerator, torch.compile(model), dgc)
    loss_of(model, *batches(1)).backward()
    assert compression.stats()["steps"] == 1


@needs("accelerate")
def test_accelerate_with_one_process_warns_that_nothing_is_compressed(fresh, tmp_path, monkeypatch):
    """Each rank takes itself for the only process of a job."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(UserWarning, match=r"Accelerate does not wrap.*nothing is compressed") as caught:
        alone = Accelerated()
    assert alone.compression is None and caught[0].filename == __file__
    alone.train(batches(3)).accelerator.save_state(str(tmp_path))
    alone.accelerator.load_state(str(tmp_path))


def test_one_process_keeps_the_state_of_several_and_several_start_from_none():
    from hvd_sparse.torch.accelerate import SummedState

    loop = Loop().train(batches(3))
    saved = SummedState(loop.compression).state_dict()
    alone = SummedState(None)
    assert alone.state_dict() == {}
    alone.load_state_dict(saved)
    assert_same_memory(alone.state_dict(), saved)
    SummedState(loop.compression).load_state_dict({})
    assert loop.compression.state_dict()["step"] == 0
    SummedState(loop.compression).load_state_dict(saved)
    assert_same_memory(loop.compression.state_dict(summed=True), saved)
