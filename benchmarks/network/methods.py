"""The models and methods that are compared on slow networks."""

from typing import NamedTuple


class Method(NamedTuple):
    """A method of exchanging gradients: the package that has it, its name there, and its settings."""

    package: str  # "horovod", "hvd_sparse", or "ddp": PyTorch's DistributedDataParallel over gloo
    name: str
    settings: dict
    label: str
    settles_in: int = 3  # steps before the timing starts

    @property
    def is_ours(self) -> bool:
        """Return whether hvd_sparse compresses, with Horovod or DDP."""
        return self.package == "hvd_sparse" or self.name == "dgc"


SPARSE = {"momentum": 0.9}
METHODS = {
    "dense": Method("horovod", "none", {}, "Horovod"),
    "fp16": Method("horovod", "fp16", {}, "Horovod, fp16"),
    "dgc": Method("hvd_sparse", "dgc", {**SPARSE, "density": 0.001}, "DGC 0.001"),
    "dgc_measured": Method(
        "hvd_sparse", "dgc", {**SPARSE, "density": 0.001, "dense_fallback": "measured"}, "DGC 0.001, measured", 20
    ),
    "dgc_0.01": Method("hvd_sparse", "dgc", {**SPARSE, "density": 0.01}, "DGC 0.01"),
    "gradient_dropping": Method("hvd_sparse", "gradient_dropping", {"density": 0.01}, "Gradient Dropping 0.01"),
    "micro": Method("hvd_sparse", "micro", {"density": 0.01}, "MiCRO 0.01"),
    "ddp": Method("ddp", "none", {}, "DDP"),
    "ddp_fp16": Method("ddp", "fp16", {}, "DDP, fp16 hook"),
    "powersgd": Method("ddp", "powersgd", {"matrix_approximation_rank": 1}, "DDP, PowerSGD rank 1"),
    "ddp_dgc": Method("ddp", "dgc", {**SPARSE, "density": 0.001}, "DDP, DGC 0.001"),
    "ddp_dgc_0.01": Method("ddp", "dgc", {**SPARSE, "density": 0.01}, "DDP, DGC 0.01"),
}
AT_HOSTS = {**SPARSE, "density": 0.01, "dense_fallback": None}  # for four hosts with two ranks, and for eight hosts
TWO_A_HOST = {**AT_HOSTS, "exchange": "hierarchical", "ranks_per_host": 2}
EXCHANGES = {  # four hosts with two ranks have those with "hosts" in their names, too
    "exchange_dense": Method("horovod", "none", {}, "Horovod"),
    "exchange_gather": Method("hvd_sparse", "dgc", AT_HOSTS, "DGC 0.01, gather"),
    "exchange_scatter": Method("hvd_sparse", "dgc", {**AT_HOSTS, "exchange": "reduce_scatter"}, "reduce-scatter"),
    "exchange_complete": Method(
        "hvd_sparse", "dgc", {**AT_HOSTS, "exchange": "reduce_scatter", "complete": True}, "reduce-scatter, complete"
    ),
    "exchange_hosts": Method("hvd_sparse", "dgc", {**TWO_A_HOST, "between_hosts": "gather"}, "hierarchical"),
    "exchange_hosts_scatter": Method(
        "hvd_sparse", "dgc", {**TWO_A_HOST, "between_hosts": "reduce_scatter"}, "hierarchical, reduce-scatter"
    ),
}
EXCHANGES |= {
    name.replace("exchange", "exchange_ddp"): method._replace(package="ddp", label=f"DDP, {method.label}")
    for name, method in EXCHANGES.items()
    if name != "exchange_complete"
}
EXCHANGES["exchange_ddp_dense"] = EXCHANGES["exchange_ddp_dense"]._replace(label="DDP")
MAIN = tuple(METHODS)  # the methods that `run.py` compares
METHODS |= EXCHANGES
METHODS |= {  # Table 1 of Gradient Dropping
    f"gradient_dropping_{density}": Method(
        "hvd_sparse", "gradient_dropping", {"density": density}, f"Gradient Dropping {density}"
    )
    for density in (0.1, 0.001)
}
FRAMEWORKS = {"pytorch": "pytorch_job", "tensorflow": "tensorflow_job"}


class Layers(NamedTuple):
    """The layer widths of a multi-layer perceptron."""

    widths: tuple[int, ...]


class Recurrent(NamedTuple):
    """A word-level language model: embedding, LSTM layers, and a linear layer over the words."""

    words: int
    hidden: int
    layers: int
    length: int


class ResNet50(NamedTuple):
    """The parameters of ResNet-50, with gradients that cost almost nothing."""


MODELS = {
    "mlp10": Layers((1024, 2048, 2048, 2048, 10)),  # 10.5 M
    "mlp38": Layers((1024, 4096, 4096, 4096, 10)),  # 37.8 M
    "lstm": Recurrent(10_000, 650, 2, 16),  # 19.8 M
    "resnet50": ResNet50(),  # 25.6 M
}
