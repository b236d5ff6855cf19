"""One rank that hangs, as in a collective on a GPU, or raises: `python -m ...hanging_process hang|raise`."""

import sys
import threading

from xtoken_services.trainer.distributed import RankGroup


def main() -> None:
    """Meet the others, report it, then hang; rank 1 of `raise` leaves because of an error, and hangs in that too."""
    group = RankGroup.of_environment()
    group.barrier()
    print("met", flush=True)
    if sys.argv[1] == "raise" and group.rank == 1:
        group.close(failed=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
