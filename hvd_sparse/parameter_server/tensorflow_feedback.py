"""The error feedback of a worker as a part of TensorFlow's checkpoints."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from hvd_sparse.parameter_server.tensorflow import TensorFlowSession


class WorkerFeedback(tf.train.experimental.PythonState):
    """A worker's residual, velocity and thresholds, as a part of a `tf.train.Checkpoint`."""

    def __init__(self, session: "TensorFlowSession"):
        self._session = session

    def arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Return {variable: {"residual": float32[n], ...}}, copies of what `Worker.feedback_of` returns."""
        feedback = {name: self._session.worker.feedback_of(name) for name in self._session.tensors}
        return {name: {kind: array.copy() for kind, array in kinds.items()} for name, kinds in feedback.items()}

    def load(self, arrays: dict[str, dict[str, np.ndarray]], method: str | None) -> None:
        """Take over what `arrays` returned; ValueError, and nothing is changed, if it is of another model or method."""
        if differing := sorted({*arrays} ^ {*self._session.tensors}):
            raise ValueError(f"the state must be of the same model; missing there or here: {', '.join(differing)}")
        self._session.worker.load_feedback(arrays, method)

    def serialize(self) -> bytes:
        """Return the method's name and the error feedback as the bytes of an .npz file."""
        file, arrays = io.BytesIO(), self.arrays().items()
        named: dict[str, Any] = {f"{kind}/{name}": part for name, kinds in arrays for kind, part in kinds.items()}
        np.savez(file, method=np.array(self._session.method.name), **named)
        return file.getvalue()

    def deserialize(self, value: bytes) -> None:
        """Take over what `serialize` returned."""
        arrays: dict[str, dict[str, np.ndarray]] = {}
        with np.load(io.BytesIO(value), allow_pickle=False) as file:
            method = str(file["method"]) if "method" in file.files else None  # as in earlier versions
            for kind, name in (key.split("/", 1) for key in file.files if key != "method"):
                arrays.setdefault(name, {})[kind] = file[f"{kind}/{name}"]
        self.load(arrays, method)
