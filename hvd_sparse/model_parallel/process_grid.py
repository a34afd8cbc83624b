"""The stage and the replica of each rank."""

from typing import Literal, NamedTuple, get_args

from hvd_sparse.checks import check_choice, checked_integer

Order = Literal["pipeline", "replica"]
ORDERS = get_args(Order)


class Place(NamedTuple):
    """The fields of a `ProcessGrid`."""

    rank: int
    size: int
    stages: int
    order: Order = "pipeline"


class ProcessGrid(Place):
    """R replicas of S stages on R * S ranks. order: "pipeline", a replica's stages are neighbours, or "replica".

    Stages of a replica exchange activations, replicas of a stage gradients: those that exchange more should be
    neighbours, which often share a node. Source: Dynamic Communication Thresholding, figure 1 (hybrid).

    Args:
        rank: This rank, from 0.
        size: Number of ranks.
        stages: Number of stages of a replica; it must divide `size`.
        order: "pipeline" or "replica".

    Raises:
        TypeError: A number is no integer.
        ValueError: A number is out of range, `stages` does not divide `size`, or `order` is unknown.
    """

    __slots__ = ()

    def __new__(cls, rank: int, size: int, stages: int, order: Order = "pipeline"):
        """Check the arguments, and make the grid."""
        size = checked_integer("size", size, 1)
        rank, stages = checked_integer("rank", rank, 0, size - 1), checked_integer("stages", stages, 1)
        if size % stages:
            raise ValueError(
                f"stages must divide the number of ranks, got stages={stages} on {size} ranks: start a multiple "
                f"of {stages}"
            )
        check_choice("order", order, ORDERS)
        return super().__new__(cls, rank, size, stages, order)

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return self.size // self.stages

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.rank % self.stages if self.order == "pipeline" else self.rank // self.replicas

    @property
    def replica(self) -> int:
        """This rank's replica of the model."""
        return self.rank // self.stages if self.order == "pipeline" else self.rank % self.replicas

    def rank_of(self, stage: int, replica: int) -> int:
        """Return the rank of a stage of a replica."""
        return replica * self.stages + stage if self.order == "pipeline" else stage * self.replicas + replica

    def stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks that hold a stage: those of its Horovod process set."""
        return [self.rank_of(stage, replica) for replica in range(self.replicas)]

    def pipeline_ranks(self) -> list[int]:
        """Return the ranks of this rank's replica, stage after stage."""
        return [self.rank_of(stage, self.replica) for stage in range(self.stages)]

    def name_of(self, rank: int) -> str:
        """Describe a rank, for errors."""
        other = self._replace(rank=rank)
        return f"stage {other.stage} of replica {other.replica} (rank {rank})"

    def describe(self) -> str:
        """Describe this rank."""
        return (
            f"rank {self.rank} of {self.size}: stage {self.stage} of {self.stages}, replica {self.replica} of "
            f"{self.replicas}; activations on ranks {self.pipeline_ranks()}, gradients on "
            f"{self.stage_ranks(self.stage)}"
        )
