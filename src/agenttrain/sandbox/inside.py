"""The first process of a sandbox: frames in on one descriptor, programs and file work inside, frames out on another.

Depends on the standard library alone and is one file, so that it runs wherever there is a Python: forked by
`starter`, as a bare subprocess, under bubblewrap, in a container. It does nothing itself with what programs inside can
write: each program and each file operation is a process of its own with the sandbox's rights, and a deadline. End of
file on its input ends it, and with it everything.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

Header = dict[str, Any]
Limits = dict[str, float]

HEAD = struct.Struct(">II")
"""Of a frame: bytes of its header, which is JSON, and of its body."""
CHUNK = 1 << 16
FILE_SECONDS = 60.0
"""Of one file operation: only programs inside, which may stop its process, make it take long."""
MANY_BACKGROUND_PIPES = 256
NOFILE = 1024
NOFILE_MOST = 1 << 16


class Refusal(Exception):
    """What was asked for can't be done inside; its text is for whoever asked."""


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def frame(header: Header, body: bytes = b"") -> bytes:
    """The bytes of one."""
    head = json.dumps(header).encode()
    return HEAD.pack(len(head), len(body)) + head + body


def read_exactly(fd: int, n: int) -> bytes:
    """That many bytes; fewer only at the end of file."""
    parts: list[bytes] = []
    left = n
    while left:
        part = os.read(fd, min(left, 1 << 20))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> tuple[Header, bytes] | None:
    """The next (header, body). None: the other side is gone."""
    head = read_exactly(fd, HEAD.size)
    if len(head) < HEAD.size:
        return None
    n_header, n_body = HEAD.unpack(head)
    content = read_exactly(fd, n_header + n_body)
    if len(content) < n_header + n_body:
        return None
    return json.loads(content[:n_header]), content[n_header:]


