"""Attacks that read or write what is outside of the sandbox: nothing is learnt, nothing is changed."""

from __future__ import annotations

from contextlib import suppress

import pytest
from attacks.harness import Program, Siege, attack, outside, run

from agenttrain.sandbox_protocol import Sandbox, SandboxFile, SandboxRefusal

READING, WRITING = "reading outside", "writing outside"

READS = [
    attack(
        READING,
        "hidden tests",
        "opens the hidden tests by their path",
        Program(body="print(open(PREY['hidden']).read(), open(PREY['tasks']).read())"),
    ),
    attack(
        READING,
        "search for tasks.jsonl",
        "walks the folders beside and above its own for tasks and tests",
        Program(
            body="""
            for top in {os.getcwd(), os.path.dirname(os.getcwd()), PREY["folder"]} - {"/"}:
                for folder, _, names in os.walk(top):
                    for name in names:
                        if name.endswith((".jsonl", ".py", ".txt")):
                            print(may_fail(lambda: open(os.path.join(folder, name)).read()))
            """
        ),
    ),
    attack(
        READING,
        "by a symbolic link",
        "reads through links to files and folders outside",
        Program(
            body="""
            os.symlink(PREY["file"], "link")
            os.symlink(PREY["folder"], "folder")
            print(may_fail(lambda: open("link").read()), may_fail(lambda: open("folder/file.txt").read()))
            """
        ),
    ),
    attack(
        READING,
        "by a hard link",
        "links a file outside into the working directory",
        Program(body="os.chdir(PREY['folder']) or os.link(PREY['file'], 'mine') or print(open('mine').read())"),
    ),
    attack(
        READING,
        "by going up",
        "goes up from the working directory to the root and down again",
        Program(body="print(open('../' * 40 + PREY['file'].lstrip('/')).read())"),
    ),
    attack(
        READING,
        "by roots in proc",
        "goes through /proc/PID/root, cwd and fd of every process",
        Program(
            body="""
            for pid in [each for each in os.listdir("/proc") if each.isdigit() and int(each) < 3] + ["self"]:
                for way in ("root", "cwd"):
                    print(may_fail(lambda: open(f"/proc/{pid}/{way}/" + PREY["file"].lstrip("/")).read()))
            """
        ),
    ),
    attack(
        READING,
        "environment of others",
        "reads environment and arguments of every process it sees",
        Program(
            body="""
            for folder in glob.glob("/proc/[0-9]*"):
                for name in ("environ", "cmdline"):
                    try:
                        print(open(f"{folder}/{name}", "rb").read())
                    except OSError:
                        pass
            """
        ),
    ),
    attack(
        READING,
        "secrets of agenttrain's environment",
        "prints its own environment and that of its parents",
        Program(
            body="""
            print(dict(os.environ))
            for pid in (1, os.getppid()):
                print(may_fail(lambda: open(f"/proc/{pid}/environ", "rb").read()))
            """,
            needs="seconds",
        ),
    ),
    attack(
        READING,
        "inherited descriptors",
        "reads every open descriptor of its own and of its parent's",
        Program(
            body="""
            for fd in range(3, 1024):
                try:
                    print(os.pread(fd, 4096, 0))
                except OSError:
                    pass
            for path in glob.glob("/proc/1/fd/*") + glob.glob(f"/proc/{os.getppid()}/fd/*"):
                print(may_fail(lambda: os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 4096)))
            """,
            needs="seconds",
        ),
    ),
    attack(
        READING,
        "shadow and home of root",
        "opens /etc/shadow, lists /root and this repository",
        Program(
            body="""
            def home():
                return [name for name in os.listdir("/root") if not sys.base_prefix.startswith(f"/root/{name}/")]
            for what in (lambda: open("/etc/shadow").read(), home, lambda: os.listdir(PREY["repository"] + "/tests")):
                if may_fail(what):
                    won("opened it")
            """,
            works=False,
        ),
    ),
    attack(
        READING,
        "open by handle",
        "opens the root of the machine's file system by a file handle",
        Program(
            body="""
            handle = ctypes.create_string_buffer(8 + 128)
            ctypes.memmove(handle, (ctypes.c_uint * 2)(128, 1), 8)
            number = ctypes.c_int()
            libc.name_to_handle_at(-100, b"/", handle, ctypes.byref(number), 0)
            fd = os.open("/", os.O_RDONLY)
            call("open_by_handle_at", fd, handle, os.O_RDONLY)
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        READING,
        "devices and kernel memory",
        "opens disks, /dev/mem, /proc/kcore and the kernel's log",
        Program(
            body="""
            disks = [path for path in glob.glob("/dev/*") if stat.S_ISBLK(os.stat(path).st_mode)]
            for path in [*disks, "/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore", "/dev/kmsg"]:
                if may_fail(os.open, path, os.O_RDONLY):
                    won(path)
            if libc.klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0:
                won("the kernel's log")
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        READING,
        "memory of its parent",
        "reads the memory of process 1 and of its parent",
        Program(
            body="""
            for pid in {1, os.getppid()} - {os.getpid()}:
                for path in ("mem", "maps", "stack", "auxv"):
                    if may_fail(lambda: open(f"/proc/{pid}/{path}", "rb").read(1)):
                        won(path)
                local = ctypes.create_string_buffer(64)
                iov = (ctypes.c_void_p * 2)(ctypes.addressof(local), 64)
                call("process_vm_readv", pid, iov, 1, (ctypes.c_void_p * 2)(0x400000, 64), 1, 0)
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        READING,
        "shared memory of the machine",
        "looks for segments, message queues and semaphores of others",
        Program(
            body="""
            for name, args in (("shmget", (0x41, 4096, 0o1666)), ("msgget", (0x41, 0o1666)),
                               ("semget", (0x41, 1, 0o1666))):
                if call(name, *args) >= 0:
                    print(name)
            """,
            needs="privileges",
            works=False,
        ),
    ),
]

WRITES = [
    attack(
        WRITING,
        "a file outside",
        "overwrites, appends to, removes and renames files by their path",
        Program(
            body="""
            may_fail(put, PREY["file"], "mine")
            may_fail(os.remove, PREY["hidden"])
            may_fail(os.rename, PREY["tasks"], PREY["folder"] + "/mine")
            may_fail(os.chmod, PREY["folder"], 0)
            """
        ),
    ),
    attack(
        WRITING,
        "a new file in shared folders",
        "writes to /tmp, /var/tmp and /dev/shm of the machine",
        Program(
            body="""
            for folder in ("/tmp", "/var/tmp", "/dev/shm"):
                may_fail(put, f"{folder}/{TOKEN}", "mine")
            """
        ),
    ),
    attack(
        WRITING,
        "by links",
        "writes through a symbolic and a hard link",
        Program(
            body="""
            os.symlink(PREY["file"], "link")
            may_fail(put, "link", "mine")
            os.chdir(PREY["folder"])
            os.link(PREY["file"], "hard")
            """
        ),
    ),
    attack(
        WRITING,
        "the system and this Python",
        "puts programs on the PATH, a .pth into site-packages and a preload into /etc",
        Program(
            body="""
            import shutil, site
            for path in (f"/usr/local/bin/{TOKEN}", f"/etc/{TOKEN}", f"/{TOKEN}",
                         *(f"{folder}/{TOKEN}.pth" for folder in site.getsitepackages())):
                if may_fail(put, path, "import os"):
                    won(path)
            for path in (sys.executable, os.__file__, json.__file__, "/bin/sh", "/etc/passwd", "/etc/ld.so.preload"):
                if may_fail(os.open, path, os.O_WRONLY | os.O_APPEND):
                    won(path)
            """,
            works=False,
        ),
    ),
    attack(
        WRITING,
        "a device of its own",
        "makes device nodes of the disk and of memory",
        Program(
            body="""
            for kind, major, minor in ((stat.S_IFBLK, 8, 0), (stat.S_IFBLK, 254, 0), (stat.S_IFCHR, 1, 1)):
                os.path.exists("node") and os.remove("node")
                may_fail(os.mknod, "node", kind | 0o666, os.makedev(major, minor))
                if os.path.exists("node"):
                    won("a node")
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        WRITING,
        "release agent of a control group",
        "writes a program that the kernel would start as root outside",
        Program(
            body="""
            for path in glob.glob("/sys/fs/cgroup/**/release_agent", recursive=True) + ["/sys/fs/cgroup/release_agent"]:
                if may_fail(os.open, path, os.O_WRONLY):
                    won(path)
            os.mkdir("groups")
            call("mount", b"cgroup", b"groups", b"cgroup", 0, b"pids")
            call("mount", b"cgroup2", b"groups", b"cgroup2", 0, None)
            for path in glob.glob("/sys/fs/cgroup/*/cgroup.procs") + ["/sys/fs/cgroup/cgroup.procs"]:
                if may_fail(put, path, str(os.getpid())):
                    won(path)
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        WRITING,
        "settings of the kernel",
        "writes core_pattern, sysctls and sysrq",
        Program(
            body="""
            for path in ("kernel/core_pattern", "kernel/modprobe", "kernel/hostname", "vm/overcommit_memory",
                         "net/ipv4/ip_forward", "user/max_user_namespaces", "fs/file-max"):
                if may_fail(os.open, f"/proc/sys/{path}", os.O_WRONLY):
                    won(path)
            for path in ("/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/sys/power/state"):
                if may_fail(os.open, path, os.O_WRONLY):
                    won(path)
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        WRITING,
        "the system made writable",
        "mounts it again without read-only, and others over it",
        Program(
            body="""
            for place in (b"/", b"/usr", b"/etc", b"/proc/sys"):
                call("mount", None, place, None, 32 | 4096, None)
                call("mount", b"tmpfs", place, b"tmpfs", 0, None)
            call("umount2", b"/proc", 2)
            """,
            needs="privileges",
            works=False,
        ),
    ),
    attack(
        WRITING,
        "memory of its parent",
        "writes to process 1, to its descriptors and to what the kernel ends first",
        Program(
            body="""
            for pid in {1, os.getppid()}:
                for path in ("mem", "clear_refs", "oom_score_adj", "coredump_filter", "uid_map", "setgroups"):
                    if may_fail(os.open, f"/proc/{pid}/{path}", os.O_WRONLY):
                        won(path)
                for path in glob.glob(f"/proc/{pid}/fd/*"):
                    if may_fail(os.open, path, os.O_WRONLY | os.O_NONBLOCK):
                        won(path)
            if may_fail(put, "/proc/self/oom_score_adj", "-900"):
                won("it is ended last")
            """,
            needs="privileges",
            works=False,
        ),
    ),
]


@pytest.mark.parametrize("program", READS)
def test_nothing_outside_is_read(siege: Siege, program: Program) -> None:
    siege.attacked(program)


@pytest.mark.parametrize("program", WRITES)
def test_nothing_outside_is_written(siege: Siege, program: Program) -> None:
    siege.attacked(program)


WORKING = [each for each in (*READS, *WRITES) if each.values[0].works]


@pytest.mark.slow
@pytest.mark.parametrize("body", [pytest.param(each.values[0].body, id=each.id) for each in WORKING])
def test_where_nothing_holds_it_the_attack_works(body: str, the_prey: object) -> None:
    assert outside(body) != []


@pytest.mark.attack(
    kind=READING,
    name="by the helper read",
    tried="asks read for paths outside, and for links that lead there",
    outcome="contained",
)
def test_read_gives_nothing_of_the_machine(siege: Siege) -> None:
    paths = [
        siege.prey.facts["file"],
        "../" * 20 + siege.prey.facts["file"].lstrip("/"),
        "/etc/shadow",
        "/proc/self/environ",
        "/proc/1/environ",
    ]
    with siege.sandbox() as sandbox:
        for n, path in enumerate(paths):
            assert sandbox.run(["ln", "-s", path, f"link{n}"]).ok
        sandbox.run(["ln", "-s", siege.prey.facts["folder"], "folder"])
        for path in (*paths, *(f"link{n}" for n in range(len(paths))), "folder/file.txt", "folder/../file.txt", "a\0b"):
            for read in (sandbox.read, sandbox.read_bytes):
                with pytest.raises(SandboxRefusal):
                    read(path)


@pytest.mark.attack(
    kind=READING,
    name="by the helper list and the snapshot",
    tried="asks list for folders outside, and leaves links to them",
    outcome="contained",
)
def test_neither_list_nor_snapshot_goes_out(siege: Siege) -> None:
    with siege.sandbox() as sandbox:
        for name, target in (("out", siege.prey.facts["folder"]), ("root", "/"), ("up", "..")):
            assert sandbox.run(["ln", "-s", target, name]).ok
        for path in ("/", "..", "out", "root", "up", siege.prey.facts["folder"]):
            with pytest.raises(SandboxRefusal):
                sandbox.list(path)
        assert sandbox.list() == ["out", "root", "up"]
        sandbox.settle()
        assert {path: file.kind for path, file in sandbox.snapshot().items()} == dict.fromkeys(
            ("out", "root", "up"), "link"
        )


@pytest.mark.attack(
    kind=READING,
    name="another sandbox",
    tried="looks for the files, processes and sockets of a sandbox beside it",
    outcome="contained",
)
def test_a_sandbox_sees_nothing_of_another(siege: Siege) -> None:
    siege.skip_unless_it_holds("filesystem")
    with siege.sandbox({"secret.txt": SandboxFile(data=siege.prey.secrets["file"].encode())}) as other:
        other.run(f"(sleep 60; : {siege.prey.secrets['argument']}) & echo {siege.prey.secrets['tasks']} > /tmp/left")
        with_other = run(
            other,
            """
            server = socket.socket(socket.AF_UNIX)
            server.bind("\\0between")
            server.listen()
            background(lambda: time.sleep(60))
            """,
        )
        assert "TRIED" in with_other.stdout
        with siege.beside() as sandbox:
            execution = run(
                sandbox,
                """
                for top in ("/tmp", "/run", "/var", "/dev/shm", "/home", os.getcwd()):
                    for folder, _, names in os.walk(top):
                        for name in names:
                            print(may_fail(lambda: open(os.path.join(folder, name)).read(4096)))
                for path in glob.glob("/proc/[0-9]*/cmdline"):
                    print(may_fail(lambda: open(path).read()))
                client = socket.socket(socket.AF_UNIX)
                if may_fail(client.connect, "\\0between") is None and may_fail(client.getpeername) is not None:
                    won("a socket of the other")
                """,
            )
        assert "TRIED" in execution.stdout
        siege.hold(execution)


@pytest.mark.attack(
    kind=WRITING,
    name="by the helper write",
    tried="asks write for paths outside, through links and through a folder that is a link",
    outcome="contained",
)
def test_write_writes_nothing_outside(siege: Siege) -> None:
    facts = siege.prey.facts
    with siege.sandbox() as sandbox:
        sandbox.run(["ln", "-s", facts["folder"], "folder"])
        sandbox.run(["ln", "-s", facts["file"], "link"])
        sandbox.run(["ln", "-s", f"/tmp/{facts['token']}", "dangling"])
        for path in (facts["file"], f"/etc/{facts['token']}", "../mine", "folder/mine", "link", "dangling", "."):
            with pytest.raises(SandboxRefusal):
                sandbox.write(path, "mine")


@pytest.mark.attack(
    kind=WRITING,
    name="a folder that becomes a link",
    tried="swaps a folder for a link outside while write and read are at work",
    outcome="contained",
)
def test_a_race_between_the_helpers_and_a_link_leads_nowhere(siege: Siege) -> None:
    """The helpers' work is done inside, so whoever wins the race stays inside."""
    siege.skip_unless_it_holds("filesystem")
    with siege.sandbox(processes=16) as sandbox:
        execution = run(
            sandbox,
            """
            os.makedirs("real")
            def swap():
                while True:
                    for target in ("real", PREY["folder"]):
                        os.symlink(target, "next")
                        os.rename("next", "swapped")
            swapping = background(swap)
            """,
        )
        assert "TRIED" in execution.stdout
        for _ in range(40):
            with suppress(SandboxRefusal):
                sandbox.write("swapped/file.txt", "mine")
            with suppress(SandboxRefusal):
                assert siege.prey.learnt(sandbox.read("swapped/file.txt")) == []


@pytest.mark.attack(
    kind=WRITING,
    name="a name that is no name",
    tried="files of a task or of a tool with absolute paths, .. and zero bytes",
    outcome="contained",
)
def test_no_file_can_be_laid_outside(siege: Siege) -> None:
    def laid(sandbox: Sandbox) -> None:
        with sandbox.fresh({f"/tmp/{siege.prey.token}": "mine"}):
            raise AssertionError("it was opened")

    with siege.sandbox() as sandbox:
        for path in (f"../{siege.prey.token}", f"a/../../{siege.prey.token}", f"/tmp/{siege.prey.token}", "a\0b"):
            with pytest.raises(SandboxRefusal):
                sandbox.write(path, "mine")
        with pytest.raises(ValueError, match="within its working directory"):
            laid(sandbox)
