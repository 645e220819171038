"""What devices can do, by their makers' figures, and how much of it is assumed to be reached."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One device, as ``--workers`` counts them; rates are per second.

    Attributes:
        cube_flops: floating-point operations of matrix products in bfloat16 (on a CPU: float32).
        memory_bytes: read and written in the device's memory.
        link_bytes: sent over one link, in one direction.
        links: a group of n devices in a node uses min(n - 1, links) of them.
        network_bytes: sent between nodes.
        host_bytes: copied between a device and pinned memory of its host.
        copied_bytes: the same of pageable memory.
        kernel_s: that a kernel takes whatever its size.
        decode_s: of the host for each token that a server decodes.
        node_size: devices that links connect: those of a node of the machine; all of them if 0.
        launch_s: seconds that the host needs to launch a kernel.
        collective_s: seconds that a collective takes whatever its size.
        reached: share of the maker's figures, for products, memory and links.
        assumed: in words, where the figures are from.
    """

    name: str
    cube_flops: float
    memory_bytes: float
    link_bytes: float
    links: int
    network_bytes: float
    host_bytes: float
    copied_bytes: float
    node_size: int = 0
    launch_s: float = 6e-6
    collective_s: float = 20e-6
    kernel_s: float = 0.0
    decode_s: float = 10e-3
    reached: tuple[float, float, float] = (0.65, 0.7, 0.8)
    assumed: str = ""

    @property
    def promised(self) -> "Device":
        """The device with all that its maker promises, and no cost of the host."""
        free = {"launch_s": 0.0, "collective_s": 0.0, "decode_s": 0.0, "copied_bytes": self.host_bytes}
        return dataclasses.replace(self, reached=(1.0, 1.0, 1.0), **free)

    @property
    def words(self) -> str:
        """What is assumed, as text."""
        cube, memory, links = (f"{share:.0%}" for share in self.reached)
        reached = f"{cube} of products, {memory} of memory, {links} of links, {1e6 * self.launch_s:.0f} us a launch"
        return f"{self.name}: {self.assumed}; assumed to be reached: {reached}"

    @property
    def product_rate(self) -> float:
        """Floating-point operations a second that are assumed to be reached in products."""
        return self.cube_flops * self.reached[0]

    @property
    def memory_rate(self) -> float:
        """Bytes a second that are assumed to be reached of memory."""
        return self.memory_bytes * self.reached[1]

    def exchange_rate(self, ranks: Sequence[int]) -> float:
        """Bytes a second that each of some ranks is assumed to send while all of them exchange data."""
        return self.link_rate(ranks) * self.reached[2]

    def link_rate(self, ranks: Sequence[int]) -> float:
        """Return the same as promised."""
        if self.node_size and len({rank // self.node_size for rank in ranks}) > 1:
            return self.network_bytes
        return min(len(ranks) - 1, self.links) * self.link_bytes


DEVICES = {
    "A2": Device(
        "A2",
        cube_flops=354e12,
        memory_bytes=1.6e12,
        link_bytes=28e9,
        links=7,
        network_bytes=25e9,
        host_bytes=22e9,
        copied_bytes=5e9,
        assumed="Ascend 910B: 354 TFLOPS, 1.6 TB/s, full mesh of 7 HCCS links of 28 GB/s a direction, 200 Gbit/s RoCE",
    ),
    # Zuo et al. 2025, arXiv:2506.12708, section 3.
    "A3": Device(
        "A3",
        cube_flops=376e12,
        memory_bytes=1.6e12,
        link_bytes=196e9,
        links=1,
        network_bytes=25e9,
        host_bytes=22e9,
        copied_bytes=5e9,
        node_size=768,
        assumed="a die of an Ascend 910C: 376 TFLOPS, 1.6 TB/s, 196 GB/s a direction to other dies of its SuperPod",
    ),
}
