"""Files and directories of a run: which exist, which may be read or written, and which only this user could change."""
