"""Upload of a run's model to the Hugging Face Hub."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger("xtoken.trainer")


def push_model(directory: Path, repo: str) -> dict[str, Any]:
    """Upload a model directory as a commit; the repository is created, as a private one, if there is none.

    A failure is logged and does not fail the run: its model is complete on this machine.

    Args:
        directory: The model.
        repo: `org/name`.

    Returns:
        The entry `pushed` of `summary.json`: `repo`, and `commit` or `error`.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN"))
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=directory, commit_message="Model distilled by xtoken")
    except Exception as error:  # of the library, its HTTP client, or the server
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.error(
            "the model could not be pushed to %s (%s): push it by `hf upload %s %s`", repo, reason, repo, directory
        )
        return {"repo": repo, "error": reason}
    log.info("pushed the model to %s, commit %s", repo, commit.oid)
    return {"repo": repo, "commit": commit.oid}
