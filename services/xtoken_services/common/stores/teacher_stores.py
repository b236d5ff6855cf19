"""The stores of a run's teachers: opened, and checked against the run. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import InputError
from xtoken_core.teacher_store.identity import identity_of
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.tokenizers.chat_templates import read_chat_template


def open_store(run: ResolvedRun, teacher: int) -> TeacherStore:
    """Open the store of a teacher.

    Args:
        run: The run.
        teacher: Number of the teacher, which has a store.

    Raises:
        StoreError: There is none, it is damaged, or it was built from something else than the run has.
        ConfigError: Its address needs a package that is not installed, or lies outside the control plane's roots.
    """
    store = run.spec.teacher[teacher].store
    assert store is not None
    roots = Roots.of_environment()
    if roots is not None:
        roots.check_store(store, f"teacher.{teacher}.store")
    opened = TeacherStore.open(store)
    opened.identity.check(identity_of(run, teacher), store)
    return opened


def skip_condition(run: ResolvedRun, teacher: int) -> str:
    """Return the digest of what decides which records have no row: tokenizers, chat templates, `train_on`, routes.

    Args:
        run: The run.
        teacher: Number of the teacher whose output is stored.
    """
    sides = ((run.spec.student, run.student), (run.spec.teacher[teacher], run.teachers[teacher]))
    parts = [run.spec.data.train_on, str(run.same_tokenizer[teacher])]
    for spec, files in sides:
        parts += [files.tokenizer_fingerprint, files.template_fingerprint or _own_template(spec.tokenizer_dir)]
    if run.routes is not None:
        parts.append(json.dumps(run.routes.form_of(teacher)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _own_template(directory: Path) -> str:
    """Return the SHA-256 of a tokenizer's own chat template; empty without one."""
    try:
        return hashlib.sha256(read_chat_template(directory).encode()).hexdigest()
    except InputError:
        return ""
