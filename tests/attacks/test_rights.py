"""Attacks for more rights, and over the network: nothing is gained, nobody is reached."""

from __future__ import annotations

import pytest
from attacks.harness import Program, Siege, attack, outside, run

RIGHTS, NETWORK = "privileges", "network"

GAINS = [
    attack(
        RIGHTS,
        "programs with the setuid bit",
        "starts su, mount, passwd and the like, and looks whether one runs as root",
        Program(
            body="""
            import shutil
            print([line for line in open("/proc/self/status") if line.startswith("NoNewPrivs")])
            for name in ("su", "mount", "passwd", "chsh", "newgrp", "sudo", "ping", "fusermount3"):
                path = shutil.which(name)
                if path is None:
                    continue
                started = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=-3, stderr=-3)
                time.sleep(0.02)
                for line in may_fail(lambda: open(f"/proc/{started.pid}/status").readlines()) or ():
                    if line.startswith("Uid:") and "0" in line.split()[1:]:
                        won(path)
                started.kill()
                started.wait()
            """,
        ),
    ),
    attack(
        RIGHTS,
        "another user",
        "sets its user, group and groups to root's",
        Program(
            body="""
            for what, args in ((os.setuid, (0,)), (os.setgid, (0,)), (os.setgroups, ([0],)),
                               (os.setresuid, (0, 0, 0)), (os.seteuid, (0,)), (os.setreuid, (-1, 0))):
                may_fail(what, *args)
            if 0 in os.getresuid() + os.getresgid():
                won("root")
            """
        ),
    ),
    attack(
        RIGHTS,
        "capabilities",
        "looks for capabilities, and takes, raises and inherits them",
        Program(
            body="""
            header = ctypes.create_string_buffer(bytes.fromhex("2205082000000000"))
            data = ctypes.create_string_buffer(b"\\xff" * 24)
            call("capset", header, data)
            for number in (12, 21):
                if libc.prctl(47, 2, number, 0, 0) == 0:
                    won("an ambient capability")
            for line in open("/proc/self/status"):
                if line.startswith(("CapEff", "CapPrm", "CapAmb")) and int(line.split()[1], 16):
                    won(line)
            """
        ),
    ),
    attack(
        RIGHTS,
        "namespaces of its own",
        "asks for user, mount, process and network namespaces by unshare, clone, clone3 and the program unshare",
        Program(
            body="""
            for flags in (0x10000000, 0x10020000, 0x50000000, 0x20000, 0x20000000, 0x40000000, 0x2000000):
                call("unshare", flags)
            for number, args in ((56, (0x10000011, 0, 0, 0, 0)), (435, (ctypes.create_string_buffer(
                    (0x10000000).to_bytes(8, "little") + bytes(80)), 88))):
                pid = libc.syscall(number, *args)
                if pid == 0:
                    os._exit(0)
                if pid > 0 and not may_fail(os.waitpid, pid, 0) is None:
                    won(f"a process by system call {number}")
            for words in (["-r", "true"], ["-rm", "true"], ["-rn", "true"]):
                if (may_fail(subprocess.run, ["unshare", *words], capture_output=True) or sys).__dict__.get(
                        "returncode") == 0:
                    won("unshare")
            """
        ),
    ),
    attack(
        RIGHTS,
        "namespaces of others",
        "enters those of process 1 and of its parent",
        Program(
            body="""
            for pid in (1, os.getppid()):
                for path in sorted(glob.glob(f"/proc/{pid}/ns/*")):
                    fd = may_fail(os.open, path, os.O_RDONLY)
                    if fd is not None:
                        call("setns", fd, 0)
            """
        ),
    ),
    attack(
        RIGHTS,
        "another root",
        "changes its root by chroot and pivot_root, and mounts",
        Program(
            body="""
            os.makedirs("root/old")
            may_fail(os.chroot, "root") is None or won("chroot")
            if may_fail(os.chroot, ".") is None and os.path.exists("root/old") is False:
                won("chroot")
            if libc.syscall(155, b"root", b"root/old") == 0:
                won("pivot_root")
            call("mount", b"proc", b"root", b"proc", 0, None)
            call("mount", b"/", b"root", None, 4096, None)
            call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)
            for number in (428, 429, 430, 442):
                if libc.syscall(number, -100, b"/", 1, 0, 0) >= 0 and number != 428:
                    won(f"system call {number}")
            """
        ),
    ),
    attack(
        RIGHTS,
        "tracing its parent",
        "attaches to process 1 and to its parent by ptrace, and takes their descriptors",
        Program(
            body="""
            for pid in {1, os.getppid()} - {os.getpid()}:
                for request in (16, 0x4206):
                    call("ptrace", request, pid, 0, 0)
                fd = may_fail(os.pidfd_open, pid)
                if fd is not None and libc.syscall(438, fd, 0, 0) >= 0:
                    won("a descriptor")
            """
        ),
    ),
    attack(
        RIGHTS,
        "keys of the kernel",
        "adds, asks for and reads keys and keyrings",
        Program(
            body="""
            for number, args in ((248, (b"user", b"attack", b"secret", 6, -3)), (249, (b"user", b"a", None, -3)),
                                 (250, (0, -4, 1)), (250, (1, b"attack"))):
                if libc.syscall(number, *args) >= 0:
                    won(f"system call {number}")
            """
        ),
    ),
    attack(
        RIGHTS,
        "parts of the kernel that break",
        "asks for bpf, io_uring, perf events, userfaultfd, modules and kexec",
        Program(
            body="""
            zeros = ctypes.create_string_buffer(256)
            for number, args in ((321, (0, zeros, 128)), (425, (8, zeros)), (298, (zeros, 0, -1, -1, 0)),
                                 (323, (0x800,)), (175, (zeros, 16, b"")), (313, (0, b"", 0)),
                                 (246, (0, 0, None, 0)), (167, (b"file", 0)), (163, (None,))):
                if libc.syscall(number, *args) >= 0:
                    won(f"system call {number}")
            """
        ),
    ),
    attack(
        RIGHTS,
        "clock, name and priority",
        "sets the clock, the host's name, its own priority and its limits",
        Program(
            body="""
            may_fail(time.clock_settime, time.CLOCK_REALTIME, time.time() + 3600) is None and time.time() > PREY[
                "now"] + 1800 and won("the clock")
            call("sethostname", b"mine", 4)
            if may_fail(os.nice, -5) is not None:
                won("priority")
            for which in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
                _, hard = resource.getrlimit(which)
                if hard == -1 or may_fail(lambda: resource.setrlimit(which, (hard + 1, hard + 1)) or "set") == "set":
                    won(f"limit {which}")
            """
        ),
    ),
    attack(
        RIGHTS,
        "settings of its parent",
        "changes limits, priority and processors of process 1 and of its parent",
        Program(
            body="""
            for pid in {1, os.getppid()} - {os.getpid()}:
                for what in (lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
                             lambda: os.setpriority(os.PRIO_PROCESS, pid, 19) or "set",
                             lambda: os.sched_setaffinity(pid, {0}) or "set",
                             lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)) or "set"):
                    if may_fail(what) is not None:
                        won(f"a setting of process {pid}")
            """
        ),
    ),
]

