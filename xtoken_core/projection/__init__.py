"""The projection from the student's vocabulary to a teacher's: built, stored, read, cached and looked at.

Importing this package imports no torch; its names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtoken_core.projection.build import BuildOptions as BuildOptions
    from xtoken_core.projection.build import build_projection as build_projection
    from xtoken_core.projection.cache import _EXACT_TOKEN_MAP_CACHE as _EXACT_TOKEN_MAP_CACHE
    from xtoken_core.projection.cache import _SPARSE_PROJECTION_CACHE as _SPARSE_PROJECTION_CACHE
    from xtoken_core.projection.cache import _TOPK_PROJECTION_CACHE as _TOPK_PROJECTION_CACHE
    from xtoken_core.projection.cache import build_exact_token_map as build_exact_token_map
    from xtoken_core.projection.cache import get_sparse_projection_matrix as get_sparse_projection_matrix
    from xtoken_core.projection.cache import get_topk_projection as get_topk_projection
    from xtoken_core.projection.files import TopKProjection as TopKProjection
    from xtoken_core.projection.files import parse_projection_file as parse_projection_file
    from xtoken_core.projection.files import write_projection as write_projection
    from xtoken_core.projection.fingerprint import check_projection_pair as check_projection_pair
    from xtoken_core.projection.fingerprint import file_fingerprint as file_fingerprint
    from xtoken_core.projection.fingerprint import tokenizer_fingerprint as tokenizer_fingerprint

_EXPORTS = {
    "BuildOptions": "build",
    "TopKProjection": "files",
    "_EXACT_TOKEN_MAP_CACHE": "cache",
    "_SPARSE_PROJECTION_CACHE": "cache",
    "_TOPK_PROJECTION_CACHE": "cache",
    "build_exact_token_map": "cache",
    "build_projection": "build",
    "check_projection_pair": "fingerprint",
    "file_fingerprint": "fingerprint",
    "get_sparse_projection_matrix": "cache",
    "get_topk_projection": "cache",
    "parse_projection_file": "files",
    "tokenizer_fingerprint": "fingerprint",
    "write_projection": "files",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value
