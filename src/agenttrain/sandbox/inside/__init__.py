"""The first process of a sandbox: frames in on one descriptor, programs and file work inside, frames out on another.

Depends on the standard library alone, and only on itself, so that this folder runs wherever there is a Python
(`python -I -S FOLDER`): forked, as a bare subprocess, under bubblewrap, in a container. It does nothing itself with
what programs inside can write: each program and each file operation is a process of its own with the sandbox's rights,
and a deadline. The end of its input ends it, and with it everything.

    server      requests to answers
    job         one process under way
    files       what is done to files, in a process of its own
    processes   who is there, and ending them
    rights      what a process inside may do
    frames      the bytes of requests and answers
"""
