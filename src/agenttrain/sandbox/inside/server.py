"""Serves the requests to one sandbox, until whoever asks is gone."""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import sys
import time
from functools import partial
from typing import Any, NoReturn

from .files import Refusal, file_work, place_of, walk, why
from .frames import CHUNK, HEAD, Header, frame, read_all_there_is, read_frame, write_all
from .job import Job
from .processes import end_all, end_namespace, end_processes_of, family, memory_of, processes
from .rights import (
    NOFILE,
    become_first_to_end,
    become_subreaper,
    become_user,
    hide,
    lay_down_privileges,
    load_filter,
    restore_signals,
    set_limit,
)

FILE_SECONDS = 10.0
"""Of one file operation: only programs inside, which may stop its process or dig folders deep, make it take long. A
small part of what a verifier has, so that what they do to it is refused and never the verifier's failure."""
MANY_BACKGROUND_PIPES = 256
NOFILE_MOST = 1 << 16
FILES_PER_MIB = 256
"""That a disk may hold where they are watched, and 1024 at least."""


class Server:
    """Serves one sandbox until its input ends."""

    def __init__(self, fd_in: int, fd_out: int) -> None:
        self.fd_in = fd_in
        self.fd_out = fd_out
        self.jobs: dict[int, Job] = {}
        """Process id to Job."""
        self.background: dict[int, Job] = {}
        """Outputs of programs that have ended, which something that they left may still write to; read and dropped."""
        self.poll = select.poll()
        self.ends = ""

    def serve(self) -> None:
        """Answer frames until the other side is gone."""
        begin = read_frame(self.fd_in)
        if begin is None:
            return
        self.poll.register(self.child_ends(), select.POLLIN)
        self.begin(*begin)
        self.poll.register(self.fd_in, select.POLLIN)
        while self.turn():
            pass

    def begin(self, header: Header, body: bytes) -> None:
        """Take the settings; the first answer says that programs can be run."""
        self.root = header["path"]
        self.limits = header["limits"]
        self.env = header["env"]
        self.user: tuple[int, int] | None = (header["uid"], header["gid"]) if header.get("uid") is not None else None
        self.watches_memory = header.get("watch_memory", False)
        self.watched_folder: str | None = header.get("watch_disk")
        self.python = header.get("python")
        if header["ends"] == "namespace" and os.getpid() != 1:
            self.answer({"id": 1}, {"failed": f"it is process {os.getpid()} of its namespace, not the first."})
            sys.exit(1)
        if header["ends"] == "uid" and (self.user is None or self.user[0] in (0, os.getuid())):
            self.answer({"id": 1}, {"failed": "it has no user of its own to end the processes of."})
            sys.exit(1)
        self.ends = header["ends"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.ends != "namespace":
            become_subreaper()
        hide()
        lay_down_privileges()
        if header.get("filter"):
            load_filter(bytes.fromhex(header["filter"]))
        self.start_files({**header, "op": "lay"}, body)

    def child_ends(self) -> int:
        """A descriptor that can be read after a child ended."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.wakeup = read
        return read

    def turn(self) -> bool:
        """Wait for something and do it; False when the other side is gone."""
        for fd, _ in self.poll.poll(self.patience_ms()):
            if fd == self.fd_in:
                request = read_frame(self.fd_in)
                if request is None:
                    return False
                self.take(*request)
            elif fd == self.wakeup:
                read_all_there_is(fd)
            else:
                self.move(fd)
        self.reap()
        self.end_what_is_late()
        if self.watches_memory:
            self.watch_memory()
        if self.watched_folder and any(job.header["op"] == "run" for job in self.jobs.values()):
            self.watch_disk(self.watched_folder)
        return True

    def patience_ms(self) -> float | None:
        """How long nothing need be looked at."""
        if (self.watches_memory or self.watched_folder) and (self.jobs or self.background):
            return 50
        if not self.jobs:
            return None
        return max(0, min(job.deadline for job in self.jobs.values()) - time.monotonic()) * 1000 + 1

    def take(self, header: Header, body: bytes) -> None:
        """Begin what a request asks for."""
        op = header["op"]
        try:
            if op == "run":
                self.start_program(header, body)
            elif op == "settle":
                self.settle(header)
            else:
                self.start_files(header, body)
        except Refusal as refusal:
            self.answer(header, {"refused": str(refusal)})
        except OSError as error:
            limit = {errno.EAGAIN: "processes", errno.ENOMEM: "memory_mib"}.get(error.errno or 0)
            if limit is None:
                raise
            self.answer(header, full(header, limit))

    def answer(self, header: Header, answer: Header, body: bytes = b"") -> None:
        """Send the answer to a request."""
        write_all(self.fd_out, frame({"id": header["id"], **answer}, body))

    # ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_program(self, header: Header, stdin: bytes) -> None:
        """Begin a program; it is answered when it has ended."""
        pipes = [os.pipe() for _ in range(4)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write), (why_read, why_write) = pipes
        began = time.monotonic()
        try:
            pid = os.fork()
        except OSError:
            for fd in sum(pipes, ()):
                os.close(fd)
            raise
        if pid == 0:
            self.become_program(header, (in_read, out_write, err_write), why_write)
        for fd in (in_read, out_write, err_write, why_write):
            os.close(fd)
        job = Job(header, pid, began + header["seconds"], int(self.limits["output_kib"] * 1024))
        self.jobs[pid] = job
        for fd in (out_read, err_read, why_read):
            self.follow(job, fd)
        job.stdin, job.stdin_fd = memoryview(stdin), in_write
        os.set_blocking(in_write, False)
        self.feed(job)

    def follow(self, job: Job, fd: int) -> None:
        """Read an output of a job as it comes."""
        os.set_blocking(fd, False)
        job.outputs[fd] = []
        job.kept.append(job.outputs[fd])
        self.poll.register(fd, select.POLLIN)

    def become_program(self, header: Header, fds: tuple[int, int, int], why_write: int) -> NoReturn:
        """In the new process: take the sandbox's rights and become the program; what prevents it goes to a pipe."""
        stage = "rights"
        try:
            os.setsid()
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            os.dup2(why_write, 3)
            os.set_inheritable(3, False)
            os.closerange(4, NOFILE_MOST)
            if self.watches_memory:
                set_limit(resource.RLIMIT_DATA, int(self.limits["memory_mib"] * (1 << 20)))
            self.take_rights()
            os.umask(0o022)
            stage = "folder"
            os.chdir(place_of(self.root, header["folder"]))
            stage = "program"
            env = {**self.env, **header["env"]}
            argv = header["argv"]
            if argv[0] in ("python", "python3") and self.python:
                argv = [self.python, *argv[1:]]
            restore_signals()
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(3, json.dumps([stage, error.errno, error.strerror]).encode())
        except BaseException as error:
            os.write(3, json.dumps([stage, 0, str(error)[:500]]).encode())
        finally:
            os._exit(127)

    def take_rights(self) -> None:
        """Those of programs inside: another user where there is one, and the limits of one process."""
        limits = self.limits
        become_first_to_end()
        set_limit(resource.RLIMIT_NOFILE, NOFILE)
        set_limit(resource.RLIMIT_FSIZE, int(limits["disk_mib"] * (1 << 20)))
        if self.user is not None:
            become_user(*self.user)
        if self.ends != "tree":  # the kernel counts a user's processes, and a "tree" shares its user with others
            of_first = 0 if self.user is not None else 1
            set_limit(resource.RLIMIT_NPROC, int(limits["processes"]) + of_first)

    def refuse_program(self, header: Header, reason: list[Any]) -> None:
        """Say why a program could not begin."""
        stage, number, text = reason
        name = header["folder"] if stage == "folder" else header["argv"][0]
        if number == errno.EAGAIN:
            self.answer(header, full(header, "processes"))
        elif stage == "rights":
            self.answer(header, {"failed": f"a program can't be given the sandbox's rights: {text}."})
        elif number in (errno.ENOENT, errno.ENOTDIR):
            self.answer(header, {"refused": f"There is no {stage} {name!r} in the sandbox."})
        elif number == 0:
            self.answer(header, {"refused": text})
        else:
            self.answer(header, {"refused": f"{name!r} can't be used as {stage}: {text}."})

    def feed(self, job: Job) -> None:
        """Write what fits of the program's input; close it when all is written."""
        fd = job.stdin_fd
        if fd is None:
            return
        try:
            while job.stdin:
                job.stdin = job.stdin[os.write(fd, job.stdin[:CHUNK]) :]
        except BlockingIOError:
            self.poll.register(fd, select.POLLOUT)
            return
        except OSError:
            pass
        self.stop_feeding(job)

    def stop_feeding(self, job: Job) -> None:
        """The program's input ends here."""
        if job.stdin_fd is not None:
            self.forget(job.stdin_fd)
            job.stdin_fd = None

    def forget(self, fd: int) -> None:
        """Close a descriptor that may be polled."""
        try:
            self.poll.unregister(fd)
        except KeyError:
            pass
        os.close(fd)

    def move(self, fd: int) -> None:
        """Take from an output, or give to an input, what is ready."""
        if fd in self.background:
            if not self.background[fd].take(fd):
                self.forget(fd)
                del self.background[fd]
            return
        for job in self.jobs.values():
            if fd == job.stdin_fd:
                self.feed(job)
                return
            if fd in job.outputs:
                if job.take(fd) is False:
                    self.forget(fd)
                    del job.outputs[fd]
                return

    def reap(self) -> None:
        """Answer for the processes that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self.jobs.pop(pid, None)
            if job is not None:
                self.finish(job, os.waitstatus_to_exitcode(status))

    def finish(self, job: Job, exit_code: int) -> None:
        """Answer for a job whose process has ended; what it left may go on writing, and nobody reads it."""
        self.stop_feeding(job)
        for fd in list(job.outputs):
            taken = 0
            while taken < 256 and job.take(fd):
                taken += 1
        if job.header["op"] == "run":
            self.finish_program(job, exit_code)
        else:
            self.finish_files(job)

    def finish_program(self, job: Job, exit_code: int) -> None:
        """Say how a program ended, or why it never began."""
        out, err, reason = (b"".join(kept) for kept in job.kept)
        job.kept, job.most = [], 0
        self.leave(job)
        if reason:
            self.refuse_program(job.header, json.loads(reason))
            return
        if exit_code == -signal.SIGXFSZ and not job.ended_by:
            job.ended_by = "disk_mib"
        answer = {
            "exit_code": None if job.ended_by else exit_code,
            "ended_by": job.ended_by,
            "seconds": time.monotonic() - job.began,
            "n_dropped": job.n_dropped,
            "n_stdout": len(out),
        }
        self.answer(job.header, answer, out + err)

    def leave(self, job: Job) -> None:
        """Let what a program left go on writing to its outputs, and read that no more than need be."""
        for fd in job.outputs:
            self.background[fd] = job
        while len(self.background) > MANY_BACKGROUND_PIPES:
            fd = next(iter(self.background))
            self.forget(fd)
            del self.background[fd]

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_files(self, header: Header, body: bytes) -> None:
        """Begin file work in a process with the sandbox's rights."""
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if pid == 0:
            os.close(read)
            self.do_files(header, body, write)
        os.close(write)
        job = Job(header, pid, time.monotonic() + FILE_SECONDS, 1 << 40)
        self.jobs[pid] = job
        self.follow(job, read)

    def do_files(self, header: Header, body: bytes, fd: int) -> NoReturn:
        """In the new process: do it, and write a frame to the pipe."""
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            self.take_rights()
            os.chdir(self.root)
            answer = frame(*file_work(self.root, self.limits, header, body))
        except Refusal as refusal:
            answer = frame({"refused": str(refusal)})
        except OSError as error:
            answer = frame({"refused": why(error, header.get("path", "."), self.limits)})
        except BaseException as error:
            answer = frame({"failed": f"{type(error).__name__}: {error}"})
        try:
            write_all(fd, answer)
        finally:
            os._exit(0)

    def finish_files(self, job: Job) -> None:
        """Pass the frame on."""
        for fd in list(job.outputs):
            while job.take(fd):
                pass
            self.forget(fd)
        data = b"".join(job.kept[0])
        if len(data) < HEAD.size or len(data) < HEAD.size + sum(HEAD.unpack_from(data)):
            self.answer(
                job.header, {"refused": "A program in the sandbox ended the file operation, or it took too long."}
            )
            return
        n_header, _ = HEAD.unpack_from(data)
        header = json.loads(data[HEAD.size : HEAD.size + n_header])
        self.answer(job.header, header, data[HEAD.size + n_header :])

    # ── what ends ────────────────────────────────────────────────────────────────────────────────────────────────────

    def end_what_is_late(self) -> None:
        """End what has passed its deadline, with all that it started in its foreground."""
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if now >= job.deadline and not job.ended_by:
                job.ended_by = "seconds"
                end_all(partial(family, job.pid))

    def watch_memory(self) -> None:
        """End everything when all of it together takes more than its limit."""
        if self.memory_bytes() > self.limits["memory_mib"] * (1 << 20):
            self.end_everything_by("memory_mib")

    def watch_disk(self, folder: str) -> None:
        """End everything when all that stands in a folder takes more than its limit, or is too many to be looked at."""
        left = self.limits["disk_mib"] * (1 << 20)
        most = max(1024, int(self.limits["disk_mib"] * FILES_PER_MIB))
        for n, (_, about) in enumerate(walk(folder)):
            left -= about.st_blocks * 512
            if left < 0 or n >= most:
                self.end_everything_by("disk_mib")
                return

    def end_everything_by(self, limit: str) -> None:
        """End everything, and say by which limit where that is asked for; what goes on holds nothing of it any more."""
        for job in self.jobs.values():
            job.ended_by = job.ended_by or limit
        self.end_and_wait()

    def memory_bytes(self) -> int:
        """Of all processes but this one, and of files in memory."""
        return sum(memory_of(pid) for pid in self.others()) + (self.files_bytes() if self.ends == "namespace" else 0)

    def files_bytes(self) -> int:
        """Of files in memory, all that can be written."""
        try:
            about = os.statvfs(self.root)
        except OSError:  # programs that may remove the working directory have
            return 0
        return (about.f_blocks - about.f_bfree) * about.f_frsize

    def others(self) -> list[int]:
        """Every other process of the sandbox."""
        if self.ends == "namespace":
            return [pid for pid in processes() if pid != os.getpid()]
        return family(os.getpid())[1:]

    def end_everything(self) -> None:
        """End every other process of the sandbox; does not wait for it."""
        if self.ends == "namespace":
            end_namespace()
        elif self.ends == "uid":
            self.end_user()
        else:
            end_all(self.others)

    def end_user(self) -> None:
        """End all processes of the sandbox's own user, by one of them; again where another of them was quicker."""
        while True:
            pid = os.fork()
            if pid == 0:
                try:
                    if self.user is not None:
                        end_processes_of(*self.user)
                finally:
                    os._exit(0)
            if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
                return

    def end_for_good(self) -> None:
        """Leave nothing running, and answer nobody."""
        if self.ends:
            self.jobs.clear()
            self.end_and_wait()

    def settle(self, header: Header) -> None:
        """Leave nothing running; all jobs under way are answered first."""
        self.end_and_wait()
        self.answer(header, {})

    def end_and_wait(self) -> None:
        """End every other process until there is none."""
        while True:
            self.end_everything()
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            job = self.jobs.pop(pid, None)
            if job is not None:
                self.finish(job, os.waitstatus_to_exitcode(status))


def full(header: Header, limit: str) -> Header:
    """The answer to what could not begin, for want of a process or of memory for it."""
    if header["op"] == "run":
        return {"exit_code": None, "ended_by": limit, "seconds": 0.0, "n_dropped": 0, "n_stdout": 0}
    return {"refused": f"What runs in the sandbox has taken all that its limit `{limit}` allows. Settle it first."}


def serve(fd_in: int, fd_out: int) -> None:
    """Serve one sandbox; returns when its other side is gone and nothing is left inside."""
    server = Server(fd_in, fd_out)
    try:
        server.serve()
    finally:
        server.end_for_good()
