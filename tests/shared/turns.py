"""What tests of DCT's kept thresholds share: a schedule in which turns are missed, and the ages of thresholds."""

from hvd_sparse.schedule import Schedule


class Alternating(Schedule):
    """Every fourth step is dense, as the same turns of every life-span of eight steps are."""

    def density(self, step):
        return 1.0 if step % 4 == 0 else 0.01

    def describe(self):
        return "alternating"


class Ages:
    """For how many steps each threshold has had its value, and the most there were."""

    def __init__(self):
        self.oldest = 0
        self._last = {}

    def note(self, name, value):
        """Note the value of a threshold after a step."""
        before, age = self._last.get(name, (0.0, 0))
        self._last[name] = value, age + 1 if value == before else 1
        self.oldest = max(self.oldest, self._last[name][1])