def write_all(fd: int, data: bytes) -> None:
    """Every byte, however long it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# ── file work, each in a process of its own ──────────────────────────────────────────────────────────────────────────


def place_of(root: str, path: str) -> str:
    """The absolute place of a path, links resolved.

    Raises:
        Refusal: it leads out of the working directory.
    """
    if "\0" in path:
        raise Refusal(f"{path!r} is no path.")
    resolved = os.path.realpath(os.path.join(root, path))
    if resolved != root and not resolved.startswith(root.rstrip("/") + "/"):
        raise Refusal(f"{path!r} leads out of the working directory {root}. Give a path within it.")
    return resolved


def read_file(root: str, path: str, most: int, most_name: str) -> bytes:
    """A file's content."""
    fd = os.open(place_of(root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        about = os.fstat(fd)
        if stat.S_ISDIR(about.st_mode):
            raise Refusal(f"{path!r} is a folder. List it, or name a file.")
        if not stat.S_ISREG(about.st_mode):
            raise Refusal(f"{path!r} is no file but a pipe, a socket or a device.")
        data = read_exactly(fd, most + 1)
    finally:
        os.close(fd)
    if len(data) > most:
        raise Refusal(f"{path!r} has {about.st_size} bytes, and {most_name} allows {most}.")
    return data


def write_file(root: str, path: str, data: bytes, executable: bool = False) -> None:
    """Content into a file, its folders too."""
    place = place_of(root, path)
    if place == root:
        raise Refusal(f"{path!r} is the working directory. Name a file in it.")
    os.makedirs(os.path.dirname(place), exist_ok=True)
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o777 if executable else 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refusal(f"{path!r} is no file but a pipe, a socket or a device.")
        os.ftruncate(fd, 0)
        write_all(fd, data)
    finally:
        os.close(fd)


def walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path relative to the folder, stat) of all below it, links not followed, in order; what can't be seen is left."""
    left = [""]
    while left:
        inner = left.pop()
        try:
            names = sorted(os.listdir(os.path.join(folder, inner)), reverse=True)
        except PermissionError:
            names = opened_names(os.path.join(folder, inner))
        except OSError:
            continue
        for name in reversed(names):
            path = os.path.join(inner, name)
            try:
                about = os.lstat(os.path.join(folder, path))
            except OSError:
                continue
            yield path, about
        left += [os.path.join(inner, n) for n in names if is_folder(os.path.join(folder, inner, n))]


def is_folder(path: str) -> bool:
    """Whether a folder stands there, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def opened_names(folder: str) -> list[str]:
    """Names in a folder that its owner closed, which is opened for good."""
    try:
        os.chmod(folder, 0o700)
        return sorted(os.listdir(folder), reverse=True)
    except OSError:
        return []


def list_folder(root: str, path: str) -> list[str]:
    """All that stands in a folder and below it, relative to the working directory; folders end in "/"."""
    place = place_of(root, path)
    if not os.path.isdir(place):
        raise Refusal(f"{path!r} is no folder." if os.path.lexists(place) else f"There is no folder {path!r}.")
    below = os.path.relpath(place, root)
    return sorted(
        os.path.normpath(os.path.join(below, name)) + ("/" if stat.S_ISDIR(about.st_mode) else "")
        for name, about in walk(place)
    )


def snapshot(root: str, most: int) -> tuple[list[list[Any]], bytes]:
    """([path, kind, bytes, executable] each, their contents on end) of all that stands there, links not followed."""
    index: list[list[Any]] = []
    contents: list[bytes] = []
    n = 0
    for path, about in walk(root):
        kind, data = content_of(os.path.join(root, path), about, most - n)
        n += len(data)
        if n > most:
            raise Refusal(f"The working directory holds more than disk_mib allows: {n} bytes or more of {most}.")
        index.append([path, kind, len(data), bool(about.st_mode & 0o100)])
        contents.append(data)
    return index, b"".join(contents)


def content_of(place: str, about: os.stat_result, most: int) -> tuple[str, bytes]:
    """(kind, content) of what stands there; a file that its owner closed is opened for good."""
    if stat.S_ISLNK(about.st_mode):
        return "link", os.fsencode(os.readlink(place))
    if stat.S_ISDIR(about.st_mode):
        return "folder", b""
    if not stat.S_ISREG(about.st_mode):
        return "other", b""
    if not about.st_mode & 0o400:
        os.chmod(place, 0o600 | (about.st_mode & 0o777))
    fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW)
    try:
        return "file", read_exactly(fd, most + 1)
    finally:
        os.close(fd)


def lay(root: str, index: list[list[Any]], body: bytes) -> None:
    """Files, folders and links of a snapshot's form into a folder."""
    at = 0
    for path, kind, size, executable in index:
        data, at = body[at : at + size], at + size
        place = os.path.join(root, path)
        if kind == "folder":
            os.makedirs(place, exist_ok=True)
        elif kind == "link":
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(os.fsdecode(data), place)
        elif kind == "file":
            write_file(root, path, data, executable)


def file_work(root: str, limits: Limits, header: Header, body: bytes) -> tuple[Header, bytes]:
    """The (answer, body) to a request over files."""
    op, disk = header["op"], int(limits["disk_mib"] * (1 << 20))
    if op == "read":
        most = int(limits["output_kib"] * 1024) if header["text"] else disk
        return {}, read_file(root, header["path"], most, "output_kib" if header["text"] else "disk_mib")
    if op == "write":
        write_file(root, header["path"], body)
        return {}, b""
    if op == "list":
        return {"names": list_folder(root, header["path"])}, b""
    if op == "lay":
        lay(root, header["index"], body)
        return {}, b""
    index, contents = snapshot(root, disk)
    return {"index": index}, contents


def why(error: OSError, path: str, limits: Limits) -> str:
    """An operating system's refusal in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"The disk of the sandbox is full: disk_mib={limits['disk_mib']:g}. Remove files first."
    if error.errno == errno.ENOENT:
        return f"There is no file {path!r}."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{path!r} leads through something that is no folder."
    if error.errno == errno.EISDIR:
        return f"{path!r} is a folder. Name a file."
    return f"{path!r}: {error.strerror}."


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Job:
    """A process under way, and what is read from it and written to it."""

    def __init__(self, header: Header, pid: int, deadline: float, most: int) -> None:
        self.header = header
        self.pid = pid
        self.deadline = deadline
        self.most = most
        """Bytes that are kept of each output."""
        self.began = time.monotonic()
        self.outputs: dict[int, list[bytes]] = {}
        """Descriptor to what was read from it, while it is read."""
        self.kept: list[list[bytes]] = []
        """The same lists, in order, read to the end or not."""
        self.n_dropped = 0
        self.stdin_fd: int | None = None
        self.stdin = memoryview(b"")
        self.ended_by = ""

    def take(self, fd: int) -> bool | None:
        """Read what there is. False: the output has ended; None: there is nothing yet."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return False
        kept = self.outputs[fd]
        room = max(0, self.most - sum(map(len, kept)))
        if room:
            kept.append(data[:room])
        self.n_dropped += max(0, len(data) - room)
        return bool(data)


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

    def serve(self) -> None:
        """Answer frames until the other side is gone."""
        begin = read_frame(self.fd_in)
        if begin is None:
            return
        self.begin(*begin)
        self.poll.register(self.fd_in, select.POLLIN)
        self.poll.register(self.child_ends(), select.POLLIN)
        while self.turn():
            pass

    def begin(self, header: Header, body: bytes) -> None:
        """Take the settings; the first answer says that programs can be run."""
        self.root = header["path"]
        self.limits = header["limits"]
        self.env = header["env"]
        self.ends = header["ends"]
        self.user: tuple[int, int] | None = (header["uid"], header["gid"]) if header.get("uid") is not None else None
        self.watches_memory = header.get("watch_memory", False)
        self.python = header.get("python")
        if self.ends == "namespace" and os.getpid() != 1:
            self.answer({"id": 1}, {"failed": f"it is process {os.getpid()} of its namespace, not the first."})
            sys.exit(1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.ends != "namespace":
            become_subreaper()
        hide()
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
        return True

    def patience_ms(self) -> float | None:
        """How long nothing need be looked at."""
        if self.watches_memory and (self.jobs or self.background):
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
        except BlockingIOError:
            self.answer(header, too_many(header))

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
        refused = read_exactly(why_read, 1 << 12)
        os.close(why_read)
        if refused:
            for fd in (in_write, out_read, err_read):
                os.close(fd)
            wait_for(pid)
            self.refuse_program(header, json.loads(refused))
            return
        job = Job(header, pid, began + header["seconds"], int(self.limits["output_kib"] * 1024))
        self.jobs[pid] = job
        for fd in (out_read, err_read):
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
        """In the new process: take the sandbox's rights and become the program."""
        stage = "rights"
        try:
            os.setsid()
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            os.dup2(why_write, 3)
            os.set_inheritable(3, False)
            os.closerange(4, NOFILE_MOST)
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
        set_limit(resource.RLIMIT_NOFILE, NOFILE)
        set_limit(resource.RLIMIT_FSIZE, int(limits["disk_mib"] * (1 << 20)))
        set_limit(resource.RLIMIT_DATA, int(limits["memory_mib"] * (1 << 20)))
        if self.user is not None:
            become_user(*self.user)
        set_limit(resource.RLIMIT_NPROC, int(limits["processes"]))
        lay_down_privileges()
        become_first_to_end()

    def refuse_program(self, header: Header, reason: list[Any]) -> None:
        """Say why a program could not begin."""
        stage, number, text = reason
        name = header["folder"] if stage == "folder" else header["argv"][0]
        if number == errno.EAGAIN:
            self.answer(header, too_many(header))
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
        """Say how a program ended."""
        for fd in job.outputs:
            self.background[fd] = job
        while len(self.background) > MANY_BACKGROUND_PIPES:
            fd = next(iter(self.background))
            self.forget(fd)
            del self.background[fd]
        if exit_code == -signal.SIGXFSZ and not job.ended_by:
            job.ended_by = "disk_mib"
        out, err = (b"".join(kept) for kept in job.kept)
        answer = {
            "exit_code": None if job.ended_by else exit_code,
            "ended_by": job.ended_by,
            "seconds": time.monotonic() - job.began,
            "n_dropped": job.n_dropped,
            "n_stdout": len(out),
        }
        job.kept = []
        job.most = 0
        self.answer(job.header, answer, out + err)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_files(self, header: Header, body: bytes) -> None:
        """Begin file work in a process with the sandbox's rights."""
        read, write = os.pipe()
        pid = os.fork()
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
            for job in self.jobs.values():
                job.ended_by = job.ended_by or "memory_mib"
            self.end_everything()

    def memory_bytes(self) -> int:
        """Of all processes but this one, and of files in memory."""
        of_files = os.statvfs(self.root)
        held = (of_files.f_blocks - of_files.f_bfree) * of_files.f_frsize
        return sum(memory_of(pid) for pid in self.others()) + (held if self.ends == "namespace" else 0)

    def others(self) -> list[int]:
        """Every other process of the sandbox."""
        if self.ends == "namespace":
            return [pid for pid in processes() if pid != os.getpid()]
        return family(os.getpid())[1:]

    def end_everything(self) -> None:
        """End every other process, and wait for it."""
        if self.ends == "namespace":
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
        elif self.ends == "uid":
            self.end_user()
        else:
            end_all(self.others)

    def end_user(self) -> None:
        """End all processes of the sandbox's own user, by one of them."""
        pid = os.fork()
        if pid == 0:
            try:
                if self.user is not None:
                    become_user(*self.user)
                    os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)

    def settle(self, header: Header) -> None:
        """Leave nothing running; all jobs under way are answered first."""
        while True:
            self.end_everything()
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            job = self.jobs.pop(pid, None)
            if job is not None:
                self.finish(job, os.waitstatus_to_exitcode(status))
        self.answer(header, {})


def too_many(header: Header) -> Header:
    """The answer to what could not begin, for want of a process."""
    if header["op"] == "run":
        return {"exit_code": None, "ended_by": "processes", "seconds": 0.0, "n_dropped": 0, "n_stdout": 0}
    return {"refused": "The sandbox has as many processes as its limit `processes` allows. Settle it first."}


def read_all_there_is(fd: int) -> None:
    """Empty a pipe."""
    try:
        while os.read(fd, CHUNK):
            pass
    except BlockingIOError:
        pass


def wait_for(pid: int) -> None:
    """Until a child has ended."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def set_limit(which: int, value: int) -> None:
    """A limit that can't be raised again; where a lower one holds already, that."""
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def become_user(uid: int, gid: int) -> None:
    """For good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def restore_signals() -> None:
    """What Python ignores, as programs expect it."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def processes() -> list[int]:
    """Every process that is seen in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def family(pid: int) -> list[int]:
    """A process, its descendants, and all in sessions of these."""
    about = {}
    for each in processes():
        try:
            with open(f"/proc/{each}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            about[each] = (int(fields[1]), int(fields[3]))
    found = [pid] if pid in about else []
    members = {pid}
    while True:
        more = [
            each for each, (parent, session) in about.items() if each not in members and {parent, session} & members
        ]
        more = [each for each in more if each != os.getpid()]
        if not more:
            return found
        found += more
        members.update(more)


def end_all(members: Callable[[], list[int]]) -> None:
    """Kill what a function names, again until it names nothing that can be killed."""
    for _ in range(1000):
        alive = [pid for pid in members() if kill(pid)]
        if not alive:
            return
        time.sleep(0.001)


def kill(pid: int) -> bool:
    """Whether there was such a process to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def memory_of(pid: int) -> int:
    """Bytes of memory that a process holds and no file backs."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file if line.startswith((b"RssAnon", b"RssShmem")))
    except OSError:
        return 0
    return sum(int(value.split()[0]) for value in lines.values()) * 1024


# ── rights, by the kernel's own calls ────────────────────────────────────────────────────────────────────────────────

PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
_libc: Any = None


def prctl(option: int, value: int) -> None:
    """One of the kernel's settings of this process."""
    global _libc
    if _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None, use_errno=True)
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl {option} failed")


def become_subreaper() -> None:
    """What loses its parent inside becomes a child of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def hide() -> None:
    """No process of the same user may look into this one, or trace it."""
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def lay_down_privileges() -> None:
    """No program started from here on gains rights by what it executes."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def become_first_to_end() -> None:
    """Where memory runs out, this process ends before the sandbox's first one."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass


def serve(fd_in: int, fd_out: int) -> None:
    """Serve one sandbox; returns when its other side is gone."""
    server = Server(fd_in, fd_out)
    try:
        server.serve()
    finally:
        if getattr(server, "ends", "namespace") != "namespace":
            server.end_everything()


if __name__ == "__main__":
    fd_in, fd_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    serve(fd_in, fd_out)
    sys.exit(0)
