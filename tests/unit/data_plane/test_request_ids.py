"""Request ids: nobody else's, also in a process that was forked from one that had used some."""

import subprocess
import sys

PROGRAM = """
import os
from xtoken_core.data_plane.queue_client import new_id

def tell():
    os.write(1, f"{new_id()}\\n".encode())

tell()
child = os.fork()
tell()
if child:
    os.waitpid(child, 0)
else:
    os._exit(0)
"""


def test_forked_process_has_its_own_ids() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == len(set(found)) == 3
