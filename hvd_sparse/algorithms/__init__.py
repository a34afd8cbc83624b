"""All methods: for each a dataclass of settings, and a class method of `CompressionMethods` as signature."""

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
