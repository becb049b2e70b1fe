"""Runs a command in namespaces that have just been made: `unshare --net ... python -m tests.security.isolated`.

The network has loopback and no route; the host gets a name with an address that is not loopback, as any real host
has, so that whoever listens on "the host's address" is seen. Writes the kernel's count of packets that found no way.
"""

import fcntl
import socket
import struct
import subprocess
import sys
from pathlib import Path

HOST, ADDRESS = "far-host", "10.77.0.2"
_SET_ADDRESS, _SET_MASK, _GET_FLAGS, _SET_FLAGS, _UP = 0x8916, 0x891C, 0x8913, 0x8914, 0x1


def main() -> int:
    """Arguments: where to write the count, then the command. Expects network, mount and UTS namespaces of its own."""
    count, *argv = sys.argv[1:]
    _bring_up_loopback()
    hosts = Path(count).with_name("hosts")
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n", encoding="utf-8")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    socket.sethostname(HOST)
    code = subprocess.run(argv, check=False).returncode
    with Path(count).open("a", encoding="utf-8") as file:
        file.write(f"{without_route()}\n")
    return code


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack("16sH", fcntl.ioctl(control, _GET_FLAGS, name + b"\0" * 16)[:18])[1]
        fcntl.ioctl(control, _SET_FLAGS, name + struct.pack("H", flags | _UP) + b"\0" * 14)
        for request, address in ((_SET_ADDRESS, ADDRESS), (_SET_MASK, "255.255.255.255")):
            packed = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, request, b"lo:0".ljust(16, b"\0") + packed)


def without_route() -> int:
    """How many packets or connections of this network namespace found no way out, IPv4 and IPv6."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:3] == "Ip:")
    fourth = int(dict(zip(names, values, strict=True))["OutNoRoutes"])
    sixth = (line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return fourth + sum(int(words[1]) for words in sixth if words[0] == "Ip6OutNoRoutes")


if __name__ == "__main__":
    sys.exit(main())
