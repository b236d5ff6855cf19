"""Files about pairs of tokenizers: built once, and again where they cannot be used."""

import logging
import os

import torch

from tests.support.cases import cases
from xtoken_core.atomic import atomic_write
from xtoken_core.projection.fingerprint import FORMAT, FORMAT_KEY, STUDENT_KEY, TEACHER_KEY
from xtoken_core.projection.pair_cache import PairCache
from xtoken_core.projection.stored_tensors import safetensors_bytes

PRINTS = "a" * 64, "b" * 64


def content(version=FORMAT, prints=PRINTS):
    metadata = {FORMAT_KEY: version, STUDENT_KEY: prints[0], TEACHER_KEY: prints[1]}
    return safetensors_bytes({"x": torch.arange(3)}, metadata)


class Builder:
    def __init__(self):
        self.calls = 0

    def __call__(self, path):
        self.calls += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content())


def test_a_file_is_built_once(tmp_path):
    build = Builder()
    paths = [PairCache(tmp_path).file("projection", PRINTS, build) for _ in range(2)]
    assert paths[0] == paths[1] and build.calls == 1
    assert PairCache(tmp_path).file("projection", PRINTS[::-1], build) != paths[0]


@cases(
    "damaged, reason",
    (content(version="xtoken-projection-0"), "has xtoken-projection-0, this version reads"),
    (content(prints=("c" * 64, PRINTS[1])), "belongs to other tokenizers"),
    (content()[:-4], "is damaged"),
    (b"", "is damaged"),
    (b"\x00" * 40, "is damaged"),
    ids=["version", "tokenizers", "short", "empty", "zeros"],
)
def test_a_file_that_cannot_be_used_is_built_again_and_reported_once(tmp_path, caplog, damaged, reason):
    build, cache = Builder(), PairCache(tmp_path)
    cache.file("projection", PRINTS, build).write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "xtoken.pairs"):
        for _ in range(2):
            assert cache.file("projection", PRINTS, build).read_bytes() == content()
    assert build.calls == 2
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_a_pipe_in_the_cache_is_replaced(tmp_path):
    build, cache = Builder(), PairCache(tmp_path)
    path = cache.file("projection", PRINTS, build)
    path.unlink()
    os.mkfifo(path)
    assert cache.file("projection", PRINTS, build).read_bytes() == content()
    assert path.is_file()
