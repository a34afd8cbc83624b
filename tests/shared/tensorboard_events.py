"""What TensorBoard would show of a folder."""

import tensorflow as tf


def events(folder):
    """Return {name: {step: value}} of what TensorBoard would show."""
    found = {}
    for path in folder.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, {})[event.step] = number
    return found
