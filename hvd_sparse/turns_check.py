"""Tells when several optimizers use in turn what belongs to one of them."""

import weakref


class TurnsCheck:
    """Records the optimizers that use a compressor or session."""

    def __init__(self):
        self._users: weakref.WeakSet = weakref.WeakSet()
        self._last: weakref.ref | None = None
        self._has_told = False

    def note_use(self, user) -> bool:
        """Record a use. Return True once: when an optimizer is used again after another one was used in between.

        One that replaces another for good is allowed.
        """
        if self._last is not None and self._last() is user:
            return False
        tells = user in self._users and not self._has_told
        self._has_told |= tells
        self._users.add(user)
        self._last = weakref.ref(user)
        return tells

    def is_by_another(self, user) -> bool:
        """Return whether the last use was by another optimizer, which still exists."""
        last = None if self._last is None else self._last()
        return last is not None and last is not user
