"""Warnings and errors that are the same in both frameworks."""

NOT_COPIED = (
    "hvd_sparse: a compressor cannot be copied, pickled or broadcast: N ranks with the residual of one would send it "
    "N times. Leave it out of what is copied, such as a Module or hvd.elastic's state: each rank keeps its own, and "
    "may save state_dict(). Under DistributedDataParallel copy or save model.module"
)

NEW_EACH_STEP = (
    "hvd_sparse: a new compressor is built in each step: its residual, what has not been sent, is lost. Build it once, "
    "outside the step"
)


def not_called(name: str, where: str = "with one process") -> str:
    """Return the warning that Horovod will not call a compressor of a method that takes the optimizer's work."""
    return (
        f"hvd_sparse: Horovod calls no compressor {where}: nothing is compressed, and momentum, weight_decay and "
        f"clip_norm of Compression.{name} are not applied. Give them to the optimizer for such a run"
    )


def not_compressed(gradient: str, algorithm) -> str:
    """Return the warning for a gradient that Horovod does not pass to the compressor."""
    settings = f", nor does it get the momentum, weight_decay and clip_norm of Compression.{algorithm.name}"
    return (
        f"hvd_sparse: Horovod reduces {gradient} without its compressor: it is not compressed, and does not count in "
        f"stats(){settings if algorithm.replaces_optimizer else ''}. sparse_as_dense=True of Horovod's optimizer or "
        "tape compresses it"
    )


def two_momenta(outer: float, name: str, inner: float) -> str:
    """Return the warning for an optimizer with a momentum around a compressor with one."""
    return (
        f"hvd_sparse: the optimizer has momentum (or beta1) {outer:g} and Compression.{name} has momentum={inner:g}: "
        "both are applied. Set the optimizer's to 0: momentum must be applied before the selection, by the compressor"
    )


def clips_late(option: str, algorithm, off: str) -> str:
    """Return the warning for a bound that clips what has been reduced. option: its name. off: how to turn it off."""
    remedy = f"Compression.{algorithm.name} has no clip_norm: try a larger bound than for dense training"
    if hasattr(algorithm, "clip_norm"):
        remedy = f"Set {off}, and use clip_norm of Compression.{algorithm.name}"
    return (
        f"hvd_sparse: {option} clips the reduced gradient: what that removes is lost, because it has left the "
        f"residual. {remedy}"
    )
