"""Answers that attack the judge, each with the error type of its verdict (alternatives are separated by `|`).

A function is tested with `TEST`, which calls `f(x)` for `2 * x` and holds a canary. A program must print `6` for `3`.
"""

from __future__ import annotations

CANARY = "KANARIENVOGEL73501928465019283746"
TEST = f"""
secret = "{CANARY}"
assert f(3) == 6
assert f("ab") == "abab"
"""
RIGHT = "def f(x): return 2 * x\n"

# write(2) from an address that is not mapped is an error, not a signal
SCAN_MEMORY = """
import ctypes, gc, os, re
libc = ctypes.CDLL(None)
pattern = re.compile("LEGOVNEIRANAK"[::-1].encode() + rb"[0-9]{20}")
control_pattern = re.compile("ELLORTNOK"[::-1].encode() + rb"[0-9]{20}")
def pages(controls):
    out, into = os.pipe()
    buffer = ctypes.create_string_buffer(100_000)
    anchors = [id(object()), ctypes.addressof(buffer), id(re), id([0] * 100_000), id(gc), id(type("A", (), {}))]
    anchors += [id(control) for control in controls]
    for start in sorted({anchor >> 22 << 22 for anchor in anchors}):
        before = b""
        for address in range(start - 2**23, start + 2**23, 4096):
            if libc.write(into, ctypes.c_void_p(address), ctypes.c_size_t(4096)) != 4096:
                before = b""
                continue
            page = os.read(out, 4096)
            yield before + page
            before = page[-64:]  # a match may span two pages
def f(x):
    controls = ["KONTROLLE" + "7" * 20]
    works = False
    for page in pages(controls):
        works = works or bool(control_pattern.search(page))
        if pattern.search(page): raise RuntimeError("found it in memory")
    assert works, "the scan does not work"
    if any(pattern.search(repr(o).encode()) for o in gc.get_objects() if type(o) in (str, dict, list, tuple)):
        raise RuntimeError("found it in an object")
    return 2 * x
"""

_ALWAYS_EQUAL = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
    def __abs__(self): return self
    def __contains__(self, other): return True
    def __hash__(self): return hash(6)
"""

# writes frames of the protocol between an answer and its test
_FORGE = """
import os, pickle, struct
def frame(value):
    data = pickle.dumps(value, 5)
    return struct.pack('>I', len(data)) + data
