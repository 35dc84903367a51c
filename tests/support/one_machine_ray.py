"""A stand-in for the module `ray`: actors are objects of the process that has connected, and end with it.

A process that finds `ray.py` in its path imports it as `ray`; a cluster's scheduling, its nodes and its sockets are not
there. So it shows what a keeper of loaders does, and what becomes of its actors where it is killed, without Ray.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = """
class exceptions:
    class RayError(Exception):
        pass


class util:
    @staticmethod
    def get_node_ip_address():
        return "127.0.0.1"


def is_initialized():
    return False


def init(**words):
    pass


def cluster_resources():
    return {"CPU": 4.0, "memory": float(8 << 30)}


class Method:
    def __init__(self, function):
        self.function = function

    def remote(self, *words):
        try:
            return self.function(*words), None
        except Exception as error:
            return None, error


class Actor:
    def __init__(self, made):
        self.made = made

    def __getattr__(self, name):
        return Method(getattr(self.made, name))


class Kind:
    def __init__(self, kind):
        self.kind = kind

    def options(self, **words):
        return self

    def remote(self, *words):
        return Actor(self.kind(*words))


remote = Kind


def get(call, timeout=None):
    value, error = call
    if error is not None:
        raise exceptions.RayError(str(error)) from error
    return value


def wait(calls, num_returns, timeout):
    return calls, []


def kill(actor):
    actor.made.close()
"""


def write_stand_in(folder: Path) -> Path:
    """The folder to put before the others of a path."""
    (folder / "stand_in").mkdir()
    (folder / "stand_in" / "ray.py").write_text(SOURCE, encoding="utf-8")
    return folder / "stand_in"
