"""The environment of workers: what programs written for torchrun read from it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["group_environment"]


def group_environment(
    base: Mapping[str, str], *, size: int, port: int, secret: str, threads: int | None
) -> dict[str, str]:
    """What is the same for all of a group. Each also gets its rank, when it is forked.

    Args:
        base: what the launcher itself was started with.
        secret: what the workers prove to each other, unless the user has set one. With it, being
            able to reach the meeting place is not enough to join the group.
        threads: see `LaunchOptions.threads`.
    """
    # A launcher that was started by torchrun would else pass on where torchrun's own store is.
    found = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    found.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        PYTHONUNBUFFERED="1",  # what is printed is seen when it is printed
    )
    found.setdefault("TELEGRAD_SECRET", secret)
    found.setdefault("PYTHONFAULTHANDLER", "1")  # a crash shows where it happened
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    return found
