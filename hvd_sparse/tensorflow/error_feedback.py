"""The error feedback of one variable: residual and velocity, and their update rules.

The twin of `hvd_sparse.torch.error_feedback`, with the same names, arithmetic and rounding: the payloads of the two
frameworks are equal bit for bit. Three things differ: a buffer is a tf.Variable, created before any tracing; an update
is an operation in a graph, on which later operations have to depend; and TensorFlow may reorder the additions of a
dense tensor.
"""

import math
from types import SimpleNamespace

import tensorflow as tf

from hvd_sparse.algorithms import Algorithm, DeepGradientCompression, SparsificationAwareMomentum
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.devices import CPU, beside
from hvd_sparse.tensorflow.norm import sum_of_squares
from hvd_sparse.units import Units


class ErrorFeedback(tf.__internal__.tracking.AutoTrackable):
    """The error feedback of Gradient Dropping: r <- r + g; sent values are subtracted (section 4).

    Buffers are flat float32, on `device`. A variable below `min_numel` or in `dense` has none, unless sent values stay
    in the residual (SAMomentum), or a float16 velocity may be clamped.
    """

    BUFFERS = ("residual",)
    retained = 0.0  # fraction of a sent value that stays in the residual

    def __init__(self, algorithm: Algorithm, variable: tf.Variable, name: str, weight_decay: float, device: str):
        self.algorithm = algorithm
        self.device = device
        self.weight_decay = weight_decay
        # In an object that TensorFlow does not look into: a checkpoint of error feedback must not restore the weights.
        self._of = SimpleNamespace(variable=variable)
        self.size = variable.shape.num_elements()
        is_large = algorithm.compresses(name, self.size)
        self.is_compressed = is_large and not is_always_dense(algorithm.schedule)
        has_residual = is_large or self.retained > 0.0 or self.may_be_cut()
        self.buffers = {
            kind: make_variable([self.size], f"hvd_sparse/{name}/{kind}", device=device)
            for kind in self.BUFFERS
            if kind != "residual" or has_residual
        }

    @property
    def variable(self) -> tf.Variable:
        """The variable of the model, or a `Shard` of it."""
        return self._of.variable

    @property
    def residual(self) -> tf.Variable:
        """The accumulated, unsent gradient, float32[n]."""
        return self.buffers["residual"]

    def accumulate(
        self, gradient: tf.Tensor, factor: tf.Tensor, units: Units, is_active: bool | tf.Tensor
    ) -> tf.Tensor:
        """Accumulate a gradient, scaled by `factor`, if active; return whether it was finite everywhere.

        Elements that are not finite count as zero.
        """
        options = {"is_active": is_active, "factor": factor, "weight_decay": units.decay(self.weight_decay)}
        return ops.accumulate(gradient, *self.destination(), **options, **self.rule())

    def destination(self) -> tuple[tf.Variable | tf.Tensor | None, ...]:
        """Return residual, velocity and, with weight decay, the parameter: arguments of `ops.accumulate`."""
        return self.residual, None, None

    def rule(self) -> dict:
        """Return the keyword arguments of `ops.accumulate` other than factor and weight decay."""
        return {}

    def cleared(self) -> tuple[tf.Variable, ...]:
        """Return the buffers in which sent entries are cleared: the residual first."""
        return (self.residual,)

    def dense_dtype(self, dtype: tf.DType) -> tf.DType:
        """Return the dtype in which a dense gradient of a dtype is sent: its own, or float32.

        Horovod cannot reduce bfloat16. A residual, or the sum of which a mean is taken, may exceed the range of
        float16. If all steps are dense, float16 is sent as in dense training.
        """
        if dtype == tf.bfloat16 or (dtype == tf.float16 and not is_always_dense(self.algorithm.schedule)):
            return tf.float32
        return dtype

    def may_be_cut(self) -> bool:
        """Return whether the dense tensor may exceed the range of its type; the gradient itself never does."""
        return False

    def take_all(
        self, gradient: tf.Tensor, factor: tf.Tensor, units: Units, most: float = math.inf
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
        """Return the dense tensor to send, the next content of the buffers, and whether all elements are finite.

        The tensor is the gradient plus the residual, if there is one, in the gradient's shape and units and in
        `dense_dtype`. With a residual, the sum for a float16 gradient is clamped to `most`, and the excess stays in the
        residual. The buffers change only if the step is not skipped.
        """
        dtype = self.dense_dtype(gradient.dtype)
        if "residual" not in self.buffers:
            return tf.cast(gradient, dtype), {}, ops.all_finite(gradient)
        wide = tf.float64 if gradient.dtype == tf.float64 else tf.float32
        whole = tf.cast(gradient, wide)
        shape = gradient.shape if gradient.shape.is_fully_defined() else self.variable.shape  # that of a shard is flat
        whole += tf.cast(tf.reshape(enlarged(self.residual.read_value(), units), shape), wide)
        if gradient.dtype != tf.float16:
            return whole, {"residual": tf.zeros([self.size])}, ops.all_finite(whole)
        sent, left = self._cut(whole, most, dtype)
        return sent, {"residual": left * tf.cast(units.incoming, tf.float32)}, ops.all_finite(whole)

    def _cut(self, whole: tf.Tensor, most, dtype: tf.DType = tf.float32) -> tuple[tf.Tensor, tf.Tensor]:
        """Return float32 values clamped to magnitude `most`, in `dtype`, and the flat excess."""
        most = tf.cast(most, tf.float32)
        sent = tf.cast(tf.clip_by_value(whole, -most, most), dtype)
        return sent, tf.reshape(whole - tf.cast(sent, tf.float32), [-1])

    def _sent(self, whole: tf.Tensor, units: Units, most: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the clamped values and the excess, in units of the residual, and whether the clamp hides no infinity.

        `most` is in units of the gradient.
        """
        if most == math.inf:
            return whole, tf.zeros([self.size]), tf.constant(True)
        return *self._cut(whole, most * units.incoming), ops.all_finite(whole)

    def after_sending(self, left: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return {buffer: its values at the sent elements}.

        left: the values of the residual: the rounding error in the payload, plus `retained` times what was sent.
        """
        return {"residual": left}

    def _local(self, gradient: tf.Tensor, factor: tf.Tensor, units: Units) -> tf.Tensor:
        """Return the gradient, float32[n], in units of the residual, clipped and with weight decay."""
        local = tf.reshape(tf.cast(gradient, tf.float32), [-1]) * factor
        if self.weight_decay:
            local += self.decayed_parameter() * units.decay(self.weight_decay)
        return local

    def decayed_parameter(self) -> tf.Tensor | None:
        """Return the variable as float32[n]; None without weight decay."""
        if not self.weight_decay:
            return None
        return tf.reshape(tf.cast(self.variable.read_value(), tf.float32), [-1])


class MomentumCorrection(ErrorFeedback):
    """The error feedback of Deep Gradient Compression: momentum correction and factor masking (Algorithms 3 and 4).

    momentum SGD:  u <- m*u + g      v <- v + u
    Nesterov:      u <- m*(u + g)    v <- v + u + g
    where g is the clipped gradient plus weight_decay * variable. Both buffers are cleared at the sent entries.
    """

    BUFFERS = ("residual", "velocity")
    algorithm: DeepGradientCompression

    @property
    def velocity(self) -> tf.Variable:
        """The local momentum, float32[n]."""
        return self.buffers["velocity"]

    def destination(self) -> tuple[tf.Variable | tf.Tensor | None, ...]:
        """Return residual, velocity and, with weight decay, the parameter."""
        return self.residual, self.velocity, self.decayed_parameter()

    def rule(self) -> dict:
        """Return momentum and nesterov."""
        return {"momentum": self.algorithm.momentum, "nesterov": self.algorithm.nesterov}

    def cleared(self) -> tuple[tf.Variable, ...]:
        """Return the residual, and with factor masking the velocity."""
        return (self.residual, self.velocity) if self.algorithm.factor_masking else (self.residual,)

    def dense_dtype(self, dtype: tf.DType) -> tf.DType:
        """Return the dtype in which a dense gradient is sent: that of the velocity."""
        return tf.float32

    def may_be_cut(self) -> bool:
        """Return whether the velocity may exceed the range of the variable's type."""
        return self.variable.dtype.base_dtype == tf.float16

    def take_all(
        self, gradient: tf.Tensor, factor: tf.Tensor, units: Units, most: float = math.inf
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
        """Return the dense tensor to send: the velocity, so that the update equals that of dense momentum SGD.

        Momentum is linear: the average of local velocities is the velocity of the average gradient. No momentum is
        masked, as no element is delayed.
        """
        velocity, terms = self._advance(gradient, factor, units)
        sent, after, finite = tf.add_n(terms), {"velocity": velocity}, tf.constant(True)
        if "residual" in self.buffers:
            sent, after["residual"], finite = self._sent(sent + self.residual.read_value(), units, most)
        sent = enlarged(sent, units)
        return tf.reshape(sent, self.variable.shape), after, tf.logical_and(finite, ops.all_finite(sent))

    def after_sending(self, left: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return {buffer: its values at the sent elements}: factor masking clears the velocity (section 3.3)."""
        after = super().after_sending(left)
        return {**after, "velocity": tf.zeros_like(left)} if self.algorithm.factor_masking else after

    def _advance(self, gradient: tf.Tensor, factor: tf.Tensor, units: Units) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the next velocity, and the terms to add to the residual."""
        local = self._local(gradient, factor, units)
        velocity, momentum = self.velocity.read_value(), self.algorithm.momentum
        if self.algorithm.nesterov:
            velocity = (velocity + local) * momentum
            return velocity, [velocity, local]
        velocity = velocity * momentum + local
        return velocity, [velocity]


class SparsificationAware(ErrorFeedback):
    """The error feedback of SAMomentum (DGS, Algorithm 3): it stores m * u, to which the next gradient is added.

    A sent entry decays to m times its value; an unsent one stays as it is: see `SparsificationAwareMomentum`.
    """

    algorithm: SparsificationAwareMomentum

    @property
    def retained(self) -> float:
        """The momentum."""
        return self.algorithm.momentum

    def destination(self) -> tuple[tf.Variable | tf.Tensor | None, ...]:
        """Return the residual, no velocity and, with weight decay, the parameter."""
        return self.residual, None, self.decayed_parameter()

    def dense_dtype(self, dtype: tf.DType) -> tf.DType:
        """Return the dtype in which a dense gradient is sent: that of the residual."""
        return tf.float32

    def take_all(
        self, gradient: tf.Tensor, factor: tf.Tensor, units: Units, most: float = math.inf
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
        """Return the dense tensor to send: the whole residual, which makes the update momentum SGD."""
        sent, after, finite = self._local(gradient, factor, units), {}, tf.constant(True)
        if "residual" in self.buffers:
            sent, left, finite = self._sent(sent + self.residual.read_value(), units, most)
            after["residual"] = sent * self.retained + left
        sent = enlarged(sent, units)
        return tf.reshape(sent, self.variable.shape), after, tf.logical_and(finite, ops.all_finite(sent))


KINDS = {DeepGradientCompression: MomentumCorrection, SparsificationAwareMomentum: SparsificationAware}


def make_error_feedback(
    algorithm: Algorithm, variable: tf.Variable, name: str, weight_decay: float = 0.0, device: str = CPU
) -> ErrorFeedback:
    """Return the error feedback of a method for one variable, with its buffers on a device."""
    return KINDS.get(type(algorithm), ErrorFeedback)(algorithm, variable, name, weight_decay, device)


def destinations(feedback: list[ErrorFeedback]) -> list[list]:
    """Return lists of residuals, velocities and parameters, one for each member; empty where unused."""
    columns = list(zip(*(one.destination() for one in feedback), strict=True))
    unread = tf.zeros([0])  # in place of a parameter without weight decay
    lists = [[unread if one is None else one for one in column] for column in columns]
    return [[] if all(one is unread for one in column) else column for column in lists]


def decays(feedback: list[ErrorFeedback], units: Units) -> list[float]:
    """Return the weight decays in the form of `bucket_ops.accumulate_bucket`."""
    return [units.decay(one.weight_decay) for one in feedback]


def enlarged(sent: tf.Tensor, units: Units) -> tf.Tensor:
    """Convert a float32 tensor from units of the residual to units of the gradient."""
    return sent * tf.cast(units.loss_scale, tf.float32)


def make_variable(shape: list[int], name: str, dtype: tf.DType = tf.float32, value=0, device: str = CPU) -> tf.Variable:
    """Create a rank-local variable with a value, or filled with one, on a device and outside any graph being traced.

    In a v1 graph, it is a local variable: a broadcast of the global ones must not copy rank 0's residual to all ranks.
    """
    with tf.init_scope(), tf.device(device):
        return tf.compat.v1.Variable(
            lambda: tf.broadcast_to(tf.constant(value, dtype), shape),
            trainable=False,
            name=name,
            dtype=dtype,
            use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        )


def read_after(variable: tf.Variable, operation) -> tf.Tensor:
    """Return the variable's value once the operation has run."""
    with tf.control_dependencies([operation]):
        return variable.read_value()


def clip_ratio(algorithm: Algorithm, units: Units, gradients: list[tf.Tensor], device: str) -> tf.Tensor:
    """Return the factor, a float64 scalar, that clips gradients of this rank by their joint L2 norm; at most 1.

    Elements that are not finite count as zero. device: that of the error feedback.
    """
    with beside(device):
        norm = tf.sqrt(tf.add_n([sum_of_squares(gradient, device) for gradient in gradients]))
    bound = units.clip_bound(algorithm.clip_norm)
    # Without a division by a norm of 0: its infinity, though unused, would stop a program with check_numerics.
    return bound / tf.maximum(norm, bound)