"""

FUNCTIONS: dict[str, tuple[str, str]] = {
    "fork bomb": ("import os\nwhile True: os.fork()", "runtime_error|timeout"),
    "fork bomb that catches": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "timeout",
    ),
    "thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "runtime_error",
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(2**24))", "runtime_error"),
    "memory bomb of many processes": (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        x = bytearray(2**26)\n"
        "        for i in range(0, 2**26, 4096): x[i] = 1\n        time.sleep(60)\ntime.sleep(60)",
        "runtime_error",
    ),
    "hidden shared memory": (
        "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 2**24)); x[-1].write(b'x' * 2**24)",
        "runtime_error",
    ),
    "memory behind a file descriptor": ("import os\nos.memfd_create('x')", "runtime_error"),
    "data in the sockets of many processes": (
        "import os, socket, time\ndone, ready = os.pipe()\nfor _ in range(28):\n    if os.fork() == 0:\n"
        "        pairs = [socket.socketpair() for _ in range(27)]\n        for end in sum(pairs, ()):\n"
        "            end.setblocking(False)\n            try:\n                while True: end.send(bytes(2**16))\n"
        "            except OSError: pass\n        os.write(ready, b'x')\n        time.sleep(60)\n"
        "count = 0\nwhile count < 28: count += len(os.read(done, 28))\ntime.sleep(0.5)\n" + RIGHT,
        "runtime_error",
    ),
    "larger buffers of sockets and pipes": (
        "import fcntl, os, socket\nours, theirs = socket.socketpair()\n"
        "before = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)\n"
        "for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):\n"
        "    ours.setsockopt(socket.SOL_SOCKET, option, 2 * before)\n"
        "assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before\n"
        "ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)\n"
        "assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED)\n"
        "try: fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 2**20)\nexcept PermissionError: pass\n"
        "else: raise RuntimeError('a larger pipe')\n" + RIGHT,
        "success",
    ),
    "disk filler": (
        "import os\nn = 0\nwhile True:\n    n += 1\n    with open(f'f{n}', 'wb') as file:\n"
        "        file.write(bytes(2**20))",
        "runtime_error",
    ),
    "disk filler with deleted files": (
        "import os, time\nkept = []\nfor n in range(8):\n    kept.append(open(f'f{n}', 'wb', buffering=0))\n"
        "    os.remove(f'f{n}')\n    kept[-1].write(bytes(2**20))\ntime.sleep(1)\n" + RIGHT,
        "runtime_error",
    ),
    "disk filler with empty files": (
        "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'x').close()",
        "runtime_error",
    ),
    "files in a directory that it cannot list": (
        "import os\nos.mkdir('d', 0o300)\nfor n in range(8): open(f'd/{n}', 'wb').write(bytes(2**20))\n" + RIGHT,
        "runtime_error",
    ),
    "nested directories": (
        "import os\nfor _ in range(1100):\n    os.mkdir('nested', 0o300)\n    os.chdir('nested')\n"
        "os.mkdir('shut', 0)\n" + RIGHT,
        "success",
    ),
    "loop in C": ("import itertools, collections\ncollections.deque(itertools.count(), 0)", "timeout"),
    "loop in pow": ("x = pow(3, 10**8)", "timeout"),
    "loop in re": ("import re\nre.match('(a+)+b', 'a' * 40)", "timeout"),
    "loop with all signals blocked": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "timeout",
    ),
    "endless generator": ("def f(x):\n    while True: yield x", "wrong_answer"),
    "_exit at import": ("import os\nos._exit(0)", "runtime_error"),
    "_exit in the function": ("import os\ndef f(x): os._exit(0)", "runtime_error"),
    "_exit in an exit hook": (RIGHT + "import atexit, os\natexit.register(os._exit, 1)", "success"),
    "kill itself": ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)", "runtime_error"),
    "stop itself": ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "kill everybody": (
        "import os, signal\nfor s in (9, 15, 2, 19, 1):\n  for pid in (-1, 1, os.getppid(), 2, 3, 4, 5, 6):\n"
        "    try:\n      if pid not in (0, os.getpid()): os.kill(pid, s)\n    except OSError: pass\n" + RIGHT,
        "success",
    ),
    "limit its parent": (
        # of a fresh sandbox one of these would be the answer itself
        "import os, resource\nfor limit in range(16):\n  for pid in {1, 2, 3} - {os.getpid()}:\n"
        "    try: resource.prlimit(pid, limit, (0, 0))\n    except (OSError, ValueError): pass\n" + RIGHT,
        "success",
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\nos.wait()\n" + RIGHT,
        "success",
    ),
    "memory of its parent": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "assert libc.ptrace(16, os.getppid(), 0, 0) == -1\nassert libc.ptrace(16, 1, 0, 0) == -1\n"
        "assert libc.prctl(4, 0, 0, 0, 0) == -1\n"  # which would hide its own open files
        "class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "buffer = ctypes.create_string_buffer(64)\nlocal = V(ctypes.addressof(buffer), 64)\n"
        "for pid in (1, os.getppid(), os.getpid()):\n"
        "    assert libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(local), 1, 0) == -1\n" + RIGHT,
        "success",
    ),
    "/proc": (
        "import os\nassert os.listdir('/proc') == []\nassert not os.environ\n"
        "for path in ('/proc/1/environ', '/proc/self/mem', '/proc/self/maps'):\n"
        "    try: open(path)\n    except OSError: continue\n    raise RuntimeError(path)\n" + RIGHT,
        "success",
    ),
    "a /proc of its own": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.mount(b'proc', b'/tmp', b'proc', 0, None) == -1\n"
        "assert libc.umount2(b'/proc', 2) == -1\nassert libc.unshare(0x10000000) == -1\n"
        "assert libc.syscall(56, 0x10000011, 0, 0, 0, 0) == -1\nassert libc.setuid(0) == -1\n" + RIGHT,
        "success",
    ),
    "frames": (
        "import sys, gc\nframe = sys._getframe()\nwhile frame:\n"
        "    assert 'secret' not in frame.f_globals and 'secret' not in frame.f_locals\n    frame = frame.f_back\n"
        + RIGHT,
        "success",
    ),
    "scan of memory": (SCAN_MEMORY, "success"),
    "writing outside": (
        "import os\nfor path in ('/', '/usr', '/etc', '/dev', '/judge', '/root', '/proc', '/var', '/home'):\n"
        "    try: open(path + '/hostile', 'w')\n    except OSError: continue\n    raise RuntimeError(path)\n" + RIGHT,
        "success",
    ),
    "datagrams to paths": (
        "import socket\nfor kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n"
        "    try: socket.socketpair(socket.AF_UNIX, kind)\n    except PermissionError: continue\n"
        "    raise RuntimeError(kind)\nsocket.socketpair()\n" + RIGHT,
        "success",
    ),
    "lease of a file that others open": (
        "import fcntl, os\nfd = os.open(os.__file__, os.O_RDONLY)\n"
        "try: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)\nexcept PermissionError: pass\n"
        "else: raise RuntimeError('leased')\n" + RIGHT,
        "success",
    ),
    "syntax error with a long name": ("x" * 70_000 + " = 1\nglobal " + "x" * 70_000, "syntax_error"),
    "sockets": (
        "import socket\nfor family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 40, 16, 17, 38):\n"
        "  for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
        "    try: socket.socket(family, kind)\n    except OSError: continue\n    raise RuntimeError(family)\n" + RIGHT,
        "success",
    ),
    "symbolic links": (
        "import os\nfor n, path in enumerate(('/', '/etc/passwd', '/proc/self/root', '/tmp/1', '/dev/zero')):\n"
        "    os.symlink(path, f'/tmp/{n}')\nos.symlink('loop', '/tmp/loop')\nos.mkdir('/tmp/shut', 0)\n" + RIGHT,
        "success",
    ),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.abs = builtins.sum = lambda x: 6\n"
        "builtins.__build_class__ = builtins.print = None\ndef f(x): return 5",
        "wrong_answer",
    ),
    "patched builtins of the judge's own": (
        "import builtins\nfor name in ('len', 'type', 'isinstance', 'all', 'int', 'next'):\n"
        "    setattr(builtins, name, lambda *a: 6)\ndef f(x): return 5",
        "wrong_answer|runtime_error|timeout",
    ),
    "trace function": (
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 5",
        "wrong_answer",
    ),
    "always equal": (_ALWAYS_EQUAL + "def f(x): return Yes()", "wrong_answer"),
    "always equal string": (
        "class S(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "    def __reduce_ex__(self, n): return eval, ('1',)\ndef f(x): return S('x')",
        "wrong_answer",
    ),
    "always equal number": (
        "class N(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return N(5)",
        "wrong_answer",
    ),
    "poisoned pickle": (
        _FORGE + "class P:\n    def __reduce__(self): return os.system, ('touch /tmp/hostile',)\n"
        "def f(x):\n    os.write(3, frame((1, P(), None)))\n    while True: os.read(3, 1)",
        "runtime_error",
    ),
    "forged success": (
        _FORGE + 'for n in range(64):\n    try: os.write(n, b\'{"outcome": "passed"}\' * 9 + frame((1, True, None)))\n'
        "    except OSError: pass\ndef f(x): return 6",
        "runtime_error",
    ),
    "garbage on every descriptor": (
        "import os\ndef f(x):\n  for n in range(64):\n    try: os.write(n, os.urandom(100))\n"
        "    except OSError: pass\n  return 6",
        "runtime_error",
    ),
    "huge message": ("import os\ndef f(x):\n    os.write(3, b'\\xff' * 8)\n    return 6", "runtime_error"),
    "no descriptors": ("import os\ndef f(x):\n    os.closerange(0, 1000)\n    return 6", "runtime_error"),
    "endless requests": (
        _FORGE + "def f(x):\n    while True: os.write(3, frame((0, 'len', ((),))))",
        "runtime_error|timeout",
    ),
    "10 MB on standard error": ("import sys\nfor _ in range(10): sys.stderr.write('x' * 2**20)\n" + RIGHT, "success"),
    "closed output": ("import sys\nsys.stdout.close(); sys.stderr.close(); sys.stdin.close()\n" + RIGHT, "success"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f([x])", "runtime_error"),
    "deep result": ("def f(x):\n    for _ in range(10**6): x = [x]\n    return x", "runtime_error"),
    "recursive result": ("def f(x):\n    y = []\n    y.append(y)\n    return y", "wrong_answer"),
    "huge result": ("def f(x): return 'x' * 2**27", "runtime_error"),
    "raising descriptions": (
        "class E(Exception):\n    def __str__(self): raise E\n    __repr__ = __str__\ndef f(x): raise E(E(), object())",
        "runtime_error",
    ),
    "swallows everything": (
        "def f(x):\n    try: return g(x)\n    except BaseException: return f(x)\ndef g(x): return f(x)",
        "runtime_error|timeout",
    ),
}

PROGRAMS: dict[str, tuple[str, str]] = {
    "output flood": ("while True: print('6' * 10**6)", "timeout"),
    "cheating": ('print(\'{"outcome": "passed"}\\n1 passed\\nsuccess\')', "wrong_answer"),
    "right and 10 MB on standard error": (
        "import sys\nsys.stderr.write('x' * 10**7)\nprint(2 * int(input()))",
        "success",
    ),
    "closing all": ("import os\nos.closerange(0, 1000)", "wrong_answer"),
    "daemon that goes on printing": (
        "import os, time\nprint(6, flush=True)\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.5)\n    print(7)",
        "success",
    ),
    "writes its input": (
        "import os\nfor n in (0, 3, 4, 5):\n    try: os.write(n, b'x'); os.ftruncate(n, 10**9)\n"
        "    except OSError: pass\n"
        "print(2 * int(input()))",
        "success",
    ),
    "leaves a stopped child": (
        "import os, signal\npid = os.fork()\nif pid == 0: os.kill(os.getpid(), signal.SIGSTOP)\nprint(6)",
        "success",
    ),
}

NAME = "KENNZEICHEN7351"
LEAVES_CANARIES = {
    "program": f"secret = '{CANARY}'  # {CANARY}\n" + RIGHT,
    "error": f"def f(x):\n    raise ValueError('{CANARY}')\n",
    "compiler": f"{CANARY} = 1\nglobal {CANARY}\n",
    "name": (
        "import ctypes, time\nlibc = ctypes.CDLL(None)\n"
        f"assert libc.prctl(15, b'{NAME}', 0, 0, 0) == 0\ntime.sleep(0.3)\n" + RIGHT
    ),
    "files": f"for path in ('/tmp/x', '/dev/shm/x'): open(path, 'w').write('{CANARY}')\n" + RIGHT,
}
"""Functions that could leave the canary, or their process name, in the memory of their supervisor."""
ECHO = "import sys\ntext = sys.stdin.read()\nprint(text)\nsys.stderr.write(text * 1000)\n"
SCAN_MEMORY_FOR_NAMES = SCAN_MEMORY.replace('rb"[0-9]{20}")\nc', 'rb"[0-9]{20}|KENNZEICHEN[0-9]{4}")\nc')
SCAN_MEMORY_WIDELY = SCAN_MEMORY_FOR_NAMES.replace("2**23", "2**26")

DAEMONS = {
    "does not wait": (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(1000)\n        os._exit(0)\n    return 2 * x\n"
    ),
    "ten": (
        "import os, time\ndef f(x):\n  for _ in range(10):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(1000)\n        os._exit(0)\n  return 2 * x\n"
    ),
    "a child": "import os, time\ndef f(x):\n    if os.fork() == 0: time.sleep(1000)\n    return 2 * x\n",
}
"""Right answers that leave processes."""
KILLS_ITS_SUPERVISOR = (
    "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(1000)\n"
    "open('left', 'w').close()\nos.kill(os.getppid(), 9)\ntime.sleep(1000)\n"
)

NEED_NAMESPACES = (
    "kill everybody",
    "limit its parent",
    "/proc",
    "a /proc of its own",
    "hidden shared memory",
    "writing outside",
    "symbolic links",
    "memory bomb of many processes",
    "fork bomb",
    "fork bomb that catches",
    "thread bomb",
)
"""Only namespaces contain these: they write to /tmp, look at other processes, or need the kernel to count tasks."""
FUNCTIONS_ON_HOST = {name: case for name, case in FUNCTIONS.items() if name not in NEED_NAMESPACES}
