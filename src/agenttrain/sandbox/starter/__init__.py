"""The program that sandboxes in namespaces are forked from: started once per process of agenttrain, small and with one
thread, so that Python's start and imports are paid once and nothing of agenttrain's memory is in a sandbox.

Depends on the standard library alone, and only on itself. Each request brings a socket; what is born serves `inside`
over it.

    loop        requests to children, until agenttrain is gone
    birth       a child becomes the first process of new namespaces
    room        the file system that it sees
    kernel      calls of the kernel that Python has not
"""
