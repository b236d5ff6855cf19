"""Bounds of the protocol, all in this module; `proto/README.md` lists them and `proto/schema.json` carries them."""

from __future__ import annotations

MAX_ROWS = 1 << 20
"""Ids in a reply, rows of a column, entries of a map of reasons, samples of a step."""
MAX_IDS = 1 << 16
"""Ids in a request, samples of a claim, positions of a block."""
MAX_COLUMNS = 256
"""Columns of a message, names in a list."""
MAX_FRAMES = 1 + 2 * MAX_COLUMNS
"""Frames of a message: the header and two buffers per column."""
MAX_HEADER_BYTES = 64 << 20
MAX_NAME = 128
"""Characters of a name."""
MAX_TEXT = 4096
"""Characters of a reason or an error's message, bytes of a ring's handle."""
MAX_TOKEN = 64
"""Characters of a request id or a session id."""
MAX_DOCUMENT_BYTES = 4 << 20
MAX_DIMS = 8
MAX_EXTENT = 1 << 32
MAX_UNIT_BYTES = 1 << 40
"""Bytes of a dense row, or of one step along a ragged axis."""
MAX_OBJECT_BYTES = 1 << 20
MAX_OBJECT_DEPTH = 16
MAX_OBJECT_VALUES = 1 << 16
"""Values in the object rows of a request, with the keys and items of lists and maps."""
MAX_WAIT_S = 60.0
MAX_SILENCE_S = 86400.0
MAX_AHEAD_S = 300.0
"""Seconds by which an incarnation, read as nanoseconds since 1970, may lie ahead of the queue's clock."""
MAX_PARTITIONS = 1024
MAX_SESSIONS = 16384
MAX_LANES = 256
"""Lanes of a session whose last reply is kept."""
MAX_WAITING = 1 << 16
"""Requests that wait, of all sessions together."""
MAX_WAITING_OF_SESSION = 256
MAX_CONNECTIONS = 8192
HANDSHAKE_S = 2.0

BOUNDS: dict[str, int | float] = {
    name.lower(): value for name, value in sorted(vars().items()) if name.isupper() and isinstance(value, int | float)
}
"""All of them by name, as the schema carries them."""