CALLS = [
    attack(
        NETWORK,
        "TCP to the loopback",
        "connects to a server of this machine",
        Program(body="socket.create_connection(('127.0.0.1', PREY['tcp']), 2)", needs="network"),
    ),
    attack(
        NETWORK,
        "UDP to the loopback",
        "sends a datagram to a server of this machine",
        Program(
            body="socket.socket(type=socket.SOCK_DGRAM).sendto(b'secret', ('127.0.0.1', PREY['udp']))", needs="network"
        ),
    ),
    attack(
        NETWORK,
        "an abstract socket",
        "connects to a Unix socket that needs no file",
        Program(body="socket.socket(socket.AF_UNIX).connect('\\0' + PREY['abstract'])", needs="network"),
    ),
    attack(
        NETWORK,
        "a named socket",
        "connects to a Unix socket by its path, as one would to a container engine's",
        Program(body="socket.socket(socket.AF_UNIX).connect(PREY['named'])", needs="network"),
    ),
    attack(
        NETWORK,
        "addresses beyond",
        "connects to addresses of the documentation range by IPv4 and IPv6",
        Program(
            body="""
            for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    made = may_fail(socket.socket, family, kind)
                    if made is not None:
                        made.settimeout(0.5)
                        try:
                            made.connect((address, 80))
                            won("a way out")
                        except OSError as error:
                            if error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL):
                                print("HELD", error)
                            else:
                                won(f"a way out, at whose end {error}")
            """,
            needs="network",
            works=False,
        ),
    ),
    attack(
        NETWORK,
        "names",
        "looks a name up, by the resolver and by DNS to usual addresses",
        Program(
            body="""
            if may_fail(socket.getaddrinfo, "example.com", 443):
                won("an address")
            """,
            needs="network",
            works=False,
        ),
    ),
    attack(
        NETWORK,
        "raw and packet sockets",
        "opens sockets that see or forge what others send",
        Program(
            body="""
            for args in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET6, socket.SOCK_RAW, 58),
                         (socket.AF_PACKET, socket.SOCK_RAW, 768), (socket.AF_PACKET, socket.SOCK_DGRAM, 768)):
                if may_fail(socket.socket, *args) is not None:
                    won(str(args))
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        NETWORK,
        "other families of sockets",
        "asks for every family that a network namespace does not hold, virtual machines' among them",
        Program(
            body="""
            for family in set(range(1, 46)) - {1, 2, 10, 16}:
                for kind in (1, 2, 3, 5):
                    fd = libc.socket(family, kind, 0)
                    if fd >= 0:
                        won(f"a socket of family {family}")
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        NETWORK,
        "interfaces by netlink",
        "lists interfaces, and sets one up with an address",
        Program(
            body="""
            import fcntl, struct
            names = {name for _, name in may_fail(socket.if_nameindex) or ()}
            if names - {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0",
                        "ip6gre0", "teql0"}:
                won(str(names))
            made = may_fail(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
            if made is not None:
                for name in names | {"lo"}:
                    request = struct.pack("16sH14s", name.encode(), 0x1 | 0x40, b"")
                    if may_fail(fcntl.ioctl, made, 0x8914, request) is not None:
                        won(f"{name} is up")
            """,
            needs="network",
            works=False,
        ),
    ),
]


@pytest.mark.parametrize("program", GAINS)
def test_no_right_is_gained(siege: Siege, program: Program) -> None:
    siege.skip_unless_it_holds("privileges")
    with siege.sandbox(processes=24) as sandbox:
        execution = run(sandbox, program.body)
    siege.hold(execution)
    assert "TRIED" in execution.stdout, execution.text


@pytest.mark.parametrize("program", CALLS)
def test_nobody_is_reached(siege: Siege, program: Program) -> None:
    siege.attacked(program)


WORKING = [each for each in CALLS if each.values[0].works]


@pytest.mark.slow
@pytest.mark.parametrize("body", [pytest.param(each.values[0].body, id=each.id) for each in WORKING])
def test_where_nothing_holds_it_the_call_is_heard(body: str, the_prey: object) -> None:
    assert outside(body) != []


@pytest.mark.attack(
    kind=RIGHTS,
    name="ending its parent",
    tried="sends every signal to process 1, to its parent and to all that it may (kill -1)",
    outcome="contained",
)
def test_the_first_process_can_be_neither_ended_nor_stopped(siege: Siege) -> None:
    siege.skip_unless_it_holds("privileges")
    with siege.sandbox() as sandbox:
        execution = run(
            sandbox,
            """
            parent = os.getppid()
            for number in set(signal.Signals) - {signal.SIGCONT}:
                signal.signal(number, signal.SIG_IGN) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
                for pid in {1, parent, PREY["agenttrain"], PREY["pid"]} - {os.getpid()}:
                    may_fail(os.kill, pid, number)
            background(lambda: time.sleep(60))
            print("TRIED", flush=True)
            os.kill(-1, signal.SIGKILL)
            """,
        )
        assert "TRIED" in execution.stdout
        assert sandbox.run(["echo", "alive"]).stdout == "alive\n"
        assert siege.prey.touched() == []


@pytest.mark.attack(
    kind=NETWORK,
    name="between two sandboxes",
    tried="connects to a server in a sandbox beside it, by TCP and by a Unix socket",
    outcome="contained",
)
def test_no_sandbox_reaches_another(siege: Siege) -> None:
    siege.skip_unless_it_holds("network")
    with siege.sandbox() as server:
        execution = run(
            server,
            """
            def serve():
                for made in (socket.socket(socket.AF_UNIX), socket.socket()):
                    may_fail(made.bind, f"\\0{TOKEN}" if made.family == socket.AF_UNIX else ("127.0.0.1", 45871))
                    may_fail(made.listen)
                    kept.append(made)
                time.sleep(60)
            kept = []
            background(lambda: may_fail(serve))
            """,
        )
        assert "TRIED" in execution.stdout
        with siege.beside() as sandbox:
            execution = run(
                sandbox,
                """
                for family, address in ((socket.AF_UNIX, f"\\0{TOKEN}"), (socket.AF_INET, ("127.0.0.1", 45871))):
                    made = may_fail(socket.socket, family)
                    if made is not None and may_fail(lambda: made.connect(address) or "connected"):
                        won("the other sandbox")
                """,
            )
        siege.hold(execution)
        assert "TRIED" in execution.stdout
