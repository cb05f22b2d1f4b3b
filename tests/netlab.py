"""Several hosts on one machine: network namespaces joined by a bridge with limited links, or by an emulator that also delays.

Needs root, `ip` and `tc`; nothing touches the machine's own network. The addresses 198.18.0.1, .2, … exist only inside.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def unavailable() -> str | None:
    """Why no namespaces can be made here, or None."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no `{tool}` (Debian package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Hosts:
    """n hosts by namespace name; host i has the address 198.18.0.(i + 1) on eth0."""

    def __init__(self, n: int) -> None:
        self.n, self.prefix = n, f"h{os.getpid() % 100_000}n"

    def __getitem__(self, i: int) -> str:
        return f"{self.prefix}{i}"

    @staticmethod
    def address(i: int) -> str:
        """Of host i."""
        return f"198.18.0.{i + 1}"

    def start(self, i: int, command: list[str], env: Mapping[str, str] | None = None, **kwargs) -> subprocess.Popen:
        """Start a command on host i."""
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(env or {})}
        return subprocess.Popen(["ip", "netns", "exec", self[i], *command], env=env, cwd=ROOT, **kwargs)

    def everywhere(self, command: list[str], timeout: float, port: int = 29611) -> list[str]:
        """Run a command with RANK, WORLD_SIZE and MASTER_ADDR on every host; what each printed. All end when one fails."""
        ranks = [
            self.start(
                i,
                command,
                {"RANK": str(i), "WORLD_SIZE": str(self.n), "MASTER_ADDR": self.address(0), "MASTER_PORT": str(port)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(self.n)
        ]
        return outputs(ranks, timeout)


def outputs(processes: list[subprocess.Popen], timeout: float) -> list[str]:
    """Wait for all; what each printed. Raises with their output if one fails or the time is up, and ends the others."""
    deadline = time.monotonic() + timeout
    printed = []
    try:
        for process in processes:
            printed.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
            if process.returncode:
                raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{printed[-1]}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return printed


def _sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def bridged(n: int, rate: str | None = None) -> Iterator[Hosts]:
    """Hosts joined by a bridge; `rate` ("100mbit") limits each one's link in both directions by `tc tbf`."""
    hosts, switch = Hosts(n), f"h{os.getpid() % 100_000}sw"
    try:
        _sh(f"ip netns add {switch}")
        _sh(f"ip -n {switch} link add br0 type bridge")
        _sh(f"ip -n {switch} link set br0 up")
        for i in range(n):
            _sh(f"ip netns add {hosts[i]}")
            _sh(f"ip -n {switch} link add p{i} type veth peer name eth0 netns {hosts[i]}")
            _sh(f"ip -n {switch} link set p{i} master br0")
            _sh(f"ip -n {switch} link set p{i} up")
            _sh(f"ip -n {hosts[i]} link set lo up")
            _sh(f"ip -n {hosts[i]} link set eth0 up")
            _sh(f"ip -n {hosts[i]} addr add {hosts.address(i)}/24 dev eth0")
            if rate is not None:
                limit = f"root tbf rate {rate} burst 256kb latency 100ms"
                _sh(f"ip netns exec {hosts[i]} tc qdisc replace dev eth0 {limit}")
                _sh(f"ip netns exec {switch} tc qdisc replace dev p{i} {limit}")
        yield hosts
    finally:
        for name in (*(hosts[i] for i in range(n)), switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def delayed(n: int, rate: float, delay: float) -> Iterator[Hosts]:
    """Hosts whose links have `rate` Mbit/s each way and `delay` ms one way, forwarded packet by packet by a process."""
    hosts = Hosts(n)
    command = [sys.executable, "-m", "tests.netlab", hosts.prefix, str(n), str(rate), str(delay)]
    emulator = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert emulator.stdout is not None
        if emulator.stdout.readline().strip() != "up":
            raise RuntimeError("the link emulator did not start: it needs root and /dev/net/tun")
        yield hosts
    finally:
        emulator.terminate()
        emulator.wait(10)
        for i in range(n):
            subprocess.run(["ip", "netns", "del", hosts[i]], capture_output=True)


def emulate(prefix: str, n: int, rate: float, delay: float) -> None:
    """Forward packets between n TUN devices, one per namespace, until SIGTERM.

    A packet leaves when its sender's link is free, arrives when its receiver's link is free, and is handed over `delay`
    later; a sender may be 0.25 s ahead of its link before packets are dropped.
    """
    seconds_per_byte, delay = 8 / (rate * 1e6), delay / 1e3
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    devices = []
    for i in range(n):
        name = f"{prefix}{i}"
        _sh(f"ip netns add {name}")
        there = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
        assert libc.setns(there, 0x40000000) == 0
        os.close(there)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH", b"eth0", 0x0001 | 0x1000))
        devices.append(device)
        libc.setns(home, 0x40000000)
        for command in ("link set lo up", "link set eth0 mtu 9000 up", f"addr add {Hosts.address(i)}/24 dev eth0"):
            _sh(f"ip -n {name} {command}")
    print("up", flush=True)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    poller, index = select.epoll(), {d: i for i, d in enumerate(devices)}
    for d in devices:
        poller.register(d, select.EPOLLIN)
    up, down = [0.0] * n, [0.0] * n
    queue: list[tuple[float, int, int, bytes]] = []
    count = 0
    while not ended:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else 0.5
        for d, _ in poller.poll(wait if wait > 5e-4 else 0):
            i = index[d]
            for _ in range(32):
                try:
                    packet = os.read(d, 9100)
                except BlockingIOError:
                    break
                if packet[0] >> 4 != 4 or packet[16:19] != b"\xc6\x12\x00" or not 0 < packet[19] <= n:
                    continue
                j, now, cost = packet[19] - 1, time.monotonic(), len(packet) * seconds_per_byte
                if up[i] - now > 0.25:
                    continue
                up[i] = max(now, up[i]) + cost
                down[j] = down[j] + cost if down[j] > up[i] else up[i]
                count += 1
                heapq.heappush(queue, (down[j] + delay, count, j, packet))
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, j, packet = heapq.heappop(queue)
            with contextlib.suppress(OSError):
                os.write(devices[j], packet)


if __name__ == "__main__":
    emulate(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
