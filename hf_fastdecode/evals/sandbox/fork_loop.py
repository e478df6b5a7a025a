"""Forks a sandboxed process per request from one interpreter, which has imported what they need. Runs as the first
process of a sandbox, on the standard library alone.

A request comes over the socket that is standard input: limits, and descriptors for the streams of the new process and
for a report. Nothing else that is meant for that process passes here: all later ones inherit this memory. Each request
makes three processes:

    holder   in this PID namespace: makes the other namespaces and a writable folder, gives the host a descriptor of
             the next process, waits for its end and reports that
    first    the first process of the new PID namespace: it reaps, and its end ends all others
    program  in another user namespace, without any rights

Holder and first keep their rights. The program cannot reach them: a signal or a trace needs a number of its PID
namespace, and a trace rights over the other's user namespace; the kernel keeps signals from a first process.
"""

from __future__ import annotations

import _socket
import ctypes
import fcntl
import json
import marshal
import os
import resource
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAMESPACES = 0x6E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET: sched.h
_NEW_USER_NAMESPACE = 0x10000000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC: sys/mount.h
_PRIVATE = 0x44000  # MS_REC, MS_PRIVATE
_DIE_WITH_PARENT, _DUMPABLE, _SECCOMP, _BOUNDED, _DROP, _NO_NEW_RIGHTS, _AMBIENT = 1, 4, 22, 23, 24, 38, 47  # prctl.h
_CLEAR_ALL = 4  # of _AMBIENT
_CAPABILITIES_3 = 0x20080522  # capability.h
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP: sockios.h, if.h
_LONGEST_REQUEST = 4096
_FILES = 4096  # of the writable folder: files without content take memory as well

_LIBC = ctypes.CDLL(None, use_errno=True)


def load(control: Any) -> None:
    """Import the standard modules and make ours, which the first message brings, as a file."""
    _, (file,) = _received(control)
    data = b""
    while part := os.pread(file, 1 << 20, len(data)):
        data += part
    os.close(file)
    imports, modules = marshal.loads(data)
    for name in imports:
        __import__(name)
    for name, code in modules:
        module = sys.modules[name] = type(sys)(name)
        module.__package__ = name.rpartition(".")[0]
        exec(code, module.__dict__)


def serve(control: Any) -> None:
    """Answer requests, one after another, until there are no more; returns in the process of a program only."""
    _call("mount", None, b"/", None, _PRIVATE, None)  # what is mounted later is not visible here
    _prctl(_DUMPABLE, 0)
    loopback = _loopback_flags(_GET_FLAGS, 0)
    os.write(1, b"ready\n")
    while request := _received(control):
        content, descriptors = request
        holder = os.fork()
        if holder == 0:
            control.close()
            if _became_program(json.loads(content), descriptors, loopback):
                return
        for descriptor in descriptors:
            os.close(descriptor)
        del request, content, descriptors
        while os.wait()[0] != holder:  # one at a time; all else are orphans
            pass
    os._exit(0)


def _received(control: Any) -> Any:
    """The next message and its descriptors; None at the end."""
    content, ancillary, _, _ = control.recvmsg(_LONGEST_REQUEST, _socket.CMSG_SPACE(4 * 4))
    return (content, [one for _, _, data in ancillary for one in memoryview(data).cast("i")]) if content else None


def _became_program(request: Any, descriptors: list[int], loopback: int) -> bool:
    """Make a sandbox, where `lo` has the flags `loopback`: True in the new process, and no return in the others."""
    *streams, reports = descriptors
    report = _socket.socket(fileno=reports)
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        first = _isolated(request, loopback)
        if first == 0:
            os.close(report.detach())
            return _led(request)
        pidfd = os.pidfd_open(first)
        sent = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, pidfd.to_bytes(4, sys.byteorder))]
        report.sendmsg([b"ready"], sent)
        _, status, usage = os.wait4(first, 0)
        code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        report.send(json.dumps([code, seconds]).encode())
        os._exit(0)
    except BaseException as error:
        try:
            report.send(_line(error))
        finally:
            os._exit(1)


def _line(error: BaseException) -> bytes:
    return f"{type(error).__name__}: {error}".encode(errors="replace")[:_LONGEST_REQUEST]


