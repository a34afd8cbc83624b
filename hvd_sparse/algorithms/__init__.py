"""All methods: for each a dataclass of settings, and a class method of `CompressionMethods` as signature."""

from hvd_sparse.algorithms import shared_indices, threshold, top_k
from hvd_sparse.algorithms.base import CODINGS, SCOPES, WIRE_VALUES, Algorithm, Compressor, Parameters
from hvd_sparse.algorithms.shared_indices import CyclicLocalTopK, MiCRO, RandomK, SharedIndicesMethods
from hvd_sparse.algorithms.threshold import (
    DynamicCommunicationThresholding,
    HardThreshold,
    SIDCo,
    ThresholdMethods,
)
from hvd_sparse.algorithms.top_k import (
    DeepGradientCompression,
    GradientDropping,
    LocalMomentum,
    Scoped,
    SparsificationAwareMomentum,
    TopK,
    TopKMethods,
)

__all__ = [
    "CODINGS",
    "METHODS",
    "SCOPES",
    "WIRE_VALUES",
    "Algorithm",
    "CompressionMethods",
    "CyclicLocalTopK",
    "DeepGradientCompression",
    "DynamicCommunicationThresholding",
    "GradientDropping",
    "HardThreshold",
    "LocalMomentum",
    "MiCRO",
    "RandomK",
    "SIDCo",
    "Scoped",
    "Settings",
    "SparsificationAwareMomentum",
    "TopK",
]


METHODS: dict[str, type[Algorithm]] = {  # {name of the method of `Compression`: the class of its settings}
    one.name: one
    for module in (top_k, threshold, shared_indices)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Algorithm) and "name" in vars(one)
}


class CompressionMethods(
    TopKMethods[Parameters, Compressor],
    ThresholdMethods[Parameters, Compressor],
    SharedIndicesMethods[Parameters, Compressor],
):
    """All methods; a framework adds `_build`, which makes its compressor of the settings."""


class Settings(CompressionMethods[object, Algorithm]):
    """The settings of a method alone, without a framework: `Settings.dgc(None, density=0.01)`."""

    @classmethod
    def _build(cls, algorithm: Algorithm, parameters, process_set) -> Algorithm:
        return algorithm
