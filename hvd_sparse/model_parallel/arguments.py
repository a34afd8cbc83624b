"""Checks of what a user gives a pipeline: the loss, inputs, targets and outputs."""

from typing import Literal, get_args

from hvd_sparse.checks import check_choice

Reduction = Literal["mean", "sum"]
REDUCTIONS = get_args(Reduction)
MEANS = ("mean", "batchmean", "sum_over_batch_size", "mean_with_sample_weight", "auto")  # in PyTorch and Keras


def check_reduction(reduction: Reduction, loss) -> None:
    """Raise ValueError unless reduction is one of REDUCTIONS, and the one that a loss object says it does."""
    check_choice("reduction", reduction, REDUCTIONS)
    own = getattr(loss, "reduction", None)
    if not isinstance(own, str):
        return
    if (reduction, own) == ("mean", "sum") or (reduction == "sum" and own in MEANS):
        other = "sum" if reduction == "mean" else "mean"
        raise ValueError(
            f"reduction must be that of the loss, got {reduction!r} with {type(loss).__name__}(reduction={own!r}): "
            f"pass reduction={other!r} to Pipeline, or build the loss with another reduction"
        )


def check_samples(name: str, leaf, is_tensor: bool, expected: str) -> None:
    """Raise TypeError unless a leaf of inputs or targets is a tensor, ValueError unless it has a first dimension."""
    if not is_tensor:
        raise TypeError(f"{name} must be {expected}, or tuples or dicts of them; got {type(leaf).__name__}: convert it")
    if len(leaf.shape) == 0:
        raise ValueError(f"{name} must have a first dimension that counts samples, got a tensor of shape []")


def checked_rows(leaves: list) -> int:
    """Return the number of samples of the inputs' leaves; ValueError unless it is the same for all, and at least 1."""
    rows = {leaf.shape[0] for leaf in leaves}  # a tf.Variable has no length
    if len(rows) != 1 or rows == {0}:
        raise ValueError(
            "inputs must be given on the first stage: a tensor, or a tuple or dict of tensors, with the same "
            f"number of samples, at least 1; got {len(leaves)} tensors with {sorted(rows)} samples"
        )
    return rows.pop()


def check_targets(leaves: list, rows: int) -> None:
    """Raise ValueError unless each of the targets' leaves has as many samples as the inputs."""
    wrong = [leaf.shape[0] for leaf in leaves if leaf.shape[0] != rows]
    if wrong:
        raise ValueError(f"targets must have as many samples as inputs, {rows}; got {wrong[0]}")


def checked_dtype(name: str, dtype, names: dict) -> str:
    """Return the name of a dtype in messages; TypeError if messages cannot have it. No name: targets."""
    if dtype not in names:
        what = f"output {name!r} of a stage" if name else "targets"
        raise TypeError(f"{what} must have one of the dtypes {', '.join(names.values())}; got {dtype}: cast it before")
    return names[dtype]
