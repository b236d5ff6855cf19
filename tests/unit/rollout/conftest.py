"""A student for completions by servers."""

from pathlib import Path

import pytest

from tests.support.tiny_run import documents, make_model
from xtoken_services.demo.vocabularies import train_teacher_tokenizer


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student")
    train_teacher_tokenizer(documents(200, seed=1), directory, vocabulary=400)
    make_model(directory, seed=1, extra_rows=0)
    return directory
