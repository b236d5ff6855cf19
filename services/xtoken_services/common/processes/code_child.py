"""The child of `run_code`: gives up what reaches outside, and runs the program from its input in a directory in memory.

Started with all capabilities of a user namespace of its own, as the first process of a PID namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path

DONE = 77
"""Exit status of a program that has reached its end: one that leaves earlier has another."""
DIRECTORIES = ("/run", "/tmp")
"""Directories with the sockets of other programs; covered by empty ones in memory. The last is the program's."""
AT_FDCWD, AT_RECURSIVE, READ_ONLY, NO_DEVICES = -100, 0x8000, 1, 4
MOUNT_SETATTR = 442
"""System call, of the same number on all architectures."""
NEW_PIDS = 0x20000000
CAPABILITIES = 0x20080522
"""Version of Linux's `struct __user_cap_header_struct`."""
REFUSED = {
    *("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "subprocess.Popen"),
    *("socket.connect", "socket.sendto", "socket.sendmsg", "ctypes.dlopen", "ctypes.dlsym"),
}
"""Audit events of what a program may not do; without those of the second line it could reach sockets that are files."""


def main() -> None:
    """Shut out the rest of the machine, and run the program."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_ = (ctypes.c_uint64 * 4)(READ_ONLY | NO_DEVICES)  # Linux's `struct mount_attr`
    _check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, set_, ctypes.sizeof(set_)), "read-only files")
    for directory in filter(os.path.isdir, DIRECTORIES):
        _check(libc.mount(b"tmpfs", directory.encode(), b"tmpfs", NO_DEVICES, f"size={sys.argv[1]}".encode()), "tmpfs")
    _check(libc.unshare(NEW_PIDS), "a PID namespace")
    # Once the first process of this second namespace has ended, the kernel starts no other in it, nor a thread.
    if not os.fork():
        os._exit(0)
    os.wait()
    _check(libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()), "dropping capabilities")
    os.chdir(DIRECTORIES[-1])
    Path("main.py").write_text(sys.stdin.read(), encoding="utf-8")
    sys.argv = ["main.py"]
    sys.addaudithook(_refuse)
    runpy.run_path("main.py", run_name="program")
    os._exit(DONE)


def _check(failed: int, what: str) -> None:
    if failed:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


def _refuse(event: str, _arguments: object) -> None:
    if event in REFUSED:
        raise PermissionError(f"{event} is not allowed here")


if __name__ == "__main__":
    main()
