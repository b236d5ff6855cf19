"""Child processes of a control plane that read another user's files and texts, with limits of time and memory."""
