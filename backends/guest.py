"""Whether this process is somebody else's, whose libraries keep the settings that he has given them.

In a process of our own a backend sets for all threads what suits its models: they may begin some themselves.
"""

_guest = False


def be_guest() -> None:
    """From now on this process is somebody else's."""
    global _guest
    _guest = True


def is_guest() -> bool:
    return _guest
