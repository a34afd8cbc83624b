"""Tells when several optimizers use in turn what belongs to one of them."""

import weakref


class SharedUse:
    """Notes who uses an object."""

    def __init__(self):
        self._users: weakref.WeakSet = weakref.WeakSet()
        self._last: weakref.ref | None = None
        self._has_told = False

    def begins(self, user) -> bool:
        """Note a use; return True once, when a user comes back after another: not where one has replaced another."""
        if self._last is not None and self._last() is user:
            return False
        tells = user in self._users and not self._has_told
        self._has_told |= tells
        self._users.add(user)
        self._last = weakref.ref(user)
        return tells

    def is_by_another(self, user) -> bool:
        """Return whether the last use was by somebody else, who still exists."""
        last = None if self._last is None else self._last()
        return last is not None and last is not user