def _isolated(request: Any, loopback: int) -> int:
    """Fork into new namespaces: 0 in the first process there, its number in this one."""
    _call("unshare", _NAMESPACES)
    size = f"size={request['scratch_bytes']},nr_inodes={_FILES},mode=1777"
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", _NO_SETUID | _NO_DEVICES, size.encode())
    os.chdir("/tmp")
    if os.path.isdir("/dev/pts"):
        _call("mount", b"devpts", b"/dev/pts", b"devpts", _NO_SETUID | _NO_PROGRAMS, b"ptmxmode=0666,mode=620")
    if loopback & _UP:  # as the back end has it
        _loopback_flags(_SET_FLAGS, _UP)
    return os.fork()


def _led(request: Any) -> bool:
    """Fork the program: True in that, and no return in this first process."""
    try:
        _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        os.setsid()  # no signal to its group reaches a process outside
        _call("mount", b"proc", b"/proc", b"proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS, None)
        # The kernel keeps from it what it has no handler for.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        program = os.fork()
        if program == 0:
            _confine(request)
            signal.signal(signal.SIGINT, interrupt)
            return True
        while (ended := os.wait())[0] != program:  # of an orphan
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        os._exit(code if code >= 0 else 128 - code)
    except BaseException as error:
        os.write(2, _line(error))
        os._exit(125)


def _confine(request: Any) -> None:
    """Give all rights away, set the limits, and undo what a new interpreter would not have."""
    _prctl(_DUMPABLE, 1)
    owner = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    _call("unshare", _NEW_USER_NAMESPACE)
    _write("/proc/self/setgroups", "deny")
    for name, inherited in owner.items():
        _write(f"/proc/self/{name}", f"65534 {inherited} 1")
    _write("/proc/sys/user/max_user_namespaces", "0")  # in a new one it could mount a tmpfs that has no size
    _prctl(_AMBIENT, _CLEAR_ALL)
    capability = 0
    while _LIBC.prctl(_BOUNDED, *map(ctypes.c_ulong, (capability, 0, 0, 0))) >= 0:
        _prctl(_DROP, capability)
        capability += 1
    _prctl(_NO_NEW_RIGHTS, 1)
    _deny_keys()
    _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)())
    for name, limits in request["resources"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), tuple(limits))
    sys.argv[1:] = []


_KEYS = {"x86_64": ((0xC000003E, 248), (0x40000003, 286)), "aarch64": ((0xC00000B7, 217), (0x40000028, 309))}
"""By machine, its kinds of system calls (audit.h) and the number of the first of add_key, request_key and keyctl."""

_FILTER = 2  # SECCOMP_MODE_FILTER: seccomp.h
_ALLOW, _NOT_IMPLEMENTED = 0x7FFF0000, 0x00050000 | 38  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with ENOSYS
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_ABOVE, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06  # bpf_common.h
_NUMBER, _KIND, _NOT_X32 = 0, 4, 0xBFFFFFFF  # offsets in seccomp_data, and a mask of numbers


def _deny_keys() -> None:
    """Have the kernel refuse keyrings: keys outlive their process for a moment, and the next one has the same user."""
    steps = [(_LOAD, 0, 0, _KIND)]
    for kind, first in _KEYS[os.uname().machine]:
        steps += [(_IF_EQUAL, 0, 6, kind), (_LOAD, 0, 0, _NUMBER), (_AND, 0, 0, _NOT_X32)]
        steps += [(_IF_AT_LEAST, 0, 2, first), (_IF_ABOVE, 1, 0, first + 2)]
        steps += [(_RETURN, 0, 0, _NOT_IMPLEMENTED), (_RETURN, 0, 0, _ALLOW)]
    steps.append((_RETURN, 0, 0, _NOT_IMPLEMENTED))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    _call("prctl", _SECCOMP, ctypes.c_ulong(_FILTER), program, ctypes.c_ulong(0), ctypes.c_ulong(0))


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    os.write(file, text.encode())
    os.close(file)


def _loopback_flags(operation: int, flags: int) -> int:
    with_flags = b"lo".ljust(16, b"\0") + flags.to_bytes(2, sys.byteorder) + bytes(22)  # ifreq: netdevice(7)
    any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    found = fcntl.ioctl(any_socket, operation, with_flags)
    any_socket.close()
    return int.from_bytes(found[16:18], sys.byteorder)


def run() -> None:
    """Load, then serve; returns in the process of a program only."""
    control = _socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    load(control)
    serve(control)
