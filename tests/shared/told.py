"""The warnings of a training."""

import warnings


def told(training):
    """Return the texts of all warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training()
    return [str(one.message) for one in caught]
