"""The parts of a compressor that TensorFlow does not track."""

import weakref
from collections.abc import Mapping

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.tensorflow.caller import TracedCall
from hvd_sparse.tensorflow.exchange import Exchange
from hvd_sparse.tensorflow.lifetime import Lifetime
from hvd_sparse.tensorflow.step import Step
from hvd_sparse.tensorflow.traffic import TrafficVariables
from hvd_sparse.tensorflow.variables import Variables


class Parts:
    """The parts of a compressor that TensorFlow need not track."""

    step: Step  # once the variables are known

    def __init__(
        self,
        algorithm: Algorithm,
        loss_scale: tf.Variable,
        variables: Variables,
        lifetime: Lifetime,
        exchange: Exchange,
        traffic: TrafficVariables,
    ):
        self.algorithm = algorithm
        self.loss_scale = loss_scale
        self.variables = variables
        self.lifetime = lifetime
        self.exchange = exchange
        self.traffic = traffic
        self.threshold_rows: Mapping[str, int] = {}
        self.averages = True  # whether results are means over ranks, as in the call that was traced last
        self.is_checked = False
        self.norm: tf.Tensor | None = None  # of the residuals, in a graph of TensorFlow 1
        self.reduced: set[str] = set()  # names of the variables in calls so far
        self.logs = False  # whether steps are traced with a report
        self.call: TracedCall | None = None  # the one that is being traced
        self.is_scaled = False  # whether loss_scale was set
        self.has_optimizer = False  # whether a Keras optimizer of Horovod was made with it
        self.calls_in: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # graph -> how many calls it holds

    def is_idle(self) -> bool:
        """Return whether Horovod has called the compressor for no gradient, though there are ranks to exchange with."""
        is_alone = not hvd.is_initialized() or not self.exchange.is_used() or self.exchange.is_last_of_elastic()
        return self.call is None and not is_alone
