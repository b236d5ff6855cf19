"""A Ray cluster on this host: a head without resources, and a node per GPU."""

from __future__ import annotations

from types import TracebackType
from typing import Any

CPUS = 8
STORE_BYTES = 80 << 20


class RayNodes:
    """The cluster.

    Args:
        nodes: Number of nodes beside the head.
        gpus: Whether node `n` has GPU `n`.
    """

    def __init__(self, nodes: int, *, gpus: bool) -> None:
        from ray.cluster_utils import Cluster

        self._gpus = gpus
        head = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add(number) for number in range(nodes)]
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        """Address of the head."""
        return str(self._cluster.address)

    def replace(self, used: str) -> str:
        """End a node without warning and add another one with its GPU.

        Args:
            used: Text with the ids of the nodes that the run uses, by their first 8 characters.

        Returns:
            The first 8 characters of the ended node's id.
        """
        number = max(number for number, node in enumerate(self._nodes) if node.node_id[:8] in used)
        ended = str(self._nodes[number].node_id)[:8]
        self._cluster.remove_node(self._nodes[number], allow_graceful=False)
        self._nodes[number] = self._add(number)
        return ended

    def _add(self, number: int) -> Any:
        sees = {"env_vars": {"CUDA_VISIBLE_DEVICES": str(number)}} if self._gpus else {}
        return self._cluster.add_node(num_cpus=CPUS, num_gpus=int(self._gpus), object_store_memory=STORE_BYTES, **sees)

    def __enter__(self) -> RayNodes:
        """Return the cluster."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:  # fmt: skip
        """End the cluster."""
        self._cluster.shutdown()
