"""What the workers run: importable functions, so that every pool sends a name and no pool sends code."""

import time


def nothing(_item=None):
    return None


def rest(seconds):
    time.sleep(seconds)


class Bare:
    """An actor with nothing in it."""

    def call(self, _item=None):
        """Do nothing."""
        return None

    def rest(self, seconds):
        """Sleep; return when that began and ended (Unix time [s])."""
        started = time.time()
        time.sleep(seconds)
        return started, time.time()
