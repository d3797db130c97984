"""Requests over a socket, each with the socket of a sandbox to be; a child is forked for each. Ends with its input."""

from __future__ import annotations

import array
import gc
import json
import os
import select
import signal
import socket

from .birth import Serve, give_birth, tell
from .kernel import PR_SET_CHILD_SUBREAPER, prctl

MOST = 1 << 20
"""Bytes of a request."""


def take_requests(serve: Serve) -> None:
    """Until agenttrain is gone."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = wake_when_a_child_ends()
    gc.freeze()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        reap(ended)
        if control.fileno() in ready and not take_one(control, serve):
            return


def take_one(control: socket.socket, serve: Serve) -> bool:
    """Take a request and fork for it; False at the end of requests."""
    data, rights, _, _ = control.recvmsg(MOST, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    if not data:
        return False
    fds = array.array("i", rights[0][2])
    if os.fork() == 0:
        try:
            forget_parent(control)
            give_birth(json.loads(data), fds[0], serve)
        except BaseException as error:
            tell(fds[0], {"id": 0, "failed": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    os.close(fds[0])
    return True


def forget_parent(control: socket.socket) -> None:
    """What a child must not keep of it."""
    control.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def wake_when_a_child_ends() -> int:
    """A descriptor that can be read then."""
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


def reap(ended: int) -> None:
    """Let go of children that have ended."""
    try:
        os.read(ended, 4096)
    except BlockingIOError:
        pass
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
