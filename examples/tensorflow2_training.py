"""The common part of the TensorFlow examples with Horovod: start, compression, optimizer, sums over ranks.

The baselines (`none`, `fp16`) use Horovod's own compressors and run without the plugin.
"""

import importlib.util
import os

if importlib.util.find_spec("tf_keras"):  # TensorFlow before 2.16 has Keras 2 without it
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod's Keras optimizer needs Keras 2
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import reporting
import tensorflow as tf
import tensorflow2_device

from hvd_sparse.checkpoint import load_state, save_state


def start(parser):
    """Parse the command line, start Horovod, seed."""
    args = reporting.parse_arguments(parser, hvd)
    tensorflow2_device.prepare(hvd.local_rank())
    tf.keras.utils.set_random_seed(args.seed)
    return args


def make_compression(model, args, warmup_steps):
    """Make the compressor that the arguments ask for; a single process needs none."""
    method = args.method if args.size > 1 or args.method in reporting.DENSE_METHODS else "none"
    settings = reporting.compression_settings(args, warmup_steps)
    settings.pop("weight_decay", None)  # Keras' acts on the weights, and not through the gradient: see make_sgd
    variables = model.trainable_variables
    compression = reporting.choose_compression(hvd, "hvd_sparse.tensorflow", method, variables, settings)
    if args.tensorboard and reporting.compresses(args):  # on every rank, or their graphs differ
        compression.log_to(tf.summary.create_file_writer(args.tensorboard) if args.rank == 0 else None)
    return compression


def make_sgd(args, learning_rate):
    """Return SGD with weight decay, and without the momentum that the compressor does."""
    decay = args.weight_decay or None
    if reporting.compresses_momentum(args):
        return tf.keras.optimizers.SGD(learning_rate, weight_decay=decay)
    return tf.keras.optimizers.SGD(learning_rate, momentum=args.momentum, nesterov=args.nesterov, weight_decay=decay)


@tf.keras.utils.register_keras_serializable("examples")
class LearningRate(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A linear rise over the warm-up, then half a cosine down to 0: `reporting.learning_rate` as a table."""

    def __init__(self, peak, steps, warmup_steps):
        self.config = {"peak": peak, "steps": steps, "warmup_steps": warmup_steps}
        rates = [reporting.learning_rate(peak, step, steps, warmup_steps) for step in range(steps)]
        self.rates = tf.constant(rates, tf.float32)

    def __call__(self, step):
        """Return the rate of a step."""
        return tf.gather(self.rates, tf.minimum(tf.cast(step, tf.int64), len(self.rates) - 1))

    def get_config(self):
        """Return the arguments."""
        return self.config


def loss_of(labels, logits):
    """Return the mean cross entropy."""
    losses = tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return tf.reduce_mean(losses)


def make_step(model, optimizer, compression, args):
    """Return a function that takes one training step on a batch, with a tape, and returns the loss."""

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        if args.clip_norm and not reporting.compresses_momentum(args):
            gradients, _ = tf.clip_by_global_norm(gradients, args.clip_norm)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def save(model, optimizer, compression, rows, steps, args):
    """Write args.checkpoint: model, optimizer, the sum of all ranks' error feedback, metrics; every rank calls it.

    A job that is killed meanwhile leaves the previous epoch's file. A job with another world size can resume from it.
    """
    variables = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    state = {"rows": rows, "steps": steps, "method": args.method, "variables": variables}
    if reporting.compresses(args):
        state["compression"] = compression.state_dict(summed=True)
    if args.rank == 0:
        save_state(args.checkpoint, state)


def load(model, optimizer, compression, args):
    """Restore args.checkpoint; return metrics and number of steps: [] and 0 without a checkpoint."""
    if not reporting.has_checkpoint(args, sum_over_ranks):
        return [], 0
    optimizer.build(model.trainable_variables)
    state = load_state(args.checkpoint)
    reporting.check_method(state["method"], args)
    # With one rank the optimizer has the momentum, not the compressor: its variables may be more, or fewer, than saved
    for variable, value in zip([*model.variables, *optimizer.variables], state["variables"], strict=False):
        variable.assign(value)
    if "compression" in state:
        if reporting.compresses(args):
            compression.load_state_dict(state["compression"])
        else:
            reporting.warn_of_dropped_residuals(args)
    return state["rows"], state["steps"]


def digits_model():
    """Return the network of `pytorch_digits.py`, built: 151,306 parameters."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def count_parameters(model):
    """Return the number of elements of all trained variables."""
    return sum(variable.shape.num_elements() for variable in model.trainable_variables)


def sum_over_ranks(values, name):
    """Sum a list of numbers over all ranks; every rank gets the same floats."""
    return hvd.allreduce(tf.constant(values, tf.float64), name=name, op=hvd.Sum).numpy().tolist()
