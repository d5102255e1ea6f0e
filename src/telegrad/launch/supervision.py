"""`launch`: two processes, so that the death of either leaves no process behind.

::

    front     the process that was started: passes the terminal's signals on, and waits
    └── keeper    in a process group of its own: starts the workers, reads their output, ends them
        ├── worker 0    each in a session of its own; forked by `forking`, which then ends
        └── worker 1

Both adopt orphans among their descendants. If the front is killed, a pipe closes, and the keeper
ends the workers. If the keeper is killed, the front inherits the workers and their children, and
kills them. The keeper is outside the front's process group, so one `kill -9` does not kill both.

(Rejected: `PR_SET_PDEATHSIG` in each worker, which does nothing for the workers' own children.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from types import FrameType

from telegrad.errors import LaunchError
from telegrad.launch.environment import reserve_port
from telegrad.launch.group import PASSED_ON, Group
from telegrad.launch.output import Screen, wants_colour
from telegrad.launch.processes import (
    SignalInbox,
    adopt_orphans,
    descendants,
    only_noted,
    signal_all,
)
from telegrad.launch.program import LaunchOptions

__all__ = ["launch"]

_INTERNAL_ERROR = 70  # EX_SOFTWARE
_KEEPER_SECONDS = 5.0  # beyond the grace, for a keeper that is blocked in writing its output


def launch(options: LaunchOptions) -> int:
    """Runs a program on several workers of this machine; returns when all of them have ended.

    Call it from the main thread of a process that does nothing else: it forks, and handles the
    signals that end a program.

    Returns:
        the exit code: 0, that of the worker that failed (128 + n if signal n killed it), or 128 + n
        if this process got signal n.

    Raises:
        LaunchError: nothing was started, because there is no such program, the port is taken, or
            the system does not let a process adopt orphans.
    """
    options.program.check()
    with reserve_port(options.master_port) as holder:
        adopt_orphans()
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals wait until both processes are ready for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        # A process inherits an ignored SIGCHLD, and could then not learn how a child has ended.
        signal.signal(signal.SIGCHLD, only_noted)
        keeper = os.fork()
        if keeper == 0:
            os.close(writer)
            _keep(options, holder, reader)
        os.close(reader)
        try:
            return _Front(keeper, options.grace).wait()
        finally:
            os.close(writer)


def _keep(options: LaunchOptions, holder: socket.socket, front: int) -> None:
    """Runs the keeper. Does not return."""
    code = _INTERNAL_ERROR
    try:
        os.setpgid(0, 0)
        # On some terminals (stty tostop) writing from the background stops a process.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        adopt_orphans()
        out, err = (
            Screen(
                descriptor,
                is_terminal=os.isatty(descriptor),
                colour=wants_colour(descriptor, os.environ),
                marks=options.workers > 1,
            )
            for descriptor in (1, 2)
        )
        try:
            code = Group(options, holder.getsockname()[1], front, out, err).run()
        except LaunchError as error:
            err.warn(str(error))
            code = 2
    except BaseException:  # noqa: BLE001 - shown; the process ends in any case
        traceback.print_exc()
    finally:
        os._exit(code)


class _Front:
    """Waits for the keeper, and passes signals on to it.

    A second Ctrl-C kills all processes at once. So does a keeper that has not ended a while after
    the grace period: it may be blocked in writing to a reader that does not read.
    """

    def __init__(self, keeper: int, grace: float) -> None:
        self._keeper = keeper
        self._grace = grace
        self._signalled_by = 0
        self._is_waiting = True

    def wait(self) -> int:
        with SignalInbox() as inbox:
            for number in PASSED_ON:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, self._pass_on)
            if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
                signal.signal(signal.SIGTSTP, self._suspend)
            signal.signal(signal.SIGALRM, self._kill)
            # The parent may have blocked any of them.
            needed = (*PASSED_ON, signal.SIGALRM, signal.SIGCHLD)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, needed)
            # Ends with the keeper, at the latest by _kill. WNOWAIT keeps its process id reserved,
            # in case a signal comes at this moment.
            ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
            while os.waitid(os.P_PID, self._keeper, ended) is None:
                inbox.wait()  # ends with any signal, including that of the keeper's end
                inbox.read()
            self._is_waiting = False
        _, status = os.waitpid(self._keeper, 0)  # has ended
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._sweep()
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return code
        return 128 + (self._signalled_by or -code)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if not self._is_waiting:
            return  # its process id may be reused
        if self._signalled_by and number == signal.SIGINT:
            self._kill(number, None)
            return
        if not self._signalled_by:
            self._signalled_by = number
            signal.setitimer(signal.ITIMER_REAL, self._grace + _KEEPER_SECONDS)
        os.kill(self._keeper, number)

    def _suspend(self, _: int, __: FrameType | None) -> None:
        """Ctrl-Z: stops the workers, too, which are in sessions of their own."""
        signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when a shell says `fg` or `bg`
        signal_all(signal.SIGCONT)

    def _kill(self, _: int, __: FrameType | None) -> None:
        if self._is_waiting:
            os.kill(self._keeper, signal.SIGKILL)

    def _sweep(self) -> None:
        """Kills the processes that the keeper has left: none, unless it was killed itself."""
        while descendants():
            signal_all(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)  # this process has adopted and killed them
