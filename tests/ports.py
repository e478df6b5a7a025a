"""Ports of servers that tests start."""

import socket

_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port of 127.0.0.1 that no other program is given before a server listens on it.

    This process stays bound to it, which a server ignores that may reuse addresses, as those of PyTorch and uvicorn.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


def place_of(processes: int) -> dict[str, str]:
    """Environment variables of so many processes that find each other, each on one thread."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    return place | {"OMP_NUM_THREADS": "1"}
